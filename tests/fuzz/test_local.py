"""Faults of every kind at any line of a refit: the engine serves one whole policy, or it is dirty and refuses.

Besides: nobody holds its turn afterwards, the next good refit heals, the version moves with a commit alone, and KV scales are
those of the policy that is served. On a tiny model in this process, and on two ranks that vote.
"""

import asyncio
import copy
import functools
import itertools
import re

import pytest
import torch
from fp8refit_transformers import to_block_fp8
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.generation.streamers import BaseStreamer

from fp8refit import (
    EngineBusyError,
    EngineDirtyError,
    InvalidSourceError,
    KvConfig,
    NonFiniteError,
    Refitter,
    StaleCacheError,
    UnsupportedEngineError,
)
from fp8refit.live.overlaps import shared_bytes
from fp8refit.live.slots import Slot
from tests.fake_ranks import FAULTS, KV_FAULTS, ClientEntryPoint, Cluster, Drivers, Remote, arm
from tests.fuzz.line_faults import lines_of, raising

# An error in front of the first step of a coroutine leaves it unawaited.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
ERRORS = [KeyboardInterrupt, asyncio.CancelledError, SystemExit, RuntimeError, MemoryError]
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
NUM_POLICIES = 3
SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def make_network(seed):
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        network.lm_head.weight *= 8
    return network


def bytes_of(network):
    tensors = network.state_dict().items()
    return {name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in tensors}


class Policy:
    """What the trainer has, and an engine that was never anything else."""

    def __init__(self, seed):
        network = make_network(seed)
        self.state = network.state_dict()
        self.fresh = to_block_fp8(copy.deepcopy(network))
        self.bytes = bytes_of(self.fresh)
        with torch.no_grad():
            self.logits = self.fresh(PROMPT).logits
            self.entries = [entry(self.fresh) for entry in ENTRIES]
            layers = self.fresh(PROMPT, use_cache=True).past_key_values.layers
        self.tokens = self.fresh.generate(PROMPT, max_new_tokens=4, do_sample=False, use_cache=False)
        seen = [tensor.abs().max().item() for layer in layers for tensor in (layer.keys, layer.values)]
        self.scales = [1.05 * largest / 448 for largest in seen]

    def soiled(self):
        state = {name: value.clone() for name, value in self.state.items()}
        state["model.norm.weight"][1] = torch.inf
        return state


HIDDEN = torch.linspace(-2, 2, 2 * 32).view(2, 32).bfloat16()
ENTRIES = [
    lambda network: network.model.embed_tokens(PROMPT),
    lambda network: network.model.norm(HIDDEN),
    lambda network: network.model.layers[0].mlp.up_proj(HIDDEN),
]


def compile_entries(network):
    """`ENTRIES` of one network, each compiled once."""
    first, second, third = ENTRIES
    compiled = [
        torch.compile(entry, backend="eager", dynamic=False)
        for entry in (lambda: first(network), lambda: second(network), lambda: third(network))
    ]
    with torch.no_grad():
        for entry in compiled:
            entry()
    return compiled


class World:
    """One engine under attack, and a model of what it may be."""

    def __init__(self):
        self.policies = [Policy(seed) for seed in range(NUM_POLICIES)]
        self.engine = to_block_fp8(make_network(9), kv_cache_dtype="fp8")
        self.refitter = Refitter(self.engine)
        self.compiled = compile_entries(self.engine)
        self.heal(0)

    def heal(self, index):
        """A good refit succeeds, whatever was before."""
        version = self.refitter.version
        self.refitter.refit(self.policies[index].state, calibration=PROMPT)
        self.version, self.served, self.scaled, self.is_dirty = version + 1, index, index, False
        assert self.refitter.version == self.version
        self.check()

    def attack(self, index, call, *, measures):
        """Do what may fail, and find out what became of it. Gives the error."""
        error = None
        try:
            call()
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the engine is judged
            error = raised
        self.judge(index, error, measures=measures)
        return error

    def judge(self, index, error, *, measures):
        """Between the state before and a commit of `index` there is only dirt."""
        was_dirty, version = self.is_dirty, self.refitter.version
        self.is_dirty = self.refitter.is_dirty
        if error is None:
            assert not self.is_dirty
        if self.is_dirty:
            assert version == self.version, "what is not committed has no version"
        elif version != self.version:
            assert version == self.version + 1
            self.version, self.served = version, index
            self.scaled = index if measures else self.scaled
        else:
            assert not was_dirty, "only a commit heals"
            assert error is not None
        self.check()

    @torch.no_grad()
    def check(self, *, thoroughly=False):
        assert self.engine._fp8refit_engine.turns.is_free, "nobody holds its turn"
        if self.is_dirty:
            for entry in (lambda: self.engine(PROMPT), lambda: self.engine.model(PROMPT), *self.compiled):
                with pytest.raises(EngineDirtyError, match="the last refit failed part way"):
                    entry()
            return
        policy = self.policies[self.served]
        assert bytes_of(self.engine) == policy.bytes
        held = [scale.item() for name, scale in self.engine.named_buffers() if name.endswith(("k_scale", "v_scale"))]
        assert held == pytest.approx(self.policies[self.scaled].scales, rel=1e-6)
        for entry, expected in zip(self.compiled, policy.entries, strict=True):
            assert torch.equal(entry(), expected)
        if thoroughly:
            assert torch.equal(self.engine(PROMPT, use_cache=False).logits, policy.logits)


@functools.cache
def world():
    return World()


def sources(policy, form):
    return {
        "mapping": lambda: policy.state,
        "function": lambda: lambda: iter(policy.state.items()),
        "iterator": lambda: iter(policy.state.items()),
    }[form]()


FORMS = st.sampled_from(["mapping", "function", "iterator"])
INDICES = st.integers(0, NUM_POLICIES - 1)


class OneRank(RuleBasedStateMachine):
    """Refits, calibrations and requests in any order, with errors at any line."""

    @initialize(index=INDICES)
    def begin(self, index):
        self.world = world()
        self.world.heal(index)
        self.caches = []

    @property
    def refitter(self):
        return self.world.refitter

    def serve(self):
        """Be an engine that answers. No precondition of a rule: what an error at some line does depends on what ran before, and
        which rules are enabled must not.
        """
        if self.world.is_dirty:
            self.world.heal(0)

    @rule(index=INDICES, form=FORMS, measures=st.booleans())
    def refit(self, index, form, measures):
        source = sources(self.world.policies[index], form)
        options = {"calibration": PROMPT} if measures else {}
        assert self.world.attack(index, lambda: self.refitter.refit(source, **options), measures=measures) is None

    @rule(index=INDICES, form=FORMS, measures=st.booleans(), kind=st.sampled_from(ERRORS), line=st.integers(1, 4000))
    def refit_with_an_error_at_some_line(self, index, form, measures, kind, line):
        source = sources(self.world.policies[index], form)
        options = {"calibration": PROMPT} if measures else {}

        def refit():
            with raising(kind("on purpose"), at=line):
                self.refitter.refit(source, **options)

        self.world.attack(index, refit, measures=measures)

    @rule(index=INDICES, strict=st.booleans())
    def refit_with_infinity(self, index, strict):
        refitter = Refitter(self.world.engine, validate="strict" if strict else "fused")
        was_dirty, source = self.world.is_dirty, self.world.policies[index].soiled()
        error = self.world.attack(index, lambda: refitter.refit(source), measures=False)
        assert isinstance(error, NonFiniteError) and self.world.is_dirty == (was_dirty or not strict)

    @rule(index=INDICES)
    def refit_with_a_name_too_few(self, index):
        was_dirty, source = self.world.is_dirty, dict(self.world.policies[index].state)
        del source["lm_head.weight"]
        error = self.world.attack(index, lambda: self.refitter.refit(source), measures=False)
        assert isinstance(error, InvalidSourceError) and self.world.is_dirty == was_dirty

    @rule(index=INDICES)
    def refit_with_a_stream_that_breaks_off(self, index):
        def broken():
            yield from itertools.islice(self.world.policies[index].state.items(), 4)
            raise ConnectionError("the trainer is gone")

        error = self.world.attack(index, lambda: self.refitter.refit(broken()), measures=False)
        assert isinstance(error, ConnectionError) and self.world.is_dirty

    @rule(kind=st.sampled_from([None, *ERRORS]), line=st.integers(1, 1200))
    def calibrate(self, kind, line):
        self.serve()

        def calibrate():
            with raising(kind("on purpose") if kind is not None else None, at=line if kind is not None else -1):
                self.refitter.calibrate(PROMPT)

        held, scaled = self.world.served, self.world.scaled
        error = None
        try:
            calibrate()
        except BaseException as raised:  # noqa: BLE001 - see `attack`
            error = raised
        self.world.is_dirty = self.refitter.is_dirty
        assert self.refitter.version == self.world.version
        if self.world.is_dirty:
            assert error is not None
            return self.world.check()
        scales = [value.item() for name, value in self.world.engine.named_buffers() if name.endswith("_scale")]
        is_new = scales == pytest.approx(self.world.policies[held].scales, rel=1e-6)
        assert is_new or error is not None
        self.world.scaled = held if is_new else scaled
        return self.world.check()

    @rule()
    def close(self):
        self.refitter.close()

    @rule(index=INDICES, at=st.integers(1, 4))
    def generate_and_refit_meanwhile(self, index, at):
        """Tokens are of one policy: the refit is refused."""
        self.serve()
        outcomes = []

        class Streamer(BaseStreamer):
            left = at

            def put(streamer, value):
                streamer.left -= 1
                if streamer.left == 0:
                    with pytest.raises(EngineBusyError) as raised:
                        self.refitter.refit(self.world.policies[index].state)
                    outcomes.append(raised.value)

            def end(self):
                pass

        engine, policy = self.world.engine, self.world.policies[self.world.served]
        got = engine.generate(PROMPT[:1], max_new_tokens=4, do_sample=False, use_cache=False, streamer=Streamer())
        assert torch.equal(got, policy.tokens[:1]) and len(outcomes) == 1
        self.world.check(thoroughly=True)

    @rule()
    @torch.no_grad()
    def fill_a_cache(self):
        self.serve()
        self.caches.append((self.world.version, self.world.engine(PROMPT).past_key_values))

    @rule(index=INDICES)
    def use_a_cache_across_a_refit(self, index):
        self.fill_a_cache()
        self.refit(index, "mapping", False)
        self.use_a_cache()

    @rule()
    @torch.no_grad()
    def use_a_cache(self):
        if not self.caches:
            return
        version, cache = self.caches.pop()
        expected = EngineDirtyError if self.world.is_dirty else StaleCacheError
        if self.world.is_dirty or version != self.world.version:
            with pytest.raises(expected):
                self.world.engine(PROMPT[:, :1], past_key_values=cache)
        else:
            self.world.engine(PROMPT[:, :1], past_key_values=cache)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.heal(0)


TestOneRank = OneRank.TestCase


def test_an_error_at_every_line_of_a_refit():
    """Once at each line that a refit of a mapping comes to, with scales and without: the first time or the last."""
    here = world()
    here.heal(0)
    tried = set()
    for measures in (False, True):
        options = {"calibration": PROMPT} if measures else {}
        here.refitter.refit(here.policies[0].state, **options)
        here.heal(0)
        places = lines_of(lambda options=options: here.refitter.refit(here.policies[0].state, **options))
        here.heal(0)
        counts = {place: places.count(place) for place in dict.fromkeys(places) if place not in tried}
        assert len(counts) > 150
        tried |= set(counts)
        for number, (place, count) in enumerate(counts.items()):
            index = 1 + number % 2
            kind = ERRORS[number % len(ERRORS)]

            def refit(place=place, count=count, index=index, kind=kind, number=number, options=options):
                with raising(kind("on purpose"), at=place, again=count if number % 3 == 0 else 1) as raised:
                    here.refitter.refit(here.policies[index].state, **options)
                assert raised, f"{place} was not come to"

            error = here.attack(index, refit, measures=measures)
            # What asks torch, and takes its errors for an answer, may ask again.
            assert error is not None or kind is RuntimeError, place
            if here.is_dirty or number % 8 == 0:
                here.heal(0)


def test_an_error_at_every_line_that_sees_to_a_refit_that_failed():
    """Two errors: the second comes while the first is seen to."""
    here = world()
    here.heal(0)
    source = here.policies[1].soiled()

    def refit():
        with pytest.raises(NonFiniteError):
            here.refitter.refit(source)

    places = [*dict.fromkeys(lines_of(refit))][-80:]
    here.heal(0)
    for number, place in enumerate(places):

        def refit_with_an_error(place=place, number=number):
            with raising(ERRORS[number % len(ERRORS)]("on purpose"), at=place):
                here.refitter.refit(source)

        error = here.attack(1, refit_with_an_error, measures=False)
        assert error is not None
        if here.is_dirty:
            here.heal(0)


# Two ranks.


class Entry:
    """`Drivers` and `Remote` are found as engines in a test alone, where there is no fixture for it."""

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])

    def __exit__(self, *_):
        self.patch.undo()


KV = KvConfig(margin=1.0)
BATCH = [[1, 2, 3]]


class TwoRanks(RuleBasedStateMachine):
    """Votes: both ranks go on to the next policy, or neither does and both say so."""

    @initialize(is_remote=st.booleans(), layout=st.sampled_from(["tensor", "replicated"]))
    def begin(self, is_remote, layout):
        self.entry = Entry()
        self.entry.__enter__()
        self.cluster = Cluster(layout, kv=[["model.layers.0.self_attn"]] * 2)
        self.side = (Remote if is_remote else Drivers)(self.cluster, kv=KV, timeout_s=4)
        self.is_remote = is_remote
        self.version, self.served, self.scale, self.is_dirty = 0, None, 1.0, False
        self.seed = 0
        self.policies = [self.cluster.make_policy(seed) for seed in range(3)]
        self.refit(measures=True)

    def teardown(self):
        if hasattr(self, "entry"):
            self.entry.__exit__()

    def call(self, **arguments):
        """The errors of all drivers."""
        if not self.is_remote:
            return [each for each in self.side.refit(arguments) if isinstance(each, BaseException)]
        try:
            self.side.refitter.refit(**arguments)
        except BaseException as error:  # noqa: BLE001 - it is judged
            return [error]
        return []

    def arguments(self, measures, form="mapping"):
        self.seed += 1
        self.policy = self.policies[self.seed % len(self.policies)]
        self.largest = 448.0 * (1 + self.seed % 5)
        for cache in self.cluster.caches:
            cache.largest = dict.fromkeys(cache.largest, self.largest)
        source = {
            "mapping": lambda policy: policy,
            "function": lambda policy: lambda: iter(policy.items()),
            "iterator": lambda policy: iter(policy.items()),
        }[form](self.policy)
        return {"state_dict": source} | ({"calibration": BATCH} if measures else {})

    def committed(self, measures):
        self.version, self.served, self.is_dirty = self.version + 1, self.policy, False
        self.scale = self.largest / 448 if measures else self.scale

    @rule(measures=st.booleans(), form=st.sampled_from(["mapping", "function"]))
    def refit(self, measures, form="mapping"):
        assert self.call(**self.arguments(measures, form)) == []
        self.committed(measures)
        self.check()

    @rule(
        rank=st.integers(0, 1),
        fault=st.sampled_from([*FAULTS, *KV_FAULTS]),
        kind=st.sampled_from(ERRORS),
        form=st.sampled_from(["mapping", "function"]),
    )
    def refit_with_a_step_that_fails(self, rank, fault, kind, form):
        kind = self.possible(kind)
        arguments = self.arguments(True, form)
        arm(self.cluster.targets[rank], fault, kind("on purpose"))
        assert self.call(**arguments), "somebody heard of it"
        self.settle(True)

    @rule(rank=st.integers(0, 1), line=st.integers(1, 2500), kind=st.sampled_from(ERRORS), measures=st.booleans())
    def refit_with_an_error_at_some_line_of_a_rank(self, rank, line, kind, measures):
        kind = self.possible(kind)
        agreement, arguments = self.cluster.ranks[rank]._agreement, self.arguments(measures)
        attempt, left = agreement.attempt, [line]

        def with_an_error(step):
            def counted():
                with raising(kind("on purpose"), at=left[0]) as raised:
                    places = step()
                left[0] = left[0] if not raised else -1
                return places

            return attempt(counted)

        agreement.attempt = with_an_error
        try:
            errors = self.call(**arguments)
        finally:
            del agreement.attempt
        self.settle(measures, has_failed=bool(errors))

    def possible(self, kind):
        """An interrupt ends a worker process, and the engine with it; a rank beside its driver may have one."""
        return kind if not self.is_remote or issubclass(kind, Exception) else RuntimeError

    @precondition(lambda self: self.is_remote)
    @rule(line=st.integers(1, 900), kind=st.sampled_from(ERRORS), measures=st.booleans(), form=FORMS)
    def refit_with_an_error_at_some_line_of_the_driver(self, line, kind, measures, form):
        arguments = self.arguments(measures, form)
        with raising(kind("on purpose"), at=line):
            errors = self.call(**arguments)
        refitter = self.side.refitter
        if refitter.is_dirty and not any(dirty for dirty, _ in self.cluster.states):
            # Interrupted just before the ranks were asked to write: it does not know whether they did.
            assert "failed part way" in self.side.client.blocked and refitter.version == self.version
            self.refit(measures)
        else:
            self.settle(measures, has_failed=bool(errors))

    def settle(self, measures, has_failed=True):
        """Look what became of it: what the ranks say has to be what they hold."""
        states = self.cluster.states
        assert len(set(states)) == 1, f"the ranks differ: {states}"
        is_dirty, version = states[0]
        if not has_failed:
            assert not is_dirty and version == self.version + 1
        if not is_dirty and version == self.version + 1:
            self.committed(measures)
        else:
            assert version == self.version and (is_dirty or not self.is_dirty)
            self.is_dirty = is_dirty
        self.check()

    def check(self):
        clients = [self.side.client] if self.is_remote else self.side.clients
        refitters = [self.side.refitter] if self.is_remote else self.side.refitters
        for client, refitter in zip(clients, refitters, strict=True):
            assert client._fp8refit_engine.turns.is_free
            assert (refitter.is_dirty, refitter.version) == (self.is_dirty, self.version)
            assert ("failed part way" in (client.blocked or "")) == self.is_dirty
            assert (client.blocked is None) != self.is_dirty
        if not self.is_dirty:
            self.cluster.assert_holds(self.served, version=self.version)
            assert [set(cache.held.values()) for cache in self.cluster.caches] == [{self.scale}] * 2


TestTwoRanks = TwoRanks.TestCase


@pytest.mark.parametrize("is_remote", [False, True], ids=["drivers", "remote"])
@pytest.mark.parametrize("fault", [*FAULTS, *KV_FAULTS])
def test_a_step_that_fails_on_one_rank_fails_on_both(fault, is_remote):
    """The shortest of those orders, each one: what `TwoRanks` would have to make small first."""
    ranks = TwoRanks()
    ranks.begin(is_remote=is_remote, layout="tensor")
    try:
        for rank, form in enumerate(("mapping", "function")):
            ranks.refit_with_a_step_that_fails(rank=rank, fault=fault, kind=RuntimeError, form=form)
            ranks.refit(measures=False)
    finally:
        ranks.teardown()


# Ties.


TIES = {
    "weight": lambda one, other: setattr(one, "weight", other.weight),
    "scales": lambda one, other: setattr(one, "weight_scale_inv", other.weight_scale_inv),
    "rows": lambda one, other: setattr(one, "weight", nn.Parameter(other.weight.data[:32], requires_grad=False)),
    "transposed": lambda one, other: setattr(one, "weight", nn.Parameter(other.weight.data.t(), requires_grad=False)),
    "bias": lambda one, other: setattr(one, "bias", nn.Parameter(other.weight_scale_inv.data[0], requires_grad=False)),
}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Linear(64, 64, bias=False) for _ in range(2))


Pair.__module__ = "transformers.made_up"


@given(ties=st.sets(st.sampled_from(list(TIES)), max_size=2), is_late=st.booleans(), seed=st.integers(0, 3))
def test_tensors_that_share_bytes_are_one_or_refused(ties, is_late, seed):
    """A committed refit holds what the trainer sent under both names, or nothing is written."""
    torch.manual_seed(seed)
    engine, policy = to_block_fp8(Pair(), block_size=(32, 32)), Pair()
    refitter = Refitter(engine)
    if is_late:
        refitter.refit(policy.state_dict())
    if is_late:
        ties -= {"bias"}  # a layer that had none is another one
    for tie in ties:
        TIES[tie](engine.one, engine.other)
    state = policy.state_dict()
    if ties == {"weight", "scales"}:
        state["one.weight"] = state["other.weight"]
    if "bias" in ties:
        state["one.bias"] = torch.ones_like(engine.one.bias)
    if ties & {"rows"}:
        state["one.weight"] = state["one.weight"][:32]
    before = bytes_of(engine)
    if ties in (set(), {"weight", "scales"}):
        refitter.refit(state)
        expected = Pair()
        expected.load_state_dict(state)
        assert bytes_of(engine) == bytes_of(to_block_fp8(expected, block_size=(32, 32)))
    else:
        with pytest.raises(UnsupportedEngineError, match=r"shares memory with the .* of other\.weight"):
            refitter.refit(state)
        assert bytes_of(engine) == before and not refitter.is_dirty


VIEWS = st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5), st.integers(0, 12), st.integers(0, 12))


@given(views=st.lists(VIEWS, min_size=2, max_size=4))
def test_views_share_bytes_if_an_element_is_in_both(views):
    memory = torch.zeros(256)
    tensors = [
        torch.as_strided(memory, (rows, cols), (down, across), start) for start, rows, cols, down, across in views
    ]
    places = [
        {start + i * down + j * across for i in range(rows) for j in range(cols)}
        for start, rows, cols, down, across in views
    ]
    slots = [
        Slot(name=str(index), full_shape=tuple(tensor.shape), weight=tensor) for index, tensor in enumerate(tensors)
    ]
    found = {(refusal.module, re.search(r"weight of (\d+)", refusal.reason)[1]) for refusal in shared_bytes(slots)}
    expected = {(str(a), str(b)) for a, b in itertools.combinations(range(len(views)), 2) if places[a] & places[b]}
    assert found == expected
