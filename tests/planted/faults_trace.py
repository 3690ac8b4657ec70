"""What could be seen wrongly of a loader, or taken for granted."""

from tests.planted.fault import Fault

FUZZER = "tests/fuzz/test_trace.py"

FAULTS = [
    Fault(
        name="strides of a checkpoint tensor are not looked at where runs are joined",
        path="fp8refit/layers/trace.py",
        before="(last.into, last.stride) == (into * size, stride * size)",
        after="last.into == into * size",
        found_by=FUZZER,
    ),
    Fault(
        name="places in a storage of another order begin at its start",
        path="fp8refit/layers/trace.py",
        before="    start = origin.start_of(int(tensor.storage_offset()) if offset is None else offset)\n",
        after="    start = origin.start\n",
        found_by=FUZZER,
    ),
    Fault(
        name="a dense tensor in another order is taken for a copy in the same one",
        path="fp8refit/layers/trace.py",
        before="modes = _modes(_Mode(run.size, run.into, run.stride) for run in places.runs)",
        after="modes = _modes(_Mode(run.size, run.into, run.into) for run in places.runs)",
        found_by=FUZZER,
    ),
    Fault(
        name="rows of tensors that were joined are all taken from the first",
        path="fp8refit/layers/trace.py",
        before="offset = int(part.storage_offset()) - places.start",
        after="offset = int(part.storage_offset())",
        found_by=FUZZER,
    ),
    Fault(
        name="parts that begin within a block are quantized as if they began with one",
        path="fp8refit/layers/twin.py",
        before="    return start % block == 0 and (size % block == 0 or start + size == full)\n",
        after="    return True\n",
        found_by=FUZZER,
    ),
    Fault(
        name="columns of a checkpoint tensor are taken for rows",
        path="fp8refit/layers/twin.py",
        before="    return is_stack and row in (None, ndim - 2) and column in (None, ndim - 1)\n",
        after="    return is_stack\n",
        found_by=FUZZER,
    ),
    Fault(
        name="what is put in order after a fill is read from the start of its source",
        path="fp8refit/layers/staged.py",
        before="as_strided(sizes, [run.stride for run in copy.runs], copy.start)",
        after="as_strided(sizes, [run.stride for run in copy.runs], 0)",
        found_by=FUZZER,
    ),
    Fault(
        name="a parameter that is loaded in part, or twice, is taken for a whole one",
        path="fp8refit/layers/twin.py",
        before="        return next((fault for fault in faults if fault is not None), None)\n",
        after="        return None\n",
        found_by=FUZZER,
    ),
    Fault(
        name="the first layer's experts are thought to lie evenly",
        path="fp8refit/layers/alike.py",
        before="a is None or a != b for a, b in pairwise(steps)",
        after="False for a, b in pairwise(steps)",
        found_by=FUZZER,
    ),
    Fault(
        name="a layer that places its experts otherwise is taken for one like the first",
        path="fp8refit/layers/alike.py",
        before="if (a.into, a.start, a.runs) != (b.into, b.start, b.runs):\n                return None",
        after="if (a.start, a.runs) != (b.start, b.runs):\n                return None",
        found_by=FUZZER,
    ),
    Fault(
        name="what a loader computes is thought to be a copy in layers like the first",
        path="fp8refit/layers/alike.py",
        before="        return copies if is_plain else None\n",
        after="        return copies\n",
        found_by=FUZZER,
    ),
    Fault(
        name="what a loader computes in place is taken for the tensor as it came",
        path="fp8refit/layers/trace.py",
        before="        self._origins.pop(storage, None)\n",
        after="",
        found_by=FUZZER,
    ),
    Fault(
        name="a tensor that is read as a number is taken for zeros",
        path="fp8refit/layers/trace.py",
        before="            self._copy(name, into, self._numbers.pop(args[1]))\n",
        after="            self.copies.append(_nothing_into(name, into))\n            del self._numbers[args[1]]\n",
        found_by=FUZZER,
    ),
    Fault(
        name="numbers that a loader computes with are forgotten",
        path="fp8refit/layers/trace.py",
        before="        if self._numbers:\n",
        after="        if not self._parameters:\n",
        found_by=FUZZER,
    ),
    Fault(
        name="a buffer that is computed from another weight is left as it was",
        path="fp8refit/layers/twin.py",
        before="        written = self._copies.keys() | self._computed.keys() | self._reasons.keys()\n",
        after="        written = self._copies.keys()\n",
        found_by=FUZZER,
    ),
    Fault(
        name="a weight that is computed from another one is computed from itself",
        path="fp8refit/layers/staged.py",
        before="if base.is_parameter and base not in self.others}",
        after="if base.is_parameter}",
        found_by=FUZZER,
    ),
    Fault(
        name="constants stay the noise of a dummy boot",
        path="adapters/fp8refit_sglang/worker.py",
        before="            refreshes += refreshes_of_constants(self.network, self._twin)\n",
        after="            refreshes += ()\n",
        found_by="tests/sglang/test_zoo_stubbed_kernels.py -k Gemma2",
        session="sglang",
    ),
]
