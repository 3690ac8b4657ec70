"""A running SGLang server with stubbed kernels is refitted by its URL. What is and is not real here: `conftest.py`."""

import json
import signal

import pytest

from tests.serving import RAW

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served(run_engine):
    """What one server says through refits over HTTP."""
    return run_engine("served", family="qwen3")


def test_a_refit_over_http_leaves_the_weights_and_answers_of_a_server_booted_from_that_policy(served):
    assert served["again"] == served["booted"]
    assert served["other"]["checksum"] != served["booted"]["checksum"]
    assert served["other"]["outputs"] != served["booted"]["outputs"]


def test_outputs_say_the_version(served):
    assert served["version"] == {"reported": 1, "on outputs": "1"}


def test_requests_that_run_are_kept_and_those_that_arrive_wait(served):
    assert served["kept"]["num_interrupted"] == 1
    assert served["kept"]["statuses"] == [200, 200]
    assert served["kept"]["lengths"] == [200, 200]
    assert served["after load"] == served["booted"]


def test_a_request_that_goes_on_with_its_cache_shares_it_with_no_later_one(served):
    went_on = served["continued"]
    assert went_on["refitted"] == 1
    assert went_on["length"] == 200
    assert went_on["num_cached"] == went_on["num_cached_alone"]
    assert went_on["later"] == went_on["alone"]


def test_a_dirty_server_refuses_at_once_and_is_healed_by_the_next_refit(served):
    assert served["bad"]["error"] == "NonFiniteError"
    assert len(served["bad"]["running"]) == 1  # it is not stuck
    assert served["dirty"]["status"] == 503
    assert "this engine refuses requests" in served["dirty"]["body"]
    assert served["dirty"]["s"] < 1
    assert served["healed"] == served["booted"]


def test_metrics_of_refits_are_beside_the_engines_own(served):
    counted = served["bad"]["metrics"]
    assert counted['fp8refit_failures_total{kind="NonFiniteError"}'] == counted["fp8refit_is_dirty"] == 1
    assert counted["fp8refit_refits_total"] == counted["fp8refit_version"] == 6
    assert 0 < counted["fp8refit_last_refit_seconds"] < 60


def test_a_driver_killed_while_it_writes_leaves_the_server_refusing_until_the_next_refit(served):
    status, body = served["refused"]
    assert served["killed"] == -signal.SIGKILL
    assert status == 503
    assert "the driver of a refit died, part way" in str(body)
    assert served["after drivers"] == served["booted"]


@pytest.mark.parametrize(
    ("attempt", "read_by", "after"), [("push", "server", "after drivers"), ("broadcast", "driver", "after broadcast")]
)
def test_push_sends_a_checkpoint_that_the_server_reads_or_is_broadcast(attempt, read_by, after, served):
    assert served[attempt]["code"] == 0, served[attempt]["log"]
    (pushed,) = json.loads(served[attempt]["said"])["servers"]
    assert (pushed["engine"], pushed["read_by"]) == ("sglang", read_by)
    assert served[after] == served["booted"]


def test_a_second_driver_and_one_without_the_token_are_refused(served):
    assert served["second"]["error"] == "EngineBusyError"
    assert served["stranger"]["error"] == "UnsupportedEngineError"
    assert "the token is not that of the server" in served["stranger"]["message"]


@pytest.mark.parametrize("way", RAW)
def test_what_is_no_order_is_answered_and_read_no_further_than_it_has_to_be(way, served):
    status, says = RAW[way]
    assert served["raw"][way]["status"] == status
    assert says in served["raw"][way]["says"]
