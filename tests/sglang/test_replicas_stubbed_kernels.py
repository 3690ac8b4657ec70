"""SGLang engines of several replicas with stubbed kernels: one refit and one vote, and all replicas commit or none does.

If a replica of several ranks loses one, SGLang ends the engine and the process that booted it; if one of one rank dies, nobody
notices but us.
"""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

NUM_REPLICAS = 2
CASES = {"qwen3": 1, "qwen2_wide": 2}
"""Ranks of each replica, by the family."""


@pytest.fixture(scope="module")
def of_one(run_engine):
    ways = ["wait", "keep", "continue"]
    return run_engine("replicas", family="qwen3", in_flight=ways, ending="killed", dp_size=NUM_REPLICAS)


@pytest.fixture(scope="module")
def of_two(run_engine):
    return run_engine("replicas", family="qwen2_wide", in_flight=[], ending="nothing", dp_size=NUM_REPLICAS, tp_size=2)


@pytest.fixture(scope="module")
def of_stages(run_engine):
    """Two stages each."""
    options = {"dp_size": NUM_REPLICAS, "pp_size": 2, "drop_in": True}
    return run_engine("replicas", family="qwen3", in_flight=["wait"], ending="faults", **options)


@pytest.fixture(scope="module")
def with_dp_attention(run_engine):
    """Whose ranks share their experts, and step together."""
    options = {"dp_size": NUM_REPLICAS, "tp_size": 2, "enable_dp_attention": True}
    ways = ["wait", "keep", "continue"]
    return run_engine("replicas", family="qwen3_moe", in_flight=ways, ending="rank fault", has_fresh=True, **options)


@pytest.fixture(params=CASES)
def case(request, of_one, of_two, fresh):
    """What replicas found, and a fresh engine of the policy."""
    return {"qwen3": of_one, "qwen2_wide": of_two}[request.param], fresh[f"{request.param}-{CASES[request.param]}"]


def test_every_rank_of_every_replica_holds_what_a_fresh_engine_loads(case):
    found, booted = case
    rounds, num_ranks = found["policies"]["rounds"], NUM_REPLICAS * len(booted["live"])
    assert [(one["version"], one["ranks"]) for one in rounds] == [
        (version, list(range(num_ranks))) for version in (1, 2, 3)
    ]
    assert rounds[1]["live"] == booted["live"] * NUM_REPLICAS
    assert rounds[0]["live"] == rounds[2]["live"] != rounds[1]["live"]
    assert found["policies"]["moved"] == [[]] * num_ranks


def test_every_replica_says_what_a_fresh_engine_says_without_an_older_policys_cache(case):
    found, booted = case
    assert found["policies"]["rounds"][1]["outputs"] == booted["outputs"] * NUM_REPLICAS
    for one in found["policies"]["rounds"]:
        assert [output["num_cached"] for output in one["again"]] == [23, 199] * NUM_REPLICAS
    assert found["policies"]["traces"] == []


def test_stages_of_every_replica_hold_together_what_a_fresh_engine_loads(of_stages, fresh):
    (booted,) = fresh["qwen3-1"]["live"]
    first, second, *others = of_stages["policies"]["rounds"][1]["live"]
    assert first | second == booted
    assert min(len(first), len(second)) > 10
    assert others == [first, second]
    assert of_stages["policies"]["rounds"][1]["outputs"] == fresh["qwen3-1"]["outputs"] * NUM_REPLICAS


def test_stages_are_told_while_a_request_runs_and_wait_for_it(of_stages):
    found = of_stages["wait"]
    assert (found["num_interrupted"], found["lengths"]) == (0, [240])
    assert found["live"] == of_stages["policies"]["rounds"][1]["live"]


def test_ranks_that_share_experts_hold_and_say_what_fresh_ones_do(with_dp_attention):
    first, second, third = with_dp_attention["policies"]["rounds"]
    assert [one["ranks"] for one in (first, second, third)] == [[0, 1]] * 3
    assert second["live"] == with_dp_attention["fresh"]["live"] and second["live"][0] != second["live"][1]
    assert second["outputs"] == with_dp_attention["fresh"]["outputs"] != first["outputs"]
    assert first["live"] == third["live"] != second["live"]


@pytest.mark.parametrize("source", ["refit", "files"])
def test_strict_finds_nan_before_anything_is_written_to_any_replica(source, of_stages):
    assert of_stages["strict"][source]["error"] == "NonFiniteError"
    assert of_stages["strict"]["untouched"] and not of_stages["strict"]["dirty"]


@pytest.mark.parametrize(
    ("replicas", "attempt", "error"),
    [
        ("of_stages", "rank fault", "RankFailedError"),
        ("of_stages", "bad values", "NonFiniteError"),
        ("with_dp_attention", "rank fault", "RankFailedError"),
    ],
)
def test_a_fault_on_one_rank_leaves_every_replica_refusing_until_the_next_refit(replicas, attempt, error, request):
    found = request.getfixturevalue(replicas)[attempt]
    assert found["refit"]["error"] == error
    assert all(found["changed"]) and len(found["changed"]) > 1 and found["dirty"]
    assert {entry["error"] for entry in found["entries"].values()} == {"EngineDirtyError"}
    assert found["healed"]


def test_the_fault_was_that_of_the_last_replica_alone(of_stages):
    assert of_stages["rank fault"]["armed"] == [False, False, False, True]


@pytest.mark.parametrize(("in_flight", "num_interrupted"), [("wait", 0), ("keep", 2), ("continue", 2)])
@pytest.mark.parametrize("replicas", ["of_one", "with_dp_attention"])
def test_requests_of_replicas_go_on_and_idle_ones_take_part(replicas, in_flight, num_interrupted, request):
    found, rounds = (
        request.getfixturevalue(replicas)[in_flight],
        request.getfixturevalue(replicas)["policies"]["rounds"],
    )
    assert found["num_interrupted"] == num_interrupted
    assert set(found["lengths"]) == {240}
    assert found["live"] == rounds[0 if in_flight == "keep" else 1]["live"]


@pytest.mark.parametrize("way", ["request", "answer"])
def test_a_replica_that_died_is_told_at_once(way, of_one):
    found = of_one["killed"][way]
    assert found["error"] == "EngineLostError" and "restart the engine" in found["message"]
    assert found["seconds"] < 60


def test_an_engine_that_lost_a_replica_refuses_requests(of_one):
    assert {entry["error"] for entry in of_one["killed"]["entries"].values()} == {"EngineDirtyError"}


def test_a_server_of_replicas_is_refitted_by_its_url_and_refuses_for_all_while_it_is_dirty(run_engine, fresh):
    found = run_engine("served replicas", family="qwen3")
    for state in ("booted", "healed"):
        assert found[state]["statuses"] == [200] * 4
        assert found[state]["outputs"] == [said | {"num_cached": None} for said in fresh["qwen3-1"]["outputs"]] * 2
    assert (found["other"]["version"], found["other"]["ranks"]) == (1, [0, 1])
    assert found["other"]["outputs"][:2] == found["other"]["outputs"][2:] != found["booted"]["outputs"][:2]
    assert found["bad"]["error"] == "NonFiniteError"
    assert found["dirty"]["statuses"] == [503] * 4
