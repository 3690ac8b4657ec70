"""vLLM's weight transfer by fp8refit, without vLLM: what trainer and ranks say to each other, and what becomes of faults.

The real one: `tests/vllm/test_weight_transfer.py`.
"""

import gc
import threading
from functools import cached_property
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm import transfer_driver, weight_source
from fp8refit_vllm.transfer_driver import Letter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fp8refit import (
    EngineBusyError,
    EngineLostError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    RefitConfig,
    TransportError,
    UnsupportedEngineError,
)
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import PROTOCOL, Do, Place, Request
from fp8refit.transport.collective import store
from fp8refit.transport.collective.board import Address, Board
from tests.adapters.fake_weight_transfer import Engine, Trainer
from tests.fake_kv import ATTENTION, K_SCALE
from tests.fake_ranks import NORM, Q_PROJ, Cluster
from tests.trainer_ranks import TrainerRanks

TIMEOUT_S = 5.0
UPDATE = ["start_weight_update", "finish_weight_update"]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def engine(cluster) -> Engine:
    return Engine(cluster)


@pytest.fixture
def open_session():
    """Opens sessions, and closes them."""
    opened = []

    def open(engine: Engine, **options) -> Trainer:
        opened.append(Trainer(engine, RefitConfig(timeout_s=TIMEOUT_S, **options)))
        return opened[-1]

    yield open
    for session in opened:
        session.shutdown()


@pytest.fixture
def session(engine, open_session) -> Trainer:
    """One that has brought a policy."""
    session = open_session(engine)
    session.send(engine.cluster.make_policy(seed=0))
    return session


def with_nan(policy):
    bad = policy | {Q_PROJ: policy[Q_PROJ].clone()}
    bad[Q_PROJ][3, 5] = torch.nan
    return bad


def letter(address: Address, message: str) -> dict:
    return Letter(address=address, message=message).model_dump()


def stranger() -> dict:
    address = Address(token="0" * 32, host="127.0.0.1", port=1)
    return letter(address, Request(id="1", order=Do(step="hello")).encode())


def open_board() -> Board:
    """As a trainer does."""
    opened, token, port = store.open_store(host="127.0.0.1", port=0, timeout_s=TIMEOUT_S)
    return Board(Address(token=token, host="127.0.0.1", port=port), 0, opened)


def test_every_rank_holds_what_was_sent_and_the_engine_is_told_its_version(engine, session, cluster):
    cluster.assert_holds(cluster.make_policy(seed=0), version=1)
    report = session.send(cluster.make_policy(seed=1))
    cluster.assert_holds(cluster.make_policy(seed=1), version=2)
    assert (report.version, session.version, session.is_dirty, engine.weight_version) == (2, 2, False, "2")
    assert not report.is_first
    assert engine.is_in_step


def test_kv_scales_are_set_in_the_same_update(open_session):
    cluster = Cluster(kv=[[ATTENTION], [ATTENTION]])
    open_session(Engine(cluster)).send(cluster.make_policy(seed=0), kv_scales={K_SCALE: 0.25})
    assert [scales[K_SCALE] for scales in cluster.scales] == [0.25, 0.25]


def test_a_client_that_cannot_name_a_version_does_not_have_to(engine, open_session, cluster):
    finish = engine.finish_weight_update
    engine.finish_weight_update = lambda: finish()
    open_session(engine).send(cluster.make_policy(seed=0))
    cluster.assert_holds(cluster.make_policy(seed=0), version=1)
    assert engine.weight_version is None


def test_an_update_that_somebody_else_finishes_is_refused_while_the_engine_is_dirty(engine, session, cluster):
    with pytest.raises(NonFiniteError):
        session.send(with_nan(cluster.make_policy(seed=1)))
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="parts of two policies"):
        engine.finish_weight_update("9")
    assert (engine.weight_version, engine.is_in_step) == ("1", True)
    session.send(cluster.make_policy(seed=1))


def test_prompts_are_refused_for_want_of_a_tokenizer(session):
    with pytest.raises(UnsupportedEngineError, match="pass token ids"):
        session.send({}, calibration=["a prompt"])


@pytest.mark.parametrize(
    ("letter", "says"),
    [
        ({}, r"address: Field required.*drive this engine with fp8refit_vllm.trainer"),
        (stranger() | {"more": 1}, "more: Extra inputs are not permitted"),
        ({"names": ["a"], "dtype_names": ["bfloat16"]}, r"is not a message of fp8refit .* \(1 of 4 problems\)"),
        (stranger(), "another trainer has taken over this engine"),
    ],
    ids=["nothing", "unknown field", "another backend's", "another token"],
)
def test_letters_of_strangers_fail_on_one_rank_and_end_the_update_on_all(letter, says, engine, session, cluster):
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match=says):
        engine.update_weights(letter)
    assert [worker._weight_update_active for worker in engine.workers] == [False, False]
    session.send(cluster.make_policy(seed=1))
    cluster.assert_holds(cluster.make_policy(seed=1), version=2)


def test_an_update_before_an_invitation_is_refused(engine):
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine first"):
        engine.update_weights(stranger())
    assert engine.is_in_step


def test_what_no_rank_can_read_is_answered(engine, session):
    board = session.driver._board
    engine.start_weight_update()
    engine.update_weights(letter(board.address, "{"))
    engine.finish_weight_update()
    assert all("cannot read the driver's message" in board.take(str(rank))[0] for rank in range(2))


@pytest.mark.parametrize(
    "asked", [{}, {"address": {"token": "short"}}, {"master_address": "127.0.0.1"}], ids=["nothing", "bad", "nccl's"]
)
def test_invitations_that_nobody_can_be_told_of_fail(asked, engine):
    with pytest.raises(RuntimeError, match="is not a message of fp8refit"):
        engine.init_weight_transfer_engine(asked)
    assert engine.is_in_step


def test_a_trainer_that_is_not_there_is_named(engine, monkeypatch):
    monkeypatch.setattr("fp8refit_vllm.transfer.FINDING_S", 0.5)
    with pytest.raises(RuntimeError, match=r"the trainer cannot be reached at 127\.0\.0\.1:1"):
        engine.init_weight_transfer_engine(stranger())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"protocol":', '"protocol":7'), f"the driver speaks protocol 7{PROTOCOL} and this rank.* speaks {PROTOCOL};"),
        (('"step":', '"more":1,"step":'), "cannot read the driver's message.*more: Extra inputs are not permitted"),
    ],
    ids=["protocol", "unknown field"],
)
def test_a_trainer_of_another_version_is_told_and_the_one_before_it_stays(change, says, engine, session, open_session):
    engine.before = lambda method, asked: asked.update(message=asked["message"].replace(*change))
    with pytest.raises(RankFailedError, match=says):
        open_session(engine)
    engine.before = lambda *_: None
    assert len(session.fingerprints()) == 2
    assert engine.is_in_step


def test_an_engine_that_cannot_read_the_letter_says_what_to_install(engine, open_session):
    engine.before = lambda method, asked: asked.update(more=1)
    with pytest.raises(
        UnsupportedEngineError, match=r"more: Extra inputs are not permitted.*the same version of fp8refit"
    ):
        open_session(engine)
    assert engine.is_in_step


def test_an_engine_that_cannot_be_refitted_says_why(cluster, open_session):
    with pytest.raises(UnsupportedEngineError, match="ranks of data-parallel replicas apart"):
        open_session(Engine(cluster, num_replicas=2))


def test_an_engine_without_the_backend_says_what_to_set(engine, open_session):
    def fail(*_: object) -> None:
        raise ValueError("Weight transfer not configured")

    engine.before = fail
    with pytest.raises(
        UnsupportedEngineError, match=r"not configured.*weight_transfer_config=\{'backend': 'fp8refit'\}"
    ):
        open_session(engine)


def test_an_engine_that_is_gone_is_lost(engine, open_session):
    def fail(*_: object) -> None:
        raise ConnectionRefusedError("nobody there")

    engine.before = fail
    with pytest.raises(EngineLostError, match="nobody there"):
        open_session(engine)


def test_a_client_that_reaches_several_engines_is_refused(engine, open_session):
    other = Engine(Cluster())
    engine.before = lambda method, asked: other.init_weight_transfer_engine(asked)
    with pytest.raises(UnsupportedEngineError, match="several engines"):
        open_session(engine)


def test_a_client_that_reaches_some_ranks_is_refused(engine, open_session):
    engine.reached = [0]
    with pytest.raises(UnsupportedEngineError, match="1 of 2 ranks"):
        open_session(engine)


def test_ranks_that_go_elsewhere_are_missed(engine, open_session):
    other = open_board()
    engine.before = lambda method, asked: asked.update(address=other.address.model_dump())
    with pytest.raises(TransportError, match=r"no rank of the engine connected to 127\.0\.0\.1"):
        open_session(engine)


def test_memory_of_another_host_is_not_mapped(engine, open_session, monkeypatch, cluster):
    there = Place(boot_id="another", pid_namespace=1)
    monkeypatch.setattr(transfer_driver, "messages", SimpleNamespace(**vars(messages) | {"Place": OtherPlace}))
    monkeypatch.setattr(Place, "here", lambda: there)
    with pytest.raises(TransportError, match='RefitConfig\\(transport="collective"'):
        open_session(engine)
    open_session(engine, transport="collective").send(cluster.make_policy(seed=0))
    cluster.assert_holds(cluster.make_policy(seed=0), version=1)


class OtherPlace:
    @staticmethod
    def here() -> Place:
        return Place(boot_id="this", pid_namespace=1)


def test_a_second_trainer_takes_the_engine_over_and_the_first_is_told(engine, session, open_session, cluster):
    second = open_session(engine)
    second.send(cluster.make_policy(seed=2))
    cluster.assert_holds(cluster.make_policy(seed=2), version=2)
    with pytest.raises(EngineLostError, match=r"another trainer has taken over this engine\. Create a new trainer"):
        session.send(cluster.make_policy(seed=1))
    second.send(cluster.make_policy(seed=3))
    cluster.assert_holds(cluster.make_policy(seed=3), version=3)
    assert engine.is_in_step


def test_a_second_trainer_is_refused_in_the_middle_of_an_update(engine, session, open_session, cluster):
    seen = []

    def come(method: str, asked: object) -> None:
        if method == "update_weights" and not seen:
            engine.before = lambda *_: None
            engine._line.release()
            with pytest.raises(EngineBusyError, match="in the middle of an update") as caught:
                open_session(engine)
            seen.append(caught)
            engine._line.acquire()
            engine.events.append(method)

    engine.before = come
    session.send(cluster.make_policy(seed=1))
    assert seen
    cluster.assert_holds(cluster.make_policy(seed=1), version=2)


def test_a_trainer_that_died_in_the_middle_is_replaced_and_its_parts_are_written_over(engine, open_session, cluster):
    class Died(BaseException):
        pass

    def die(method: str, asked: dict) -> None:
        if method == "finish_weight_update" or (method == "update_weights" and '"finish"' in asked["message"]):
            raise Died

    policy, session = cluster.make_policy(seed=0), open_session(engine)
    engine.before = die
    with pytest.raises(BaseException):  # noqa: B017 - whatever is told to nobody
        session.send(PolicySource(policy))
    assert [worker._weight_update_active for worker in engine.workers] == [True, True]
    engine.before = lambda *_: None
    session.driver._board = None
    gc.collect()  # its store goes with it
    open_session(engine).send(policy)
    cluster.assert_holds(policy, version=1)
    assert engine.is_in_step


def test_a_rank_that_does_not_answer_loses_the_engine(engine, session, cluster):
    engine.workers[1].transfer._board.send = lambda *_: None
    with pytest.raises(EngineLostError, match="rank 1 did not answer"):
        session.send(cluster.make_policy(seed=1))


def test_an_engine_that_does_not_return_is_given_up(engine, open_session, cluster, monkeypatch):
    monkeypatch.setattr(transfer_driver, "GRACE_S", 0.2)
    monkeypatch.setattr("fp8refit.remote.protocol.channel.GRACE_S", 0.2)
    may_end = threading.Event()
    session = Trainer(engine, RefitConfig(timeout_s=0.3))
    engine.before = lambda method, asked: method == "update_weights" and may_end.wait(30)
    with pytest.raises(EngineLostError, match="did not answer within") as lost:
        session.send(cluster.make_policy(seed=0))
    may_end.set()
    session.shutdown()
    open_session(engine).send(cluster.make_policy(seed=1))  # while the first trainer, and its error, still exist
    assert engine.is_in_step, lost
    cluster.assert_holds(cluster.make_policy(seed=1), version=1)


def test_an_update_that_is_not_ended_says_what_is_in_place(engine, session, open_session, cluster):
    def fail(method: str, asked: object) -> None:
        if method == "finish_weight_update":
            raise ValueError("no")

    engine.before = fail
    with pytest.raises(
        RankFailedError, match="version 2 is in place, but the update could not be finished: vLLM raised ValueError: no"
    ):
        session.send(cluster.make_policy(seed=1))
    cluster.assert_holds(cluster.make_policy(seed=1), version=2)
    assert not session.is_dirty


def test_after_a_shutdown_of_the_engines_side_the_trainer_is_told(engine, session, cluster):
    for worker in engine.workers:
        worker.transfer.shutdown()
    with pytest.raises(EngineLostError, match="weight transfer was shut down"):
        session.send(cluster.make_policy(seed=1))
    assert engine.is_in_step


def test_after_its_own_shutdown_a_trainer_says_so(engine, session, cluster):
    session.shutdown()
    session.shutdown()
    with pytest.raises(EngineLostError, match="this trainer was shut down"):
        session.send(cluster.make_policy(seed=1))


def test_a_port_that_is_taken_is_named(engine):
    taken = open_board()
    with pytest.raises(TransportError, match="cannot listen on"):
        Trainer(engine, RefitConfig(timeout_s=TIMEOUT_S), port=taken.address.port)


class Meta:
    def __init__(self, name, tensor):
        self.name, self.shape, self.dtype = name, tuple(tensor.shape), tensor.dtype


class PolicySource:
    """As vLLM's `WeightSource`; a pass is a collective operation of the ranks that make it."""

    def __init__(self, policy, fails_on=None):
        self.policy = policy
        self.num_passes = 0
        self.fails_on = fails_on

    def metadata(self):
        return [Meta(name, tensor) for name, tensor in self.policy.items()]

    def __iter__(self):
        self.num_passes += 1
        for place, (name, tensor) in enumerate(self.policy.items()):
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
                if torch.distributed.get_rank() == self.fails_on and place == len(self.policy) - 1:
                    raise OSError("the disk is gone")
            yield name, tensor


class HalfSource(PolicySource):
    def held_names(self):
        return [NORM]


class NewSource:
    """The same as of 0.33, which iterates by a method and says what there is in an attribute."""

    def __init__(self, policy, fails_on=None):
        self._old = PolicySource(policy, fails_on)
        self.policy = policy
        self.owned = list(policy)

    @property
    def num_passes(self):
        return self._old.num_passes

    @cached_property
    def metadata(self):
        return self._old.metadata()

    def owned_names(self, rank):
        return self.owned if rank == 0 else list(self.policy)

    def implements_iter_full(self):
        return True

    def iter_full(self):
        return iter(self._old)


class LocalSource(NewSource):
    def implements_iter_full(self):
        return False


def opened(source, monkeypatch, **options):
    monkeypatch.setattr(weight_source, "module_of", lambda source: None)
    return weight_source.opened(source, None, RefitConfig(**options))


def enter(opened):
    with opened:
        pass


@pytest.mark.parametrize("kind", [PolicySource, NewSource])
@pytest.mark.parametrize(("validate", "num_passes"), [("fused", 1), ("strict", 2)])
def test_a_weight_source_is_read_as_a_stream(validate, num_passes, kind, engine, open_session, cluster):
    source = kind(cluster.make_policy(seed=4))
    open_session(engine, validate=validate).send(source)
    cluster.assert_holds(source.policy, version=1)
    assert source.num_passes == num_passes


def test_a_source_of_which_this_rank_holds_a_part_is_refused(cluster, monkeypatch):
    with pytest.raises(InvalidSourceError, match="holds only a part of the model"):
        enter(opened(HalfSource(cluster.make_policy(seed=4)), monkeypatch))
    source = NewSource(cluster.make_policy(seed=4))
    source.owned = source.owned[1:]
    with pytest.raises(InvalidSourceError, match="rank 0 does not own 1 of its tensors"):
        enter(opened(source, monkeypatch))
    with pytest.raises(InvalidSourceError, match="does not implement iter_full"):
        enter(opened(LocalSource(cluster.make_policy(seed=4)), monkeypatch))


def test_a_module_is_read_where_it_lies(monkeypatch):
    module = torch.nn.Linear(4, 4)
    monkeypatch.setattr(weight_source, "module_of", lambda source: module)
    with weight_source.opened(None, None, RefitConfig()) as (weights, manifest):
        assert manifest is None
        assert weights["weight"].data_ptr() == module.weight.data_ptr()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    ranks = TrainerRanks(2, str(tmp_path_factory.mktemp("two") / "store"))
    yield ranks
    ranks.close()


SCENARIOS = {
    "good": ({}, "2 passes, sent True"),
    "nan": ({"has_nan": True}, "NonFiniteError"),
    "misfit": ({"misfit": True}, "InvalidSourceError"),
    "rank fails": ({"fails_on": 1}, "OSError"),
}


@pytest.mark.parametrize("is_new", [False, True], ids=["0.32", "0.33"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_rank_of_a_trainer_makes_the_same_passes_and_ends_alike(scenario, is_new, two_ranks):
    options, says = SCENARIOS[scenario]
    found = two_ranks.run(send_source, options, is_new)
    if scenario == "good":
        assert found == ["2 passes, sent True", "2 passes, sent False"]
    else:
        assert all(says in one for one in found), found


def send_source(rank, options, is_new):
    """What each rank of a trainer does."""
    cluster = Cluster()
    policy = cluster.make_policy(seed=0)
    if options.get("has_nan"):
        policy = with_nan(policy)
    if options.get("misfit"):
        policy["model.other.weight"] = policy[NORM]
    source = (NewSource if is_new else PolicySource)(policy, options.get("fails_on"))
    config = RefitConfig(validate="strict" if not options else "fused", timeout_s=TIMEOUT_S)
    report = Trainer(Engine(cluster), config, rank=rank).send(source)
    if report is not None:
        cluster.assert_holds(policy, version=1)
    return f"{source.num_passes} passes, sent {report is not None}"


@pytest.mark.parametrize("has_nan", [False, True], ids=["good", "nan"])
def test_the_shards_of_a_module_are_gathered_on_every_rank(has_nan, two_ranks):
    assert two_ranks.run(send_shards, has_nan) == ["NonFiniteError" if has_nan else "holds it"] * 2


def send_shards(rank, has_nan):
    """An FSDP trainer's ranks, of which the first drives the engine."""
    cluster = Cluster()
    policy = cluster.make_policy(seed=0)
    mesh = init_device_mesh("cpu", (2,))
    wanted = with_nan(policy) if has_nan else policy
    shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in wanted.items()}
    config = RefitConfig(timeout_s=TIMEOUT_S)
    try:
        report = Trainer(Engine(cluster), config, rank=rank).send(shards)
    except NonFiniteError as error:
        return type(error).__name__
    if report is not None:
        cluster.assert_holds(policy, version=1)
    return "holds it"
