"""Slots in NVFP4, in rows and in Marlin's tiles: a scale of the weight that fused matrices share, and scales of blocks.

What is expected comes from the second quantizer, and for tiles from what vLLM does with a checkpoint's bytes at boot.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8refit import NonFiniteError, RefitConfig
from fp8refit.errors import InvalidSourceError
from fp8refit.kernels.placement import half_codes_in_order, scales_in_order, unpacked
from fp8refit.live.formats import MARLIN_TILE, NVFP4, Placement
from fp8refit.live.layout import SlotLayout
from fp8refit.live.slots import FP8_DTYPE, Inventory, Slot, TensorMeta
from fp8refit.ranks.target import Target
from fp8refit.sources.row_runs import Piece
from fp8refit.sources.source import PushedSource, as_source
from tests.fakes import refit_target
from tests.second_quantizer import quantize_two_levels, round_to_bf16, to_numpy

TILES = replace(NVFP4, placement=Placement.MARLIN)
SHAPES = {"q": (256, 512), "k": (64, 512), "o": (128, 512), "norm": (512,)}
OFFSETS = {"q": (128, 0), "k": (0, 0), "o": (0, 256)}
HELD = {"q": (128, 512), "k": (64, 512), "o": (128, 256)}
"""What this rank holds: some rows of `q`, all of `k`, which is fused with it, and some columns of `o`."""
FUSED = {"q": "qk", "k": "qk", "o": "o"}
BUCKET_BYTES = 1 << 20


class Rank:
    """A rank's memory, all of it noise."""

    def __init__(self, block_format) -> None:
        self.format = block_format
        self.memory = {"qk": self._take(192, 512), "o": self._take(128, 256)}
        self.norm = torch.empty(512, dtype=torch.bfloat16)

    def _take(self, rows: int, columns: int):
        shapes = [(rows, columns // 2), (rows, columns // 16)]
        if self.format.is_tiled:
            shapes = [(columns // 16, rows // 64, 512), (columns // 16, rows // 64, 64)]
        codes, scales = (torch.randint(0, 126, shape, dtype=torch.uint8) for shape in shapes)
        return codes, scales.view(FP8_DTYPE), torch.tensor(77.0)

    def slots(self) -> tuple[Slot, ...]:
        found, starts = [Slot(name="norm", full_shape=SHAPES["norm"], weight=self.norm)], {"q": 0, "k": 128, "o": 0}
        dim, step = (1, MARLIN_TILE[0]) if self.format.is_tiled else (0, 1)
        for name, (rows, _) in HELD.items():
            codes, scales, over_all = self.memory[FUSED[name]]
            weight, scale = (each.narrow(dim, starts[name] // step, rows // step) for each in (codes, scales))
            place = {"full_shape": SHAPES[name], "offset": OFFSETS[name] if any(OFFSETS[name]) else ()}
            found.append(
                Slot(name=name, weight=weight, scale=scale, global_scale=over_all, format=self.format, **place)
            )
        return tuple(found)

    def target(self) -> Target:
        read = partial(Inventory, slots=self.slots())
        return Target(read, device=torch.device("cpu"), engine="fake", versions={})

    def state(self) -> list[bytes]:
        held = [each for memory in self.memory.values() for each in memory]
        return [each.reshape(-1).view(torch.uint8).numpy().tobytes() for each in held]

    def assert_holds(self, policy) -> None:
        assert torch.equal(self.norm, policy["norm"].to(torch.bfloat16))
        for fused, (codes, scales, over_all) in self.memory.items():
            names = [name for name in HELD if FUSED[name] == fused]
            values = {name: round_to_bf16(to_numpy(policy[name])) for name in names}
            maximum = max(float(np.abs(each).max()) for each in values.values())
            held = np.concatenate([values[name][box_of(name)] for name in names])
            expected = quantize_two_levels(held, maximum)
            self._assert_are(expected, codes, scales, over_all)

    def _assert_are(self, expected, codes, scales, over_all) -> None:
        packed, small, factor = torch.from_numpy(expected[0]), torch.from_numpy(expected[1]), 1.0
        if self.format.is_tiled:  # `prepare_fp4_layer_for_marlin` of vLLM
            values = small.view(FP8_DTYPE).float()
            factor = 2.0 ** math.floor(math.log2(448 / values.max().item()))
            halves = (values * factor * 2**7).to(torch.float16)
            halves[halves < 2] = 0
            small = (halves.view(torch.int16) << 1 >> 8 & 0xFF).to(torch.uint8)
            rows = packed.shape[0]
            assert torch.equal(half_codes_in_order(unpacked(codes)).reshape(rows, -1), unpacked(packed))
            assert torch.equal(scales_in_order(scales.view(torch.uint8)).reshape(rows, -1), small)
        else:
            assert torch.equal(codes, packed)
            assert torch.equal(scales.view(torch.uint8), small)
        raised = 2.0**119 / factor if self.format.is_tiled else 1.0
        assert over_all.item() == np.float32(expected[2]) * np.float32(raised)


def box_of(name: str):
    (row, column), (rows, columns) = OFFSETS[name], HELD[name]
    return np.s_[row : row + rows, column : column + columns]


@pytest.fixture(params=[NVFP4, TILES], ids=["rows", "tiles"])
def rank(request):
    return Rank(request.param)


def make_policy(seed: int) -> dict[str, torch.Tensor]:
    """The largest value of `q` is in rows, and that of `o` in columns, that the rank does not hold."""
    generator = torch.Generator().manual_seed(seed)
    policy = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    policy["q"][3, 5], policy["o"][7, 9] = 40 + seed, 300 + seed
    policy["o"][5, 256:272] = 0
    return policy


def in_rows(policy, count):
    for name, tensor in policy.items():
        for first in range(0, len(tensor), count):
            yield Piece(
                name=name, first_row=first, tensor=tensor[first : first + count], full_shape=tuple(tensor.shape)
            )


SOURCES = {
    "mapping": lambda policy: policy,
    "stream": lambda policy: iter(policy.items()),
    "reversed": lambda policy: iter(reversed(policy.items())),
    "function": lambda policy: lambda: iter(policy.items()),
    "float32": lambda policy: {name: tensor.float() for name, tensor in policy.items()},
    "float16": lambda policy: iter([(name, tensor.half()) for name, tensor in policy.items()]),
    "strided": lambda policy: {
        name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in policy.items()
    },
}


@pytest.mark.parametrize("kind", [*SOURCES, "files"])
def test_every_source_fills_codes_and_both_levels_of_scales(kind, rank, tmp_path: Path):
    for seed in (5, 1):  # the maxima fall
        policy = make_policy(seed)
        save_file(policy, tmp_path / "model.safetensors")
        source = tmp_path if kind == "files" else SOURCES[kind](policy)
        refit_target(rank.target(), as_source(source), bucket_bytes=BUCKET_BYTES)
        rank.assert_holds({name: tensor.half() for name, tensor in policy.items()} if kind == "float16" else policy)


@pytest.mark.parametrize("count", [1, 37, 1000])
def test_tensors_may_be_pushed_in_rows(count, rank):
    target, policy = rank.target(), make_policy(3)
    target.begin(target.prepare(PushedSource(None), RefitConfig()))
    target.push(in_rows(policy, count))
    target.finish()
    target.commit()
    rank.assert_holds(policy)


@pytest.mark.parametrize("name", ["q", "o"])
def test_a_weight_of_zeros_and_a_slice_of_zeros(name, rank):
    policy = make_policy(2)
    policy[name].zero_()
    refit_target(rank.target(), as_source(policy))
    rank.assert_holds(policy)
    policy = make_policy(2)
    (row, column), (rows, columns) = OFFSETS[name], HELD[name]
    policy[name][row : row + rows, column : column + columns] = 0
    refit_target(rank.target(), as_source(policy))
    rank.assert_holds(policy)


def test_a_comparison_finds_what_differs_and_changes_nothing(rank):
    target = rank.target()
    refit_target(target, as_source(make_policy(1)))
    other = make_policy(1)
    other["q"][3, 5] *= 1.5  # in rows of another rank: the scale of all that is fused changes
    for policy, differing in ((make_policy(1), set()), (other, {"q", "k"})):
        prepared = target.prepare(as_source(policy), RefitConfig(), compares=True)
        assert set(target.write(prepared).differing) == differing
    rank.assert_holds(make_policy(1))


def test_changes_are_counted_in_bytes_of_codes_and_in_scales(rank):
    target = rank.target()
    refit_target(target, as_source(make_policy(1)))
    before, other = rank.state(), make_policy(1)
    other["o"] *= 2
    changed = refit_target(target, as_source(other), count_changes=True).changed
    now = rank.state()
    differing = [sum(a != b for a, b in zip(was, there, strict=True)) for was, there in zip(before, now, strict=True)]
    total = [len(each) for each in before]
    assert changed["codes"] == (differing[0] + differing[3], total[0] + total[3])
    assert changed["scales"] == (differing[1] + differing[4] + 1, total[1] + total[4] + 2)


@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_value_is_named_and_the_next_policy_heals(value, mode, rank):
    target, policy = rank.target(), make_policy(1)
    policy["k"][5, 7] = value
    with pytest.raises(NonFiniteError) as raised:
        refit_target(target, as_source(policy), validate=mode)
    assert raised.value.names == ("k",)
    target.abandon()
    refit_target(target, as_source(make_policy(2)))
    rank.assert_holds(make_policy(2))


def test_what_is_fused_changes_together(rank):
    policy = make_policy(1)
    del policy["k"]
    with pytest.raises(InvalidSourceError, match="k: is kept, but shares one scale with q; send both or keep both"):
        rank.target().prepare(as_source(policy), RefitConfig(keep=("k",)))


@pytest.mark.parametrize("dtype", [FP8_DTYPE, torch.uint8])
def test_codes_that_a_trainer_sends_are_refused(dtype, rank):
    sent = make_policy(1) | {"k": torch.zeros(SHAPES["k"], dtype=torch.uint8).view(dtype)}
    with pytest.raises(InvalidSourceError, match=r"k: (is FP8, but this engine holds it as NVFP4|has dtype uint8)"):
        rank.target().prepare(as_source(sent), RefitConfig())


def test_a_layout_says_all_of_the_format(rank):
    slot = next(slot for slot in rank.slots() if slot.name == "q")
    assert slot.shape == HELD["q"]
    layout = SlotLayout.of(slot, "q")
    assert SlotLayout.model_validate_json(layout.model_dump_json()).format == rank.format
    assert TensorMeta.of(slot.weight).dtype is torch.uint8


def test_scales_of_experts_are_not_raised_for_one_that_is_zeros():
    """vLLM raises those of all experts of a layer alike, and another one's reach the largest."""
    codes, scales = torch.zeros(2, 8, 1, 512, dtype=torch.uint8), torch.zeros(2, 8, 1, 64).to(FP8_DTYPE)
    over_all = torch.zeros(2)
    slots = tuple(
        Slot(
            name=f"experts.{expert}",
            full_shape=(64, 128),
            weight=codes[expert],
            scale=scales[expert],
            global_scale=over_all[expert],
            format=TILES,
        )
        for expert in range(2)
    )
    target = Target(lambda: Inventory(slots=slots), device=torch.device("cpu"), engine="fake", versions={})
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    refit_target(target, as_source({"experts.0": weight, "experts.1": torch.zeros_like(weight)}))
    least = np.float32(2.0**-100) / np.float32(2688)
    assert over_all.tolist() == [(weight.abs().amax().float() / 2688 * 2.0**119).item(), least * np.float32(2.0**119)]
    assert scales[0].view(torch.uint8).max() == 0x7E + 120
    assert (scales[1].view(torch.uint8) == 0x38 + 120).all() and not codes[1].any()
