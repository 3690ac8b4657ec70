"""Fills: through a table, and through buckets, to the same bytes."""

from itertools import accumulate

import pytest
import torch

import fp8refit.fill.resident
import fp8refit.live.layout_guard
from fp8refit.config import RefitConfig
from fp8refit.fill.from_buckets import ReceivedSource
from fp8refit.fill.resident import ResidentFill
from fp8refit.fill.staging import Staging
from fp8refit.fill.tasks import bind, misfit_scales
from fp8refit.kernels import quantize_blockwise
from fp8refit.kernels.work import Action, have_layouts
from fp8refit.live.formats import PER_ROW, BlockFormat, ScaleFormat
from fp8refit.live.slots import Inventory, Op, Slot, Stacked, TensorMeta
from fp8refit.ranks.target import Target
from fp8refit.sources.source import MappingSource
from fp8refit.transport.collective.buckets import WireTensor, lay_out, take_buffers
from tests.fakes import FakeModel, assert_holds, bytes_of, compile_plan, live_bytes, make_policy, prequantize

CPU = torch.device("cpu")
FORMATS = pytest.mark.parametrize("block_format", [BlockFormat(block_size=(64, 64)), PER_ROW], ids=["blocks", "rows"])
NORM = "model.layers.0.input_layernorm.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def make_plan(slots, tensors):
    return compile_plan(slots, {name: TensorMeta.of(tensor) for name, tensor in tensors.items()})


def fill_resident(model: FakeModel, tensors, **options) -> ResidentFill:
    slots = tuple(model.slots())
    fill = ResidentFill(make_plan(slots, tensors), slots, MappingSource(tensors), CPU, RefitConfig(**options))
    fill.launch(None)
    return fill


def fill_stream(model: FakeModel, tensors, config: RefitConfig, action: Action = Action.WRITE) -> Staging:
    slots = tuple(model.slots())
    stream = Staging(slots, CPU, config, action)
    for step in make_plan(slots, tensors).steps:
        stream.add(step, tensors[step.source], is_stable=True)
    return stream


def assert_same_slots(first: FakeModel, second: FakeModel) -> None:
    for one, other in zip(first.slots(), second.slots(), strict=True):
        assert bytes_of(one.weight) == bytes_of(other.weight), one.name
        assert one.scale is None or torch.equal(one.scale, other.scale), one.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stream_and_table_give_the_same_bytes(dtype):
    resident, streamed = FakeModel(), FakeModel()
    policy = make_policy(resident, seed=1, dtype=dtype)
    assert fill_resident(resident, policy).read_flags().bad == set()
    assert fill_stream(streamed, policy, RefitConfig()).read_flags().bad == set()
    assert_same_slots(resident, streamed)


def big_slots() -> tuple[Slot, ...]:
    """Tensors of several times the smallest bucket: quantized, copied, of one dimension, of three."""
    codes = torch.zeros((1000, 1500), dtype=torch.float8_e4m3fn)
    return (
        Slot(
            name="q",
            full_shape=(1100, 1600),
            weight=codes,
            offset=(64, 100),
            scale=torch.zeros(8, 12),
            format=BlockFormat(),
        ),
        Slot(
            name="rows",
            full_shape=(1100, 1600),
            weight=torch.zeros_like(codes),
            offset=(64, 100),
            scale=torch.zeros(1000, 1),
            format=PER_ROW,
        ),
        Slot(name="embed", full_shape=(1700, 640), weight=torch.zeros(1700, 640, dtype=torch.bfloat16)),
        Slot(name="experts", full_shape=(8, 256, 640), weight=torch.zeros(8, 256, 640)),
        Slot(name="bias", full_shape=(700_000,), weight=torch.zeros(700_000)),
        Slot(name="scalar", full_shape=(), weight=torch.zeros(())),
        Slot(name="empty", full_shape=(0, 4), weight=torch.zeros(0, 4)),
    )


def test_tensors_larger_than_a_bucket_are_cut_without_changing_a_byte():
    generator = torch.Generator().manual_seed(0)
    tensors = {slot.name: torch.randn(slot.full_shape, generator=generator) for slot in big_slots()}
    slots, expected = big_slots(), big_slots()
    config = RefitConfig(bucket_bytes=1 << 20)
    stream = Staging(slots, CPU, config)
    assert stream.num_device_bytes < 6_000_000  # two buckets of a row of blocks in float32
    plan = make_plan(slots, tensors)
    for step in plan.steps:
        stream.add(step, tensors[step.source], is_stable=False)
        tensors[step.source] = tensors[step.source].clone()
    assert stream.read_flags().bad == set()
    ResidentFill(plan, expected, MappingSource(tensors), CPU, config).launch(None)
    for slot, other in zip(slots, expected, strict=True):
        assert bytes_of(slot.weight) == bytes_of(other.weight)
        assert slot.scale is None or torch.equal(slot.scale, other.scale)
    codes, scale = quantize_blockwise(tensors["rows"].bfloat16(), format=PER_ROW)
    assert bytes_of(slots[1].weight) == bytes_of(codes[64:1064, 100:]) and torch.equal(slots[1].scale, scale[64:1064])


def expert_slots(block_format: BlockFormat) -> tuple[Slot, ...]:
    """Two experts of a stack of four, of each the lower half of gate and up, and the right half of down."""
    slots = []
    for expert in (3, 1):
        for name, full, offset, shape in (
            ("gate", (128, 96), (64, 0), (64, 96)),
            ("up", (128, 96), (64, 0), (64, 96)),
            ("down", (96, 128), (0, 64), (96, 64)),
        ):
            codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
            scale = torch.zeros(block_format.scale_shape(shape))
            slots.append(
                Slot(
                    name=f"{expert}.{name}",
                    full_shape=full,
                    offset=offset,
                    weight=codes,
                    scale=scale,
                    format=block_format,
                )
            )
    return tuple(slots)


STACKS = (
    Stacked(
        name="gate_up",
        shape=(4, 256, 96),
        parts={f"{e}.{n}": (e, r) for e in (3, 1) for n, r in (("gate", 0), ("up", 128))},
    ),
    Stacked(name="down", shape=(4, 96, 128), parts={f"{e}.down": (e, 0) for e in (3, 1)}),
)


@pytest.mark.parametrize("is_turned", [False, True], ids=["as linears", "turned"])
@pytest.mark.parametrize("num_rows", [1, 3])
@FORMATS
def test_a_stack_of_experts_may_come_in_runs(block_format, num_rows, is_turned):
    stacks = {stack.name: torch.randn(stack.shape).to(torch.bfloat16) for stack in STACKS}
    if is_turned:
        stacks = {name: stack.mT.contiguous() for name, stack in stacks.items()}
    filled = [expert_slots(block_format) for _ in range(2)]
    plan = compile_plan(filled[0], {name: TensorMeta.of(stack) for name, stack in stacks.items()}, stacked=STACKS)
    for slots, is_whole in zip(filled, (True, False), strict=True):
        stream = Staging(slots, CPU, RefitConfig())
        for step in plan.steps:
            stack = stacks[step.source]
            if is_whole:
                stream.add(step, stack, is_stable=False)
                continue
            for first in range(0, len(stack), num_rows):
                stream.add_rows(step, stack[first : first + num_rows].clone(), first)
        assert stream.read_flags().bad == set()
    for slot, other in zip(*filled, strict=True):
        assert bytes_of(slot.weight) == bytes_of(other.weight) and torch.equal(slot.scale, other.scale)
        assert slot.weight.view(torch.uint8).any()


@pytest.mark.parametrize("lengths", [[128] * 4, [1, 200, 3, 60, 248], [512], [30, 482], [1] * 512], ids=str)
@pytest.mark.parametrize("start", [0, 40, 100])
@pytest.mark.parametrize("num_rows", [20, 256, 300])
@FORMATS
def test_runs_of_rows_may_cut_the_blocks_of_a_slot(block_format, start, num_rows, lengths):
    tensor = torch.randn(512, 96).to(torch.bfloat16)
    slots = [
        Slot(
            name="w",
            full_shape=tuple(tensor.shape),
            offset=(start, 32),
            weight=torch.zeros(num_rows, 64, dtype=torch.float8_e4m3fn),
            scale=torch.zeros(block_format.scale_shape((num_rows, 64))),
            format=block_format,
        )
        for _ in range(2)
    ]
    (step,) = compile_plan((slots[0],), {"w": TensorMeta.of(tensor)}).steps
    for slot, is_whole in zip(slots, (True, False), strict=True):
        stream = Staging((slot,), CPU, RefitConfig())
        if is_whole:
            stream.add(step, tensor, is_stable=False)
        else:
            ends = list(accumulate(lengths))
            for first, end in zip([0, *ends], ends, strict=False):
                stream.add_rows(step, tensor[first:end].clone(), first)
        assert stream.read_flags().bad == set()
    whole, cut = slots
    assert bytes_of(whole.weight) == bytes_of(cut.weight) and torch.equal(whole.scale, cut.scale)
    assert whole.scale.all()
    if block_format is PER_ROW:
        codes, scale = (each[start : start + num_rows] for each in quantize_blockwise(tensor, format=PER_ROW))
        assert bytes_of(whole.weight) == bytes_of(codes[:, 32:]) and torch.equal(whole.scale, scale)


def test_a_stream_holds_no_tensor_it_was_given():
    """A trainer may gather every tensor into one buffer."""
    model = FakeModel()
    policy = make_policy(model, seed=1)
    slots = tuple(model.slots())
    stream = Staging(slots, CPU, RefitConfig())
    buffer = torch.empty(max(tensor.numel() for tensor in policy.values()), dtype=torch.bfloat16)
    for step in make_plan(slots, policy).steps:
        source = policy[step.source]
        gathered = buffer[: source.numel()].view(source.shape).copy_(source)
        stream.add(step, gathered, is_stable=False)
        buffer.fill_(float("nan"))
    assert stream.read_flags().bad == set()
    model.embed[10:] = 0
    model._refresh()
    assert_holds(model, policy)


def test_a_stream_names_every_bad_source():
    model = FakeModel()
    policy = make_policy(model, seed=1)
    for name in (NORM, O_PROJ):
        policy[name].view(-1)[-1] = float("nan")
    assert fill_stream(model, policy, RefitConfig()).read_flags().bad == {NORM, O_PROJ}
    assert fill_stream(model, policy, RefitConfig(validate="off")).read_flags().bad == set()


def test_a_stream_that_only_looks_writes_nothing():
    model = FakeModel()
    before = live_bytes(model)
    policy = make_policy(model, seed=1)
    policy[NORM][0] = float("inf")
    assert fill_stream(model, policy, RefitConfig(), Action.CHECK).read_flags().bad == {NORM}
    assert live_bytes(model) == before


def test_rebinding_writes_the_other_policy():
    model = FakeModel()
    fill = fill_resident(model, make_policy(model, seed=1))
    policy = make_policy(model, seed=2)
    assert fill.renew(MappingSource(policy), RefitConfig())
    fill.launch(None)
    assert fill.read_flags().bad == set()
    model.embed[10:] = 0
    model._refresh()
    assert_holds(model, policy)


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: {**policy, O_PROJ: None},
        lambda policy: {**policy, O_PROJ: policy[O_PROJ].to("meta")},
        lambda policy: {**policy, "model.extra.weight": torch.ones(1)},
        lambda policy: {name: tensor for name, tensor in policy.items() if name != NORM},
        lambda policy: {**policy, NORM: policy[NORM].float()},
        lambda policy: {**policy, NORM: policy[NORM][1:]},
        lambda policy: {**policy, O_PROJ: policy[O_PROJ].T.contiguous().T},
    ],
    ids=["no tensor", "meta", "one more", "one less", "dtype", "shape", "strides"],
)
def test_another_layout_is_not_rebound(change):
    model = FakeModel()
    fill = fill_resident(model, make_policy(model, seed=1))
    before = live_bytes(model)
    assert not fill.renew(MappingSource(change(make_policy(model, seed=2))), RefitConfig())
    assert live_bytes(model) == before


@pytest.mark.parametrize("is_recognised", [True, False], ids=["guards of torch", "without them"])
def test_a_known_layout_is_recognised_in_one_call_if_torch_can(monkeypatch, is_recognised):
    if not is_recognised:
        monkeypatch.setattr(fp8refit.live.layout_guard, "_tensor_guards", None)
    looked = []
    monkeypatch.setattr(
        fp8refit.fill.resident, "have_layouts", lambda *args: looked.append(args) or have_layouts(*args)
    )
    model = FakeModel()
    fill = fill_resident(model, make_policy(model, seed=1))
    policy = make_policy(model, seed=2)
    assert fill.renew(MappingSource(policy), RefitConfig()) and bool(looked) is not is_recognised
    reordered = {f"module.{name}": policy[name] for name in reversed(policy)}
    for is_first in (True, False):
        looked.clear()
        assert fill.renew(MappingSource(reordered), RefitConfig()) and bool(looked) is (is_first or not is_recognised)
    fill.launch(None)
    model.embed[10:] = 0
    model._refresh()
    assert_holds(model, policy)


def test_a_fill_holds_the_exact_fp32_values_only_when_asked():
    model = FakeModel()
    policy = make_policy(model, seed=1, dtype=torch.float32)
    fill_resident(model, policy)
    rounded = live_bytes(model)
    fill_resident(model, policy, fp32_sources="exact")
    exact = live_bytes(model)
    assert rounded["layers.0.qkv"] != exact["layers.0.qkv"]
    assert rounded["layers.0.norm"] == exact["layers.0.norm"]


def test_scales_that_their_slot_cannot_hold_are_named():
    model = FakeModel()
    slots = tuple(model.slots())
    tensors = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.FP32)
    plan = make_plan(slots, tensors)
    (problem,) = misfit_scales(plan.steps, slots, tensors.items())
    assert problem.startswith(f"{O_PROJ}_scale_inv: holds scales that are not powers of two")
    source = MappingSource(tensors)
    fill = ResidentFill(plan, slots, source, CPU, RefitConfig())
    assert fill.misfit_scales() == [problem]
    assert ResidentFill(plan, slots, source, CPU, RefitConfig(on_scale_mismatch="copy")).misfit_scales() == []


def test_bind_copies_mismatched_scales_only_when_asked():
    model = FakeModel()
    slots = tuple(model.slots())
    tensors = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.FP32)
    step = next(step for step in make_plan(slots, tensors).steps if step.op is Op.COPY_SCALES)
    slot, source = slots[step.slot], tensors[step.source]
    assert bind(step, slot, source, RefitConfig()).format.scale_format is ScaleFormat.UE8M0
    assert bind(step, slot, source, RefitConfig(on_scale_mismatch="copy")).format.scale_format is ScaleFormat.FP32


@pytest.mark.parametrize("count", [False, True])
def test_what_came_under_another_name_is_compared_once_its_bucket_is_written(count):
    """A bucket may begin with a second name whose first one came before, and bring another pair whole."""
    slots = tuple(Slot(name=name, full_shape=(64, 64), weight=torch.zeros(64, 64).bfloat16()) for name in "xyab")
    inventory = Inventory(slots=slots, aliases={"a2": "a", "b2": "b"})
    target = Target(lambda: inventory, device=torch.device("cpu"), engine="fake", versions={})
    names = ("x", "y", "a", "a2", "b", "b2")
    wires = [WireTensor(name=name, shape=(64, 64), dtype="bfloat16") for name in names]
    layouts = lay_out(wires, 3 * slots[0].weight.nbytes + 2048)
    assert [[wires[run.tensor].name for run in each.runs] for each in layouts] == [["x", "y", "a"], ["a2", "b", "b2"]]
    source = ReceivedSource(wires, layouts, take_buffers(layouts, torch.device("cpu"), remedy=""))
    for version in (1, 2):
        policy = {name: torch.randn(64, 64).bfloat16() for name in "xyab"}
        prepared = target.prepare(source, RefitConfig(count_changes=count))
        target.begin(prepared)
        for ordinal, layout in enumerate(layouts):
            portions = layout.portions(source.buffer(ordinal))
            for part, portion in (
                (part, portions[placed.portion])
                for run in layout.runs
                for placed in run.placements
                for part in placed.parts
            ):
                part.view(portion).copy_(policy[part.name[0]])
            target.push()
        target.finish()
        assert target.commit() == version
        assert all(torch.equal(slot.weight, policy[slot.name]) for slot in slots)
