import pytest
import torch

from fp8refit.live import formats, slots
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.live.slots import Slot

CODES, SCALES = torch.zeros(4, 4, dtype=torch.float8_e4m3fn), torch.ones(2, 2)


def test_a_slot_without_offset_begins_at_the_origin():
    assert Slot(name="w", full_shape=(4, 4), weight=torch.zeros(4, 4)).origin == (0, 0)
    assert Slot(name="w", full_shape=(4, 4), weight=torch.zeros(2, 4), offset=(2, 0)).origin == (2, 0)


@pytest.mark.parametrize("parts", [{}, {"scale_format": ScaleFormat.UE8M0, "block_size": (2, 2)}], ids=str)
def test_a_slot_takes_the_parts_of_a_format_until_04_and_warns(parts):
    with pytest.warns(DeprecationWarning, match=r"pass format=BlockFormat.*0\.4 removes"):
        slot = Slot(name="w", full_shape=(4, 4), weight=CODES, scale=SCALES, **parts)
    assert slot.format == BlockFormat(**parts)
    with pytest.warns(DeprecationWarning, match=r"Slot\.format\.scale_format"):
        assert slot.scale_format is slot.format.scale_format
    with pytest.warns(DeprecationWarning, match=r"Slot\.format\.block_size"):
        assert slot.block_size == slot.format.block_size


def test_the_parts_of_a_format_mean_nothing_for_a_slot_that_is_copied():
    slot = Slot(name="w", full_shape=(4, 4), weight=torch.zeros(4, 4), block_size=(2, 2))
    assert slot.format is None and not slot.is_quantized


def test_scale_formats_are_still_found_where_they_were_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"from fp8refit\.live\.formats; 0\.4 removes"):
        assert slots.ScaleFormat is formats.ScaleFormat
    with pytest.raises(AttributeError, match="no attribute 'Scale'"):
        slots.Scale  # noqa: B018
