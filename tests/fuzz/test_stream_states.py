"""The states of a stream's two ends: what their tables say, and what the ends do on random walks through them.

The sender, its client, the ring and the rank are real. Only the channel is the test's: an order is carried out when its answer
is awaited, or earlier if the walk says so. So nothing depends on time.
"""

import asyncio
from contextlib import closing

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fp8refit.remote.host.stream_reader as reader
import fp8refit.remote.host.stream_sender as sender
from fp8refit import EngineLostError, RankFailedError, RefitConfig
from fp8refit.config import Job
from fp8refit.live.slots import dtype_name
from fp8refit.live.turn import DisplacedError
from fp8refit.remote.host.packing import Packer
from fp8refit.remote.host.stream_reader import StreamReader
from fp8refit.remote.host.stream_sender import StreamSender
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import Answers, RankClient
from fp8refit.remote.rank_orders import RankOrders
from fp8refit.remote.rank_server import RankServer
from fp8refit.sources.source import StreamSource
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.ring import Ring
from tests.fake_ranks import Cluster

ENDS = {"sender": (sender, sender.State.NEW), "reader": (reader, reader.State.NONE)}
ENDED = {sender.State.DONE, sender.State.FAILED, sender.State.LOST}
BUCKET_BYTES = 1 << 17
FATAL = {
    "the source fails": ZeroDivisionError,
    "the rank fails": RankFailedError,
    "the rank is displaced": RankFailedError,
    "the rank is displaced while it reads": RankFailedError,
    "the rank dies": EngineLostError,
    "the rank reads and dies": EngineLostError,
}
"""Steps that end a stream, and what the caller then gets."""
STEPS = ("go on", "the rank reads", *FATAL)


class Line:
    """A channel to one rank. See `fp8refit.remote.protocol.channel.Channel`."""

    num_at_once = 1
    is_asynchronous = False

    def __init__(self, server, num_ahead):
        self.server, self.num_ahead = server, num_ahead
        self.under_way = None
        self.is_dead = False

    async def send(self, messages, timeouts_s, *, begins):
        if self.is_dead:
            raise EngineLostError("a rank died")
        self.under_way = Exchange(self, messages[0])
        return self.under_way


class Exchange:
    """One order, and the answer to it."""

    def __init__(self, line, message):
        self.line, self.message, self.answer = line, message, None

    def carry_out(self):
        if self.answer is None:
            self.answer = self.line.server.handle(self.message)

    def __await__(self):
        yield from ()
        self.line.under_way = None
        if self.answer is None and self.line.is_dead:
            raise EngineLostError("a rank died")
        self.carry_out()
        return Answers(said=[self.answer])


def fail(*_):
    raise RuntimeError("boom")


class Walk:
    """One stream. Before each tensor of its source, one step is made."""

    def __init__(self, steps, *, sends_ahead):
        self.steps, self.made = steps, []
        self.cluster = Cluster("alone")
        self.target = self.cluster.targets[0]
        self.policy = self.cluster.make_policy(1)
        self.server = RankServer(lambda: self.cluster.ranks[0])
        self.line = Line(self.server, int(sends_ahead))
        self.client = RankClient(self.line)
        self.ring, self.packer = Ring.make(), Packer(lambda device, num_bytes: Bucket(BUCKET_BYTES))
        self.sender = StreamSender(self.client, self.packer, self.ring, "a")
        self.source = StreamSource(self.tensors, is_repeatable=False, manifest=None)
        self.error = None

    @property
    def reader(self):
        return self.server.orders.streams

    async def run(self):
        await self.client.handshake()
        manifest = {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in self.policy.items()}
        job = Job(config=RefitConfig())
        await self.client.ask(messages.Prepare(refit="a", job=job, source=messages.Pushed(manifest=manifest)))
        try:
            with closing(self.sender):
                self.sender.open(self.source, BUCKET_BYTES)
                await self.sender.hand_over()
        except (*FATAL.values(),) as error:
            self.error = error

    def tensors(self):
        steps = iter(self.steps)
        for item in self.policy.items():
            self.check()
            step = next(steps, "go on")
            self.made.append(step)
            self.make(step)
            self.check()
            yield item

    def make(self, step):
        if step == "the source fails":
            raise ZeroDivisionError
        if step.startswith("the rank reads") and self.line.under_way is not None:
            self.line.under_way.carry_out()
        if step == "the rank fails":
            self.target.begin = self.target.push = fail
        elif step == "the rank is displaced":
            self.target.abandon()
        elif step == "the rank is displaced while it reads":
            push = self.target.push
            self.target.push = lambda tensors: (self.target.abandon(), push(tensors))
        elif step.endswith("dies"):
            self.line.is_dead = True

    def check(self):
        """Each end is in the state that it says."""
        states = sender.State
        assert self.sender.state in {states.NEW, states.READ, states.UNREAD}
        assert (self.sender.state is states.READ) == (self.line.under_way is not None)
        assert self.reader.state in {reader.State.NONE, reader.State.OPEN}
        assert self.target.turn.is_free == (self.reader.state is reader.State.NONE)

    def check_end(self):
        errors = {FATAL[step] for step in self.made if step in FATAL}
        states = sender.State
        assert (self.error is None) == (not errors) and (not errors or type(self.error) in errors)
        assert self.line.under_way is None
        if self.error is None:
            assert (self.sender.state, self.reader.state) == (states.DONE, reader.State.NONE)
            self.cluster.assert_holds(self.policy, version=1)
            return
        assert self.target.version == 0
        has_begun = self.made != ["the source fails"]
        failed = states.LOST if self.client.lost_because is not None else states.FAILED
        assert self.sender.state is (failed if has_begun else states.NEW)
        assert self.client.lost_because is None or self.line.is_dead


def walk(steps, *, sends_ahead=True):
    made = Walk(steps, sends_ahead=sends_ahead)
    try:
        asyncio.run(made.run())
    finally:
        made.packer.close()
        made.ring.close()
    made.check_end()
    return made


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """A rank leaves as soon as there is nothing to read, and the sender asks at once whether one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_LINGERING_S", 0.0)
        patch.setattr(reader, "_FOLLOWING_S", 60.0)
        patch.setattr(sender, "_PATIENCE_S", 0.0)
        yield


@pytest.mark.parametrize("end", ENDS)
def test_every_state_is_reached_and_none_but_an_end_is_final(end):
    module, first = ENDS[end]
    reached, rest = {first}, [first]
    while rest:
        state = rest.pop()
        following = {to for (since, _), to in module.TRANSITIONS.items() if since is state}
        assert bool(following) == (state not in ENDED)
        rest += following - reached
        reached |= following
    assert reached == set(module.State)
    assert {event for _, event in module.TRANSITIONS} == set(module.Event)


@pytest.mark.parametrize("end", ENDS)
def test_an_event_is_in_the_table_or_refused(end):
    made = Walk((), sends_ahead=True)
    machine, error = (made.sender, AssertionError) if end == "sender" else (StreamReader(None, None), DisplacedError)
    module = ENDS[end][0]
    for state in module.State:
        for event in module.Event:
            machine.state = state
            if (state, event) in module.TRANSITIONS:
                machine._go(event)
                assert machine.state is module.TRANSITIONS[state, event]
            else:
                with pytest.raises(error):
                    machine._go(event)
                assert machine.state is state
    made.ring.close()


@pytest.mark.parametrize("state", reader.State)
def test_a_rank_refuses_what_its_stream_is_not_at_and_goes_on_with_another(state):
    cluster = Cluster("alone")
    streams = RankOrders(cluster.ranks[0]).streams
    ring = Ring.make()
    order = messages.Stream(refit="a", ring=ring.segment)
    calls = {
        reader.Event.BEGIN: lambda: streams.begin(None),
        reader.Event.FOLLOW: lambda: streams.follow(order, None),
        reader.Event.FINISH: lambda: streams.finish(None),
    }
    for event, call in calls.items():
        if (state, event) not in reader.TRANSITIONS:
            streams.state = state
            with pytest.raises(DisplacedError, match="this refit was abandoned"):
                call()
    streams.state = state
    streams.displace()
    assert streams.state is reader.State.NONE
    ring.close()


@pytest.mark.parametrize("state", sender.State)
def test_a_sender_hands_over_one_stream_that_was_opened(state):
    made = Walk((), sends_ahead=True)
    made.sender.state = state
    if state is not sender.State.NEW:
        with pytest.raises(AssertionError, match="a sender has one stream"):
            made.sender.open(made.source, BUCKET_BYTES)
    if state is not sender.State.OPEN:
        with pytest.raises(AssertionError, match=r"open\(\) comes first"):
            asyncio.run(made.sender.hand_over())
    made.ring.close()


GO, READS = "go on", "the rank reads"
WALKS = [
    *(([GO] * place + [step], ahead) for step in STEPS for place in range(4) for ahead in (False, True)),
    ([GO, READS, READS, READS, READS], True),
    ([GO, "the rank dies", "the source fails"], True),
]


def test_all_of_both_tables_happens(monkeypatch):
    happened = set()
    for end in (StreamSender, StreamReader):

        def go(self, event, go=end._go):
            happened.add((self.state, event))
            go(self, event)

        monkeypatch.setattr(end, "_go", go)
    for steps, sends_ahead in WALKS:
        walk(steps, sends_ahead=sends_ahead)
    between = {(reader.State.OVER, event) for event in (reader.Event.FAIL, reader.Event.DISPLACE)}
    between.add((reader.State.NONE, reader.Event.FAIL))
    assert happened | between == set(sender.TRANSITIONS) | set(reader.TRANSITIONS)


@given(steps=st.lists(st.sampled_from(STEPS), max_size=7), sends_ahead=st.booleans())
@example(steps=[GO, "the rank fails", READS, "the source fails"], sends_ahead=True)
def test_both_ends_walk_as_their_tables_say(steps, sends_ahead):
    walk(steps, sends_ahead=sends_ahead)
