"""Copies of weights that could be overlooked, and other tensors that could be taken for some."""

from tests.planted.fault import Fault

FUZZER = "tests/fuzz/test_copies.py"
HELD = "tests/live/test_held.py"
COPIES = "tests/live/test_copies.py"

FAULTS = [
    Fault(
        name="a model is searched for copies only once",
        path="fp8refit/live/held.py",
        before="        if self._known is None or any(self._empty)",
        after="        if self._known is not None:\n            return False\n        if True or any(self._empty)",
        found_by=FUZZER,
    ),
    Fault(
        name="what a dead tensor's identity says of another one is believed",
        path="fp8refit/live/held.py",
        before=" or any(each() is None for each in self._tensors)",
        after="",
        found_by=f"{HELD}::test_a_tensor_in_another_ones_place_is_noticed",
    ),
    Fault(
        name="closures are not looked into",
        path="fp8refit/live/held.py",
        before='            yield f".{name}", cell\n',
        after="            pass\n",
        found_by=FUZZER,
    ),
    Fault(
        name="default arguments are not looked into",
        path="fp8refit/live/held.py",
        before="(value.__defaults__, value.__kwdefaults__, vars(value))",
        after="(vars(value),)",
        found_by=HELD,
    ),
    Fault(
        name="objects without a dict are not looked into",
        path="fp8refit/live/held.py",
        before='        yield from (("", each) for each in gc.get_referents(value) if each is not held)\n',
        after="",
        found_by=FUZZER,
    ),
    Fault(
        name="attributes of weights are not looked into",
        path="fp8refit/live/held.py",
        before="            stack += [(path + way, part) for way, part in _parts(value)][::-1]\n",
        after="            if not isinstance(value, Tensor):\n"
        "                stack += [(path + way, part) for way, part in _parts(value)][::-1]\n",
        found_by=FUZZER,
    ),
    Fault(
        name="caches of classes are not looked into",
        path="fp8refit/live/held.py",
        before="        while classes:  #",
        after="        while False:  #",
        found_by=HELD,
    ),
    Fault(
        name="a tensor that the twin has too passes whatever it holds",
        path="fp8refit/live/copies.py",
        before="for held in unknown if self._is_built(held)}",
        after="for held in unknown if held.name in self._built}",
        found_by=FUZZER,
    ),
    Fault(
        name="a tensor that once had the twin's values is never compared again",
        path="fp8refit/live/copies.py",
        before=" and all(map(torch.equal, values, self._passed[1])):",
        after=":",
        found_by=f"{FUZZER} {COPIES}",
    ),
    Fault(
        name="views of weights are taken for copies",
        path="fp8refit/live/copies.py",
        before="if _storage_of(held.tensor) not in current]",
        after="]",
        found_by=FUZZER,
    ),
    Fault(
        name="norms near one pass as a vector of ones",
        path="fp8refit/live/copies.py",
        before="        if is_uniform(built):\n",
        after="        if False:\n",
        found_by=f"{COPIES}::test_norms_near_one_are_not_taken_for_a_vector_of_ones",
    ),
    Fault(
        name="copies that requests made after a refit was prepared are not looked for",
        path="fp8refit/ranks/target.py",
        before="            if self.version == 0:  # its first requests may have run since it was prepared\n",
        after="            if False:\n",
        found_by="tests/ranks/test_target.py::test_copies_made_after_a_refit_was_prepared_are_refused",
    ),
    Fault(
        name="copies that an engine made while it was refitted are not looked for",
        path="fp8refit/ranks/write.py",
        before="        if writes and (copies := self._live.refusals(prepared.inventory)):\n",
        after="        if copies := ():\n",
        found_by="tests/ranks/test_target.py::test_copies_made_while_a_later_refit_is_written_leave_the_engine_dirty",
    ),
    Fault(
        name="sinks that FlashInfer cast keep the old policy",
        path="adapters/fp8refit_vllm/layout.py",
        before="run=partial(impl.sinks.copy_, source)",
        after="run=lambda: None",
        found_by="tests/vllm/test_kept_copies.py -k sinks",
        session="vllm",
    ),
]
