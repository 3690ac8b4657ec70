"""One rank: what is refused before a byte is written, what is left dirty, and what heals."""

import dataclasses
import gc
import time
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fp8refit.fill.resident
import fp8refit.fill.staging
import fp8refit.fill.stream
import fp8refit.ranks.target
from fp8refit.config import RefitConfig
from fp8refit.errors import (
    EngineLostError,
    InvalidSourceError,
    LiveTensorMovedError,
    NonFiniteError,
    RankFailedError,
    StagingMemoryError,
    UnsupportedEngineError,
)
from fp8refit.fill.plan import PlanBuilder
from fp8refit.live.formats import ScaleFormat
from fp8refit.live.slots import FP8_DTYPE, Refresh, Refusal, TensorMeta
from fp8refit.ranks.target import Target
from fp8refit.sources.row_runs import Piece, Recipe
from fp8refit.sources.sharded.gather import gathered
from fp8refit.sources.source import PushedSource, as_source
from tests.fakes import (
    FakeModel,
    assert_holds,
    box_of,
    bytes_of,
    changes_of,
    copies_of,
    live_bytes,
    make_policy,
    make_target,
    prequantize,
    refit_target,
)

EMBED = "model.embed_tokens.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"


def from_mapping(policy, folder):
    return as_source(policy)


def from_function(policy, folder):
    return as_source(lambda: iter(policy.items()))


def from_announced_iterator(policy, folder):
    manifest = {name: TensorMeta.of(tensor) for name, tensor in policy.items()}
    return as_source(iter(policy.items()), manifest=manifest)


def from_files(policy, folder):
    save_file(policy, folder / "weights.safetensors")
    return as_source(folder)


def from_iterator(policy, folder):
    return as_source(iter(policy.items()))


JUDGED_BEFORE = [from_mapping, from_function, from_announced_iterator, from_files]
REPEATABLE = [from_mapping, from_function, from_files]
ALL = [*JUDGED_BEFORE, from_iterator]


@pytest.fixture
def target(model) -> Target:
    """A rank that holds a good policy."""
    target = make_target(model)
    refit_target(target, as_source(make_policy(model, seed=0)))
    return target


def refuse(target: Target, model: FakeModel, error: type[Exception], source, match: str, **options) -> Exception:
    """Check that `source` is refused before a byte is written."""
    before = live_bytes(model)
    with pytest.raises(error, match=match) as caught:
        target.prepare(source, RefitConfig(**options))
    assert live_bytes(model) == before
    assert (target.is_dirty, target.version) == (False, 1)
    return caught.value


def break_off(target: Target, error: type[Exception], source, match: str, **options) -> Exception:
    """Check that `source` is found bad while it is written, and leaves the rank dirty."""
    prepared = target.prepare(source, RefitConfig(**options))
    with pytest.raises(error, match=match) as caught:
        target.write(prepared)
    assert (target.is_dirty, target.version) == (True, 1)
    return caught.value


def assert_heals(target: Target, model: FakeModel) -> None:
    """Check that the next good policy is written whole."""
    policy = make_policy(model, seed=9)
    refit_target(target, as_source(policy))
    assert (target.is_dirty, target.version) == (False, 2)
    assert_holds(model, policy)


@pytest.mark.parametrize("make_source", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_kind_of_source_gives_the_same_bytes(make_source, dtype, model, tmp_path):
    target, policy = make_target(model), make_policy(model, seed=1, dtype=dtype)
    result = refit_target(target, make_source(policy, tmp_path))
    assert_holds(model, policy)
    assert (target.version, result.num_tensors, result.is_first) == (1, len(policy), True)


@pytest.mark.parametrize("make_source", ALL)
def test_what_a_refit_changes_is_counted_if_asked(make_source, model, tmp_path):
    target, policy = make_target(model), make_policy(model, seed=1)
    assert refit_target(target, make_source(policy, tmp_path)).changed == {}
    for name in (Q_PROJ, NORM):
        policy[name] = policy[name].clone()
        policy[name][-1] *= -300
    before = copies_of(model.slots())
    report = refit_target(target, make_source(policy, tmp_path), count_changes=True)
    assert_holds(model, policy)
    assert report.changed == changes_of(model.slots(), before)
    assert all(num > 0 for num, _ in report.changed.values()) and report.differing == ()
    again = refit_target(target, make_source(policy, tmp_path), count_changes=True)
    assert all(num == 0 for num, _ in again.changed.values())
    assert refit_target(target, make_source(policy, tmp_path)).changed == {}


@pytest.mark.parametrize("make_source", ALL)
def test_small_buckets_give_the_same_bytes(make_source, model, tmp_path):
    policy = make_policy(model, seed=1)
    refit_target(make_target(model), make_source(policy, tmp_path), bucket_bytes=1 << 20)
    assert_holds(model, policy)


def test_times_of_a_write_are_parts_of_it(model):
    target, policy = make_target(model), make_policy(model, seed=1)
    start_s = time.perf_counter()
    report = refit_target(target, as_source(policy))
    assert 0 < report.fill_s + report.verify_s < time.perf_counter() - start_s
    assert min(report.fill_s, report.verify_s) > 0


def test_a_generator_may_reuse_one_buffer(model):
    policy = make_policy(model, seed=1)
    buffer = torch.empty(max(tensor.numel() for tensor in policy.values()), dtype=torch.bfloat16)

    def gather():
        for name, tensor in policy.items():
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            buffer.fill_(float("nan"))

    refit_target(make_target(model), as_source(gather))
    assert_holds(model, policy)


def test_a_source_may_be_strided(model):
    policy = make_policy(model, seed=1)
    strided = {
        name: torch.stack([tensor, tensor], dim=-1)[..., 0] if tensor.ndim == 1 else tensor.T.contiguous().T
        for name, tensor in policy.items()
    }
    refit_target(make_target(model), as_source(strided))
    assert_holds(model, policy)


# Names, shapes and dtypes.


@pytest.mark.parametrize("make_source", JUDGED_BEFORE)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda policy: policy.pop(Q_PROJ), f"{Q_PROJ}: missing"),
        (lambda policy: policy.update({"model.extra.weight": torch.ones(1)}), "model.extra.weight: unexpected"),
        (lambda policy: policy.update({Q_PROJ: torch.ones(192, 256)}), f"{Q_PROJ}: has shape"),
        (lambda policy: policy.update({NORM: torch.ones(192, dtype=torch.int64)}), f"{NORM}: has dtype int64"),
        (lambda policy: policy.update({Q_PROJ: policy[Q_PROJ].to(FP8_DTYPE)}), f"{Q_PROJ}: is FP8 without its scales"),
        (
            lambda policy: policy.update({Q_PROJ + "_scale_inv": torch.ones(2, 2)}),
            f"{Q_PROJ}_scale_inv: is a scale, but",
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "FP8 without scale", "scale without FP8"],
)
def test_a_source_that_does_not_fit_is_refused(change, problem, make_source, target, model, tmp_path):
    policy = make_policy(model, seed=1)
    change(policy)
    refuse(target, model, InvalidSourceError, make_source(policy, tmp_path), problem)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda policy: policy.pop(Q_PROJ), f"{Q_PROJ}: missing"),
        (lambda policy: policy.update({"model.extra.weight": torch.ones(1)}), "model.extra.weight: unexpected"),
        (lambda policy: policy.update({Q_PROJ: torch.ones(192, 256)}), f"{Q_PROJ}: has shape"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_an_iterator_that_turns_out_not_to_fit_leaves_the_rank_dirty(change, problem, target, model, tmp_path):
    policy = make_policy(model, seed=1)
    change(policy)
    break_off(target, InvalidSourceError, from_iterator(policy, tmp_path), problem)
    assert_heals(target, model)


def test_a_name_under_two_wrappers_is_refused(target, model):
    policy = make_policy(model, seed=1)
    policy["module." + Q_PROJ] = policy[Q_PROJ]
    refuse(target, model, InvalidSourceError, as_source(policy), f"{Q_PROJ}: sent twice")
    refuse(target, model, InvalidSourceError, as_source(lambda: iter(policy.items())), f"{Q_PROJ}: sent twice")
    break_off(target, InvalidSourceError, as_source(iter(policy.items())), f"{Q_PROJ}: sent twice")


def test_a_tensor_on_the_meta_device_is_refused_and_named_once(target, model):
    policy = make_policy(model, seed=1)
    policy[Q_PROJ] = policy[Q_PROJ].to("meta")
    error = refuse(target, model, InvalidSourceError, as_source(policy), "is on the meta device")
    assert len(error.problems) == 1


def test_wrapped_names_are_those_of_the_checkpoint(model):
    policy = make_policy(model, seed=1)
    refit_target(make_target(model), as_source({"module._orig_mod." + name: tensor for name, tensor in policy.items()}))
    assert_holds(model, policy)


@pytest.mark.parametrize("make_source", ALL)
def test_a_tied_tensor_may_be_sent_under_both_names(make_source, model, tmp_path):
    policy = make_policy(model, seed=1)
    result = refit_target(
        make_target(model), make_source({**policy, "lm_head.weight": policy[EMBED].clone()}, tmp_path)
    )
    assert result.ignored == ("lm_head.weight",)
    assert_holds(model, policy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("make_source", ALL)
def test_a_tied_tensor_that_differs_under_its_second_name_is_refused(
    make_source, is_last, dtype, target, model, tmp_path
):
    policy = make_policy(model, seed=1)
    head = policy[EMBED].to(dtype, copy=True)
    head[-1, -1] += 1
    heads = {"lm_head.weight": head}
    sent = policy | heads if is_last else heads | policy
    if make_source in (from_mapping, from_files):
        refuse(target, model, InvalidSourceError, make_source(sent, tmp_path), "is tied, and differs")
    else:
        break_off(target, InvalidSourceError, make_source(sent, tmp_path), "is tied, and differs")
    head[-1, -1] = policy[EMBED][-1, -1] * (1 + 2**-12) if dtype is torch.float32 else policy[EMBED][-1, -1]
    refit_target(target, make_source(sent, tmp_path))
    assert_holds(model, policy)


def test_a_tied_tensor_that_differs_is_refused_when_its_layout_is_known(model):
    target, policy = make_target(model), make_policy(model, seed=1)
    policy["lm_head.weight"] = policy[EMBED].clone()
    refit_target(target, as_source(policy))
    policy["lm_head.weight"][0, 0] += 1
    refuse(target, model, InvalidSourceError, as_source(policy), "is tied, and differs")


def test_codes_and_scales_of_a_tied_weight_are_compared(model):
    model.aliases = {"twin.weight": Q_PROJ}
    target, policy = make_target(model), make_policy(model, seed=1)
    refit_target(target, as_source(make_policy(model, seed=0)))
    policy = prequantize(policy, Q_PROJ, ScaleFormat.FP32)
    twin = {f"twin.{leaf}": policy[Q_PROJ.replace("weight", leaf)].clone() for leaf in ("weight", "weight_scale_inv")}
    twin["twin.weight_scale_inv"][0, 0] *= 2
    refuse(target, model, InvalidSourceError, as_source(policy | twin), "twin.weight_scale_inv: is tied")
    break_off(target, InvalidSourceError, as_source(iter((policy | twin).items())), "weight_scale_inv: is tied")
    twin["twin.weight_scale_inv"][0, 0] /= 2
    for source in (policy | twin, iter((twin | policy).items())):
        refit_target(target, as_source(source))
        assert not target.is_dirty


def test_a_tied_tensor_may_be_sent_under_its_alias_alone(model):
    policy = make_policy(model, seed=1)
    sent = {"lm_head.weight" if name == EMBED else name: tensor for name, tensor in policy.items()}
    refit_target(make_target(model), as_source(sent))
    assert_holds(model, policy)


def test_an_engine_with_refusals_is_never_written(model):
    model.refusals = (Refusal(module="layers.0", reason="its kernel repacks weights", remedy="Set X=1"),)
    before = live_bytes(model)
    with pytest.raises(UnsupportedEngineError, match=r"layers\.0: its kernel repacks weights\. Set X=1"):
        make_target(model).prepare(as_source(make_policy(model, seed=1)), RefitConfig())
    assert live_bytes(model) == before


# Values.


@pytest.fixture(scope="module")
def deep_model() -> FakeModel:
    """A model of 401 tensors."""
    return FakeModel(num_layers=50)


BAD = "model.layers.31.mlp.down_proj.weight"


def bad_policy(model: FakeModel) -> dict[str, torch.Tensor]:
    policy = make_policy(model, seed=1)
    assert len(policy) == 401
    policy[BAD][100, 300] = float("nan")
    return policy


@pytest.mark.parametrize("make_source", [from_mapping, from_function, from_iterator])
def test_one_nan_in_400_tensors_is_named_when_all_is_written(make_source, deep_model, tmp_path):
    target = make_target(deep_model)
    prepared = target.prepare(make_source(bad_policy(deep_model), tmp_path), RefitConfig())
    with pytest.raises(NonFiniteError, match="holds part of this policy") as caught:
        target.write(prepared)
    assert caught.value.names == (BAD,)
    assert target.is_dirty
    policy = make_policy(deep_model, seed=2)
    refit_target(target, as_source(policy))
    assert not target.is_dirty
    assert_holds(deep_model, policy)


@pytest.mark.parametrize("make_source", [from_mapping, from_function])
def test_strict_finds_one_nan_in_400_tensors_before_writing(make_source, deep_model, tmp_path):
    before, target = live_bytes(deep_model), make_target(deep_model)
    with pytest.raises(NonFiniteError, match="Nothing was written") as caught:
        target.prepare(make_source(bad_policy(deep_model), tmp_path), RefitConfig(validate="strict"))
    assert caught.value.names == (BAD,)
    assert live_bytes(deep_model) == before and not target.is_dirty


def test_off_does_not_look_for_nan(deep_model):
    refit_target(make_target(deep_model), as_source(bad_policy(deep_model)), validate="off")


def test_nan_outside_this_rank_s_slice_is_not_this_rank_s(model):
    policy = make_policy(model, seed=1)
    policy[DOWN_PROJ][0, 5] = float("nan")
    refit_target(make_target(model), as_source(policy))
    assert_holds(model, policy)


@pytest.mark.parametrize("make_source", ALL)
@pytest.mark.parametrize("name", [Q_PROJ, NORM, EMBED])
def test_fp32_beyond_bf16_is_not_finite(name, make_source, target, model, tmp_path):
    policy = make_policy(model, seed=1, dtype=torch.float32)
    policy[name].view(-1)[0] = 3.4e38
    error = break_off(target, NonFiniteError, make_source(policy, tmp_path), name)
    assert error.names == (name,)
    assert_heals(target, model)


def test_fp32_beyond_bf16_is_finite_where_the_engine_keeps_fp32(model):
    policy = make_policy(model, seed=1, dtype=torch.float32)
    policy[BIAS][0] = 3.4e38
    refit_target(make_target(model), as_source(policy))
    assert_holds(model, policy)


@pytest.mark.parametrize("make_source", [from_iterator, from_announced_iterator])
def test_strict_refuses_what_can_be_read_only_once(make_source, target, model, tmp_path):
    source = make_source(make_policy(model, seed=1), tmp_path)
    refuse(target, model, InvalidSourceError, source, "reads everything twice", validate="strict")


def test_strict_writes_a_good_policy(model):
    for make_source in (from_mapping, from_function):
        policy = make_policy(model, seed=1)
        refit_target(make_target(model), make_source(policy, None), validate="strict")
        assert_holds(model, policy)


def test_flags_of_a_refit_that_broke_off_are_not_the_next_one_s(target, model):
    policy = make_policy(model, seed=1)
    policy[Q_PROJ][0, 0] = float("nan")
    model.on_refresh = lambda: (_ for _ in ()).throw(RuntimeError("refresh failed"))
    break_off(target, RuntimeError, as_source(policy), "refresh failed")
    model.on_refresh = lambda: None
    assert_heals(target, model)


# Tensors that are FP8 already.


@pytest.mark.parametrize("make_source", ALL)
@pytest.mark.parametrize("name", [Q_PROJ, O_PROJ, DOWN_PROJ])
def test_fp8_is_copied_bit_for_bit(name, make_source, model, tmp_path):
    policy = make_policy(model, seed=1)
    sent = prequantize(policy, name, ScaleFormat.UE8M0)
    report = refit_target(make_target(model), make_source(sent, tmp_path))
    written = [tensor for slot in model.slots() for tensor in (slot.weight, slot.scale) if tensor is not None]
    assert report.bytes_written == sum(tensor.nbytes for tensor in written)
    slot = next(slot for slot in model.slots() if slot.name == name)
    grid = sent[name + "_scale_inv"][:, slot.origin[1] // 128 :]
    assert bytes_of(slot.weight) == bytes_of(box_of(slot, sent[name]))
    assert torch.equal(slot.scale, grid)


@pytest.mark.parametrize("make_source", JUDGED_BEFORE)
def test_an_fp8_slice_off_the_grid_is_refused(make_source, target, model, tmp_path):
    sent = prequantize(make_policy(model, seed=1), UP_PROJ, ScaleFormat.FP32)
    refuse(
        target, model, InvalidSourceError, make_source(sent, tmp_path), f"{UP_PROJ}_scale_inv: .* off the 128x128 grid"
    )


@pytest.mark.parametrize("make_source", REPEATABLE)
def test_scales_that_are_no_powers_of_two_are_refused_where_the_kernel_wants_them(make_source, target, model, tmp_path):
    sent = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.FP32)
    refuse(target, model, InvalidSourceError, make_source(sent, tmp_path), f"{O_PROJ}_scale_inv: .* not powers of two")


@pytest.mark.parametrize("make_source", [from_iterator, from_announced_iterator])
def test_scales_that_are_no_powers_of_two_end_a_stream_that_is_read_once(make_source, target, model, tmp_path):
    sent = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.FP32)
    break_off(target, InvalidSourceError, make_source(sent, tmp_path), f"{O_PROJ}_scale_inv: .* not powers of two")
    assert_heals(target, model)


@pytest.mark.parametrize("make_source", ALL)
def test_scales_that_are_no_powers_of_two_are_copied_when_asked(make_source, model, tmp_path):
    sent = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.FP32)
    refit_target(make_target(model), make_source(sent, tmp_path), on_scale_mismatch="copy")
    assert torch.equal(model.layers[0].o_scale, sent[O_PROJ + "_scale_inv"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 3e38, 2.0**121])
@pytest.mark.parametrize(("name", "scale_format"), [(Q_PROJ, ScaleFormat.FP32), (O_PROJ, ScaleFormat.UE8M0)])
def test_a_scale_that_is_not_positive_or_too_large_is_refused(name, scale_format, value, target, model):
    sent = prequantize(make_policy(model, seed=1), name, scale_format)
    sent[name + "_scale_inv"][1, 1] = value
    refuse(target, model, InvalidSourceError, as_source(sent), f"{name}_scale_inv: holds scales")


def test_a_scale_that_is_not_finite_is_called_so_when_any_scale_is_copied(target, model):
    sent = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.FP32)
    sent[O_PROJ + "_scale_inv"][1, 1] = float("nan")
    problem = f"{O_PROJ}_scale_inv: holds scales that are not finite and positive, or above"
    break_off(target, InvalidSourceError, as_source(sent), problem, on_scale_mismatch="copy")


@pytest.mark.parametrize("make_source", ALL)
def test_codes_that_are_nan_are_named(make_source, target, model, tmp_path):
    sent = prequantize(make_policy(model, seed=1), Q_PROJ, ScaleFormat.FP32)
    sent[Q_PROJ].view(torch.uint8)[3, 3] = 0xFF
    error = break_off(target, NonFiniteError, make_source(sent, tmp_path), Q_PROJ)
    assert error.names == (Q_PROJ,)
    assert_heals(target, model)


# Streams that are not what they said.


@pytest.mark.parametrize("announced", [True, False])
def test_a_truncated_iterator_leaves_the_rank_dirty(announced, target, model):
    policy = make_policy(model, seed=1)
    manifest = {name: TensorMeta.of(tensor) for name, tensor in policy.items()} if announced else None
    source = as_source(iter(list(policy.items())[:-1]), manifest=manifest)
    last = list(policy)[-1]
    break_off(
        target, InvalidSourceError, source, f"{last}: {'was announced but did not arrive' if announced else 'missing'}"
    )
    assert_heals(target, model)


@pytest.mark.parametrize("announced", [True, False])
def test_an_iterator_that_raises_midway_leaves_the_rank_dirty(announced, target, model):
    policy = make_policy(model, seed=1)

    def gather():
        yield from list(policy.items())[:3]
        raise ConnectionError("the trainer went away")

    manifest = {name: TensorMeta.of(tensor) for name, tensor in policy.items()} if announced else None
    break_off(target, ConnectionError, as_source(gather(), manifest=manifest), "the trainer went away")
    assert_heals(target, model)


@pytest.mark.parametrize(
    ("second_pass", "problem"),
    [
        (lambda policy: list(policy.items())[:-1], f"{BIAS}: was announced but did not arrive"),
        (lambda policy: [*policy.items(), ("model.extra.weight", torch.ones(1))], "model.extra.weight: arrived as"),
        (lambda policy: [*policy.items(), (NORM, policy[NORM])], f"{NORM}: sent twice"),
        (lambda policy: {**policy, NORM: policy[NORM].float()}.items(), f"{NORM}: arrived as"),
    ],
    ids=["shorter", "longer", "twice", "other dtype"],
)
def test_a_function_whose_second_pass_differs_leaves_the_rank_dirty(second_pass, problem, target, model):
    policy = make_policy(model, seed=1)
    passes = iter([policy.items(), second_pass(policy)])
    break_off(target, InvalidSourceError, as_source(lambda: iter(next(passes))), problem)
    assert_heals(target, model)


def test_an_iterator_that_is_not_what_its_manifest_says_leaves_the_rank_dirty(target, model):
    policy = make_policy(model, seed=1)
    manifest = {name: TensorMeta.of(tensor) for name, tensor in policy.items()}
    sent = {**policy, NORM: policy[NORM].float()}
    break_off(target, InvalidSourceError, as_source(iter(sent.items()), manifest=manifest), f"{NORM}: arrived as")


# Plans.


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Digests of the plans that were compiled."""
    digests = []

    def plan_and_record(*args):
        plan = plan_all(*args)
        digests.append(plan.digest)
        return plan

    plan_all = PlanBuilder.plan
    monkeypatch.setattr(PlanBuilder, "plan", plan_and_record)
    return digests


def test_a_second_mapping_of_the_same_layout_replays_the_plan(compiled, model):
    target = make_target(model)
    first = refit_target(target, as_source(make_policy(model, seed=1)))
    policy = make_policy(model, seed=2)
    second = refit_target(target, as_source(policy))
    assert (first.is_first, second.is_first) == (True, False)
    assert len(compiled) == 1 and model.num_inventories == 1
    assert_holds(model, policy)


@pytest.fixture
def judged(monkeypatch) -> list[torch.Tensor]:
    """Tensors whose layout was looked at."""
    seen, have_layouts = [], fp8refit.fill.resident.have_layouts

    def look(tensors, layouts):
        seen.extend(tensors[name] for name in layouts if name in tensors)
        return have_layouts(tensors, layouts)

    monkeypatch.setattr(fp8refit.fill.resident, "have_layouts", look)
    return seen


def test_the_same_source_again_is_not_judged_again_and_its_new_values_are_written(compiled, judged, model):
    target, source = make_target(model), as_source(make_policy(model, seed=1))
    refit_target(target, source)
    assert judged == []
    for seed in (2, 3):
        policy = make_policy(model, seed)
        for name, tensor in source.tensors.items():
            tensor.copy_(policy[name])
        assert not refit_target(target, source).is_first
        assert_holds(model, policy)
    refit_target(target, as_source(make_policy(model, seed=4)))
    refit_target(target, source)
    assert judged == [] and len(compiled) == 1
    assert_holds(model, make_policy(model, seed=3))


@pytest.mark.parametrize("change", ["dtype", "strides", "missing"])
def test_another_source_of_another_layout_is_judged_after_one_that_was_known(change, compiled, judged, model):
    target, source = make_target(model), as_source(make_policy(model, seed=1))
    for _ in range(2):
        refit_target(target, source)
    policy = make_policy(model, seed=2)
    sent = dict(policy)
    if change == "dtype":
        sent[NORM] = sent[NORM].float()
    elif change == "strides":
        sent[O_PROJ] = sent[O_PROJ].t().contiguous().t()
    else:
        del sent[NORM]
        with pytest.raises(InvalidSourceError, match=f"{NORM}: missing"):
            target.prepare(as_source(sent), RefitConfig())
        sent = policy
    refit_target(target, as_source(sent))
    assert judged != [] or change == "missing"
    assert_holds(model, policy)
    refit_target(target, source)
    assert_holds(model, make_policy(model, seed=1))


def test_a_known_source_is_planned_anew_where_its_plan_is_no_longer_the_engine_s(compiled, model):
    target, policy = make_target(model), make_policy(model, seed=1)
    source = as_source(policy)
    refit_target(target, source)
    assert refit_target(target, source, on_scale_mismatch="copy").is_first
    target.close()
    assert refit_target(target, source, on_scale_mismatch="copy").is_first
    replace_parameter(model)
    assert refit_target(target, source, on_scale_mismatch="copy").is_first
    assert_holds(model, policy)


def test_a_known_source_is_not_kept_alive(target, model):
    source = as_source(make_policy(model, seed=1))
    kept = [weakref.ref(source), *map(weakref.ref, source.tensors.values())]
    refit_target(target, source)
    refit_target(target, source)
    del source
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_a_mapping_of_another_layout_is_planned_anew(compiled, model):
    target = make_target(model)
    refit_target(target, as_source(make_policy(model, seed=1)))
    policy = make_policy(model, seed=2, dtype=torch.float32)
    assert refit_target(target, as_source(policy)).is_first
    assert len(set(compiled)) == 2
    assert_holds(model, policy)


def test_other_options_are_planned_anew(compiled, model):
    target, policy = make_target(model), make_policy(model, seed=1, dtype=torch.float32)
    refit_target(target, as_source(policy))
    rounded = live_bytes(model)
    assert refit_target(target, as_source(policy), fp32_sources="exact").is_first
    assert live_bytes(model) != rounded


def test_the_plan_of_the_same_source_is_the_same(compiled, model):
    for _ in range(2):
        refit_target(make_target(model), as_source(make_policy(model, seed=1)))
    assert len(compiled) == 2 and len(set(compiled)) == 1


# Live tensors.


def test_a_parameter_replaced_between_refits_is_read_again(target, model):
    old = model.layers[0].qkv
    model.layers[0].qkv = nn.Parameter(old.detach().clone(), requires_grad=False)
    kept = bytes_of(old)
    assert_heals(target, model)
    assert model.num_inventories == 2
    assert bytes_of(old) == kept


def replace_parameter(model: FakeModel) -> None:
    model.layers[0].norm = nn.Parameter(model.layers[0].norm.detach().clone(), requires_grad=False)


def replace_storage(model: FakeModel) -> None:
    model.layers[0].norm.data = model.layers[0].norm.data.clone()


def change_layout(model: FakeModel) -> None:
    model.layers[0].norm.data = model.layers[0].norm.data.view(1, -1)


def restore_layout(model: FakeModel) -> None:
    model.layers[0].norm.data = model.layers[0].norm.data.view(-1)


@pytest.mark.parametrize("move", [replace_parameter, replace_storage, change_layout])
def test_a_live_tensor_that_moves_during_a_refit_is_an_error(move, target, model):
    model.on_refresh = lambda: move(model)
    break_off(target, LiveTensorMovedError, as_source(make_policy(model, seed=1)), r"layers\.0\.norm")
    model.on_refresh = lambda: None
    restore_layout(model)
    assert_heals(target, model)


def test_an_engine_that_settles_in_another_layout_can_be_refitted(target, model):
    scale = model.layers[0].o_scale
    model.on_refresh = lambda: setattr(scale, "data", scale.data.T)
    break_off(target, LiveTensorMovedError, as_source(make_policy(model, seed=1)), r"layers\.0\.o_scale")
    model.on_refresh = lambda: None
    assert_heals(target, model)


def test_refits_leave_every_live_tensor_in_place(target, model):
    before = {name: (id(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in model.named_parameters()}
    refit_target(target, as_source(make_policy(model, seed=1)))
    assert before == {
        name: (id(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in model.named_parameters()
    }


# States.


def test_a_device_fault_ends_the_engine(target, model):
    def fault():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    model.on_refresh = fault
    break_off(target, EngineLostError, as_source(make_policy(model, seed=1)), "illegal memory access")
    with pytest.raises(EngineLostError, match="restart the engine"):
        target.prepare(as_source(make_policy(model, seed=1)), RefitConfig())


def test_a_refused_source_leaves_nothing_to_write(target, model):
    prepared = target.prepare(as_source(make_policy(model, seed=1)), RefitConfig())
    refuse(target, model, InvalidSourceError, as_source({}), "missing")
    with pytest.raises(RankFailedError, match="abandoned"):
        target.write(prepared)
    assert not target.is_dirty


def test_commits_are_counted(target, model):
    for version in range(2, 5):
        refit_target(target, as_source(make_policy(model, seed=version)))
        assert target.version == version


def test_a_closed_rank_begins_afresh(target, model):
    target.close()
    policy = make_policy(model, seed=1)
    assert refit_target(target, as_source(policy)).is_first
    assert target.version == 2
    assert_holds(model, policy)


def test_layout_describes_every_slot(target, model):
    layout = target.live.layout()
    assert [slot.name for slot in layout.slots] == [slot.name for slot in model.slots()]
    by_name = {slot.name: slot for slot in layout.slots}
    assert by_name[O_PROJ].scale_format is ScaleFormat.UE8M0
    assert by_name[NORM].scale_format is None and by_name[NORM].dtype == "bfloat16"
    assert (by_name[DOWN_PROJ].offset, by_name[DOWN_PROJ].shape) == ((0, 128), (192, 256))
    assert layout.aliases == {"lm_head.weight": EMBED}
    assert type(layout).model_validate_json(layout.model_dump_json()) == layout


# What is held, and for how long.


@pytest.mark.parametrize("source", [from_function, from_announced_iterator, from_files])
def test_a_stream_like_the_last_is_not_planned_again(source, target, model, tmp_path):
    policy = make_policy(model, seed=1)
    assert refit_target(target, source(policy, tmp_path)).is_first
    again = make_policy(model, seed=2)
    assert not refit_target(target, source(again, tmp_path)).is_first
    assert_holds(model, again)
    with pytest.raises(InvalidSourceError, match=f"{NORM}: missing"):
        target.prepare(source({name: again[name] for name in again if name != NORM}, tmp_path), RefitConfig())


@pytest.mark.parametrize("source", ALL)
def test_no_room_for_staging_leaves_the_engine_as_it_was(source, target, model, tmp_path, monkeypatch):
    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fp8refit.fill.staging, "_Bucket", no_room)
    if source is from_mapping:
        refit_target(target, source(make_policy(model, seed=1), tmp_path))
    else:
        refuse(target, model, StagingMemoryError, source(make_policy(model, seed=1), tmp_path), "lower bucket_bytes")


def test_the_source_is_let_go_of_when_the_refit_is_over(target, model):
    policy = make_policy(model, seed=1)
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    refit_target(target, as_source(policy))
    del policy
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_a_fault_found_while_preparing_ends_the_engine_too(target, model, monkeypatch):
    def fault(*args, **kwargs):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(PlanBuilder, "plan", fault)
    with pytest.raises(EngineLostError, match="illegal memory access"):
        target.prepare(from_function(make_policy(model, seed=1), None), RefitConfig())
    monkeypatch.undo()
    with pytest.raises(EngineLostError, match="restart the engine"):
        target.prepare(as_source(make_policy(model, seed=1)), RefitConfig())


def test_the_source_of_a_refused_refit_is_let_go_of_too(target, model):
    policy = make_policy(model, seed=1)
    policy[NORM][0] = float("nan")
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    with pytest.raises(NonFiniteError):
        target.prepare(as_source(policy), RefitConfig(validate="strict"))
    del policy
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.parametrize("items", ["other shape", "unannounced", "twice"])
def test_a_stream_that_is_not_what_was_announced_says_that_the_engine_is_dirty(items, target, model):
    policy = make_policy(model, seed=1)
    manifest = {name: TensorMeta.of(tensor) for name, tensor in policy.items()}
    sent = {
        "other shape": [(NORM, torch.ones(5))],
        "unannounced": [("model.other.weight", torch.ones(5))],
        "twice": [(NORM, policy[NORM])] * 2,
    }[items]
    break_off(target, InvalidSourceError, as_source(iter(sent), manifest=manifest), "holds part of this policy")
    assert_heals(target, model)


def test_every_bad_value_of_a_function_is_named_at_once(target, model):
    policy = make_policy(model, seed=1) | {NORM: 3, EMBED: None}
    error = refuse(target, model, InvalidSourceError, from_function(policy, None), "2 problems")
    assert sorted(problem.split(":")[0] for problem in error.problems) == sorted([NORM, EMBED])


@pytest.mark.parametrize("validate", ["fused", "off"])
def test_scales_that_a_slot_cannot_hold_are_refused_in_every_mode(validate, target, model):
    policy = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.FP32)
    slot = next(slot for slot in model.slots() if slot.name == O_PROJ)
    assert slot.format.scale_format is ScaleFormat.UE8M0
    prepared = target.prepare(as_source(iter(policy.items())), RefitConfig(validate=validate))
    with pytest.raises(InvalidSourceError, match="not powers of two"):
        target.write(prepared)


def test_bf16_scales_are_taken_as_they_are(target, model):
    policy = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.UE8M0)
    name = O_PROJ + "_scale_inv"
    refit_target(target, as_source(policy))
    expected = live_bytes(model)
    refit_target(target, as_source(make_policy(model, seed=2)))
    refit_target(target, as_source(policy | {name: policy[name].to(torch.bfloat16)}))
    assert live_bytes(model) == expected


def test_lora_names_are_not_to_be_left_out(target, model):
    policy = make_policy(model, seed=1)
    base = {Q_PROJ.replace("q_proj.", "q_proj.base_layer."): policy[Q_PROJ]}
    refuse(target, model, InvalidSourceError, as_source(policy | base), "sent twice")
    adapter = {Q_PROJ.replace("q_proj.", "q_proj.lora_A."): torch.ones(1, 1)}
    refuse(
        target,
        model,
        InvalidSourceError,
        as_source(policy | adapter),
        "belongs to a LoRA adapter; send fp8refit.training.peft.merged",
    )
    del policy[Q_PROJ]
    refit_target(target, as_source(policy | base))
    assert_holds(model, policy | {Q_PROJ: base.popitem()[1]})


def test_an_engine_on_no_device_is_refused(target, model):
    target.close()
    moved = model.read_inventory
    slot = moved().slots[0]
    elsewhere = dataclasses.replace(slot, weight=slot.weight.to("meta"))
    target.live._read_inventory = lambda: dataclasses.replace(moved(), slots=(elsewhere, *moved().slots[1:]))
    with pytest.raises(UnsupportedEngineError, match="the live weights are on cpu, meta"):
        target.prepare(as_source(make_policy(model, seed=1)), RefitConfig())


# Parts that somebody else reads.


def announce(policy, **fields) -> PushedSource:
    return PushedSource({name: TensorMeta.of(tensor) for name, tensor in policy.items()}, **fields)


def push_all(target: Target, items, *, num_parts: int = 3) -> None:
    """Hand over in parts, from a buffer that is overwritten after each."""
    items = list(items)
    for part in range(num_parts):
        copies = [(name, tensor.clone()) for name, tensor in items[part::num_parts]]
        target.push(copies)
        for _, tensor in copies:
            tensor.view(torch.uint8).fill_(0x7F)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("num_parts", [1, 3, 20])
def test_parts_give_the_same_bytes(num_parts, announced, target, model):
    policy = make_policy(model, seed=1)
    prepared = target.prepare(announce(policy) if announced else PushedSource(None), RefitConfig(bucket_bytes=1 << 20))
    assert not target.is_dirty
    target.begin(prepared)
    assert target.is_dirty
    push_all(target, policy.items(), num_parts=num_parts)
    report = target.finish()
    assert (target.is_dirty, report.num_tensors) == (True, len(policy))
    assert target.commit() == 2
    assert not target.is_dirty
    assert_holds(model, policy)


def test_what_was_announced_is_the_digest_of_what_came(target, model):
    policy = make_policy(model, seed=1)
    assert target.prepare(PushedSource(None), RefitConfig()).plan is None
    prepared = target.prepare(announce(policy), RefitConfig())
    digest = prepared.plan.source_digest
    target.begin(prepared)
    push_all(target, policy.items())
    assert target.finish().source_digest == digest
    assert target.prepare(as_source(policy), RefitConfig()).plan.source_digest == digest


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda policy: list(policy.items())[1:], f"{EMBED}: was announced but did not arrive"),
        (lambda policy: [*policy.items(), (NORM, policy[NORM])], f"{NORM}: sent twice"),
        (lambda policy: [*policy.items(), ("extra", torch.ones(1))], "extra: arrived as"),
        (lambda policy: (policy | {NORM: policy[NORM].float()}).items(), f"{NORM}: arrived as float32"),
    ],
    ids=["short", "twice", "extra", "dtype"],
)
def test_parts_that_are_not_what_was_announced_leave_the_rank_dirty(change, problem, target, model):
    policy = make_policy(model, seed=1)
    prepared = target.prepare(announce(policy), RefitConfig())
    target.begin(prepared)
    with pytest.raises(InvalidSourceError, match=problem) as caught:
        push_all(target, change(policy), num_parts=1)
        target.finish()
    assert caught.value.written
    assert (target.is_dirty, target.version) == (True, 1)
    assert_heals(target, model)


def runs_of(policy, *names: str, rows: int = 40) -> list:
    """All of a policy, some tensors of it in runs of rows."""
    items: list = []
    for name, tensor in policy.items():
        if name not in names:
            items.append((name, tensor))
            continue
        for first in range(0, tensor.shape[0], rows):
            run = tensor[first : first + rows]
            items.append(Piece(name=name, first_row=first, tensor=run, full_shape=tuple(tensor.shape)))
    return items


@pytest.mark.parametrize("announced", [True, False])
def test_runs_of_rows_give_the_same_bytes(announced, target, model):
    policy = make_policy(model, seed=1)
    prepared = target.prepare(announce(policy) if announced else PushedSource(None), RefitConfig())
    target.begin(prepared)
    for item in runs_of(policy, *(name for name, tensor in policy.items() if tensor.ndim == 2)):
        target.push([item])
    target.finish()
    target.commit()
    assert_holds(model, policy)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda runs: runs[1:], r"rows 40 to 80 of \[192, 256\] are out of order: expected row 0 of \[192, 256\]"),
        (lambda runs: [runs[0], *runs[2:]], r"rows 80 to 120 of \[192, 256\] are out of order: expected row 40"),
        (
            lambda runs: [*runs[:2], runs[1], *runs[2:]],
            r"rows 40 to 80 of \[192, 256\] are out of order: expected row 80",
        ),
        (lambda runs: runs[:-1], "is incomplete: got 160 of 192 rows"),
        (lambda runs: [*runs, *runs], "sent twice"),
        (lambda runs: [*runs[:-1], dataclasses.replace(runs[-1], tensor=runs[0].tensor)], "rows 160 to 200"),
        (
            lambda runs: [*runs[:-1], dataclasses.replace(runs[-1], full_shape=(193, 256))],
            r".* of \[193, 256\] are out of order",
        ),
        (
            lambda runs: [dataclasses.replace(runs[0], tensor=runs[0].tensor[:, :7]), *runs[1:]],
            r"rows 0 to 40 .* with the shape \[40, 7\]",
        ),
    ],
    ids=["no first", "a gap", "a repetition", "no last", "twice", "too many", "another shape", "narrow"],
)
def test_runs_of_rows_that_are_not_the_tensor_leave_the_rank_dirty(change, problem, announced, target, model):
    policy = make_policy(model, seed=1)
    runs = runs_of({O_PROJ: policy[O_PROJ]}, O_PROJ)
    prepared = target.prepare(announce(policy) if announced else PushedSource(None), RefitConfig())
    target.begin(prepared)
    with pytest.raises(InvalidSourceError, match=f"{O_PROJ}: {problem}"):
        target.push([*change(runs), *((name, tensor) for name, tensor in policy.items() if name != O_PROJ)])
        target.finish()
    assert target.is_dirty
    assert_heals(target, model)


def test_problems_and_odd_scales_that_were_found_elsewhere_are_refused(target, model):
    policy = make_policy(model, seed=1)
    twice = announce(policy, problems=[f"{NORM}: sent twice"])
    refuse(target, model, InvalidSourceError, twice, f"{NORM}: sent twice")
    sent = prequantize(policy, O_PROJ, ScaleFormat.FP32)
    odd = announce(sent, odd_scales=[O_PROJ + "_scale_inv"])
    refuse(target, model, InvalidSourceError, odd, f"{O_PROJ}_scale_inv: holds scales that are not powers of two")


def test_odd_scales_that_were_found_elsewhere_are_copied_when_asked(target, model):
    sent = prequantize(make_policy(model, seed=1), O_PROJ, ScaleFormat.FP32)
    prepared = target.prepare(announce(sent, odd_scales=[O_PROJ + "_scale_inv"]), RefitConfig(on_scale_mismatch="copy"))
    target.begin(prepared)
    push_all(target, sent.items())
    target.finish()
    assert torch.equal(model.layers[0].o_scale, sent[O_PROJ + "_scale_inv"])


def test_odd_scales_of_a_slot_that_takes_any_are_no_problem(target, model):
    sent = prequantize(make_policy(model, seed=1), Q_PROJ, ScaleFormat.FP32)
    target.prepare(announce(sent, odd_scales=[Q_PROJ + "_scale_inv"]), RefitConfig())


def test_strict_leaves_the_looking_to_whoever_reads(target, model):
    policy = make_policy(model, seed=1)
    prepared = target.prepare(announce(policy), RefitConfig(validate="strict"))
    target.begin(prepared)
    policy[NORM][0] = float("nan")
    push_all(target, policy.items())
    with pytest.raises(NonFiniteError, match="holds part of this policy"):
        target.finish()
    assert_heals(target, model)


def test_a_write_that_nobody_finished_is_given_up_by_the_next(target, model):
    policy = make_policy(model, seed=1)
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    prepared = target.prepare(announce(policy), RefitConfig())
    target.begin(prepared)
    push_all(target, list(policy.items())[:3])
    del policy
    assert target.is_dirty
    assert_heals(target, model)
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_a_write_gives_its_buckets_back_before_it_is_committed(target, model):
    """A calibration comes between, and needs the memory."""
    prepared = target.prepare(from_function(make_policy(model, seed=1), None), RefitConfig())
    assert prepared.fills[-1].num_device_bytes > 0
    assert target.write(prepared).extra_bytes > 0
    assert prepared.fills[-1].num_device_bytes == 0


def test_an_abandoned_write_leaves_the_rank_dirty_and_takes_no_more_parts(target, model):
    policy = make_policy(model, seed=1)
    prepared = target.prepare(announce(policy), RefitConfig())
    target.begin(prepared)
    target.abandon()
    assert target.is_dirty
    for step in (lambda: target.push(policy.items()), target.finish, lambda: target.begin(prepared), target.commit):
        with pytest.raises(RankFailedError, match="abandoned"):
            step()
    assert target.is_dirty
    assert_heals(target, model)


def test_an_abandoned_prepare_leaves_the_rank_as_it_was(target, model):
    policy, before = make_policy(model, seed=1), live_bytes(model)
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    target.prepare(as_source(policy), RefitConfig())
    target.abandon()
    del policy
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert (live_bytes(model), target.is_dirty) == (before, False)


@pytest.mark.parametrize("state", ["booted", "committed", "prepared", "begun", "failed", "prepared anew"])
def test_only_a_finished_write_is_committed(state, model):
    target, policy = make_target(model), make_policy(model, seed=1)
    if state != "booted":
        prepared = target.prepare(as_source(policy), RefitConfig())
    if state == "begun":
        target.begin(prepared)
    if state == "failed":
        model.on_refresh = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            target.write(prepared)
    if state in ("committed", "prepared anew"):
        target.write(prepared)
    if state == "committed":
        target.commit()
    if state == "prepared anew":
        target.prepare(as_source(policy), RefitConfig())
    with pytest.raises(RankFailedError, match="abandoned"):
        target.commit()
    assert target.version == (state == "committed")
    assert target.is_dirty == (state in ("begun", "failed", "prepared anew"))


def test_a_version_that_is_said_is_taken(model):
    target = make_target(model)
    prepared = target.prepare(as_source(make_policy(model, seed=1)), RefitConfig())
    target.write(prepared)
    assert target.commit(7) == target.version == 7


# Among other ranks.


@pytest.mark.parametrize("make_source", ALL)
def test_names_of_other_ranks_may_come(make_source, target, model, tmp_path):
    policy = make_policy(model, seed=1)
    foreign = {"model.layers.7.q_proj.weight": torch.ones(3), "model.layers.7.q_proj.weight_scale_inv": torch.ones(1)}
    source = make_source(policy | foreign, tmp_path)
    prepared = target.prepare(source, RefitConfig(), foreign=frozenset({"model.layers.7.q_proj.weight"}))
    report = target.write(prepared)
    target.commit()
    assert sorted(report.ignored) == sorted(foreign)
    assert report.num_tensors == len(policy)
    assert_holds(model, policy)


@pytest.mark.parametrize("make_source", ALL)
def test_names_that_other_ranks_hold_no_more_are_unexpected(make_source, target, model, tmp_path):
    policy, name = make_policy(model, seed=1), "model.layers.7.q_proj.weight"
    everything = policy | {name: torch.ones(3)}
    for _ in range(2):
        target.write(target.prepare(make_source(everything, tmp_path), RefitConfig(), foreign=frozenset({name})))
        target.commit()
    with pytest.raises(InvalidSourceError, match=f"{name}: unexpected"):
        target.write(target.prepare(make_source(everything, tmp_path), RefitConfig(), foreign=frozenset()))


def test_a_tensor_of_another_rank_in_another_dtype_is_another_source(target, model):
    policy, name = make_policy(model, seed=1), "model.layers.7.q_proj.weight"
    digests = {
        target.prepare(
            as_source(policy | {name: torch.ones(3, dtype=dtype)}), RefitConfig(), foreign=frozenset({name})
        ).plan.source_digest
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)
    }
    assert len(digests) == 2


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 60_000, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("validate", ["fused", "strict"])
def test_tensors_may_come_in_runs_of_rows(bucket_bytes, dtype, validate, target, model):
    """Among them one whose slot begins off the blocks of the runs: it is put together first."""
    policy = make_policy(model, seed=1, dtype=dtype)
    source = gathered(policy, bucket_bytes=bucket_bytes)
    num_pieces = len(list(source.pieces(1 << 30)))
    assert (num_pieces > len(policy)) == (bucket_bytes < 1 << 20)
    refit_target(target, source, validate=validate)
    assert_holds(model, policy)


class Made:
    """Tensors that are made in the reader's memory."""

    is_repeatable = True

    def __init__(self, policy):
        self.policy = policy

    def scan(self):
        return {name: TensorMeta.of(tensor) for name, tensor in self.policy.items()}, ()

    def __iter__(self):
        return iter(self.policy.items())

    def recipes(self, max_bytes):
        for name, tensor in self.policy.items():
            like = torch.full_like(tensor, torch.nan)
            yield Recipe(name=name, first_row=0, tensor=like, full_shape=tuple(tensor.shape))

    def make(self, recipes, outs):
        for recipe, out in zip(recipes, outs, strict=True):
            out.copy_(self.policy[recipe.name][recipe.first_row : recipe.first_row + len(out)])


@pytest.mark.parametrize("validate", ["fused", "strict"])
@pytest.mark.parametrize("at_once", [1, 2, 5, 1000])
def test_tensors_may_be_made_together(at_once, validate, target, model, monkeypatch):
    """Those of whole tensors are recognized once they came twice."""
    recognized, fill_group = [], fp8refit.fill.stream.DirectFill.fill_group

    def note(*group):
        recognized.append(fill_group(*group))
        return recognized[-1]

    monkeypatch.setattr(fp8refit.fill.stream.DirectFill, "fill_group", note)
    monkeypatch.setattr("fp8refit.sources.recipe_batches._shares_launches", lambda device: True)
    monkeypatch.setattr("fp8refit.fill.stream._MOST_TOGETHER", at_once)
    for seed in range(1, 5):
        recognized.clear()
        policy = make_policy(model, seed=seed)
        refit_target(target, Made(policy), validate=validate)
        assert_holds(model, policy)
        assert all(recognized) if seed >= 3 else not any(recognized)
    assert bool(recognized) == (at_once > 1)


def test_a_bad_value_in_a_run_of_rows_is_named(target, model):
    policy = make_policy(model, seed=1)
    for name in (NORM, UP_PROJ):
        policy[name].view(-1)[-1] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        refit_target(target, gathered(policy, bucket_bytes=1000))
    assert set(caught.value.names) == {NORM, UP_PROJ}
    assert_heals(target, model)


@pytest.mark.parametrize("drain", [True, False])
def test_a_stream_is_read_to_its_end_if_others_wait_in_it(drain, target, model):
    policy, read = make_policy(model, seed=1), []

    def gather():
        for name, tensor in [(NORM, torch.ones(3)), *policy.items()]:
            read.append(name)
            yield name, tensor

    prepared = target.prepare(
        as_source(gather(), manifest={name: TensorMeta.of(each) for name, each in policy.items()}), RefitConfig()
    )
    with pytest.raises(InvalidSourceError, match=f"{NORM}: arrived as"):
        target.write(prepared, drain=drain)
    assert read == ([NORM, *policy] if drain else [NORM])
    assert_heals(target, model)


def test_a_stream_is_read_to_its_end_after_any_error(target, model, monkeypatch):
    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    policy, read = make_policy(model, seed=1), []
    source = as_source(lambda: (read.append(name) or (name, tensor) for name, tensor in policy.items()))
    prepared = target.prepare(source, RefitConfig())
    read.clear()
    monkeypatch.setattr(fp8refit.fill.stream.DirectFill, "fill", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        target.write(prepared, drain=True)
    assert read == list(policy)


def test_a_stream_that_raises_is_not_drained(target, model):
    def gather():
        yield NORM, torch.ones(192)
        raise ConnectionError("the trainer went away")

    prepared = target.prepare(as_source(gather()), RefitConfig())
    with pytest.raises(ConnectionError, match="went away"):
        target.write(prepared, drain=True)
    assert target.is_dirty


def test_what_was_just_found_ready_is_not_asked_again(target, model):
    target.check_ready()
    asked = []
    target.check_ready = lambda: asked.append(1)
    target.prepare(as_source(make_policy(model, seed=1)), RefitConfig(), is_ready=True)
    assert asked == []


def without(policy, *names):
    return {name: tensor for name, tensor in policy.items() if name not in names}


FROZEN = ("model.layers.*norm*", "*e_score_correction_bias")


@pytest.mark.parametrize(
    "kind", [dict, lambda policy: iter(policy.items()), lambda policy: lambda: iter(policy.items())]
)
def test_what_is_kept_need_not_come_and_is_named(kind, target, model):
    first, second = make_policy(model, seed=1), make_policy(model, seed=2)
    refit_target(target, as_source(first))
    frozen = [name for name in first if "norm" in name or "bias" in name]
    report = refit_target(target, as_source(kind(without(second, *frozen))), keep=FROZEN)
    assert sorted(report.kept) == sorted(frozen)
    assert_holds(model, {**second, **{name: first[name] for name in frozen}})
    report = refit_target(target, as_source(kind(second)), keep=FROZEN)
    assert report.kept == ()
    assert_holds(model, second)
    with pytest.raises(InvalidSourceError, match=f"{frozen[0]}: missing"):
        refit_target(target, as_source(kind(without(second, *frozen))))


@pytest.mark.parametrize(
    "kind", [dict, lambda policy: iter(policy.items()), lambda policy: lambda: iter(policy.items())]
)
def test_what_a_sleep_has_thrown_away_is_not_kept(kind, target, model):
    policy = make_policy(model, seed=1)
    frozen = [name for name in policy if "norm" in name]
    refit_target(target, as_source(policy))
    target.forget_values()
    with pytest.raises(InvalidSourceError) as caught:
        refit_target(target, as_source(kind(without(policy, *frozen))), keep=FROZEN[:1])
    assert [problem.split(":")[0] for problem in caught.value.problems] == frozen
    assert all("sleep mode has discarded" in problem for problem in caught.value.problems)
    assert not target.is_dirty
    refit_target(target, as_source(policy))
    refit_target(target, as_source(kind(without(policy, *frozen))), keep=FROZEN[:1])
    assert_holds(model, policy)


def test_constants_are_written_once_and_again_where_they_were_lost(target, model):
    policy, num_written = make_policy(model, seed=1), []
    constant = Refresh(name="cache", run=lambda: num_written.append(1), is_constant=True)
    read = target.live._read_inventory
    target.live._read_inventory = lambda: dataclasses.replace(read(), refreshes=(constant,))
    target.live.forget()

    def total_after_refit():
        refit_target(target, as_source(policy))
        return len(num_written)

    assert [total_after_refit(), total_after_refit()] == [1, 1]
    target.forget_values()
    with pytest.raises(NonFiniteError):
        refit_target(target, as_source(policy | {NORM: torch.full_like(policy[NORM], torch.nan)}))
    assert [total_after_refit(), total_after_refit()] == [3, 3]  # the refit that failed did not end what sleep began
    target.live.forget()
    assert [total_after_refit(), total_after_refit()] == [4, 4]


def test_what_a_refit_that_failed_has_written_is_not_kept(target, model):
    first, second = make_policy(model, seed=1), make_policy(model, seed=2)
    frozen = [name for name in first if "norm" in name]
    refit_target(target, as_source(first))
    bad = {**second, UP_PROJ: torch.full_like(second[UP_PROJ], torch.nan)}
    with pytest.raises(NonFiniteError):
        refit_target(target, as_source(without(bad, *frozen)), keep=FROZEN[:1])
    # It did not write them, so they are what they were.
    refit_target(target, as_source(without(second, *frozen)), keep=FROZEN[:1])
    assert_holds(model, {**second, **{name: first[name] for name in frozen}})
    for source in (as_source(bad), as_source(iter(bad.items()))):
        with pytest.raises(NonFiniteError):
            refit_target(target, source, keep=FROZEN[:1])
        with pytest.raises(InvalidSourceError, match="a failed refit has overwritten it"):
            refit_target(target, as_source(without(second, *frozen)), keep=FROZEN[:1])
        refit_target(target, as_source(second))
        assert_holds(model, second)


def target_that_copies(model):
    """A target, and the refusals of copies that its engine has made."""
    copies: list[Refusal] = []

    def read_inventory():
        return dataclasses.replace(model.read_inventory(), find_copies=lambda *_: tuple(copies))

    return Target(read_inventory, device=torch.device("cpu"), engine="fake", versions={}), copies


def test_copies_made_after_a_refit_was_prepared_are_refused():
    model = FakeModel()
    policy = make_policy(model, seed=1)
    target, copies = target_that_copies(model)
    before = live_bytes(model)
    prepared = target.prepare(as_source(policy), RefitConfig())
    copies.append(Refusal(module="layers.0", reason="keeps `joined`", remedy="Boot without it"))
    with pytest.raises(UnsupportedEngineError, match="keeps `joined`"):
        target.begin(prepared)
    assert not target.is_dirty
    assert live_bytes(model) == before
    assert target.live.layout().refusals == ("layers.0: keeps `joined`. Boot without it",)
    copies.clear()
    refit_target(target, as_source(policy))
    assert_holds(model, policy)


def test_copies_made_while_a_later_refit_is_written_leave_the_engine_dirty():
    model = FakeModel()
    policy = make_policy(model, seed=1)
    target, copies = target_that_copies(model)
    refit_target(target, as_source(policy))
    prepared = target.prepare(as_source(policy), RefitConfig())
    copies.append(Refusal(module="layers.0", reason="keeps `joined`", remedy="Boot without it"))
    with pytest.raises(UnsupportedEngineError, match=r"is dirty:\n.*keeps `joined`"):
        target.write(prepared)
    assert target.is_dirty
    assert target.version == 1
    copies.clear()
    refit_target(target, as_source(policy))
    assert not target.is_dirty


def test_a_model_is_read_again_if_what_a_refresh_writes_was_replaced():
    model, scales = FakeModel(), [torch.ones(1)]

    def read_inventory():
        known = scales[0]
        unknown = Refusal(module="experts", reason="keeps `scale`", remedy="Boot without it")
        return dataclasses.replace(model.read_inventory(), find_copies=lambda *_: (unknown,) * (scales[0] is not known))

    target = Target(read_inventory, device=torch.device("cpu"), engine="fake", versions={})
    for seed in (1, 2):
        policy = make_policy(model, seed=seed)
        refit_target(target, as_source(policy))
        assert_holds(model, policy)
        scales[0] = torch.ones(1)


@pytest.mark.parametrize("was_booted_with_weights", [False, True])
def test_whether_constants_hold_their_values_is_told(was_booted_with_weights):
    model, told = FakeModel(), []
    policy = make_policy(model, seed=1)

    def tell(hold, _):
        told.append(hold)
        return ()

    def read_inventory():
        return dataclasses.replace(model.read_inventory(), find_copies=tell)

    target = Target(
        read_inventory, device=torch.device("cpu"), engine="fake", versions={}, has_constants=was_booted_with_weights
    )
    refit_target(target, as_source(policy))
    assert set(told) == {was_booted_with_weights}
    target.check_ready()
    target.forget_values()
    target.check_ready()
    assert told[-2:] == [True, False]
