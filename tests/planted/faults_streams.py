"""Faults of streams: what is lent, what is known from the last one, what is kept, and what is compared."""

from tests.planted.fault import Fault

STREAM, TARGET, COMPARE, PLAN = (
    "fp8refit/fill/taking.py",
    "fp8refit/ranks/target.py",
    "fp8refit/fill/kernels/reference_table.py",
    "fp8refit/fill/plan.py",
)
STREAMS = "tests/fuzz/test_streams.py"

FAULTS = [
    Fault(
        name="a tensor that was lent is read after it was overwritten",
        path=STREAM,
        before="            lying.tensor = lying.tensor.detach().clone()\n",
        after="",
        found_by=STREAMS,
    ),
    Fault(
        name="a stream that begins like the last one is taken for whole",
        path="fp8refit/fill/arrivals.py",
        before="if expected is not None and not self._is_announced and len(self._names) < len(expected.metadata or ()):",
        after="if expected is not None and not self._is_announced and not self._names:",
        found_by=STREAMS,
    ),
    Fault(
        name="a bucket is recognised by its shapes alone",
        path="fp8refit/fill/direct.py",
        before="if group is None or not group.guard.holds(keys, tensors):",
        after="if group is None or not group.guard.holds(group.guard._names, tensors):",
        found_by=STREAMS,
    ),
    Fault(
        name="a tensor is recognized by its name alone",
        path="fp8refit/fill/direct.py",
        before="return known.place if known is not None and known.fits(tensor) else None",
        after="return known.place if known is not None else None",
        found_by="tests/driver/test_update.py -k begins_like",
    ),
    Fault(
        name="a table that is joined to another keeps its places",
        path="fp8refit/fill/direct.py",
        before="                known.place += num_places\n",
        after="",
        found_by="tests/driver/test_update.py -k 'otherwise or another_order'",
    ),
    Fault(
        name="a source that comes alone is read where the last one lay",
        path="fp8refit/fill/kernels/triton_launch.py",
        before="TARGET))\n    num_cols = tl.load(row + 4)\n",
        after="TARGET))\n    source = tl.load(row).to(tl.pointer_type(SOURCE))\n    num_cols = tl.load(row + 4)\n",
        found_by="tests/fill/kernels/test_table.py -k one_by_one",
    ),
    Fault(
        name="what a refit that failed has written is kept",
        path=TARGET,
        before="            self._torn |= _names(prepared.inventory) - set(_kept(prepared))\n",
        after="",
        found_by=STREAMS,
    ),
    Fault(
        name="what came although it was to be kept is kept after the refit failed",
        path=TARGET,
        before="            self._torn.update(write.came())\n",
        after="            pass\n",
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
        before="return all(torch.equal(bytes_of(left), bytes_of(right)) for left, right in pairs)",
        after="return any(torch.equal(bytes_of(left), bytes_of(right)) for left, right in pairs)",
        found_by=STREAMS,
    ),
    Fault(
        name="a set of buckets is filled before it was read",
        path="fp8refit/remote/handing.py",
        before="<= self._packer.num_packed - NUM_SETS:",
        after="< 0:",
        found_by="tests/remote/test_handing.py -k is_not_overtaken",
    ),
    Fault(
        name="ranks are told of copies that another stream has not done",
        path="fp8refit/remote/packing.py",
        before="        with self._work[tensor.device].joined():\n",
        after="        if True:\n",
        found_by="tests/sources/test_work_stream.py",
    ),
    Fault(
        name="what is staged is read before another stream has brought it",
        path=STREAM,
        before="        with self._work.joined():\n            self._staging.flush()",
        after="        if True:\n            self._staging.flush()",
        found_by="tests/sources/test_work_stream.py",
    ),
    Fault(
        name="what is told in other words is taken for what was told before",
        path="fp8refit/remote/stream_reader.py",
        before="contents = self._packed.get(text)",
        after="contents = next(iter(self._packed.values()), None)",
        found_by="tests/remote/test_handing.py -k laid_out_otherwise",
    ),
    Fault(
        name="to compare is to commit",
        path="fp8refit/ranks/rank.py",
        before="        if prepared.writes:\n",
        after="        if prepared is not None:\n",
        found_by=STREAMS,
    ),
]
