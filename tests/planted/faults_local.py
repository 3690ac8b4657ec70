"""Faults of engines in this process: admission, interrupts, ties, votes and dirt."""

from tests.planted.fault import Fault

TARGET, RANK, ATTEMPT = "fp8refit/ranks/target.py", "fp8refit/ranks/rank.py", "fp8refit/driver/attempt.py"
ADAPTER = "adapters/fp8refit_transformers"
LOCAL = "tests/fuzz/test_local.py"

FAULTS = [
    Fault(
        name="a dirty model refuses by hooks that compiled code does not look at",
        at=f"{ADAPTER}/admission.py::refuse",
        before='object.__setattr__(module, "__class__", _refused_class(cast(Any, type(module))))',
        after="module.register_forward_pre_hook(lambda one, _: _check(one) if _REFUSAL in vars(one) else None)",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a dirty model refuses at its outermost module alone",
        at=f"{ADAPTER}/admission.py::refuse",
        before="model.modules()",
        after="[model]",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a refit in the middle of generate",
        at=f"{ADAPTER}/engine.py::TransformersEngine.check_ready",
        before="call is not None",
        after="call is None and call is not None",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a cache of the policy before",
        at=f"{ADAPTER}/engine.py::TransformersEngine.publish_version",
        before="self._served.policy, self._served.was_refitted = Policy(version), True",
        after="self._served.was_refitted = True",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="an interrupt between commit and resume leaves the engine paused",
        at=f"{ATTEMPT}::Attempt.fail",
        before="if self.version is not None:\n    ...",
        after="if self.version == ranks.version:\n    ...",
        found_by=f"{LOCAL}::test_an_error_at_every_line_of_a_refit",
    ),
    Fault(
        name="an interrupt keeps the turn",
        at=f"{ATTEMPT}::take_turn",
        before="try:\n    ...\nfinally:\n    turn.end(attempt)",
        after="try:\n    ...\nfinally:\n    pass",
        found_by=f"{LOCAL}::test_an_error_at_every_line_of_a_refit",
    ),
    Fault(
        name="an interrupt while a failed refit is seen to leaves a whole engine paused",
        at=f"{ATTEMPT}::take_turn",
        before="if attempt.version is not None:\n    await attempt.fail(error)",
        found_by=f"{LOCAL}::test_an_error_at_every_line_that_sees_to_a_refit_that_failed",
    ),
    Fault(
        name="an interrupt in the middle of a commit",
        at=f"{TARGET}::Target.commit",
        before="self.version, self.is_dirty, kv.torn = version, False, None",
        after="self.version = version\nself.is_dirty = False\nkv.torn = None",
        found_by=f"{LOCAL}::test_an_error_at_every_line_of_a_refit",
    ),
    Fault(
        name="weights that are tied and scales that are not",
        at=f"{ADAPTER}/layout.py::_place",
        before="(slot.weight, slot.scale)",
        after="(slot.weight,)",
        found_by=f"{LOCAL}::test_tensors_that_share_bytes_are_one_or_refused",
    ),
    Fault(
        name="tensors that share bytes in part",
        at="fp8refit/ranks/live_model.py::LiveModel.read",
        before="shared_bytes(inventory.slots)",
        after="shared_bytes(())",
        found_by=f"{LOCAL}::test_tensors_that_share_bytes_are_one_or_refused",
    ),
    Fault(
        name="half a fill committed",
        at="fp8refit/fill/resident.py::ResidentFill.__init__",
        before="[step for step in plan.steps if step not in staged]",
        after="[step for step in plan.steps if step not in staged][::2]",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a stale KV scale",
        at=f"{TARGET}::Target.commit",
        before="self.version, self.is_dirty, kv.torn = version, False, None",
        after="self.version, self.is_dirty = version, False",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a KV scale that is measured and not written",
        at="fp8refit/ranks/kv/scales.py::KvScales.write",
        before="self._write(values)",
        after="self._write(self.torn)",
        found_by=f"{LOCAL}::TestTwoRanks",
    ),
    Fault(
        name="a vote skipped",
        at=f"{RANK}::Rank._settle",
        before='self._agreement.vote("written", error, config, claim=claim, report=report)',
        after='self._agreement.vote("written", None, config, report=report)',
        found_by=f"{LOCAL}::test_a_step_that_fails_on_one_rank_fails_on_both",
    ),
    Fault(
        name="a vote on scales skipped",
        at="fp8refit/ranks/scaling.py::set_kv_scales",
        before='agreement.vote("scaled", error, config, kv=report)',
        after='agreement.vote("scaled", None, config, kv=report)',
        found_by=f"{LOCAL}::test_a_step_that_fails_on_one_rank_fails_on_both",
    ),
    Fault(
        name="the dirty flag lost",
        at=f"{TARGET}::Target.abandon",
        before="self._is_whole = False",
        after="self._is_whole = self.is_dirty = False",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="kernels are compiled when they are launched",
        at=f"{TARGET}::Target.prepare",
        before="prepared.compile()",
        after="pass",
        found_by="tests/driver/test_refitter.py -k compiler",
    ),
    Fault(
        name="the dirty flag set too late",
        at=f"{TARGET}::Target.begin",
        before="self.is_dirty = True",
        after="with self._undone_on_error():\n    prepared.fills[0].launch(None)\nself.is_dirty = True",
        found_by=f"{LOCAL}::test_an_error_at_every_line_of_a_refit",
    ),
]
