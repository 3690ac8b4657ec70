import dataclasses

import pytest
import torch

from fp8refit.errors import InvalidSourceError
from fp8refit.fill.plan import PlanBuilder
from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import FP8_DTYPE, Op, Slot, Stacked, TensorMeta
from tests.fakes import HIDDEN, FakeModel, compile_plan

EMBED = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
ALIASES = {"lm_head.weight": EMBED}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype)


@pytest.fixture(scope="module")
def slots() -> tuple[Slot, ...]:
    return tuple(FakeModel().slots())


@pytest.fixture
def sources(slots) -> dict[str, TensorMeta]:
    return {slot.name: meta(*slot.full_shape) for slot in slots}


def problems_of(slots, sources, **options) -> tuple[str, ...]:
    with pytest.raises(InvalidSourceError) as caught:
        compile_plan(slots, sources, aliases=ALIASES, **options)
    return caught.value.problems


def as_fp8(sources, name: str, scale: TensorMeta) -> dict[str, TensorMeta]:
    return {**sources, name: meta(*sources[name].shape, dtype=FP8_DTYPE), name + "_scale_inv": scale}


def test_every_slot_gets_its_step_in_slot_order(slots, sources):
    plan = compile_plan(slots, dict(reversed(sources.items())), aliases=ALIASES)
    assert [step.source for step in plan.steps] == [slot.name for slot in slots]
    assert [step.op for step in plan.steps] == [Op.QUANTIZE if slot.is_quantized else Op.COPY for slot in slots]
    by_name = {step.source: step for step in plan.steps}
    assert (by_name[UP].offset, by_name[UP].shape) == ((64, 0), (192, HIDDEN))
    assert (by_name[DOWN].offset, by_name[DOWN].shape) == ((0, 128), (HIDDEN, 256))


def test_bytes_are_those_of_the_slices(slots, sources):
    plan = compile_plan(slots, {**sources, NORM: meta(HIDDEN, dtype=torch.float32)}, aliases=ALIASES)
    numel = sum(slot.weight.numel() for slot in slots)
    assert plan.num_bytes_read == 2 * numel + 2 * HIDDEN
    assert plan.num_bytes_written == sum(
        slot.weight.numel() * slot.weight.element_size() + (4 * slot.scale.numel() if slot.is_quantized else 0)
        for slot in slots
    )


def test_digest_is_equal_on_repeat_and_in_any_order(slots, sources):
    digest = compile_plan(slots, sources, aliases=ALIASES).digest
    assert compile_plan(tuple(FakeModel().slots()), dict(reversed(sources.items())), aliases=ALIASES).digest == digest


@pytest.mark.parametrize("name", [Q, NORM])
def test_digest_depends_on_the_source_dtype(name, slots, sources):
    changed = {**sources, name: meta(*sources[name].shape, dtype=torch.float32)}
    assert compile_plan(slots, changed).digest != compile_plan(slots, sources).digest


def test_a_missing_tensor_is_named(slots, sources):
    del sources[Q]
    assert problems_of(slots, sources) == (f"{Q}: missing",)


def test_an_unexpected_tensor_is_named(slots, sources):
    assert problems_of(slots, {**sources, "model.extra.weight": meta(3)}) == (
        "model.extra.weight: unexpected, this engine has no such weight; leave it out",
    )


@pytest.mark.parametrize("shape", [(256, HIDDEN + 1), (HIDDEN, 256), (256,), (1, 256, HIDDEN)])
def test_a_wrong_shape_is_named(shape, slots, sources):
    assert problems_of(slots, {**sources, Q: meta(*shape)}) == (
        f"{Q}: has shape {list(shape)}, this engine's is [256, {HIDDEN}]",
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.uint8, torch.bool, torch.float8_e5m2])
def test_a_wrong_dtype_is_named(dtype, slots, sources):
    (problem,) = problems_of(slots, {**sources, Q: meta(256, HIDDEN, dtype=dtype)})
    assert problem.startswith(f"{Q}: has dtype {str(dtype).removeprefix('torch.')}")


def test_every_problem_is_raised_at_once(slots, sources):
    del sources[Q]
    sources |= {O: meta(1, 1), "model.extra.weight": meta(3), NORM: meta(HIDDEN, dtype=torch.int64)}
    problems = problems_of(slots, sources, problems=["model.twice.weight: sent twice"])
    assert sorted(problem.split(":")[0] for problem in problems) == sorted(
        [Q, O, "model.extra.weight", NORM, "model.twice.weight"]
    )


def test_rotary_tables_are_ignored(slots, sources):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert compile_plan(slots, {**sources, name: meta(64)}).ignored == (name,)


@pytest.mark.parametrize("order", [[EMBED, "lm_head.weight"], ["lm_head.weight", EMBED]])
def test_a_tied_tensor_sent_twice_is_read_as_it_came_first_and_then_compared(order, slots, sources):
    rest = {name: source for name, source in sources.items() if name != EMBED}
    plan = compile_plan(slots, {**dict.fromkeys(order, sources[EMBED]), **rest}, aliases=ALIASES)
    assert plan.ignored == ("lm_head.weight",)
    assert [step.source for step in (plan.steps[0], *plan.seconds)] == order
    assert plan.ties == {order[1]: (order[0], torch.bfloat16)}


def test_a_tied_tensor_may_come_under_its_alias_alone(slots, sources):
    plan = compile_plan(slots, {"lm_head.weight": sources.pop(EMBED), **sources}, aliases=ALIASES)
    assert plan.ignored == ()
    assert plan.steps[0].source == "lm_head.weight"


def test_a_tied_tensor_that_does_not_come_is_missing_once(slots, sources):
    del sources[EMBED]
    assert problems_of(slots, sources) == (f"{EMBED}: missing",)


def test_a_name_sent_twice_is_refused(slots, sources):
    builder = PlanBuilder(slots, aliases=ALIASES)
    for name, source in [*sources.items(), (Q, sources[Q])]:
        builder.add(name, source)
    with pytest.raises(InvalidSourceError, match=rf"{Q}: sent twice"):
        builder.finish()


def test_fp8_codes_and_scales_are_copied(slots, sources):
    plan = compile_plan(slots, as_fp8(sources, DOWN, meta(2, 3, dtype=torch.float32)))
    codes, scale = (step for step in plan.steps if step.source.startswith(DOWN))
    assert (codes.op, codes.offset, codes.shape) == (Op.COPY_CODES, (0, 128), (HIDDEN, 256))
    assert (scale.op, scale.offset, scale.shape) == (Op.COPY_SCALES, (0, 1), (2, 2))


def test_fp8_without_scales_is_refused(slots, sources):
    (problem,) = problems_of(slots, {**sources, Q: meta(256, HIDDEN, dtype=FP8_DTYPE)})
    assert problem == f"{Q}: is FP8 without its scales; send {Q}_scale_inv too"


def test_scales_without_fp8_are_refused(slots, sources):
    (problem,) = problems_of(slots, {**sources, Q + "_scale_inv": meta(2, 2, dtype=torch.float32)})
    assert problem == f"{Q}_scale_inv: is a scale, but {Q} is bfloat16; leave the scale out"


def test_scales_without_their_weight_are_refused(slots, sources):
    del sources[Q]
    assert problems_of(slots, {**sources, Q + "_scale_inv": meta(2, 2, dtype=torch.float32)}) == (f"{Q}: missing",)


def test_scales_of_another_grid_are_refused(slots, sources):
    (problem,) = problems_of(slots, as_fp8(sources, Q, meta(4, 3, dtype=torch.float32)))
    assert problem == f"{Q}_scale_inv: has shape [4, 3], blocks of 128x128 need [2, 2]"


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (256, 1)])
def test_scales_packed_for_deepgemm_are_called_so(shape, slots, sources):
    (problem,) = problems_of(slots, as_fp8(sources, Q, meta(*shape, dtype=torch.int32)))
    assert problem == (
        f"{Q}_scale_inv: is int32: scales packed for DeepGEMM, with four UE8M0 exponents in each; send them as they were "
        "before, one float32 per block of 128x128, or send the weight unquantized"
    )


def test_scales_of_another_dtype_are_refused(slots, sources):
    (problem,) = problems_of(slots, as_fp8(sources, Q, meta(2, 2, dtype=torch.uint8)))
    assert problem == f"{Q}_scale_inv: has dtype uint8; send block scales as float32, bfloat16 or float16"


def test_fp8_for_a_tensor_the_engine_does_not_quantize_is_refused(slots, sources):
    problems = problems_of(slots, as_fp8(sources, EMBED, meta(1, 2, dtype=torch.float32)))
    assert any(problem.startswith(f"{EMBED}: is FP8, but this engine holds it as bfloat16") for problem in problems)
    assert any(problem.startswith(f"{EMBED}_scale_inv: is a scale, but") for problem in problems)


def test_an_fp8_slice_off_the_grid_is_refused(slots, sources):
    (problem,) = problems_of(slots, as_fp8(sources, UP, meta(2, 2, dtype=torch.float32)))
    assert problem.startswith(f"{UP}_scale_inv: this rank's slice starts at [64, 0], off the 128x128 grid")


def test_slots_that_share_a_checkpoint_tensor_each_get_their_part():
    halves = [torch.zeros(4, 4) for _ in range(2)]
    slots = tuple(
        Slot(name="experts.w", full_shape=(8, 4), weight=half, offset=(4 * index, 0))
        for index, half in enumerate(halves)
    )
    plan = compile_plan(slots, {"experts.w": meta(8, 4)})
    assert [(step.slot, step.offset) for step in plan.steps] == [(0, (0, 0)), (1, (4, 0))]


# Names of other ranks, and what came.


@pytest.mark.parametrize("name", ["model.layers.1.q_proj.weight", "model.layers.1.q_proj.weight_scale_inv"])
def test_what_another_rank_takes_is_left_to_it(name, slots, sources):
    foreign = {"model.layers.1.q_proj.weight"}
    plan = compile_plan(slots, {**sources, name: meta(3)}, aliases=ALIASES, unneeded=foreign)
    assert plan.ignored == (name,)
    assert {step.source for step in plan.steps} == set(sources)


def test_a_name_of_another_rank_excuses_no_other(slots, sources):
    extra = {"model.layers.1.q_proj.weight": meta(3), "model.layers.1.q_proj": meta(3)}
    (problem,) = problems_of(slots, {**sources, **extra}, unneeded=["model.layers.1.q_proj.weight"])
    assert problem.startswith("model.layers.1.q_proj: unexpected")


def test_a_name_of_another_rank_that_this_one_holds_too_is_still_missing(slots, sources):
    del sources[NORM]
    assert problems_of(slots, sources, unneeded=[NORM]) == (f"{NORM}: missing",)


def test_ranks_that_hold_other_parts_know_the_same_source(slots, sources):
    halves = slots[: len(slots) // 2], slots[len(slots) // 2 :]
    others = [{slot.name for slot in half} for half in reversed(halves)]
    plans = [compile_plan(half, sources, unneeded=other) for half, other in zip(halves, others, strict=True)]
    backwards = compile_plan(slots, dict(reversed(sources.items())))
    assert len({plan.source_digest for plan in (*plans, backwards)}) == 1
    assert len({plan.digest for plan in (*plans, backwards)}) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda sources: sources | {"lm_head.weight": sources[EMBED]},
        lambda sources: sources | {NORM: meta(HIDDEN, dtype=torch.float32)},
        lambda sources: sources | {"model.rotary_emb.inv_freq": meta(4)},
        lambda sources: {"lm_head.weight" if name == EMBED else name: source for name, source in sources.items()},
    ],
    ids=["one more", "dtype", "ignored", "name"],
)
def test_every_name_shape_and_dtype_counts_for_the_source(change, slots, sources):
    digest = compile_plan(slots, sources, aliases=ALIASES).source_digest
    assert compile_plan(slots, change(sources), aliases=ALIASES).source_digest != digest


def test_the_shape_of_what_is_ignored_counts_for_the_source(slots, sources):
    name = "model.rotary_emb.inv_freq"
    digests = {compile_plan(slots, {**sources, name: meta(size)}).source_digest for size in (4, 5)}
    assert len(digests) == 2


# All experts of a layer in one tensor.

GATE_UP, DOWN_STACK = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
STACK_META = {GATE_UP: meta(4, 1024, 384), DOWN_STACK: meta(4, 384, 512)}
FP8_STACKS = {name: meta(*stack.shape, dtype=FP8_DTYPE) for name, stack in STACK_META.items()} | {
    f"{GATE_UP}_scale_inv": meta(4, 8, 3, dtype=torch.float32),
    f"{DOWN_STACK}_scale_inv": meta(4, 3, 4, dtype=torch.float32),
}
HELD = (3, 1)
"""Experts of the rank, which holds the upper half of gate and up of each, and the right half of down."""


def part(expert: int, name: str) -> str:
    return f"mlp.experts.{expert}.{name}_proj.weight"


@pytest.fixture(scope="module")
def experts() -> tuple[Slot, ...]:
    def slot(name: str, full: tuple[int, int], offset: tuple[int, int], shape: tuple[int, int]) -> Slot:
        codes, scale = torch.zeros(shape, dtype=FP8_DTYPE), torch.ones(shape[0] // 128, shape[1] // 128)
        return Slot(name=name, full_shape=full, offset=offset, weight=codes, scale=scale, format=BlockFormat())

    return tuple(
        slot(part(e, name), (384, 512), (0, 256), (384, 256))
        if name == "down"
        else slot(part(e, name), (512, 384), (256, 0), (256, 384))
        for e in HELD
        for name in ("gate", "up", "down")
    )


@pytest.fixture(scope="module")
def stacked() -> tuple[Stacked, ...]:
    gate_up = {part(e, name): (e, row) for e in HELD for name, row in (("gate", 0), ("up", 512))}
    return (
        Stacked(name=GATE_UP, shape=(4, 1024, 384), parts=gate_up),
        Stacked(name=DOWN_STACK, shape=(4, 384, 512), parts={part(e, "down"): (e, 0) for e in HELD}),
    )


def test_a_step_takes_its_expert_out_of_a_stack(experts, stacked):
    plan = compile_plan(experts, STACK_META, stacked=stacked)
    assert [(step.source, step.select, step.offset, step.shape) for step in plan.steps] == [
        (source, (expert,), offset, shape)
        for expert in HELD
        for source, offset, shape in (
            (GATE_UP, (256, 0), (256, 384)),
            (GATE_UP, (768, 0), (256, 384)),
            (DOWN_STACK, (0, 256), (384, 256)),
        )
    ]
    assert {(step.op, step.is_transposed) for step in plan.steps} == {(Op.QUANTIZE, False)}
    assert plan.num_bytes_read == 2 * sum(slot.weight.numel() for slot in experts)


def test_a_stack_may_have_rows_and_columns_exchanged(experts, stacked):
    turned = {GATE_UP: meta(4, 384, 1024), DOWN_STACK: meta(4, 512, 384)}
    plan, usual = (compile_plan(experts, found, stacked=stacked) for found in (turned, STACK_META))
    assert {step.is_transposed for step in plan.steps} == {True}
    assert [(step.offset, step.shape) for step in plan.steps] == [(step.offset, step.shape) for step in usual.steps]
    assert plan.digest != usual.digest


def test_a_model_says_which_way_round_a_square_stack_is():
    shape = (2, 128, 128)
    stacks = [Stacked(name="a", shape=shape, parts={}, is_transposed=turned) for turned in (False, True)]
    assert [stack.is_transposed_in(shape) for stack in stacks] == [False, True]


def test_a_square_stack_is_refused_where_checkpoints_and_state_dicts_differ(experts, stacked):
    either = [dataclasses.replace(stack, is_transposed=None) for stack in stacked]
    turned = {GATE_UP: meta(4, 384, 1024), DOWN_STACK: meta(4, 384, 512)}
    steps = compile_plan(experts, turned, stacked=either).steps
    assert {(step.source, step.is_transposed) for step in steps} == {(GATE_UP, True), (DOWN_STACK, False)}
    down = dataclasses.replace(experts[2], full_shape=(512, 512), offset=(0, 256))
    down = dataclasses.replace(down, weight=torch.zeros(512, 256, dtype=torch.float8_e4m3fn), scale=torch.ones(4, 2))
    square = Stacked(name=DOWN_STACK, shape=(4, 512, 512), parts={down.name: (0, 0)}, is_transposed=None)
    with pytest.raises(InvalidSourceError, match=r"as many rows as columns.*send it expert by expert"):
        compile_plan([down], {DOWN_STACK: meta(4, 512, 512)}, stacked=[square])


def test_a_stack_of_codes_comes_with_a_stack_of_scales(experts, stacked):
    plan = compile_plan(experts, FP8_STACKS, stacked=stacked)
    assert [(step.op, step.select, step.offset) for step in plan.steps] == [
        (op, (expert,), offset)
        for expert in HELD
        for offsets in (((256, 0), (2, 0)), ((768, 0), (6, 0)), ((0, 256), (0, 2)))
        for op, offset in zip((Op.COPY_CODES, Op.COPY_SCALES), offsets, strict=True)
    ]


def test_one_stack_and_the_rest_expert_by_expert(experts, stacked):
    sources = {GATE_UP: STACK_META[GATE_UP], **{part(e, "down"): meta(384, 512) for e in HELD}}
    plan = compile_plan(experts, sources, stacked=stacked)
    assert len(plan.steps) == len(experts)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {GATE_UP: meta(3, 1024, 384)},
            f"{GATE_UP}: has shape [3, 1024, 384], this engine's is [4, 1024, 384], or with rows and columns swapped",
        ),
        ({GATE_UP: meta(4, 512, 384)}, f"{GATE_UP}: has shape [4, 512, 384], this engine's is"),
        ({GATE_UP: meta(4096, 384)}, f"{GATE_UP}: has shape [4096, 384], this engine's is"),
        ({GATE_UP: meta(4, 1024, 384, dtype=torch.int8)}, f"{GATE_UP}: has dtype int8; send bfloat16"),
        ({GATE_UP: None}, f"{GATE_UP}: missing, whole and expert by expert"),
        ({part(1, "up"): meta(512, 384)}, f"{part(1, 'up')}: came in {GATE_UP} too; send it once"),
        ({f"{GATE_UP}_scale_inv": meta(4, 8, 3)}, f"{GATE_UP}_scale_inv: is a scale, but {GATE_UP} is bfloat16"),
        ({part(2, "up"): meta(512, 384)}, f"{part(2, 'up')}: unexpected"),
    ],
    ids=["experts", "rows", "two dimensions", "dtype", "missing", "an expert too", "a scale too", "another rank's"],
)
def test_a_bad_stack_is_named_once(changed, problem, experts, stacked):
    sources = {name: meta for name, meta in (STACK_META | changed).items() if meta is not None}
    (found,) = problems_of(experts, sources, stacked=stacked)
    assert found.startswith(problem)


def test_a_stack_after_one_of_its_experts_is_named(experts, stacked):
    (found,) = problems_of(experts, {part(1, "up"): meta(512, 384), **STACK_META}, stacked=stacked)
    assert found == f"{GATE_UP}: holds {part(1, 'up')}, which came as {part(1, 'up')}; send it once"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {GATE_UP: meta(4, 384, 1024, dtype=FP8_DTYPE)},
            f"{GATE_UP}: is FP8 with rows and columns swapped; send it unquantized, or expert by expert",
        ),
        ({f"{GATE_UP}_scale_inv": None}, f"{GATE_UP}: is FP8 without its scales; send {GATE_UP}_scale_inv too"),
        (
            {f"{GATE_UP}_scale_inv": meta(4, 3, 8, dtype=torch.float32)},
            f"{GATE_UP}_scale_inv: has shape [4, 3, 8], blocks of 128x128 need [4, 8, 3]",
        ),
        (
            {f"{GATE_UP}_scale_inv": meta(4, 8, 3, dtype=torch.uint8)},
            f"{GATE_UP}_scale_inv: has dtype uint8; send block scales as",
        ),
    ],
    ids=["transposed", "no scales", "another grid", "scales of another type"],
)
def test_a_bad_stack_of_codes_is_named_once(changed, problem, experts, stacked):
    sources = {name: meta for name, meta in (FP8_STACKS | changed).items() if meta is not None}
    (found,) = problems_of(experts, sources, stacked=stacked)
    assert found.startswith(problem)


def test_experts_that_are_missing_one_by_one_are_named_one_by_one(experts, stacked):
    sources = {slot.name: meta(*slot.full_shape) for slot in experts}
    del sources[part(1, "up")], sources[part(3, "down")]
    assert sorted(problems_of(experts, sources, stacked=stacked)) == [
        f"{part(1, 'up')}: missing",
        f"{part(3, 'down')}: missing",
    ]


def test_a_stack_may_come_under_another_name(experts, stacked):
    other = {f"moe.{name}": meta for name, meta in STACK_META.items()}
    plan = compile_plan(experts, other, stacked=stacked, aliases={f"moe.{name}": name for name in STACK_META})
    assert {step.source for step in plan.steps} == set(other)
    assert plan.ignored == ()
