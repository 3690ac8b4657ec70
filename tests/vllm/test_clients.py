"""Trainers' own clients, from their wheels and unmodified, over real vLLM on the CPU. Ours: `clients.py`, `cpu_transfer.py`."""

import importlib.util
import json
import uuid
from tempfile import TemporaryDirectory

import pytest

from tests.engines.clients import (  # noqa: F401 - the tests
    FAMILY,
    SEEDS,
    test_a_fault_is_raised_where_the_trainer_sees_it_and_keeps_nobody_waiting,
    test_a_second_policy_before_the_first_is_whole_is_never_mixed_with_it,
    test_after_many_policies_in_a_row_the_last_one_is_there,
    test_every_rank_holds_what_that_of_a_fresh_engine_boots,
    test_no_live_tensor_moves,
    test_no_reply_is_that_of_an_older_call,
    test_the_next_policy_heals_it,
)
from tests.tiny_models import save_model
from tests.vllm.clients import CLIENTS
from tests.vllm.processes import HERE, run_python, run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ENVIRONMENT = {
    "FP8REFIT_DROP_IN": "1",
    "FP8REFIT_QUANTIZATION": "fp8_per_block",
    "FP8REFIT_TEST_KERNEL": "fp32",
    "FP8REFIT_TEST_TRANSFER": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
CASES = [(name, ranks) for name, (_, numbers) in CLIENTS.items() for ranks in numbers]


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """A folder of checkpoints: what engines boot from, and each policy."""
    folder = tmp_path_factory.mktemp("policies")
    for seed in (0, *SEEDS):
        save_model(FAMILY, seed, folder / f"policy-{seed}")
    return folder


@pytest.fixture(scope="session")
def fresh(policies, starter):
    """What each rank of a fresh engine holds, for every policy."""
    booted: dict[int, list] = {}

    def boot(ranks: int) -> list:
        layout = {1: "multi-process", 2: "core in process"}[ranks]
        if ranks not in booted:
            asked = [{"layout": layout, "model": policies / f"policy-{seed}"} for seed in SEEDS]
            runs = [run_scenario(starter, "drop-in fresh ranks", each, policies, timeout_s=100) for each in asked]
            booted[ranks] = [run.drivers[0]["live"] for run in runs]
        return booted[ranks]

    return boot


@pytest.fixture(scope="session", params=CASES, ids=[f"{name}, ranks {ranks}" for name, ranks in CASES])
def tried(request, named, policies, fresh):
    name, ranks = request.param
    client, _ = CLIENTS[name]
    if importlib.util.find_spec(client.package) is None:
        pytest.skip(f"`nox -s trainers` has {client.package}")
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not client.is_inside))}
    run_python(
        [HERE / "run_client.py", policies, name, ranks],
        named | ENVIRONMENT | own | client.environment,
        policies,
        timeout_s=600,
    )
    return json.loads((policies / "found.json").read_text()) | {"fresh": fresh(ranks)}


WAYS = {"variables": ["FP8REFIT_DROP_IN", "FP8REFIT_QUANTIZATION"], "configuration": []}
"""How SkyRL's engine gets the drop-in, and which variables it has: SkyRL forwards none of ours to a Ray that runs already."""


@pytest.mark.parametrize("way", WAYS)
def test_the_drop_in_gets_into_the_engine_that_skyrl_starts(way, named, policies):
    if importlib.util.find_spec("skyrl") is None:
        pytest.skip("`nox -s trainers` has skyrl")
    with TemporaryDirectory(
        prefix="ray", ignore_cleanup_errors=True
    ) as folder:  # the names of Ray's sockets must be short
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}  # nobody else's Ray
        run_python(
            [HERE / "skyrl_servers.py", policies, way],
            named | ENVIRONMENT | own | {"FP8REFIT_TEST_RAY": "GPU", "RAY_USAGE_STATS_ENABLED": "0"},
            policies,
            timeout_s=280,
        )
    found = json.loads((policies / "found.json").read_text())
    assert found["variables"] == WAYS[way]
    assert found["report"] == [None], "only a worker with the drop-in answers; it has refitted nothing yet"
    assert any(name.endswith("weight_scale_inv") for name in found["live_bytes"])
