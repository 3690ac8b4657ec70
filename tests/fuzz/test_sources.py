"""What trainers may hand over, bad tensors among it: all of it is in place afterwards, or none, or nobody is served."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from fp8refit.errors import InvalidSourceError
from fp8refit.fill.plan import PlanBuilder
from fp8refit.live.slots import Slot, TensorMeta
from tests.bad_tensors import HARMLESS, MISFITS, NOT_FINITE, WITHOUT_BYTES
from tests.fakes import FakeModel, make_policy
from tests.fuzz.engines import ROUTES, Subject, fake_engine  # noqa: F401 - a fixture

NAMES = [slot.name for slot in FakeModel().slots()]


def as_mapping(items):
    return dict(items), {}


def as_ordered(items):
    return OrderedDict(items), {}


def as_list(items):
    return list(items), {}


def as_function(items):
    return lambda: iter(items), {}


def as_iterable(items):
    return dict(items).items(), {}


def as_iterator(items):
    return iter(items), {}


def announced(items):
    """With a manifest of what is announced, which may not be what comes."""
    return iter(items), {"manifest": {name: TensorMeta.of(tensor) for name, tensor in items}}


MAPPINGS = [as_mapping, as_ordered, as_list]
REPEATABLE = [*MAPPINGS, as_function, as_iterable]
forms = st.sampled_from([*REPEATABLE, as_iterator])
names = st.sampled_from(NAMES)
wrappers = st.sampled_from(["", "module.", "_orig_mod.", "base_model.model."])
places = st.integers(0, len(NAMES))
UNFIT = WITHOUT_BYTES | MISFITS
EMBED = "model.embed_tokens.weight"


def off_by_a_bit(tensor):
    changed = tensor.clone()
    changed.view(torch.int16)[-1, -1] ^= 1
    return changed


SECONDS = {
    "the same": (lambda tensor: tensor, True),
    "a copy": (torch.clone, True),
    "float32": (torch.Tensor.float, True),
    "float32 that rounds to it": (lambda tensor: tensor.float() * (1 + 2**-12), True),
    "strided": (lambda tensor: tensor.mT.contiguous().mT, True),
    "another bit": (off_by_a_bit, False),
    "another bit in float32": (lambda tensor: off_by_a_bit(tensor).float(), False),
    "zeros": (torch.zeros_like, False),
    "no number": (lambda tensor: torch.full_like(tensor, torch.nan), False),
}
"""What comes under the second name of a tied tensor, and whether the engine holds the same for both."""


def inserted(policy, place, items):
    """The items of a policy, with others at a place."""
    held = list(policy.items())
    return [*held[:place], *items, *held[place:]]


class Sources(RuleBasedStateMachine):
    """One engine, refitted again and again."""

    subject: Subject | None = None

    @initialize(route=st.sampled_from([*ROUTES, "here", "through a bucket"]))
    def start(self, route):
        self.subject, self.route = Subject(route), route
        self.is_broadcast, self.is_strict = route == "broadcast", "twice" in route
        self.kept: dict[str, Tensor] = {}
        self.seed = 0

    def teardown(self):
        if self.subject is not None:
            self.subject.close()

    def policy(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        self.seed += 1
        return make_policy(self.subject.model, self.seed, dtype)

    def can_take(self, form) -> bool:
        """A broadcast announces what comes, and to look twice takes a source that can be read twice."""
        return form in REPEATABLE or not (self.is_broadcast or self.is_strict)

    @rule(
        form=forms,
        plants=st.dictionaries(names, st.sampled_from(list(HARMLESS)), max_size=5),
        wrapper=wrappers,
        is_backwards=st.booleans(),
    )
    def refit(self, form, plants, wrapper, is_backwards):
        if not self.can_take(form):
            return
        policy = self.policy()
        sent = {wrapper + name: HARMLESS[plants.get(name, "itself")](tensor) for name, tensor in policy.items()}
        items = list(sent.items())
        state_dict, options = form(items[::-1] if is_backwards else items)
        self.subject.good(state_dict, policy, **options)

    @rule(form=forms, plants=st.dictionaries(names, st.sampled_from(list(UNFIT)), min_size=1, max_size=3))
    def plant(self, form, plants):
        if not self.can_take(form):
            return
        policy = self.policy()
        for name, kind in plants.items():
            policy[name] = UNFIT[kind](policy[name])
        state_dict, options = form(list(policy.items()))
        error = self.subject.bad(state_dict, is_seen_before=form in REPEATABLE, **options)
        if form in REPEATABLE:
            assert all(name in str(error) for name in plants), "every one is named"

    @rule(name=names, kind=st.sampled_from(list(NOT_FINITE)), form=forms)
    def plant_no_number(self, name, kind, form):
        if not self.can_take(form):
            return
        policy = self.policy()
        policy[name] = NOT_FINITE[kind](policy[name])
        state_dict, options = form(list(policy.items()))
        assert name in str(self.subject.bad(state_dict, is_seen_before=self.is_strict, **options))

    @rule(name=names, kind=st.sampled_from(list(UNFIT)))
    def lie_in_a_manifest(self, name, kind):
        """What comes is not what was announced; all is well until then."""
        if self.is_strict:
            return
        policy = self.policy()
        _, options = announced(list(policy.items()))
        policy[name] = UNFIT[kind](policy[name])
        error = self.subject.bad(iter(policy.items()), is_seen_before=False, **options)
        assert name in str(error)

    @rule(
        name=names,
        form=forms,
        how=st.sampled_from(["missing", "unknown", "twice", "no pair", "unfinished"]),
    )
    def spoil(self, name, form, how):
        if not self.can_take(form) or (how == "twice" and form is as_mapping):
            return
        items: list[Any] = list(self.policy().items())
        place = NAMES.index(name)
        tensor = items[place][1]
        is_mapping = form in (as_mapping, as_ordered, as_iterable)
        match how:
            case "missing":
                del items[place]
            case "unknown":
                items.append(("model.what.is.this.weight", tensor))
            case "twice":
                items.append(("module." + name, tensor))
            case "no pair" if not is_mapping:
                items[place] = tensor
            case _:
                items = items[:place]
        state_dict, options = form(items)
        self.subject.bad(state_dict, is_seen_before=form in REPEATABLE, **options)

    @rule(
        form=st.sampled_from([*REPEATABLE, as_iterator, announced]), kind=st.sampled_from(list(SECONDS)), place=places
    )
    def send_a_tied_tensor_twice(self, form, kind, place):
        if not (form is announced or self.can_take(form)) or (self.is_strict and form is announced):
            return
        policy = self.policy()
        make, is_equal = SECONDS[kind]
        items = inserted(policy, place, [("lm_head.weight", make(policy[EMBED]))])
        state_dict, options = form(items)
        if is_equal:
            self.subject.good(state_dict, policy, **options)
            return
        is_seen_before = form in MAPPINGS and self.route != "through a bucket"
        error = self.subject.bad(state_dict, is_seen_before=is_seen_before, **options)
        assert "is tied" in str(error) or kind == "no number"

    @rule(
        form=st.sampled_from([*REPEATABLE, as_iterator, announced]), place=places, kind=st.sampled_from(list(HARMLESS))
    )
    def send_what_nobody_needs(self, form, place, kind):
        if not (form is announced or self.can_take(form)) or (self.is_strict and form is announced):
            return
        policy = self.policy()
        drafts = [(f"mtp.{name}", HARMLESS[kind](tensor)) for name, tensor in list(policy.items())[:3]]
        state_dict, options = form(inserted(policy, place, drafts))
        report = self.subject.good(state_dict, policy, **options)
        assert sorted(report.ignored) == sorted(name for name, _ in drafts)

    @rule(name=names, form=forms, odd=st.sampled_from([3, None, ("a",), b"a", "\ud800"]))
    def misname(self, name, form, odd):
        """A name that is no text, beside all that there has to be."""
        if self.can_take(form):
            items = [*self.policy().items(), (odd, torch.ones(3))]
            state_dict, options = form(items)
            self.subject.bad(state_dict, is_seen_before=form in REPEATABLE, **options)

    @rule(returned=st.sampled_from([None, 3, torch.ones(2), "text", [None]]))
    def return_something_else(self, returned):
        self.subject.bad(lambda: returned, is_seen_before=True)

    @rule(form=st.sampled_from(MAPPINGS))
    def refit_in_place(self, form):
        """As a trainer does: the same tensors, with other values."""
        policy = self.policy()
        if not self.kept:
            self.kept = {name: tensor.clone() for name, tensor in policy.items()}
        for name, tensor in policy.items():
            self.kept[name].copy_(tensor)
        state_dict, options = form(list(self.kept.items()))
        self.subject.good(state_dict, policy, **options)

    @precondition(lambda self: self.subject is not None and self.kept)
    @rule(form=st.sampled_from(MAPPINGS), name=names, num_bytes=st.sampled_from([0, 1, -1]))
    def free_in_place(self, form, name, num_bytes):
        """The same tensors, of which one has lost its memory since."""
        self.refit_in_place(form)
        storage = self.kept[name].untyped_storage()
        num_bytes = num_bytes if num_bytes >= 0 else storage.nbytes() - 1
        storage.resize_(num_bytes)
        state_dict, options = form(list(self.kept.items()))
        assert name in str(self.subject.bad(state_dict, is_seen_before=True, **options))
        self.kept = {}


TestSources = Sources.TestCase


routes = st.sampled_from(list(ROUTES))
one_each = st.permutations(list(UNFIT)).map(lambda kinds: dict(zip(NAMES, kinds, strict=False)))
"""A kind for every name."""


@given(route=routes, plants=one_each, form=st.sampled_from(REPEATABLE))
def test_no_bad_tensor_passes_after_good_ones(route, plants, form):
    """One bad tensor, where all else is laid out as the last time."""
    subject = Subject(route)
    policy = make_policy(subject.model, 1)
    for name, kind in plants.items():
        subject.good(form(list(policy.items()))[0], policy)
        bad = {**policy, name: UNFIT[kind](policy[name])}
        assert name in str(subject.bad(form(list(bad.items()))[0], is_seen_before=True)), kind
    subject.close()


@given(route=st.sampled_from([route for route in ROUTES if "twice" not in route]), plants=one_each)
def test_no_bad_tensor_passes_for_what_was_announced(route, plants):
    """One bad tensor, from an iterator whose manifest says nothing of it."""
    subject = Subject(route)
    policy = make_policy(subject.model, 1)
    for name, kind in plants.items():
        _, options = announced(list(policy.items()))
        came = {**policy, name: UNFIT[kind](policy[name])}
        assert name in str(subject.bad(iter(came.items()), is_seen_before=False, **options)), kind
    subject.good(policy, policy)
    subject.close()


@given(
    orders=st.lists(st.tuples(st.permutations(NAMES), st.sampled_from([as_function, as_list])), min_size=2, max_size=3)
)
def test_a_broadcast_may_come_in_any_order(orders):
    subject = Subject("broadcast")
    for seed, (order, form) in enumerate(orders):
        policy = make_policy(subject.model, seed)
        state_dict, _ = form([(name, policy[name]) for name in order])
        subject.good(state_dict, policy)
    subject.close()


def slot(name: str, *shape: int) -> Slot:
    return Slot(name=name, full_shape=shape, weight=torch.empty(shape, dtype=torch.bfloat16, device="meta"))


@given(
    layers=st.integers(1, 3),
    experts=st.integers(1, 4),
    parent=st.sampled_from(["mlp", "block_sparse_moe"]),
    missing=st.booleans(),
)
def test_a_saved_mixture_of_experts_is_told_in_one_line(layers, experts, parent, missing):
    """Files hold one tensor an expert, and a model of transformers one a layer."""
    slots, sent = [slot("norm.weight", 8)], {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp"
        slots += [
            slot(f"{prefix}.experts.gate_up_proj", experts, 16, 8),
            slot(f"{prefix}.experts.down_proj", experts, 8, 8),
        ]
        slots.append(slot(f"{prefix}.gate.weight", experts, 8))
        for expert in range(experts):
            for kind in ("w1", "w2", "w3"):
                sent[f"model.layers.{layer}.{parent}.experts.{expert}.{kind}.weight"] = (8, 8)
        sent[f"model.layers.{layer}.{parent}.gate.weight"] = (experts, 8)
    if not missing:
        sent["norm.weight"] = (8,)
    metadata = {name: TensorMeta(shape=shape, dtype=torch.bfloat16) for name, shape in sent.items()}
    with pytest.raises(InvalidSourceError) as raised:
        PlanBuilder(tuple(slots)).plan(metadata)
    said, *others = raised.value.problems
    assert "state_dict()" in said and "leave it out" not in str(raised.value)
    assert others == ["norm.weight: missing"] * missing


@pytest.mark.parametrize("form", [*REPEATABLE, as_iterator, announced])
@pytest.mark.parametrize("route", ROUTES)
def test_the_second_name_of_a_tied_tensor_is_compared(route, form):
    """On every way: at either end of what is sent, with a bit more and with what rounds to the same."""
    machine = Sources()
    machine.start(route)
    for kind in ("float32 that rounds to it", "another bit"):
        for place in (0, len(NAMES)):
            machine.send_a_tied_tensor_twice(form, kind, place)
    machine.teardown()
