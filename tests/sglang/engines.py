"""Tiny SGLang engines on the CPU: boot one, see what it says and what its ranks hold, and let go of it.

A failed boot ends this process by SIGKILL, so every scenario runs in a process of its own: `run_engine.py`.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.managers.io_struct import RpcReqInput

from tests.engines.subject import make_policy
from tests.tiny_models import FP8_CONFIG, save_model

__all__ = ["make_policy"]

ANSWER_S = 60
BINDS_ALL = tuple(map(int, sglang.__version__.split(".")[:3])) >= (0, 5, 20)
"""Whether the ranks of every replica and stage have cores of their own, not only those of one."""
PROMPTS = [[(31 * i + 7 * j) % 256 for j in range(length)] for i, length in enumerate((24, 200))]
"""The radix cache keeps single tokens, so it keeps both of them."""
SAMPLING = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
ASKED = {"sampling_params": SAMPLING, "return_logprob": True, "top_logprobs_num": 4}


def settings(model: Path, num_ranks: int = 1) -> dict[str, Any]:
    """What all tiny engines are booted with."""
    return {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "bfloat16",
        "tp_size": num_ranks,
        "context_length": 512,
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "warning",
    }


NOISE = {"load_format": "dummy", "json_model_override_args": json.dumps({"quantization_config": FP8_CONFIG})}
"""Options that give an engine of a BF16 model's shape block-FP8 noise for weights."""


def boot(model: Path, num_ranks: int = 1, **options: Any) -> sglang.Engine:
    """Start an engine."""
    bind(num_ranks, **options)
    return sglang.Engine(**settings(model, num_ranks) | options)


def bind(num_ranks: int = 1, **options: Any) -> None:
    """Give each rank of the next engine a core of its own, if there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    num_replicas = 1 if options.get("enable_dp_attention") else options.get("dp_size", 1)
    num_bound = num_ranks * (options.get("pp_size", 1) * num_replicas if BINDS_ALL else 1)
    bound = (str(cores[rank % len(cores)]) for rank in range(num_bound))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)  # 0.5.15 wants one a rank, neither fewer nor more


@contextmanager
def booted(model: Path, num_ranks: int = 1, **options: Any) -> Iterator[sglang.Engine]:
    """An engine; one lives at a time."""
    engine = boot(model, num_ranks, **options)
    yield engine
    engine.shutdown()


@contextmanager
def booted_noise(family: str, work: Path, num_ranks: int = 1) -> Iterator[sglang.Engine]:
    """A block-FP8 engine of `family`, with noise for weights."""
    with booted(bf16_of(family, 1, work), num_ranks, **NOISE) as engine:
        yield engine


def bf16_of(family: str, seed: int, work: Path) -> Path:
    """The folder of policy `seed`, saved when it is first asked for."""
    folder = work / f"{family}-bf16-{seed}"
    if not folder.exists():
        save_model(family, seed, folder)
    return folder


def generate(engine: sglang.Engine) -> list[dict]:
    """What the engine says to one prompt after another: a product's last bits depend on what else is in the batch."""
    return [said(engine.generate(input_ids=prompt, **ASKED)) for prompt in PROMPTS]


def said(output: dict) -> dict:
    """Greedy tokens, every log-probability as an exact hexadecimal float, how many tokens the radix cache gave, and how many
    of a draft's were right.
    """
    meta = output["meta_info"]
    return {
        "tokens": output["output_ids"],
        "logprobs": [[(token, logprob.hex()) for logprob, token, _ in step] for step in meta["output_top_logprobs"]],
        "num_cached": meta["cached_tokens"],
        "num_accepted": meta.get("spec_num_correct_drafts"),
    }


def look(engine: sglang.Engine, what: str, *arguments: Any) -> list:
    """What each rank answers; `observer.OBSERVATIONS` and `faults.FAULTS` are what there is."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"folder": folder, "what": what, "arguments": list(arguments)}
        files = [Path(folder) / f"{rank}.json" for rank in range(num_ranks_of(engine))]
        if engine.server_args.dp_size == 1:
            engine.collective_rpc("fp8refit_test_observe", **asked)
        else:  # SGLang's own RPC reaches no replica
            engine.tokenizer_manager._dispatch_to_scheduler(
                RpcReqInput(method="fp8refit_test_observe", parameters=asked)
            )
        deadline_s = time.monotonic() + ANSWER_S
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline_s, f"ranks do not answer: {files}"
            time.sleep(1e-3)
        answers = [json.loads(file.read_text()) for file in files]
    errors = [answer for answer in answers if "error" in answer]
    assert not errors, errors
    return [answer["found"] for answer in answers]


def num_ranks_of(engine: sglang.Engine) -> int:
    arguments = engine.server_args
    return arguments.tp_size * arguments.pp_size * (1 if arguments.enable_dp_attention else arguments.dp_size)


def state(engine: sglang.Engine) -> dict:
    """What every rank holds, and what the engine says with an empty cache."""
    drop_caches(engine)
    return {"live": look(engine, "live_bytes"), "outputs": generate(engine)}


def drop_caches(engine: sglang.Engine) -> None:
    """Let SGLang flush its radix cache, as soon as each rank has noticed that the last request is over."""
    for _ in range(1000):
        if all(look(engine, "flush_cache")):
            return
    raise AssertionError("SGLang keeps its radix cache")


def num_unfinished(engine: sglang.Engine) -> int:
    return len(engine.tokenizer_manager.rid_to_state)


def traces(engine: sglang.Engine) -> set[str]:
    """Methods of the engine, of its tokenizer manager and of its schedulers that an attribute of the instance hides."""
    found = {f"scheduler.{name}" for names in look(engine, "hidden") for name in names}
    for label, owner in {"engine": engine, "tokenizer manager": engine.tokenizer_manager}.items():
        found |= {f"{label}.{name}" for name in vars(owner) if callable(getattr(type(owner), name, None))}
    return found | ({"is_pause"} if engine.tokenizer_manager.is_pause else set())
