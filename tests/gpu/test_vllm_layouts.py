"""Real vLLM on GPUs with its workers in other processes: bytes, tokens, log-probabilities and memory of refits.

    python -m pytest tests/gpu/test_vllm_layouts.py          # everything that fits this machine's GPUs
    FP8REFIT_LAYOUTS=1,served,sleep python -m pytest ...     # some of: 1, 2, 4 (ranks), external2, external4, served, sleep

Each engine runs in processes of its own (`refits_modes.py`), those it is compared with in others that our fill never touched.
"""

import json
import os
import shlex
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.judging import comparison, grown_bytes, over_roofline
from tests.gpu.scripts import RESULTS, ended, started, write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(1200),
]
pytest.importorskip("vllm")

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-8b")
SMALL_SHAPE = "qwen3-0.6b"
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "layouts"
COMMAND = "python -m pytest " + shlex.join(sys.argv[1:])
NUM_GPUS = torch.cuda.device_count()
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "900"))
NEEDED_GPUS = {"1": 1, "2": 2, "4": 4, "external2": 2, "external4": 4, "served": 1, "sleep": 1}
ASKED = os.environ.get("FP8REFIT_LAYOUTS", ",".join(NEEDED_GPUS)).split(",")
LAYOUTS = [name for name in ASKED if NEEDED_GPUS[name] <= NUM_GPUS]
TENSOR_PARALLEL = [name for name in LAYOUTS if name.isdigit()]
MIB = 1 << 20


NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}
"""For all but one rank, whose kernels are DeepGEMM's: compiling them for the shapes of every layout takes minutes."""


def start(mode, *, gpus, tp=1, shape=SHAPE, rank=None):
    """Start one process of the scenario `refits` on GPUs of its own."""
    name = f"{mode}-{tp}" + ("" if rank is None else f"-{rank}")
    out = WORK / f"{name}.json"
    arguments = [mode, "--shape", shape, "--tp", tp, "--work", WORK / shape]
    environ: dict[str, object] = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    if rank is not None:
        environ |= {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": tp,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29617,
        }
    if (mode, tp) not in {("refit", 1), ("fresh", 1)}:
        environ |= NO_DEEP_GEMM
    return started("refits", arguments, out=out, log=f"layouts-{name}", environment=environ), out


def run(mode, *, gpus, tp=1, shape=SHAPE):
    """Run one engine, or all ranks of an external launcher, and give what each process found."""
    ranks = range(tp) if mode == "external" else [None]
    processes = [start(mode, gpus=gpus, tp=tp, shape=shape, rank=rank) for rank in ranks]
    try:
        codes = [process.wait(TIMEOUT_S) for process, _ in processes]
    finally:
        for process, _ in processes:
            ended(process)
    assert not any(codes), f"{mode} with {tp} rank(s) ended with {codes}; see its log in {RESULTS}"
    return [json.loads(out.read_text()) for _, out in processes]


def run_chain(steps, gpus):
    found = {}
    for name, mode, tp, shape in steps:
        if mode == "checkpoint":
            wait_for_layouts()
        found[name] = run(mode, gpus=gpus, tp=tp, shape=shape)
    return found


def wait_for_layouts():
    """An engine writes its layout as soon as it was refitted for the first time."""
    wanted = [WORK / SHAPE / f"layout-{tp}.json" for tp in TENSOR_PARALLEL if tp != "4"]
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(file.exists() for file in wanted) and time.monotonic() < deadline_s:
        time.sleep(0.5)


@pytest.fixture(scope="module")
def found():
    """What every engine found, refitted and fresh. Those that fit beside each other run at the same time."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    result = {}

    def run_beside(*chains):
        """Run chains of steps, as many at a time as there are GPUs for."""
        kept = {*LAYOUTS, *(["checkpoint"] if TENSOR_PARALLEL else [])}
        chains = [[step for step in chain if step[0].rpartition("-")[2] in kept] for chain in chains]
        waiting = [chain for chain in chains if chain]
        while waiting:
            beside, first_free = [], 0
            while waiting and first_free + waiting[0][0][2] <= NUM_GPUS:
                gpus = range(first_free, first_free + waiting[0][0][2])
                beside.append((waiting.pop(0), gpus))
                first_free = gpus.stop
            with ThreadPoolExecutor(len(beside)) as pool:
                for part in pool.map(run_chain, *zip(*beside, strict=True)):
                    result.update(part)

    for file in (WORK / SHAPE).glob("layout-*.json"):
        file.unlink()
    run_beside(
        [("refit-2", "refit", 2, SHAPE), ("external2", "external", 2, SHAPE)],
        [("refit-1", "refit", 1, SHAPE)],
        [
            ("sleep", "sleep", 1, SMALL_SHAPE),
            ("served", "served", 1, SMALL_SHAPE),
            ("checkpoint", "checkpoint", 1, SHAPE),
        ],
    )
    if "4" in LAYOUTS:
        result["refit-4"] = run("refit", gpus=[0, 1, 2, 3], tp=4)
        run("checkpoint", gpus=[0])  # if its kernels want other formats than those of two ranks
    if "external4" in LAYOUTS:
        result["external4"] = run("external", gpus=[0, 1, 2, 3], tp=4)
    run_beside([("fresh-2", "fresh", 2, SHAPE)], [("fresh-1", "fresh", 1, SHAPE)])
    if "4" in LAYOUTS:
        result["fresh-4"] = run("fresh", gpus=[0, 1, 2, 3], tp=4)
    return result


tensor_parallel = pytest.mark.parametrize("tp", TENSOR_PARALLEL)
one_rank = pytest.mark.skipif("1" not in LAYOUTS, reason="not asked for")
external = pytest.mark.parametrize("tp", [name[-1] for name in LAYOUTS if name.startswith("external")])
served = pytest.mark.skipif("served" not in LAYOUTS, reason="not asked for")
sleep = pytest.mark.skipif("sleep" not in LAYOUTS, reason="not asked for")


def of(found, kind, tp):
    (one,) = found[f"{kind}-{tp}"]
    return one


def host_s(steps):
    """Without what vLLM itself takes to drop its prefix cache, block by block: as much as in any other layout."""
    return statistics.median(step["host_s"] - step["phases_s"]["flush"] for step in steps)


def of_rank(steps, rank):
    return [step["ranks"][rank] for step in steps]


@tensor_parallel
def test_every_rank_s_live_bytes_equal_those_of_a_freshly_booted_engine(tp, found):
    assert len(of(found, "fresh", tp)["live"]) == int(tp)
    assert of(found, "refit", tp)["live"] == of(found, "fresh", tp)["live"]


@tensor_parallel
def test_tokens_and_log_probabilities_equal_those_of_a_freshly_booted_engine(tp, found):
    assert of(found, "refit", tp)["generated"] == of(found, "fresh", tp)["generated"]


@tensor_parallel
def test_cuda_graphs_replayed_on_every_rank(tp, found):
    for kind in ("refit", "fresh"):
        assert min(of(found, kind, tp)["graph_replays"]) > 0


@tensor_parallel
def test_fifty_refits_between_generations_hold_the_same_bytes_and_do_not_grow(tp, found):
    refitted = of(found, "refit", tp)
    assert len(refitted["steps"]) == 50
    assert all(step["same_bytes"] for step in refitted["steps"])
    assert refitted["policies_differ"] and not refitted["moved"]
    assert grown_bytes(refitted["steps"]) <= 2 * MIB  # one granule of the driver's
    assert grown_bytes(refitted["steps"][25:]) - grown_bytes(refitted["steps"][25:26]) <= 0
    assert len({tuple(step["num_files"][:-1]) for step in refitted["steps"][3:]}) == 1
    assert (refitted["again"]["live"], refitted["again"]["generated"]) == (refitted["live"], refitted["generated"])


@tensor_parallel
def test_bad_values_that_one_rank_holds_are_named_refused_and_healed(tp, found):
    bad = of(found, "refit", tp)["bad_input"]
    names = ["model.layers.0.mlp.up_proj.weight"]
    assert bad["strict"] == {"names": names, "untouched": True, "dirty": False}
    assert bad["fused"] == {"names": names, "dirty": True}
    assert bad["refused_s"] < 1
    assert bad["healed"]


@tensor_parallel
def test_every_source_gives_the_same_bytes(tp, found):
    sources = of(found, "refit", tp)["sources"]
    assert len(sources) == (4 if tp == "1" else 3)
    for kind, source in sources.items():
        assert source["same_bytes"], kind


@one_rank
def test_fill_runs_at_copy_speed_in_another_process(found):
    refitted = of(found, "refit", 1)
    assert over_roofline(of_rank(refitted["steps"], 0), refitted["copy_gb_per_s"][0]) <= 1.10


@tensor_parallel
def test_reaching_other_processes_takes_little(tp, found):
    assert host_s(of(found, "refit", tp)["steps"]) <= 10e-3


@external
def test_an_external_launcher_s_ranks_equal_freshly_booted_ones(tp, found):
    fresh = of(found, "fresh", tp)
    for rank, refitted in enumerate(found[f"external{tp}"]):
        assert refitted["live"] == [fresh["live"][rank]]
        assert refitted["generated"] == fresh["generated"]
        assert min(refitted["graph_replays"]) > 0


@external
def test_an_external_launcher_s_ranks_fill_at_copy_speed(tp, found):
    for rank, refitted in enumerate(found[f"external{tp}"]):
        assert over_roofline(of_rank(refitted["steps"], rank), refitted["copy_gb_per_s"]) <= 1.10


@external
def test_an_external_launcher_s_ranks_agree_on_what_one_of_them_saw(tp, found):
    for refitted in found[f"external{tp}"]:
        assert refitted["bad"] == {"names": ["model.norm.weight"], "dirty": True}
        assert refitted["healed"]


@served
def test_requests_that_are_kept_through_fifty_refits_are_answered(found):
    (one,) = found["served"]
    assert one["same_bytes"]
    assert one["num_finished"] >= 4 and one["unlike_asked"] == []
    assert sum(step["num_interrupted"] for step in one["steps"]) > 50
    free = [step["free_bytes"] for step in one["steps"][5:]]
    assert min(free) >= free[0]


@sleep
def test_sleep_mode_in_another_process(found):
    (one,) = found["sleep"]
    assert len(one["sleep"]) == 3
    for kind, check in one["sleep"].items():
        assert all(check["refused"]), kind
        assert check["same_bytes"] and check["same_output"], kind


def test_write_the_result(found):
    first = next(iter(found.values()))[0]
    result = {
        "what": f"vLLM with its workers in other processes, {SHAPE} shape with outlier channels, BF16 CUDA tensors on one GPU",
        "command": COMMAND,
        "layouts": LAYOUTS,
        "gpu": first["gpu"],
        "num_gpus": NUM_GPUS,
        "versions": first["versions"],
        "tensor_parallel": {tp: summary(found, tp) for tp in TENSOR_PARALLEL},
    }
    launched = [name[-1] for name in LAYOUTS if name.startswith("external")]
    result["external_launcher"] = {tp: launched_summary(found, tp) for tp in launched}
    if "served" in LAYOUTS:
        (one,) = found["served"]
        result[f"served_{SMALL_SHAPE}"] = {
            "num_refits": len(one["steps"]),
            "num_requests_finished": one["num_finished"],
            "num_requests_unlike_asked": len(one["unlike_asked"]),
            "num_kept": sum(step["num_interrupted"] for step in one["steps"]),
            "grown_bytes": one["steps"][5]["free_bytes"] - min(step["free_bytes"] for step in one["steps"][5:]),
        }
    if "sleep" in LAYOUTS:
        result[f"sleep_{SMALL_SHAPE}"] = found["sleep"][0]["sleep"]
    part = "" if set(LAYOUTS) == set(NEEDED_GPUS) else f"_{'_'.join(LAYOUTS)}"
    write_result(f"vllm_layouts{part}", result)


def launched_summary(found, tp):
    fresh = of(found, "fresh", tp)
    return [
        {"equal_to_fresh_boot": rank["live"] == [fresh["live"][index]] and rank["generated"] == fresh["generated"]}
        for index, rank in enumerate(found[f"external{tp}"])
    ]


def summary(found, tp):
    refitted, fresh = of(found, "refit", tp), of(found, "fresh", tp)
    steps = refitted["steps"]
    return {
        "ranks": int(tp),
        "equal_to_fresh_boot": {
            "live_tensors_compared": sum(len(rank) for rank in fresh["live"]),
            **comparison(refitted, fresh),
            "graph_replays_in_generate": refitted["graph_replays"],
        },
        "fifty_refits": {
            "max_grown_bytes": grown_bytes(steps),
            "grown_bytes_in_the_last_25": grown_bytes(steps[25:]) - grown_bytes(steps[25:26]),
            "all_bytes_right": all(step["same_bytes"] for step in steps),
        },
        "bad_input": refitted["bad_input"],
        "sources": refitted["sources"],
    }
