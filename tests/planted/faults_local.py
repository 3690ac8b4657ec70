"""Faults of engines in this process: admission, interrupts, ties, votes and dirt."""

from tests.planted.fault import Fault

TARGET, RANK, ATTEMPT = "fp8refit/ranks/target.py", "fp8refit/ranks/rank.py", "fp8refit/driver/attempt.py"
ADAPTER = "adapters/fp8refit_transformers"
LOCAL = "tests/fuzz/test_local.py"

FAULTS = [
    Fault(
        name="a dirty model refuses by hooks that compiled code does not look at",
        path=f"{ADAPTER}/admission.py",
        before='object.__setattr__(module, "__class__", _refused_class(cast(Any, type(module))))',
        after="module.register_forward_pre_hook(lambda one, _: _check(one) if _REFUSAL in vars(one) else None)",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a dirty model refuses at its outermost module alone",
        path=f"{ADAPTER}/admission.py",
        before="    for module in model.modules():\n        vars(module)[_REFUSAL] = refusal\n",
        after="    for module in [model]:\n        vars(module)[_REFUSAL] = refusal\n",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a refit in the middle of generate",
        path=f"{ADAPTER}/engine.py",
        before="        if call is not None:\n",
        after="        if call is None and call is not None:\n",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a cache of the policy before",
        path=f"{ADAPTER}/engine.py",
        before="self._served.policy, self._served.was_refitted = Policy(version), True",
        after="self._served.was_refitted = True",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="an interrupt between commit and resume leaves the engine paused",
        path=ATTEMPT,
        before="        elif self.version is not None:\n            # Nothing",
        after="        elif self.version == ranks.version:\n            # Nothing",
        found_by=f"{LOCAL}::test_an_error_at_every_line_of_a_refit",
    ),
    Fault(
        name="an interrupt keeps the turn",
        path=ATTEMPT,
        before="    finally:\n        turn.end(attempt)\n\n\ndef _describe",
        after="    finally:\n        pass\n\n\ndef _describe",
        found_by=f"{LOCAL}::test_an_error_at_every_line_of_a_refit",
    ),
    Fault(
        name="an interrupt while a failed refit is seen to leaves a whole engine paused",
        path=ATTEMPT,
        before="            if attempt.version is not None:\n                await attempt.fail(error)\n",
        after="",
        found_by=f"{LOCAL}::test_an_error_at_every_line_that_sees_to_a_refit_that_failed",
    ),
    Fault(
        name="an interrupt in the middle of a commit",
        path=TARGET,
        before="            self.version, self.is_dirty, kv.torn = version, False, None\n",
        after="            self.version = version\n            self.is_dirty = False\n            kv.torn = None\n",
        found_by=f"{LOCAL}::test_an_error_at_every_line_of_a_refit",
    ),
    Fault(
        name="weights that are tied and scales that are not",
        path=f"{ADAPTER}/layout.py",
        before="    parts = (slot.weight, slot.scale)\n",
        after="    parts = (slot.weight,)\n",
        found_by=f"{LOCAL}::test_tensors_that_share_bytes_are_one_or_refused",
    ),
    Fault(
        name="tensors that share bytes in part",
        path="fp8refit/ranks/live_model.py",
        before="refusals=(*inventory.refusals, *shared_bytes(inventory.slots))",
        after="refusals=(*inventory.refusals, *shared_bytes(()))",
        found_by=f"{LOCAL}::test_tensors_that_share_bytes_are_one_or_refused",
    ),
    Fault(
        name="half a fill committed",
        path="fp8refit/fill/resident.py",
        before="        steps = [step for step in plan.steps if step.source not in elsewhere]\n",
        after="        steps = [step for step in plan.steps if step.source not in elsewhere][::2]\n",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a stale KV scale",
        path=TARGET,
        before="            self.version, self.is_dirty, kv.torn = version, False, None\n",
        after="            self.version, self.is_dirty = version, False\n",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="a KV scale that is measured and not written",
        path="fp8refit/ranks/kv/scales.py",
        before="                self.torn = self._read()\n            self._write(values)\n",
        after="                self.torn = self._read()\n            self._write(self.torn)\n",
        found_by=f"{LOCAL}::TestTwoRanks",
    ),
    Fault(
        name="a vote skipped",
        path=RANK,
        before='        ballots = self._agreement.vote("written", error, config, claim=claim, report=report)\n',
        after='        ballots = self._agreement.vote("written", None, config, report=report)\n',
        found_by=f"{LOCAL}::test_a_step_that_fails_on_one_rank_fails_on_both",
    ),
    Fault(
        name="a vote on scales skipped",
        path="fp8refit/ranks/scaling.py",
        before='[ballot.kv for ballot in agreement.vote("scaled", error, config, kv=report) if',
        after='[ballot.kv for ballot in agreement.vote("scaled", None, config, kv=report) if',
        found_by=f"{LOCAL}::test_a_step_that_fails_on_one_rank_fails_on_both",
    ),
    Fault(
        name="the dirty flag lost",
        path=TARGET,
        before="        self._is_whole = False\n        write, self._write = self._write, None\n",
        after="        self._is_whole = self.is_dirty = False\n        write, self._write = self._write, None\n",
        found_by=f"{LOCAL}::TestOneRank",
    ),
    Fault(
        name="the dirty flag set too late",
        path=TARGET,
        before="            self.is_dirty = True\n        with self._undone_on_error():\n",
        after="            pass\n        with self._undone_on_error():\n            prepared.fills[0].launch(None)\n"
        "        self.is_dirty = True\n        with self._undone_on_error():\n",
        found_by=f"{LOCAL}::test_an_error_at_every_line_of_a_refit",
    ),
]
