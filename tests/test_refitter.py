"""The order of a refit, who may call it when, and what it leaves behind."""

import copy
import json
import logging
import pickle
import threading

import pytest
import torch

from fp8refit import (
    CacheFlushError,
    EngineBusyError,
    InvalidSourceError,
    NonFiniteError,
    RefitConfig,
    Refitter,
    UnsupportedEngineError,
    refit,
)
from tests.fakes import FakeEntryPoint, FakeModel, assert_holds, live_bytes, make_policy, unchanged

NORM = "model.layers.0.input_layernorm.weight"
GOOD = ["check_ready", "prepare", "block", "write", "flush", "commit", "unblock"]


def policy_with_nan(model: FakeModel) -> dict[str, torch.Tensor]:
    policy = make_policy(model, seed=5)
    policy[NORM][3] = float("nan")
    return policy


def assert_dirty_until_refitted(refitter: Refitter, model: FakeModel, reason: str) -> None:
    assert refitter.is_dirty
    assert reason in model.blocked
    policy = make_policy(model, seed=9)
    refitter.refit(policy)
    assert not refitter.is_dirty and model.blocked is None
    assert_holds(model, policy)


def test_the_steps_of_a_refit_come_in_this_order(model):
    refitter = Refitter(model)
    policy = make_policy(model, seed=1)
    refitter.refit(policy)
    assert model.events == GOOD
    assert_holds(model, policy)


def test_requests_are_refused_while_weights_are_written(model):
    blocked = []
    model.on_refresh = lambda: blocked.append(model.blocked)
    Refitter(model).refit(make_policy(model, seed=1))
    assert blocked == ["a refit is under way"]
    assert model.blocked is None


def test_a_busy_engine_is_left_alone(model):
    refitter = Refitter(model)
    model.is_busy = True
    with unchanged(model), pytest.raises(EngineBusyError, match="unfinished"):
        refitter.refit(make_policy(model, seed=1))
    assert model.events == ["check_ready"]


def test_a_source_that_does_not_fit_leaves_the_engine_serving(model):
    refitter = Refitter(model)
    with unchanged(model), pytest.raises(InvalidSourceError):
        refitter.refit({})
    assert model.events == ["check_ready", "prepare"]
    assert not refitter.is_dirty


def test_a_caller_s_mistake_is_a_value_error(model):
    with pytest.raises(ValueError, match="missing"):
        Refitter(model).refit({})


def test_a_bad_value_leaves_the_engine_refusing_requests(model):
    refitter = Refitter(model)
    with pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    assert model.events == ["check_ready", "prepare", "block", "write", "block"]
    assert refitter.version == 0
    assert_dirty_until_refitted(refitter, model, "the last refit failed part way (NonFiniteError")


def test_a_failing_flush_leaves_the_engine_refusing_requests(model):
    refitter = Refitter(model)
    model.flush_fails = True
    with pytest.raises(CacheFlushError):
        refitter.refit(make_policy(model, seed=1))
    assert model.events == ["check_ready", "prepare", "block", "write", "flush", "block"]
    assert refitter.version == 0
    model.flush_fails = False
    assert_dirty_until_refitted(refitter, model, "CacheFlushError")


def test_an_interrupt_leaves_the_engine_refusing_requests(model):
    refitter = Refitter(model)

    def gather():
        yield from list(make_policy(model, seed=1).items())[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refitter.refit(gather())
    assert_dirty_until_refitted(refitter, model, "KeyboardInterrupt")


def test_a_refused_source_does_not_open_a_dirty_engine(model):
    refitter = Refitter(model)
    with pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    with unchanged(model), pytest.raises(InvalidSourceError):
        refitter.refit({})
    assert_dirty_until_refitted(refitter, model, "NonFiniteError")


def test_strict_leaves_the_engine_serving(model):
    refitter = Refitter(model, validate="strict")
    with unchanged(model), pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    assert not refitter.is_dirty


def test_one_refit_at_a_time(model):
    refitter, policy = Refitter(model), make_policy(model, seed=1)
    reached, proceed = threading.Event(), threading.Event()

    def gather():
        for name, tensor in policy.items():
            reached.set()
            assert proceed.wait(60)
            yield name, tensor

    thread = threading.Thread(target=refitter.refit, args=(gather(),))
    thread.start()
    try:
        assert reached.wait(60)
        with pytest.raises(EngineBusyError, match="another refit"):
            Refitter(model).refit(make_policy(model, seed=2))
        with pytest.raises(EngineBusyError, match="under way"):
            refitter.close()
    finally:
        proceed.set()
        thread.join(60)
    assert (refitter.version, refitter.is_dirty) == (1, False)
    assert_holds(model, policy)


def test_a_failed_refit_does_not_keep_the_next_one_out(model):
    refitter = Refitter(model)
    for _ in range(2):
        with pytest.raises(InvalidSourceError):
            refitter.refit({})


def test_versions_are_counted_per_engine(model):
    assert Refitter(model).version == 0
    for version in (1, 2):
        assert Refitter(model).refit(make_policy(model, seed=version)).version == version
    assert Refitter(model).version == 2


def test_the_one_line_form_keeps_the_plan(model):
    first, second = (refit(model, make_policy(model, seed=seed)) for seed in (1, 2))
    assert (first.version, first.is_first) == (1, True)
    assert (second.version, second.is_first) == (2, False)
    assert model.num_inventories == 1
    assert_holds(model, make_policy(model, seed=2))


def test_the_one_line_form_takes_options_and_a_manifest(model):
    policy = make_policy(model, seed=1, dtype=torch.float32)
    manifest = {name: (tensor.shape, tensor.dtype) for name, tensor in policy.items()}
    refit(model, iter(policy.items()), manifest=manifest, fp32_sources="exact")
    exact = live_bytes(model)
    refit(model, policy)
    assert live_bytes(model) != exact
    assert_holds(model, policy)


def test_the_report_says_what_was_done(model):
    policy = make_policy(model, seed=1)
    report = Refitter(model).refit({**policy, "lm_head.weight": policy["model.embed_tokens.weight"]})
    assert report.engine == "fake"
    assert report.num_tensors == len(policy)
    assert report.ignored == ("lm_head.weight",)
    assert report.bytes_read == sum(2 * slot.weight.numel() for slot in model.slots())
    assert report.bytes_written == sum(
        tensor.numel() * tensor.element_size()
        for slot in model.slots()
        for tensor in (slot.weight, slot.scale)
        if tensor is not None
    )
    assert list(report.phases_s) == ["plan", "fill", "verify", "flush"]
    assert report.total_s == sum(report.phases_s.values()) > 0
    assert report.fill_device_s is None
    assert json.loads(report.model_dump_json())["version"] == 1
    for word in ("version", "plan", "fill", "flush", "total"):
        assert word in str(report)


def test_one_line_is_logged_for_a_refit(model, caplog):
    with caplog.at_level(logging.INFO, logger="fp8refit"):
        Refitter(model).refit(make_policy(model, seed=1))
    (record,) = caplog.records
    assert "refit fake to version 1: 9 tensors" in record.getMessage()


def test_layout_is_the_engine_s(model):
    assert [slot.name for slot in Refitter(model).layout().slots] == [slot.name for slot in model.slots()]


def test_closing_drops_the_plan_and_keeps_version_and_state(model):
    other = Refitter(model)
    with Refitter(model) as refitter:
        refitter.refit(make_policy(model, seed=1))
    assert Refitter(model).version == 1
    with pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    assert model.num_inventories == 2
    assert Refitter(model).is_dirty and other.is_dirty
    assert_dirty_until_refitted(Refitter(model), model, "failed part way")


def test_closing_a_dirty_engine_keeps_it_dirty(model):
    with pytest.raises(NonFiniteError), Refitter(model) as refitter:
        refitter.refit(policy_with_nan(model))
    assert Refitter(model).is_dirty
    assert_dirty_until_refitted(Refitter(model), model, "NonFiniteError")


def test_an_unknown_engine_is_refused(model):
    with pytest.raises(UnsupportedEngineError, match=r"builtins\.dict is no engine .* \(fake\)"):
        Refitter({})


def test_options_are_checked(model):
    with pytest.raises(ValueError, match="not both"):
        Refitter(model, RefitConfig(), validate="off")
    with pytest.raises(ValueError, match="validate"):
        Refitter(model, validate="sometimes")
    with pytest.raises(ValueError, match="buckets"):
        Refitter(model, buckets=3)
    with pytest.raises(ValueError, match="bucket_bytes"):
        Refitter(model, bucket_bytes=1000)


def test_a_copy_of_an_attached_engine_is_an_engine_of_its_own(model):
    policy = make_policy(model, seed=1)
    Refitter(model).refit(policy)
    attached = model._fp8refit_engine
    assert copy.deepcopy(attached) is None
    assert pickle.loads(pickle.dumps(attached)) is None
    assert Refitter(model).version == 1


def test_an_adapter_that_cannot_be_imported_stands_in_nobody_s_way(model, monkeypatch):
    class Broken:
        name = "broken"

        def load(self):
            raise ImportError("No module named 'flux'")

    monkeypatch.setattr("fp8refit.engine.entry_points", lambda group: [Broken(), FakeEntryPoint()])
    Refitter(model).refit(make_policy(model, seed=1))
    with pytest.raises(UnsupportedEngineError, match=r"adapter broken cannot be imported: No module named 'flux'"):
        Refitter({})
