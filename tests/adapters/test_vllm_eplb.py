"""Where vLLM says that experts are (EPLB), on objects that show what vLLM's show: no vLLM here."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.eplb import ExpertPlaces, check_mover, end_moves
from fp8refit_vllm.worker import WorkerModel
from torch import nn

from fp8refit import EngineLostError
from fp8refit.driver.lora_target import LoraTarget
from fp8refit.live.slots import Inventory, Slot


class Experts(nn.Module):
    """The second of two ranks, with three of six places."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        self.register_buffer("_expert_map", torch.tensor([-1, -1, -1, 0, 1, 2]))


def worker_of(places, *, is_async=False, is_elastic=False, drains=True) -> SimpleNamespace:
    layers = [nn.ModuleDict({"routed_experts": Experts(), "gate": nn.Linear(2, 2)}) for _ in places]
    model = SimpleNamespace(moe_layers=layers, num_logical_experts=4)
    state = SimpleNamespace(
        model_states={"hash": SimpleNamespace(model=model, physical_to_logical_map=torch.tensor(places))},
        parallel_config=SimpleNamespace(enable_elastic_ep=is_elastic),
        is_async=is_async,
    )
    if drains:
        state.drain_async = lambda: setattr(state, "is_drained", True)
    return SimpleNamespace(model_runner=SimpleNamespace(eplb_state=state))


def experts_of(worker) -> list[nn.Module]:
    (model,) = worker.model_runner.eplb_state.model_states.values()
    return [layer["routed_experts"] for layer in model.model.moe_layers]


PLACES = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 0, 2]]


def test_a_rank_holds_the_experts_at_its_own_places():
    places = ExpertPlaces(worker := worker_of(PLACES))
    first, second = experts_of(worker)
    assert places.held == {first: [3, 0, 1], second: [0, 0, 2]}
    assert {id(each) for each in places.moving} == {id(p) for layer in (first, second) for p in layer.parameters()}
    assert places.refusals(()) == ()


def test_a_move_is_noticed_whether_vllm_changes_its_map_or_replaces_it():
    places = ExpertPlaces(worker := worker_of(PLACES))
    (model,) = worker.model_runner.eplb_state.model_states.values()
    assert not places.have_moved()
    model.physical_to_logical_map[1, 0] = 1
    assert places.have_moved()
    model.physical_to_logical_map = torch.tensor(PLACES)
    assert not places.have_moved()
    model.physical_to_logical_map = torch.tensor(PLACES[::-1])
    assert places.have_moved()


def test_a_map_that_sleeps_is_not_read(monkeypatch):
    places = ExpertPlaces(worker := worker_of(PLACES))
    (model,) = worker.model_runner.eplb_state.model_states.values()
    model.physical_to_logical_map = SimpleNamespace(is_cuda=True, data_ptr=lambda: 0x1000)
    monkeypatch.setattr("fp8refit_vllm.eplb.is_mapped", lambda address: address != 0x1000)
    assert not places.have_moved()
    asleep = ExpertPlaces(worker)
    assert asleep.held == {}
    model.physical_to_logical_map = torch.tensor(PLACES)
    assert asleep.have_moved()


def test_a_worker_without_eplb_has_none_that_move():
    for runner in (SimpleNamespace(), SimpleNamespace(eplb_state=None)):
        places = ExpertPlaces(worker := SimpleNamespace(model_runner=runner))
        assert (places.held, places.moving, places.refusals(()), places.have_moved()) == ({}, (), (), False)
        end_moves(worker)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_elastic": True}, "moves experts to other numbers of ranks. Boot without enable_elastic_ep"),
        (
            {"is_async": True, "drains": False},
            'moves experts in the background. Boot with eplb_config={"use_async": False}',
        ),
        ({"places": [[0, 1, 2, 0, 0, 1]]}, "no longer knows where its experts are. Sleep at level 1, or boot without"),
        ({"places": [[0, 1, 2, 3, 9, 1]]}, "no longer knows where its experts are. Sleep at level 1, or boot without"),
    ],
)
def test_experts_that_cannot_be_followed_are_refused_with_what_to_boot(options, reason):
    (refusal,) = ExpertPlaces(worker_of(**{"places": PLACES, **options})).refusals(())
    assert str(refusal).startswith(f"experts: {reason}")


def test_experts_of_a_draft_that_move_too_are_refused():
    places = ExpertPlaces(worker := worker_of(PLACES))
    assert places.refusals([nn.Linear(2, 2)]) == ()
    (refusal,) = places.refusals([nn.Sequential(experts_of(worker)[0])])
    assert "moves those of its draft too" in str(refusal)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_moves_in_the_background_is_ended(is_async):
    worker = worker_of(PLACES, is_async=is_async)
    end_moves(worker)
    assert getattr(worker.model_runner.eplb_state, "is_drained", False) is is_async


@pytest.mark.parametrize("is_served", [False, True])
def test_what_drivers_have_sent_to_a_rank_is_forgotten_once_experts_have_moved(is_served):
    """So that they map tensors, and cut broadcasts, anew."""
    events, worker = [], worker_of(PLACES)
    worker.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    if is_served:
        tensors = SimpleNamespace(unmap=lambda: events.append("unmap"))
        receiver = SimpleNamespace(leave=lambda: events.append("leave"))
        worker._fp8refit_server = SimpleNamespace(orders=SimpleNamespace(tensors=tensors, receiver=receiver))
    model, (eplb,) = WorkerModel(worker), worker.model_runner.eplb_state.model_states.values()
    for _ in range(2):
        model._read_places()
    assert events == []
    eplb.physical_to_logical_map = torch.tensor(PLACES[::-1])
    for _ in range(2):
        model._read_places()
    assert events == (["unmap", "leave"] if is_served else [])


@pytest.mark.parametrize(
    ("rebalanced", "is_alive", "is_lost"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_move_that_will_never_end_is_an_error_before_anybody_waits_for_it(rebalanced, is_alive, is_lost):
    worker = worker_of(PLACES, is_async=True)
    state = worker.model_runner.eplb_state
    state.async_worker = SimpleNamespace(is_alive=lambda: is_alive)
    state.model_states["hash"].rebalanced = rebalanced
    with pytest.raises(EngineLostError, match="has died, in the middle of a move") if is_lost else nullcontext():
        check_mover(worker)


def test_an_engine_whose_experts_do_not_move_has_no_mover():
    check_mover(SimpleNamespace(model_runner=SimpleNamespace()))


class NoAdapters:
    """An engine that serves none."""

    def loaded(self):
        return []

    seated = loaded

    def activate(self):
        pass

    deactivate = activate


def test_what_a_failed_refit_has_left_of_an_expert_is_sought_on_every_rank_once_it_has_moved():
    stack, norm = torch.zeros(2, 4), torch.zeros(4)
    names, moved = ["experts.2", "experts.3"], [False]

    def read() -> Inventory:
        slots = [Slot(name=name, full_shape=(4,), weight=row) for name, row in zip(names, stack, strict=True)]
        slots.append(Slot(name="norm", full_shape=(4,), weight=norm))
        return Inventory(slots=tuple(slots), has_moved=lambda: moved[0], moving=(stack,))

    target = LoraTarget(read, memory=NoAdapters(), device=torch.device("cpu"), engine="fake", versions={})
    target._read_inventory()
    target.is_dirty = True
    target._read_inventory()
    assert target._torn == set()
    names[0], moved[0] = "experts.0", True
    target._read_inventory()
    assert target._torn == {"experts.0", "experts.3"}
