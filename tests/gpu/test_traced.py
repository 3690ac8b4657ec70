"""Slots that were read off an engine's own loader, on a real GPU: bytes, tokens, log-probabilities, and memory.

    python -m pytest tests/gpu/test_traced.py                           # vLLM; FP8REFIT_ENGINE=sglang for SGLang
    FP8REFIT_GPU_SHAPES=qwen3-8b python -m pytest tests/gpu/test_traced.py

Every engine has a process of its own (`models_modes.py`). The fresh one of a shape runs beside the next shape's; then that
shape's result is written. All shapes take an H200's 141 GB and 60 GB of /dev/shm; `qwen3-8b` fits an H100.
"""

import contextlib
import json
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fp8refit.bench.code import INSIDE, PARTS
from tests.gpu.judging import comparison
from tests.gpu.scripts import ended, started, write_result

ENGINE = os.environ.get("FP8REFIT_ENGINE", "vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(find_spec(ENGINE) is None, reason=f"needs {ENGINE}"),
    pytest.mark.timeout(1200),
]

SHAPES = os.environ.get("FP8REFIT_GPU_SHAPES", "deepseek-v3-4layers,qwen3-8b,qwen3-30b-a3b").split(",")
"""Kernels are compiled before the first refit of each."""
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "traced"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "300"))
ENVIRONMENT = {"VLLM_USE_DEEP_GEMM": os.environ.get("VLLM_USE_DEEP_GEMM", "0")}
"""DeepGEMM's kernels are compiled for every shape, which takes minutes."""
ATTENTION = {"sglang": {"deepseek-v3-4layers": ("--attention", "triton")}}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def start(mode, shape):
    log = f"traced-{ENGINE}-{mode}-{shape}"
    options = ATTENTION.get(ENGINE, {}).get(shape, ())
    arguments = (mode, "--engine", ENGINE, "--shape", shape, "--work", WORK / shape, *options)
    return started("models", arguments, out=WORK / f"{mode}-{shape}.json", log=log, environment=ENVIRONMENT)


def finish(mode, shape, process):
    """What it found, or how it ended."""
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        ended(process)
    out = WORK / f"{mode}-{shape}.json"
    return json.loads(out.read_text()) if code == 0 else {"ended": f"{mode} of {shape} ended with {code}; see its log"}


def keep_result(shape, engine):
    """As soon as it is known: a run that is cut short keeps what it has."""
    result = {
        "what": f"{ENGINE}, {shape} shape with outlier channels, slots traced through the engine's own loader",
        "command": f"FP8REFIT_ENGINE={ENGINE} FP8REFIT_GPU_SHAPES={','.join(SHAPES)} python -m pytest tests/gpu/test_traced.py",
        "gpu": engine["gpu"],
        "versions": engine["versions"],
        "kernels": engine["kernels"],
        "num_tensors": engine["num_tensors"],
        "twin": engine["twin"],
    }
    if "fresh" in engine:
        fresh = engine["fresh"]
        result["live_tensors_compared"] = sum(map(len, fresh["live"]))
        result["equal_to_fresh_boot"] = {
            kind: comparison(engine[kind], fresh) | {"graph_replays": engine[kind]["graph_replays"]}
            for kind in ("single", "stacked")
        }
    write_result(f"traced_{ENGINE}_{shape}", result, INSIDE if ENGINE == "vllm" else PARTS)


@pytest.fixture(scope="module")
def found():
    """What a refitted engine and a fresh one of every shape hold and say."""
    shutil.rmtree(WORK, ignore_errors=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    result, fresh = {}, None
    with contextlib.ExitStack() as stack:

        def begin(mode, shape):
            process = start(mode, shape)
            stack.callback(ended, process)
            return process

        def finish_fresh(shape, process):
            result[shape] |= finish("fresh", shape, process)
            keep_result(shape, result[shape])
            shutil.rmtree(WORK / shape, ignore_errors=True)

        for shape in SHAPES:
            process = begin("traced", shape)
            if fresh is not None:
                finish_fresh(*fresh)
            result[shape] = finish("traced", shape, process)
            fresh = None
            if "ended" not in result[shape]:
                keep_result(shape, result[shape])
                fresh = (shape, begin("fresh", shape))
        if fresh is not None:
            finish_fresh(*fresh)
    signal.signal(signal.SIGTERM, before)
    shutil.rmtree(WORK, ignore_errors=True)
    return result


def of(found, shape):
    assert "ended" not in found[shape], found[shape]["ended"]
    return found[shape]


@every_shape
def test_live_bytes_equal_those_of_a_freshly_booted_engine(shape, found):
    engine = of(found, shape)
    assert engine["single"]["live"] == engine["stacked"]["live"] == engine["fresh"]["live"]
    assert not engine["moved"]


@every_shape
def test_tokens_and_log_probabilities_equal_those_of_a_freshly_booted_engine(shape, found):
    engine = of(found, shape)
    assert engine["single"]["generated"] == engine["stacked"]["generated"] == engine["fresh"]["generated"]


@every_shape
def test_looking_at_the_loader_leaves_no_memory_in_use(shape, found):
    twin = of(found, shape)["twin"]
    assert twin["refusals"] == []
    assert max(twin["left_bytes"]) <= 0
