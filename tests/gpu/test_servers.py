"""Running servers are pushed to while they answer: no request fails, every push is served, nothing grows.

python -m pytest tests/gpu/test_servers.py                  # every case of the installed engine that fits the GPUs
FP8REFIT_SERVERS=vllm python -m pytest tests/gpu/test_servers.py
python -m pytest tests/gpu/test_servers.py -k oracle        # trainers that are killed, 200 of them as they write
"""

import itertools
import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import RESULTS, run_scenario, write_result
from tests.oracle.expectations import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(1500),
]

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-8b")
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "servers"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "560"))
NUM_PUSHES = 50
NUM_WARM_UP = 6
ORACLE_SHAPE = os.environ.get("FP8REFIT_ORACLE_SHAPE", "qwen3-0.6b-untied")
ORACLE_BY = os.environ.get("FP8REFIT_ORACLE_BY", "broadcast,stream,mapped")
NUM_KILLS = int(os.environ.get("FP8REFIT_KILLS", "200"))
"""While they write."""
ATTACK_S = float(os.environ.get("FP8REFIT_ATTACK_S", "900"))
"""At most: two hundred trainers die in 7 to 12 minutes."""
BOOT_S = 300
LOG_CHARS = 200_000
"""Of the end of a server's log."""
NUM_REQUESTS = 32
"""Of each server, at least."""
WAYS = ("wait", "keep")


@dataclass(frozen=True, kw_only=True)
class Case:
    engine: str
    tp: int = 1
    replicas: int = 1

    @property
    def num_gpus(self) -> int:
        return 1 + self.tp * self.replicas


CASES = {
    "vllm": Case(engine="vllm"),
    "vllm-two-replicas": Case(engine="vllm", replicas=2),
    "vllm-tp2": Case(engine="vllm", tp=2),
    "sglang": Case(engine="sglang"),
    "sglang-tp2": Case(engine="sglang", tp=2),
}
ASKED = os.environ.get("FP8REFIT_SERVERS", ",".join(CASES)).split(",")
RUN = [
    name
    for name, case in CASES.items()
    if name in ASKED and find_spec(case.engine) is not None and case.num_gpus <= torch.cuda.device_count()
]


ATTACKED = [name for name in ("vllm", "sglang") if name in RUN]


@pytest.fixture(scope="module", params=ATTACKED)
def attacked(request):
    """What the content oracle found of one server, which is written down whatever it is."""
    engine = request.param
    out = WORK / f"oracle-{engine}.json"
    arguments = [
        "--engine",
        engine,
        "--shape",
        ORACLE_SHAPE,
        "--kills",
        NUM_KILLS,
        "--seconds",
        ATTACK_S,
        "--by",
        ORACLE_BY,
    ]
    try:
        return run_scenario(
            "servers",
            [*arguments, "--work", WORK / f"oracle-{engine}"],
            out=out,
            log=f"oracle-{engine}",
            timeout_s=ATTACK_S + BOOT_S,
            environment={"VLLM_USE_DEEP_GEMM": "0"},
        )
    finally:
        if out.exists():
            write_oracle(engine, json.loads(out.read_text()))
        for log in out.parent.glob(f"{out.stem}-server-*.log"):
            (RESULTS / log.name).write_text(log.read_text(errors="replace")[-LOG_CHARS:])


def write_oracle(engine, found):
    asked = [f"{name}={os.environ[name]} " for name in ("FP8REFIT_ATTACK_S", "FP8REFIT_KILLS") if name in os.environ]
    result = {
        **found,
        "what": f"one {engine} server of {ORACLE_SHAPE}, attacked while it answers; trainers on another GPU of its host",
        "command": f"FP8REFIT_SERVERS={engine} {''.join(asked)}python -m pytest tests/gpu/test_servers.py -k oracle",
    }
    write_result(f"oracle_{engine}", result)


def test_the_oracle_finds_no_stale_or_mixed_answer_and_none_of_a_dirty_server(attacked):
    check(attacked, least={"pushes": 100, "poisoned": 10, "kills_inside_the_write": NUM_KILLS})


@pytest.fixture(scope="module", params=RUN)
def case(request):
    name, case = request.param, CASES[request.param]
    arguments = ["--engine", case.engine, "--shape", SHAPE, "--tp", case.tp, "--replicas", case.replicas]
    found = run_scenario(
        "servers",
        [*arguments, "--pushes", NUM_PUSHES, "--work", WORK / name],
        out=WORK / f"{name}.json",
        log=f"servers-{name}",
        timeout_s=TIMEOUT_S,
        environment={"VLLM_USE_DEEP_GEMM": "0"},  # it compiles kernels while requests run
    )
    return name, found


@pytest.fixture(params=WAYS)
def pushed(request, case):
    return case[1][request.param]


def test_no_request_fails(pushed):
    for answers in pushed["answers"]:
        assert len(answers["statuses"]) >= NUM_REQUESTS
        assert set(answers["statuses"]) == {200}
        assert set(answers["num_tokens"]) == {64}


def test_every_push_leaves_the_bytes_of_a_direct_refit_on_every_rank(case, pushed):
    expected = case[1]["fingerprints"]
    assert expected["1"] != expected["2"]
    assert len(pushed["steps"]) == NUM_PUSHES
    for step in pushed["steps"]:
        assert step["fingerprints"] == expected[str(step["seed"])]


def test_the_trainer_does_not_grow(case, pushed):
    free = free_of(pushed, CASES[case[0]].num_gpus - 1)
    assert free[0] - free[-1] < 16 << 20


def test_no_server_grows_by_pushes(case, pushed):
    """Engines keep the memory of their largest batch, and a larger one may come late; what a push keeps, each one would."""
    for gpu in range(CASES[case[0]].num_gpus - 1):
        free = free_of(pushed, gpu)
        least = [min(free[: step + 1]) for step in range(len(free))]
        assert sum(now < before for before, now in itertools.pairwise(least)) < len(free) / 4
        assert free[0] - free[-1] < 1 << 30


def free_of(pushed, gpu):
    """What one GPU had left after each push, once everything was there."""
    return [step["free_bytes"][gpu] for step in pushed["steps"][NUM_WARM_UP:]]
