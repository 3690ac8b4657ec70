"""A running vLLM server is refitted by its URL. What is and is not real here: `conftest.py`."""

import json
import signal

import pytest

from tests.serving import RAW
from tests.vllm.processes import vllm_version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]
TIMEOUT_S = 400


OPTIONS = {"one process": {}, "replicas and processes": {"data_parallel_size": 2, "api_server_count": 2}}


@pytest.fixture(scope="module", params=OPTIONS)
def served(request, run_engine, tmp_path_factory):
    """What one server says and holds through refits over HTTP."""
    if vllm_version() < (0, 26):
        pytest.skip("vLLM's servers take routes of plugins from 0.26 on; the drop-in refits older ones")
    work = tmp_path_factory.mktemp("served")
    return run_engine("served", within_s=TIMEOUT_S, work=work, options=OPTIONS[request.param])


@pytest.fixture
def new(served):
    return served["policies"]["new"]


def test_a_refit_over_http_leaves_the_bytes_of_an_engine_booted_from_that_policy(served):
    assert served["policies"]["live"] == served["fresh"]["live"]
    assert set(served["policies"]["fingerprints"]) == set(served["fresh"]["fingerprints"])
    assert served["policies"]["version"] == 2


def test_requests_are_answered_by_the_policy_of_the_last_refit(served):
    assert [answer["status"] for answer in served["policies"]["old"]] == [200] * 3
    assert served["policies"]["old"] != served["policies"]["new"] == served["policies"]["again"]


@pytest.mark.parametrize(
    "attempt",
    [
        *("files", "push", "bare", "example", "meanwhile", "bad values"),
        *("killed while it writes", "killed before it writes", "strangers"),
    ],
)
def test_the_next_refit_gives_the_same_bytes_and_answers_as_before(attempt, served):
    assert served[attempt]["healed"]


def test_refits_are_counted_beside_the_engines_own_metrics(served):
    counted = served["policies"]["metrics"]
    assert (counted["fp8refit_refits_total"], counted["fp8refit_version"], counted["fp8refit_is_dirty"]) == (2, 2, 0)
    assert 0 < counted["fp8refit_last_refit_seconds"] < 60
    failed = served["bad values"]["metrics"]
    assert failed['fp8refit_failures_total{kind="NonFiniteError"}'] == failed["fp8refit_is_dirty"] == 1


@pytest.mark.parametrize("attempt", ["files", "push"])
def test_files_are_read_by_the_server(attempt, served):
    assert served[attempt]["live"] == served["fresh"]["live"]


def test_push_says_what_it_did(served):
    assert served["push"]["code"] == 0, served["push"]["log"]
    (pushed,) = json.loads(served["push"]["said"])["servers"]
    assert (pushed["engine"], pushed["read_by"]) == ("vllm", "server")


def test_a_trainer_without_any_engine_refits_by_url(served):
    bare = served["bare"]
    assert bare["code"] == 0, bare["log"]
    version, failed = bare["lines"]
    assert int(version) > 0 and failed == "()"
    assert bare["live"] == served["fresh"]["live"]


def test_doctor_says_that_the_server_can_be_refitted(served):
    *_, verdict, kv = json.loads(served["push"]["doctor"])["checks"]
    assert verdict["name"].startswith("http://127.0.0.1:")
    assert verdict["found"].startswith("can be refitted: yes; ") and not verdict["problem"]
    assert kv["name"] == "KV cache"


def test_the_example_prints_what_every_version_says(served):
    assert served["example"]["code"] == 0, served["example"]["log"]
    versions = [line.partition(": rollout [")[0] for line in served["example"]["lines"]]
    assert [version.partition(" ")[0] for version in versions] == ["version"] * 3
    assert len(set(versions)) == 3


def test_a_request_that_comes_meanwhile_waits_and_is_answered_by_the_new_policy(served, new):
    assert served["meanwhile"]["waits"]
    assert served["meanwhile"]["late"] == served["meanwhile"]["new"] == served["policies"]["old"][0] != new[0]


def test_a_second_driver_at_once_is_refused_and_disturbs_nobody(served):
    assert served["meanwhile"]["refused"]["error"] == "EngineBusyError"
    assert "another driver refits this server" in served["meanwhile"]["refused"]["message"]


def test_a_dirty_server_answers_503_with_the_reason_at_once(served):
    assert served["bad values"]["refit"]["error"] == "NonFiniteError"
    assert served["bad values"]["status"]["status"] == 503
    assert "NaN or Inf in 1 tensor(s)" in served["bad values"]["status"]["body"]["error"]["message"]
    assert served["bad values"]["seconds"] < 1
    assert served["bad values"]["statuses"] == [503] * 12


def test_a_driver_killed_while_it_writes_leaves_the_server_refusing(served):
    killed = served["killed while it writes"]
    assert killed["code"] == -signal.SIGKILL
    assert killed["status"]["status"] == 503
    assert "the driver of a refit died, part way" in killed["status"]["body"]["error"]["message"]


def test_a_driver_killed_before_it_writes_lets_requests_go_on_under_the_old_policy(served, new):
    killed = served["killed before it writes"]
    assert killed["code"] == -signal.SIGKILL
    assert killed["status"] == new[0]
    assert killed["untouched"]


def test_strangers_are_refused(served):
    strangers = served["strangers"]
    assert strangers["key"]["error"] == strangers["token"]["error"] == "UnsupportedEngineError"
    assert "it asks for an API key" in strangers["key"]["message"]
    assert "the token is not that of the server" in strangers["token"]["message"]
    assert strangers["no key"]["status"] == 401


@pytest.mark.parametrize("way", RAW)
def test_what_is_no_order_is_answered_and_read_no_further_than_it_has_to_be(way, served):
    status, says = RAW[way]
    assert served["strangers"]["raw"][way]["status"] == status
    assert says in served["strangers"]["raw"][way]["says"]
