import torch

from fp8refit.live.slots import Slot


def test_a_slot_without_offset_begins_at_the_origin():
    assert Slot(name="w", full_shape=(4, 4), weight=torch.zeros(4, 4)).origin == (0, 0)
    assert Slot(name="w", full_shape=(4, 4), weight=torch.zeros(2, 4), offset=(2, 0)).origin == (2, 0)
