"""Faults of streams: what is lent, what is known from the last one, what is kept, and what is compared."""

from tests.planted.fault import Fault

JOB, TARGET, COMPARE, PLAN = "fp8refit/job.py", "fp8refit/target.py", "fp8refit/compare.py", "fp8refit/plan.py"
STREAMS = "tests/fuzz/test_streams.py"

FAULTS = [
    Fault(
        name="a tensor that was lent is read after it was overwritten",
        path=JOB,
        before="tensor.clone() if is_small else tensor, steps",
        after="tensor, steps",
        found_by=STREAMS,
    ),
    Fault(
        name="a stream that begins like the last one is taken for whole",
        path=JOB,
        before="        if self._known is not None and len(self._names) < len(self._known.metadata):\n",
        after="        if self._known is not None and not self._names:\n",
        found_by=STREAMS,
    ),
    Fault(
        name="a bucket is recognised by its shapes alone",
        path="fp8refit/direct.py",
        before="if group is None or not group.guard.holds(names, tensors):",
        after="if group is None or not group.guard.holds(group.guard._names, tensors):",
        found_by=STREAMS,
    ),
    Fault(
        name="what a refit that failed has written is kept",
        path=TARGET,
        before="        self._torn |= _names(job.inventory) - set(kept)\n",
        after="        del kept\n",
        found_by=STREAMS,
    ),
    Fault(
        name="what came although it was to be kept is kept after the refit failed",
        path=TARGET,
        before="            self._torn.update(aliases.get(name, name) for name in write.arrivals.names)\n",
        after="            del aliases\n",
        found_by=STREAMS,
    ),
    Fault(
        name="what a sleep has thrown away is kept",
        path=TARGET,
        before="        if self._has_lost_values:\n",
        after="        if self._has_lost_values and self.is_dirty:\n",
        found_by=STREAMS,
    ),
    Fault(
        name="a tensor differs if all of it does",
        path=COMPARE,
        before="return (written.view(dtype) != held.view(dtype)).any()",
        after="return (written.view(dtype) != held.view(dtype)).all()",
        found_by=STREAMS,
    ),
    Fault(
        name="to compare is to commit",
        path="fp8refit/rank.py",
        before="        if not self._compares:\n",
        after="        if self._compares is not None:\n",
        found_by=STREAMS,
    ),
]
