"""Slots in MXFP8, in rows and in Marlin's tiles: every kind of source, buckets that cut them, slices of fused memory."""

from functools import partial

import pytest
import torch

from fp8refit import NonFiniteError, RefitConfig
from fp8refit.fill.row_tasks import rows_of
from fp8refit.kernels import Task
from fp8refit.kernels.placement import codes_in_rows, scales_in_rows
from fp8refit.kernels.reference import quantize_reference
from fp8refit.live.formats import MARLIN_TILE, MXFP8, BlockFormat, Placement, ScaleFormat
from fp8refit.live.layout import SlotLayout
from fp8refit.live.slots import FP8_DTYPE, Inventory, Op, Slot
from fp8refit.ranks.target import Target
from fp8refit.sources.source import as_source
from tests.fakes import refit_target

TILES = BlockFormat(block_size=(1, 32), scale_format=ScaleFormat.MX_CEIL, placement=Placement.MARLIN)
SHAPES = {"q": (512, 1024), "k": (128, 1024), "o": (256, 2048), "norm": (1024,)}
OFFSETS = {"q": (128, 0), "k": (0, 0), "o": (0, 512)}
HELD = {"q": (256, 1024), "k": (64, 1024), "o": (256, 768)}
"""What this rank holds of each: rows, rows, and columns."""
BUCKET_BYTES = 1 << 20


class Model:
    """A rank's memory: `q` and `k` fused, `o` alone, all of it noise."""

    def __init__(self, block_format: BlockFormat) -> None:
        self.format = block_format
        self.qk, self.qk_scale = self._memory(320, 1024)
        self.o, self.o_scale = self._memory(256, 768)
        self.norm = torch.empty(1024, dtype=torch.bfloat16)

    def _memory(self, rows: int, columns: int):
        shapes = [(rows, columns), (rows, columns // 32)]
        if self.format.is_tiled:
            shapes = [(columns // 16, rows // 64, 1024), (columns // 32, rows // 64, 64)]
        codes, scales = (torch.randint(0, 255, shape, dtype=torch.uint8) for shape in shapes)
        return codes.view(FP8_DTYPE), scales

    def slots(self) -> list[Slot]:
        qk = [(self.qk, self.qk_scale, *rows) for rows in ((0, 256), (256, 64))]
        found = [Slot(name="norm", full_shape=SHAPES["norm"], weight=self.norm)]
        for name, (weight, scale, start, count) in zip("qko", [*qk, (self.o, self.o_scale, 0, 256)], strict=True):
            dim, step = (1, MARLIN_TILE[0]) if self.format.is_tiled else (0, 1)
            cut = [each.narrow(dim, start // step, count // step) for each in (weight, scale)]
            place = {"full_shape": SHAPES[name], "offset": OFFSETS[name] if any(OFFSETS[name]) else ()}
            found.append(Slot(name=name, weight=cut[0], scale=cut[1], format=self.format, **place))
        return found

    def held(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a slot, as rows."""
        slot = next(slot for slot in self.slots() if slot.name == name)
        if not self.format.is_tiled:
            return slot.weight, slot.scale
        return codes_in_rows(slot.weight), scales_in_rows(slot.scale)

    def target(self) -> Target:
        read = partial(Inventory, slots=tuple(self.slots()))
        return Target(read, device=torch.device("cpu"), engine="fake", versions={"fake": "1.0"})


@pytest.fixture(params=[MXFP8, TILES], ids=["rows", "tiles"])
def model(request):
    return Model(request.param)


def make_policy(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def expected_of(policy, name):
    (row, column), (rows, columns) = OFFSETS[name], HELD[name]
    codes, scale, _ = quantize_reference(policy[name][row : row + rows, column : column + columns], MXFP8)
    return codes, scale


def assert_holds(model, policy) -> None:
    assert torch.equal(model.norm, policy["norm"])
    for name in HELD:
        codes, scales = model.held(name)
        expected_codes, expected_scales = expected_of(policy, name)
        assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8)), name
        assert torch.equal(scales, expected_scales), name


SOURCES = {
    "mapping": lambda policy: policy,
    "stream": lambda policy: iter(policy.items()),
    "function": lambda policy: lambda: iter(policy.items()),
    "float32": lambda policy: {name: tensor.float() for name, tensor in policy.items()},
    "strided": lambda policy: {
        name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in policy.items()
    },
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_fills_codes_and_scales(kind, model):
    """`o` in float32 is larger than a bucket."""
    policy = make_policy(1)
    assert policy["o"].float().nbytes > BUCKET_BYTES
    refit_target(model.target(), as_source(SOURCES[kind](policy)), bucket_bytes=BUCKET_BYTES)
    assert_holds(model, policy)


def test_a_bad_value_is_named(model):
    policy = make_policy(1)
    policy["k"][5, 7] = torch.nan
    with pytest.raises(NonFiniteError) as raised:
        refit_target(model.target(), as_source(policy))
    assert raised.value.names == ("k",)


@pytest.mark.parametrize("start", [0, 64, 192])
def test_rows_of_a_task_are_those_of_its_target_and_scales(start, model):
    slot = next(slot for slot in model.slots() if slot.name == "q")
    source = make_policy(2)["q"]
    task = Task(
        op=Op.QUANTIZE, source=source, offset=(128, 0), target=slot.weight, scale=slot.scale, format=slot.format
    )
    part = rows_of(task, start, 64)
    assert (part.shape, part.offset) == ((64, 1024), (128 + start, 0))
    part.target.view(torch.uint8).fill_(0x11)
    part.scale.fill_(0x22)
    codes, scales = model.held("q")
    is_there = (codes.view(torch.uint8) == 0x11).all(1) & (scales == 0x22).all(1)
    assert is_there[start : start + 64].all()
    assert not is_there[:start].any() and not is_there[start + 64 :].any()


def test_a_slot_says_the_shape_of_what_it_holds_not_of_its_memory(model):
    slot = next(slot for slot in model.slots() if slot.name == "q")
    assert slot.shape == (256, 1024)
    layout = SlotLayout.of(slot)
    assert (layout.shape, layout.placement) == ((256, 1024), model.format.placement)
    assert SlotLayout.model_validate_json(layout.model_dump_json()).format == model.format


def test_codes_of_another_format_are_refused_by_name(model):
    policy = make_policy(1) | {"k": torch.zeros(SHAPES["k"], dtype=FP8_DTYPE), "k_scale_inv": torch.ones(128, 32)}
    with pytest.raises(Exception, match="k: is FP8, but this engine holds it as MXFP8; send it unquantized"):
        model.target().prepare(as_source(policy), RefitConfig())
