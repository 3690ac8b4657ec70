"""Writes that an error ended at any line, and good ones after them: nothing of the first is in the second.

Neither a flag (finite tensors are not named), nor a difference (`verify` says equal), nor a layout without its rows (every byte
is that of the good policy).
"""

import functools
import sys
from pathlib import Path

import hypothesis.internal.conjecture.optimiser  # noqa: F401 - long runs import it, which fails after many interrupts
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp8refit
from fp8refit import RefitError, update
from fp8refit.kernels.reference_table import ReferenceTable
from tests.fakes import live_bytes, make_policy
from tests.fuzz.engines import ROUTES, Subject, assert_holds_exactly, fake_engine  # noqa: F401
from tests.fuzz.line_faults import lines_of, raising

# An error in front of the first step of a coroutine leaves it unawaited.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
FILL = Path(fp8refit.__file__).parent / "fill"
FILES = [str(FILL / name) for name in ("direct.py", "resident.py", "program.py", "kernels/reference_table.py")]
"""What is kept from one write to the next."""
ERRORS = [KeyboardInterrupt, RuntimeError, MemoryError, SystemExit]
NUM_POLICIES = 3


def soiled(policy, names):
    """A policy with NaN in some tensors."""
    return {name: torch.full_like(value, torch.nan) if name in names else value for name, value in policy.items()}


def in_place_again(policy):
    """The same layout in other memory."""
    return {name: value.clone() for name, value in policy.items()}


FORMS = {
    "mapping": lambda policy: policy,
    "turned mapping": lambda policy: dict(reversed(policy.items())),
    "list": lambda policy: list(policy.items()),
    "iterator": lambda policy: iter(policy.items()),
    "function": lambda policy: lambda: iter(policy.items()),
}
"""How a trainer gives a policy."""


class Engine:
    """A subject, and policies for it."""

    def __init__(self, route):
        self.subject = Subject(route)
        self.policies = [make_policy(self.subject.model, seed) for seed in range(NUM_POLICIES)]
        self.bytes = {}
        """What was seen to hold a policy exactly, by its index."""

    def give(self, form, policy):
        if form == "update":
            with update(self.subject.model) as begun:
                pairs = list(policy.items())
                for start in range(0, len(pairs), 4):
                    begun.load(pairs[start : start + 4])
            return begun.report
        return self.subject.refitter.refit(FORMS[form](policy))

    def abort(self, call):
        """Do what may fail, and note what became of it."""
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the engine is judged
            return error
        return None

    def heal(self, form, index, *, verifies=False):
        """A good write succeeds, whatever was before, and holds nothing else."""
        policy = in_place_again(self.policies[index])
        self.give(form, policy)
        refitter = self.subject.refitter
        assert not refitter.is_dirty and self.subject.model.blocked is None
        held = live_bytes(self.subject.model)
        if index not in self.bytes:
            assert_holds_exactly(self.subject.model, policy)
            self.bytes[index] = held
        assert held == self.bytes[index]
        if verifies and refitter.config.transport != "collective":
            assert refitter.verify(policy).differing == {}


@functools.cache
def engine_of(route):
    return Engine(route)


def places_of(call):
    """The lines of `FILES` that a call comes to, with how often."""
    counts = {}
    for place in lines_of(call):
        if place[0] in FILES:
            counts[place] = counts.get(place, 0) + 1
    return counts


NAMES = st.sets(st.integers(0, 8), max_size=3)


@given(
    route=st.sampled_from(list(ROUTES)),
    attempts=st.lists(
        st.tuples(
            st.sampled_from([*FORMS, "update"]),
            NAMES,
            st.sampled_from(["line", "part", "verify"]),
            st.integers(1, 2000),
            st.sampled_from(ERRORS),
        ),
        min_size=1,
        max_size=3,
    ),
    form=st.sampled_from([*FORMS, "update"]),
    index=st.integers(0, NUM_POLICIES - 1),
)
def test_a_good_write_after_aborted_ones(route, attempts, form, index):
    engine = engine_of(route)
    here = engine.subject.is_here

    def possible(way):
        """A policy that is looked at twice can be read twice, and an update is from inside."""
        is_read_once = way in ("iterator", "update")
        return "function" if is_read_once and (not here or "twice" in route) else way

    for way, names, end, number, kind in attempts:
        way, policy = possible(way), engine.policies[number % NUM_POLICIES]
        bad = soiled(policy, {name for place, name in enumerate(policy) if place in names})

        def broken(bad=bad, number=number, kind=kind):
            yield from list(bad.items())[: number % len(bad)]
            raise kind("on purpose")

        with raising(kind("on purpose"), at=number if end != "part" else -1):
            if end == "verify":
                engine.abort(lambda bad=bad: engine.subject.refitter.verify(bad))
            elif end == "part":
                engine.abort(lambda broken=broken: engine.subject.refitter.refit(broken()))
            else:
                engine.abort(lambda way=way, bad=bad: engine.give(way, bad))
    engine.heal(possible(form), index, verifies=True)


@pytest.mark.parametrize("is_known", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("form", ["iterator", "mapping"])
def test_an_error_at_every_line_of_a_fill(form, is_known):
    """The shortest of those, each one, for a write that compiles and one that does not."""
    engine = Engine("here")
    bad = soiled(engine.policies[0], list(engine.policies[0])[:2])

    def give_anew():
        if not is_known:
            engine.subject.close()
        engine.give(form, bad)

    engine.heal(form, 1)
    places = places_of(lambda: engine.abort(give_anew))
    assert len(places) > 20
    for number, (place, count) in enumerate(places.items()):

        def fail(place=place, count=count, number=number):
            with raising(ERRORS[number % len(ERRORS)]("on purpose"), at=place, again=count if number % 2 else 1):
                give_anew()

        assert engine.abort(fail) is not None, place
        engine.heal(form, 1)


def test_flags_of_a_broadcast_that_was_interrupted_are_not_the_next_one_s(monkeypatch):
    engine = Engine("broadcast")
    engine.heal("mapping", 0)
    launch = ReferenceTable.launch

    def interrupted(table, **options):
        launch(table, **options)
        if "from_buckets" in sys._getframe(1).f_code.co_filename:  # not where the trainer packs
            raise RuntimeError("on purpose")

    bad = soiled(engine.policies[0], set(engine.policies[0]))
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceTable, "launch", interrupted)
        assert isinstance(engine.abort(lambda: engine.give("mapping", bad)), RefitError)
    engine.heal("mapping", 0)
