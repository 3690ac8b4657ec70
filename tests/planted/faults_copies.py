"""Copies of weights that could be overlooked, and other tensors that could be taken for some."""

from tests.planted.fault import Fault

FUZZER = "tests/fuzz/test_copies.py"
HELD = "tests/live/test_held.py"
COPIES = "tests/live/test_copies.py"

FAULTS = [
    Fault(
        name="a model is searched for copies only once",
        at="fp8refit/live/held.py::Holdings.have_changed",
        before="not self._is_searched or any(each.has_changed() for each in watched)",
        after="not self._is_searched",
        found_by=FUZZER,
    ),
    Fault(
        name="what a dead tensor's identity says of another one is believed",
        at="fp8refit/live/held.py::_Watched.has_changed",
        before="any(each() is None for each in self.tensors)",
        after="False",
        found_by=f"{HELD}::test_a_tensor_in_another_ones_place_is_noticed",
    ),
    Fault(
        name="closures are not looked into",
        at="fp8refit/live/held.py::_parts",
        before='yield f".{name}", cell',
        found_by=FUZZER,
    ),
    Fault(
        name="default arguments are not looked into",
        at="fp8refit/live/held.py::_parts",
        before="(value.__defaults__, value.__kwdefaults__, vars(value))",
        after="(vars(value),)",
        found_by=HELD,
    ),
    Fault(
        name="objects without a dict are not looked into",
        at="fp8refit/live/held.py::_parts",
        before='yield from (("", each) for each in gc.get_referents(value) if each is not held)',
        found_by=FUZZER,
    ),
    Fault(
        name="attributes of weights are not looked into",
        at="fp8refit/live/held.py::Holdings._walk",
        before="stack += [(path + way, part) for way, part in _parts(value)][::-1]",
        after="""
            if not isinstance(value, Tensor):
                stack += [(path + way, part) for way, part in _parts(value)][::-1]
        """,
        found_by=FUZZER,
    ),
    Fault(
        name="caches of classes are not looked into",
        at="fp8refit/live/held.py::Holdings.search",
        before="while classes:\n    ...",
        after="while False:\n    ...",
        found_by=HELD,
    ),
    Fault(
        name="a tensor that the twin has too passes whatever it holds",
        at="fp8refit/live/copies.py::Copies.refusals",
        before="self._is_built(held)",
        after="held.name in self._built",
        found_by=FUZZER,
    ),
    Fault(
        name="a tensor that once had the twin's values is never compared again",
        at="fp8refit/live/copies.py::Copies.refusals",
        before="self._passed[0] == unknown and all(map(torch.equal, values, self._passed[1]))",
        after="self._passed[0] == unknown",
        found_by=f"{FUZZER} {COPIES}",
    ),
    Fault(
        name="views of weights are taken for copies",
        at="fp8refit/live/copies.py::Copies.refusals",
        before="[held for held in self._beside if _storage_of(held.tensor) not in current]",
        after="[held for held in self._beside]",
        found_by=FUZZER,
    ),
    Fault(
        name="norms near one pass as a vector of ones",
        at="fp8refit/live/copies.py::Copies._is_built",
        before="is_uniform(built)",
        after="False",
        found_by=f"{COPIES}::test_norms_near_one_are_not_taken_for_a_vector_of_ones",
    ),
    Fault(
        name="copies that requests made after a refit was prepared are not looked for",
        at="fp8refit/ranks/target.py::Target.begin",
        before="self.version == 0",
        after="False",
        found_by="tests/ranks/test_target.py::test_copies_made_after_a_refit_was_prepared_are_refused",
    ),
    Fault(
        name="copies that an engine made while it was refitted are not looked for",
        at="fp8refit/ranks/write.py::Write.finish",
        before="writes and (copies := self._live.refusals(prepared.inventory))",
        after="(copies := ())",
        found_by="tests/ranks/test_target.py::test_copies_made_while_a_later_refit_is_written_leave_the_engine_dirty",
    ),
    Fault(
        name="sinks that FlashInfer cast keep the old policy",
        at="adapters/fp8refit_vllm/layout.py::VllmRules.refreshes",
        before="partial(impl.sinks.copy_, source)",
        after="lambda: None",
        found_by="tests/vllm/test_kept_copies.py -k sinks",
    ),
    Fault(
        name="what torch.compile keeps is taken for copies of weights",
        at="fp8refit/live/held.py::Holdings._walk",
        before="_is_ours(value) or _is_compiler(value)",
        after="_is_ours(value)",
        found_by="tests/live/test_held.py",
    ),
]
