"""Writers of one engine at once, in every way and at every moment: one policy is served, whole, or none is.

Whoever comes second is refused before it writes, or takes over from one that then never writes again. In other threads, in
tasks of one loop, and in the middle of another's source.
"""

import asyncio
import contextlib
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8refit import EngineBusyError, EngineHost, HostedEngine, RankFailedError, RefitError, Refitter, update
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.sources.source import as_source
from tests.fake_ranks import Client, ClientEntryPoint, together
from tests.fakes import FakeEntryPoint, FakeModel, live_bytes, make_policy, make_target, refit_target


class Clients(ClientEntryPoint):
    """For what is attached to a rank that others are attached to as well."""

    name = "clients"


@pytest.fixture(autouse=True, scope="module")
def adapters():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [FakeEntryPoint(), Clients()])
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        yield
        sys.setswitchinterval(before)


NUM_POLICIES = 4


def expected_bytes():
    """Every policy, and the bytes of an engine that was never anything else."""
    found = []
    for seed in range(NUM_POLICIES):
        model = FakeModel()
        policy = make_policy(model, seed)
        refit_target(make_target(model), as_source(policy))
        found.append((policy, live_bytes(model)))
    return found


POLICIES = expected_bytes()


class Site:
    """An engine, what drives it from elsewhere, and another engine that is attached to the same rank."""

    def __init__(self):
        self.model = FakeModel()
        self.host = None
        self.lock = threading.Lock()

    @property
    def here(self):
        return Refitter(self.model)

    @property
    def beside(self):
        """Attached to the rank, and not to the model: as a worker is beside its `LLM`."""
        rank = self.here.engine.ranks.rank
        return Refitter(Client(LocalRanks(rank)))

    @property
    def elsewhere(self):
        with self.lock:
            self.host = self.host or EngineHost(self.model)
        return Refitter(HostedEngine(lambda message, _: self.host.answer(message), label="elsewhere"))

    def write(self, way, index, on_tensor=lambda number: None):
        """Write a policy by one of `WAYS`. Returns the version."""
        policy = POLICIES[index][0]

        def stream():
            for number, item in enumerate(policy.items()):
                on_tensor(number)
                yield item

        if way == "update":
            with update(self.model) as begun:
                for item in stream():
                    begun.load([item])
            return begun.report.version
        refitter = {"here": self.here, "mapping": self.here, "beside": self.beside}.get(way) or self.elsewhere
        source = policy if way in ("mapping", "elsewhere, whole") else stream()
        return refitter.refit(source).version

    def check(self, index, version):
        """It serves a policy, as that version."""
        assert live_bytes(self.model) == POLICIES[index][1]
        target = self.here.engine.ranks.rank.target
        assert (target.version, target.is_dirty) == (version, False)
        assert target.turn.is_free and self.model._fp8refit_engine.turns.is_free

    def heal(self):
        version = self.here.version
        self.write("here", 0)
        self.check(0, version + 1)


WAYS = ["here", "mapping", "update", "beside", "elsewhere", "elsewhere, whole"]
OTHERS = [*WAYS, "verify", "verify elsewhere", "close"]


def intrude(site, way, index):
    """Come second."""
    if way == "verify":
        site.beside.verify(POLICIES[index][0])
    elif way == "verify elsewhere":
        site.elsewhere.verify(POLICIES[index][0])
    elif way == "close":
        site.beside.close()
    else:
        site.write(way, index)


@given(
    first=st.sampled_from(WAYS),
    intruders=st.lists(
        st.tuples(st.integers(2, 8), st.sampled_from(OTHERS), st.integers(1, 3), st.booleans()), min_size=1, max_size=3
    ),
)
def test_whoever_comes_in_the_middle_of_a_write_is_refused(first, intruders):
    site, refused = Site(), 0

    def on_tensor(number):
        nonlocal refused
        for at, way, index, in_thread in intruders:
            if at != number:
                continue
            before = live_bytes(site.model)
            outcomes = together([lambda way=way, index=index: intrude(site, way, index)]) if in_thread else []
            if not in_thread:
                with pytest.raises(EngineBusyError) as raised:
                    intrude(site, way, index)
                outcomes = [raised.value]
            assert isinstance(outcomes[0], EngineBusyError), outcomes
            assert live_bytes(site.model) == before
            refused += 1

    version = site.write(first, 0, on_tensor)
    assert version == 1 and refused == (len(intruders) if first not in ("mapping", "elsewhere, whole") else 0)
    site.check(0, 1)
    assert site.model.blocked is None
    site.heal()


@given(ways=st.lists(st.sampled_from(WAYS), min_size=2, max_size=NUM_POLICIES), is_first=st.booleans())
def test_writers_in_threads(ways, is_first):
    """On an engine that nobody has attached to, or that somebody has."""
    site = Site()
    if not is_first:
        site.heal()
    version = 0 if is_first else 1
    start = threading.Barrier(len(ways))

    def write(index):
        start.wait(20)
        return site.write(ways[index], index)

    outcomes = together([lambda index=index: write(index) for index in range(len(ways))])
    errors = [outcome for outcome in outcomes if not isinstance(outcome, int)]
    assert all(isinstance(error, EngineBusyError | RankFailedError) for error in errors), errors
    done = {outcome: index for index, outcome in enumerate(outcomes) if isinstance(outcome, int)}
    target = site.here.engine.ranks.rank.target
    assert target.version == version + len(done)
    assert sorted(done) == list(range(version + 1, target.version + 1))
    if not target.is_dirty and done:
        assert live_bytes(site.model) == POLICIES[done[max(done)]][1]
    site.heal()


@given(
    starts=st.lists(st.tuples(st.sampled_from(["here", "beside", "close"]), st.integers(0, 3)), min_size=2, max_size=4),
    cancelled=st.sets(st.integers(0, 3), max_size=2),
)
def test_writers_in_tasks(starts, cancelled):
    site = Site()

    async def write(way, index, pauses):
        refitter = site.here if way == "here" else site.beside
        for _ in range(pauses):
            await asyncio.sleep(0)
        if way == "close":
            await refitter.close_async()
            return 0
        return (await refitter.refit_async(iter(POLICIES[index][0].items()))).version

    async def write_all():
        tasks = [asyncio.ensure_future(write(way, index, pauses)) for index, (way, pauses) in enumerate(starts)]
        await asyncio.sleep(0)
        for index in cancelled:
            if index < len(tasks):
                tasks[index].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(write_all())
    assert all(isinstance(each, int | EngineBusyError | asyncio.CancelledError) for each in outcomes)
    done = {each: index for index, each in enumerate(outcomes) if isinstance(each, int) and each}
    if done:
        site.check(done[max(done)], len(done))
    site.heal()


@given(
    ends=st.lists(
        st.tuples(st.sampled_from(["raise", "drop", "interrupt", "elsewhere"]), st.integers(0, 8)),
        min_size=1,
        max_size=4,
    ),
    way=st.sampled_from(WAYS),
)
def test_a_writer_that_is_gone_keeps_nobody_out(ends, way):
    site = Site()
    for end, number in ends:

        def stop(at, number=number, end=end):
            if at == number:
                raise KeyboardInterrupt if end == "interrupt" else ConnectionError("gone")

        if end == "drop":
            begun = update(site.model).__enter__()
            begun.load(list(POLICIES[1][0].items())[:number])
            del begun
            continue
        with contextlib.suppress(RefitError, ConnectionError, KeyboardInterrupt):
            site.write("elsewhere" if end == "elsewhere" else "update", 1, stop)
    version = site.here.version
    site.write(way, 2)
    site.check(2, version + 1)
