"""Slots that share one scale: the same bytes from every kind of source, and what is refused."""

import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError, NonFiniteError, UnsupportedEngineError
from fp8refit.fill.from_buckets import ReceivedSource
from fp8refit.fill.plan import PlanBuilder, Step
from fp8refit.fill.program import Program
from fp8refit.fill.scratch import place_spans
from fp8refit.fill.together import Together
from fp8refit.kernels.reference import quantize_reference
from fp8refit.live.formats import PER_TENSOR, AmaxOver
from fp8refit.live.overlaps import shared_bytes
from fp8refit.live.slots import FP8_DTYPE, Inventory, Op, Slot, Stacked, TensorMeta, dtype_name
from fp8refit.ranks.target import Target
from fp8refit.report import RankReport
from fp8refit.sources.row_runs import Piece
from fp8refit.sources.source import PushedSource, as_source
from fp8refit.transport.collective.buckets import WireTensor, lay_out, take_buffers
from tests.fakes import bytes_of, refit_target

ROWS = {"q": 192, "k": 64, "v": 64, "o": 96}
COLUMNS = 320
CPU = torch.device("cpu")


def read(tensor: torch.Tensor) -> torch.Tensor:
    """What is quantized: float32 is rounded first."""
    return tensor.to(torch.bfloat16) if tensor.dtype is torch.float32 else tensor


class Rank:
    """One of two ranks that hold the columns of a weight fused of q, k and v, all of `o`, and a norm.

    The largest value of a policy is in the last row of k, in the first rank's columns.
    """

    def __init__(self, place: int = 0) -> None:
        self.columns = slice(place * COLUMNS // 2, (place + 1) * COLUMNS // 2)
        names = ("q", "k", "v")
        self.fused = torch.zeros(sum(ROWS[name] for name in names), COLUMNS // 2).to(FP8_DTYPE)
        self.scale = torch.zeros(1, 1)
        self.o, self.scale_of_o = torch.zeros(ROWS["o"], COLUMNS).to(FP8_DTYPE), torch.zeros(1, 1)
        self.norm = torch.zeros(COLUMNS, dtype=torch.bfloat16)
        parts = self.fused.split([ROWS[name] for name in names])
        self.slots = (
            *(
                Slot(
                    name=name,
                    full_shape=(ROWS[name], COLUMNS),
                    weight=part,
                    offset=(0, self.columns.start),
                    scale=self.scale,
                    format=PER_TENSOR,
                )
                for name, part in zip(names, parts, strict=True)
            ),
            Slot(
                name="o",
                full_shape=(ROWS["o"], COLUMNS),
                weight=self.o,
                scale=self.scale_of_o,
                format=PER_TENSOR,
            ),
            Slot(name="norm", full_shape=(COLUMNS,), weight=self.norm),
        )
        self.target = Target(lambda: Inventory(slots=self.slots), device=CPU, engine="fake", versions={})

    def refit(self, source: object, **options: object) -> RankReport:
        return refit_target(self.target, source, **options)

    def assert_holds(self, policy: dict[str, torch.Tensor]) -> None:
        codes, scale, _ = quantize_reference(read(torch.cat([policy[name] for name in ("q", "k", "v")])), PER_TENSOR)
        assert torch.equal(self.scale, scale) and bytes_of(self.fused) == bytes_of(codes[:, self.columns])
        codes, scale, _ = quantize_reference(read(policy["o"]), PER_TENSOR)
        assert torch.equal(self.scale_of_o, scale) and bytes_of(self.o) == bytes_of(codes)
        assert torch.equal(self.norm, policy["norm"].to(torch.bfloat16))


def policy_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy = {name: torch.randn(rows, COLUMNS, generator=generator).to(dtype) for name, rows in ROWS.items()}
    policy["k"][-1, 3] = 10 + seed
    return policy | {"norm": torch.randn(COLUMNS, generator=generator).to(dtype)}


def lent(policy: dict[str, torch.Tensor]):
    """Each tensor is overwritten when the next is asked for."""
    for name, tensor in policy.items():
        yield name, (mine := tensor.clone())
        mine.fill_(torch.nan)


def in_rows(policy: dict[str, torch.Tensor], count: int):
    for name, tensor in policy.items():
        for first in range(0, len(tensor), count):
            run = tensor[first : first + count].clone()
            yield Piece(name=name, first_row=first, tensor=run, full_shape=tuple(tensor.shape))
            run.fill_(torch.nan)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["mapping", "stream", "manifest", "lent", "files", "reversed", "from parts"])
def test_every_source_gives_the_scale_of_all_that_is_fused(kind, dtype, place, tmp_path: Path):
    rank = Rank(place)
    for seed in (1, 2, 1):  # the largest value falls, too
        policy = policy_of(seed, dtype)
        save_file(policy, tmp_path / "model.safetensors")
        manifest = {name: TensorMeta.of(tensor) for name, tensor in policy.items()}
        make = {
            "mapping": lambda p: as_source(p),
            "stream": lambda p: as_source(iter(p.items())),
            "manifest": lambda p: as_source(lent(p), manifest=manifest),  # noqa: B023
            "lent": lambda p: as_source(lent(p)),
            "files": lambda _: as_source(tmp_path),
            "reversed": lambda p: as_source(lent(dict(reversed(p.items())))),
            "from parts": lambda p: as_source({name: tensor[:] for name, tensor in p.items()}),
        }[kind]
        codes = [rank.fused.view(torch.uint8).clone(), rank.o.view(torch.uint8).clone()]
        scale, norm = rank.scale.clone(), rank.norm.clone()
        changed = rank.refit(make(policy), bucket_bytes=1 << 20, count_changes=True).changed
        rank.assert_holds(policy)
        is_other = [each.view(torch.uint8) != old for each, old in zip((rank.fused, rank.o), codes, strict=True)]
        assert changed["codes"] == (sum(int(each.sum()) for each in is_other), sum(each.numel() for each in is_other))
        assert changed["scales"] == (2, 2) and not torch.equal(rank.scale, scale)
        assert changed["values"] == (int((rank.norm != norm).sum()), len(norm))


@pytest.mark.parametrize("count", [1, 37, 1000])
def test_tensors_may_be_pushed_in_rows(count):
    rank, policy = Rank(), policy_of(3)
    prepared = rank.target.prepare(PushedSource(None), RefitConfig())
    rank.target.begin(prepared)
    rank.target.push(in_rows(policy, count))
    rank.target.finish()
    rank.target.commit()
    rank.assert_holds(policy)


@pytest.mark.parametrize("order", permutations("qkv"))
def test_nothing_is_written_before_all_that_is_fused_has_come(order):
    rank, policy = Rank(), policy_of(4)
    rank.refit(as_source(policy_of(1)))
    before = rank.fused.clone(), rank.scale.clone()
    rank.target.begin(rank.target.prepare(PushedSource(None), RefitConfig()))
    for name in order[:2]:
        rank.target.push(iter([(name, policy[name])]))
    assert bytes_of(rank.fused) == bytes_of(before[0]) and torch.equal(rank.scale, before[1])
    rank.target.push(iter([(name, policy[name]) for name in (order[2], "o", "norm")]))
    rank.target.finish()
    rank.target.commit()
    rank.assert_holds(policy)


def test_a_comparison_finds_what_differs_and_changes_nothing():
    rank = Rank()
    rank.refit(as_source(policy_of(1)))
    other = policy_of(1)
    other["k"][-1, 3] *= 2
    for policy, differing in ((policy_of(1), set()), (other, {"q", "k", "v"})):
        prepared = rank.target.prepare(as_source(policy), RefitConfig(), compares=True)
        assert set(rank.target.write(prepared).differing) == differing
    rank.assert_holds(policy_of(1))


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_nan_is_named_and_the_next_policy_heals(mode):
    rank, bad = Rank(), policy_of(2)
    rank.refit(as_source(policy_of(1)))
    bad["v"][5, 5] = torch.nan
    with pytest.raises(NonFiniteError) as raised:
        rank.refit(as_source(bad), validate=mode)
    assert raised.value.names == ("v",)
    rank.target.abandon()
    if mode == "strict":
        rank.assert_holds(policy_of(1))
    rank.refit(as_source(policy_of(3)))
    rank.assert_holds(policy_of(3))


def test_what_shares_a_scale_is_kept_whole_or_not_at_all():
    rank, policy = Rank(), policy_of(2)
    rank.refit(as_source(policy_of(1)))
    with pytest.raises(InvalidSourceError) as raised:
        rank.refit(as_source({name: policy[name] for name in ("q", "v", "o", "norm")}), keep=("k",))
    assert raised.value.problems == ("k: is kept, but shares one scale with q; send both or keep both",)
    rank.refit(as_source({name: policy[name] for name in ("o", "norm")}), keep=("q", "k", "v"))
    rank.assert_holds({**policy_of(1), "o": policy["o"], "norm": policy["norm"]})


def test_fp8_is_refused_by_name():
    rank, policy = Rank(), policy_of(1)
    codes = policy | {"o": policy["o"].to(FP8_DTYPE), "o_scale_inv": torch.ones(1, 1)}
    with pytest.raises(
        InvalidSourceError, match="o: is FP8, but this engine holds it with one scale, maybe also for others"
    ):
        rank.refit(as_source(codes))


@pytest.mark.parametrize("bucket_bytes", [20_000, 60_000, 130_000, 1 << 20])
@pytest.mark.parametrize("order", [("q", "k", "v", "o", "norm"), ("q", "o", "v", "norm", "k")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_buckets_of_a_broadcast_are_kept_until_all_that_is_fused_has_come(dtype, order, bucket_bytes):
    """In few buffers, which are overwritten."""
    rank = Rank(1)
    policy = {name: policy_of(1, dtype)[name] for name in order}
    wire = [
        WireTensor(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), row_step=1)
        for name, tensor in policy.items()
    ]
    buckets = lay_out(wire, bucket_bytes)
    assert (len(buckets) > 1) is (bucket_bytes < 1 << 20)
    source = ReceivedSource(wire, buckets, take_buffers(buckets, CPU, remedy=""))
    for seed in (1, 2, 1):
        policy = policy_of(seed, dtype)
        prepared = rank.target.prepare(source, RefitConfig())
        rank.target.begin(prepared)
        for ordinal, bucket in enumerate(buckets):
            buffer = source.buffer(ordinal).fill_(0x7F)
            for run in bucket.runs:
                for part in (part for each in run.placements for part in each.parts):
                    rows = policy[part.name].narrow(0, run.first_row, run.num_rows)
                    part.view(bucket.portions(buffer)[0]).copy_(rows)
            prepared.fills[0].take()
        rank.target.finish()
        rank.target.commit()
        rank.assert_holds(policy)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(1, 5000)), max_size=30))
def test_nothing_that_is_kept_at_one_time_has_one_place(drawn):
    spans = {str(number): (first, first + length) for number, (first, length, _) in enumerate(drawn)}
    sizes = {str(number): size for number, (_, _, size) in enumerate(drawn)}
    starts, total = place_spans(spans, sizes)
    for one in spans:
        assert starts[one] % 256 == 0 and starts[one] + sizes[one] <= total
        for other in spans.keys() - {one}:
            is_at_once = spans[one][0] <= spans[other][1] and spans[other][0] <= spans[one][1]
            is_apart = starts[one] + sizes[one] <= starts[other] or starts[other] + sizes[other] <= starts[one]
            assert is_apart or not is_at_once
    assert total <= sum(-(-size // 256) * 256 for size in sizes.values())


def test_steps_that_find_a_maximum_read_the_whole_tensor_or_the_ranks_own_part():
    slots = Rank(1).slots
    plan = PlanBuilder(slots).plan(
        {slot.name: TensorMeta(shape=slot.full_shape, dtype=torch.bfloat16) for slot in slots}
    )
    steps = [(step.op, step.offset, step.shape) for step in plan.steps if step.source == "k"]
    assert steps == [(Op.MAXIMUM, (0, 0), (64, 320)), (Op.QUANTIZE, (0, 160), (64, 160))]
    own = [replace(slot, format=replace(PER_TENSOR, amax_over=AmaxOver.OWN_SLICE)) for slot in slots[:4]]
    plan = PlanBuilder((*own, slots[4])).plan(
        {slot.name: TensorMeta(shape=slot.full_shape, dtype=torch.bfloat16) for slot in slots}
    )
    steps = [(step.op, step.offset, step.shape) for step in plan.steps if step.source == "k"]
    assert steps == [(Op.MAXIMUM, (0, 160), (64, 160)), (Op.QUANTIZE, (0, 160), (64, 160))]


def test_a_stack_of_experts_has_one_scale_for_each_expert():
    weight, scale = torch.zeros(2, 8, 16).to(FP8_DTYPE), torch.zeros(2)
    slots = tuple(
        Slot(
            name=f"experts.{expert}.{part}",
            full_shape=(4, 16),
            weight=weight[expert, 4 * half : 4 * half + 4],
            scale=scale[expert].view(1, 1),
            format=PER_TENSOR,
        )
        for expert in range(2)
        for half, part in enumerate(("gate", "up"))
    )
    parts = {slot.name: (index // 2, 4 * (index % 2)) for index, slot in enumerate(slots)}
    stacked = (Stacked(name="experts", shape=(2, 8, 16), parts=parts),)
    target = Target(lambda: Inventory(slots=slots, stacked=stacked), device=CPU, engine="fake", versions={})
    policy = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for sent in ({"experts": policy}, {name: policy[e, row : row + 4] for name, (e, row) in parts.items()}):
        for source in (as_source(sent), as_source(iter(sent.items()))):
            scale.zero_()
            refit_target(target, source)
            for expert in range(2):
                codes, expected, _ = quantize_reference(policy[expert], PER_TENSOR)
                assert bytes_of(weight[expert]) == bytes_of(codes) and scale[expert] == expected


def test_a_shared_scale_is_no_overlap_but_weights_that_share_bytes_are():
    slots = Rank().slots
    assert shared_bytes(slots) == []
    (refusal,) = shared_bytes((slots[0], replace(slots[1], weight=slots[0].weight[:64])))
    assert "its weight shares memory" in refusal.reason


def test_what_waits_is_let_go():
    slots = Rank().slots
    plan = PlanBuilder(slots).plan(
        {slot.name: TensorMeta(shape=slot.full_shape, dtype=torch.bfloat16) for slot in slots}
    )
    steps = {name: [step for step in plan.steps if step.source == name] for name in ROWS}
    together = Together[str](slots)
    assert together.add("q", steps["q"]) == [] and together.add("o", steps["o"]) == ["o"]
    assert together.take_new() == ["q"] and together.take_new() == []
    assert together.add("k", steps["k"]) == [] and together.add("v", steps["v"]) == ["q", "k", "v"]
    assert together.take_new() == []


def test_ten_thousand_may_wait():
    """Every first half comes before every second one."""
    weight, scale = torch.zeros(20_000, 1, 1).to(FP8_DTYPE), torch.zeros(10_000)
    slots = [
        Slot(
            name=f"{number}.{half}",
            full_shape=(1, 1),
            weight=weight[2 * number + half],
            scale=scale[number].view(1, 1),
            format=PER_TENSOR,
        )
        for half in range(2)
        for number in range(10_000)
    ]
    steps = [[Step(Op.QUANTIZE, slot.name, index, (0, 0), (1, 1), "bfloat16")] for index, slot in enumerate(slots)]
    together, start_s = Together[int](slots), time.perf_counter()
    ready = [together.add(index, steps[index]) for index in range(len(slots))]
    assert ready[:10_000] == [[]] * 10_000
    assert ready[10_000:] == [[number, number + 10_000] for number in range(10_000)]
    assert time.perf_counter() - start_s < 5


def test_groups_that_one_tensor_has_in_common_wait_for_each_other():
    """A stack may hold a matrix of each of two groups: who waits for one waits for what the stack waits for."""
    scales = torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)
    slots = [
        Slot(name=str(index), full_shape=(1, 1), weight=torch.zeros(1, 1), scale=scales[group], format=PER_TENSOR)
        for index, group in enumerate((0, 0, 1, 1, 2))
    ]

    def steps(*indexes: int) -> list[Step]:
        return [Step(Op.QUANTIZE, "", index, (0, 0), (1, 1), "bfloat16") for index in indexes]

    for names in permutations({"first": (0,), "stack": (1, 2), "last": (3,)}.items()):
        together = Together[str](slots)
        ready = [together.add(name, steps(*indexes)) for name, indexes in names]
        assert ready == [[], [], [name for name, _ in names]]
        assert together.add("other", steps(4)) == ["other"]
        assert together.take_new() == []


@pytest.mark.parametrize("order", [("q", "norm", "k", "v", "o"), ("o", "q", "k", "v", "norm")])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 2, 1), (3, 2), (5,)])
def test_a_stream_that_comes_as_before_compiles_nothing(sizes, order, monkeypatch):
    compiled, compile_one = [], Program.compile
    monkeypatch.setattr(
        Program, "compile", lambda *args, **options: compiled.append(1) or compile_one(*args, **options)
    )
    rank, counts = Rank(), []
    for seed, names in enumerate((order, order, order, order[::-1], order), start=1):
        policy = policy_of(seed)
        items = [(name, policy[name].clone()) for name in names]
        rank.target.begin(rank.target.prepare(PushedSource(None), RefitConfig()))
        for size in sizes:
            part, items = items[:size], items[size:]
            rank.target.push(part)
        rank.target.finish()
        rank.target.commit()
        rank.assert_holds(policy)
        counts.append(len(compiled))
    assert counts == [counts[0]] * 3 + [counts[0] + 1] * 2  # in another order, only what waited is compiled anew


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 2, 1), (3, 2), (1, 4), (5,), (2, 1, 2)])
def test_lists_may_be_overwritten_once_they_were_taken(sizes):
    rank, policy = Rank(), policy_of(4)
    items = [(name, policy[name].clone()) for name in ("q", "norm", "k", "v", "o")]
    rank.target.begin(rank.target.prepare(PushedSource(None), RefitConfig()))
    for size in sizes:
        part, items = items[:size], items[size:]
        rank.target.push(part)
        for _, tensor in part:
            tensor.fill_(torch.nan)
    rank.target.finish()
    rank.target.commit()
    rank.assert_holds(policy)


def test_scales_beside_weights_that_are_not_fp8_are_named():
    rank, policy = Rank(), policy_of(1)
    items = [(name, tensor) for name, tensor in policy.items()]
    items.insert(1, ("q_scale_inv", torch.ones(1, 1)))
    with pytest.raises(InvalidSourceError, match="q_scale_inv: is a scale, but q is bfloat16; leave the scale out"):
        rank.refit(as_source(iter(items)))


def test_a_second_name_of_what_shares_a_scale_is_refused():
    rank = Rank()
    inventory = Inventory(slots=rank.slots, aliases={"other": "k"})
    target = Target(lambda: inventory, device=CPU, engine="fake", versions={})
    with pytest.raises(UnsupportedEngineError, match="other: is a second name of k, which has a scale for all of it"):
        refit_target(target, as_source(policy_of(1)))
