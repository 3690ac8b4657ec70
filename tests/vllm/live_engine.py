"""What may happen to one live vLLM engine between two refits. `test_live_engine.py` says what must come of it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from engines import (
    PROMPTS,
    SAMPLING,
    booted_dummy,
    generate,
    live_bytes,
    make_policy,
    places,
    refused,
    said,
    scribble,
    state,
    wrong_tensors,
)

from fp8refit import EngineHost, HostedEngine, Refitter
from fp8refit.checkpoint import quantize_checkpoint
from tests.tiny_models import save_model

UP_PROJ = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def run_live(work: str) -> dict:
    """One engine through everything that may happen to it between two refits."""
    folder = Path(work) / "bf16"
    save_model("qwen3", 1, folder)
    with booted_dummy(folder, "fp32") as llm:
        refitter = Refitter(llm)
        found = {"policies": try_policies(llm, refitter)}
        refitter.refit(make_policy("qwen3", 1))
        found["good"] = good = state(llm)
        for name, attempt in ATTEMPTS.items():
            found[name] = attempt(llm, refitter)
            refitter.refit(make_policy("qwen3", 1))
            found[name]["healed"] = state(llm) == good and not refitter.is_dirty
        found["streams"] = try_streams(llm, refitter, folder)
        return found


def try_policies(llm, refitter: Refitter) -> dict:
    """Five policies, one after another."""
    before = places(llm)
    rounds = []
    for seed in range(1, 6):
        policy = make_policy("qwen3", seed)
        report = refitter.refit(policy)
        rounds.append(
            {
                "version": report.version,
                "wrong": wrong_tensors(llm, policy, "fp32"),
                "tokens": [output["tokens"] for output in generate(llm)["outputs"]],
                "traces": [name for name in vars(llm.llm_engine) if name == "add_request"],
            }
        )
    after = places(llm)
    return {"rounds": rounds, "num_tensors": len(before), "moved": [n for n in before if before[n] != after.get(n)]}


def try_bad_values(llm, refitter: Refitter) -> dict:
    """NaN in a quantized and Inf in a copied tensor, looked for before and while writing."""
    policy = make_policy("qwen3", 2)
    policy[UP_PROJ][300, 200] = torch.nan
    policy[NORM][7] = torch.inf
    before = live_bytes(llm)
    strict = Refitter(llm, validate="strict")
    found = {"strict": refused(strict.refit, policy), "strict_untouched": live_bytes(llm) == before}
    found |= {"strict_dirty": strict.is_dirty, "fused": refused(refitter.refit, policy), "dirty": refitter.is_dirty}
    found["generate"] = refused(generate, llm)
    found["add_request"] = refused(llm.llm_engine.add_request, "late", {"prompt_token_ids": PROMPTS[0]}, SAMPLING)
    found["unfinished"] = llm.llm_engine.get_num_unfinished_requests()
    return found


def try_bad_names(llm, refitter: Refitter) -> dict:
    """One name missing, one unexpected, one of the wrong shape."""
    policy = make_policy("qwen3", 2)
    del policy[NORM]
    policy["model.layers.9.mlp.up_proj.weight"] = policy[UP_PROJ]
    policy[UP_PROJ] = policy[UP_PROJ][:128]
    before = state(llm)
    found = {"refit": refused(refitter.refit, policy), "dirty": refitter.is_dirty}
    return found | {
        "live_untouched": live_bytes(llm) == before["live"],
        "still_generates": refused(generate, llm) is None,
    }


def try_busy(llm, refitter: Refitter) -> dict:
    """A refit between two steps of a request, and the same request without one."""
    before = live_bytes(llm)
    found = {}

    def refit() -> None:
        found.update(refit=refused(refitter.refit, make_policy("qwen3", 2)), dirty=refitter.is_dirty)

    found["undisturbed"] = step_through(llm, lambda: None)
    found["disturbed"] = step_through(llm, refit)
    return found | {"live_untouched": live_bytes(llm) == before}


def step_through(llm, after_first_step) -> list[dict]:
    """Run one request by hand, with something else between its first two steps."""
    llm.reset_prefix_cache()
    llm.llm_engine.add_request("by hand", {"prompt_token_ids": PROMPTS[2]}, SAMPLING)
    outputs = llm.llm_engine.step()
    after_first_step()
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return [said(output) for output in outputs if output.finished]


def try_asleep(llm, refitter: Refitter) -> dict:
    """vLLM ignores sleep mode on a CPU, so its mark is set by hand: the mark is what is tested, not the memory."""
    before = live_bytes(llm)
    executor = llm.llm_engine.model_executor
    awake, executor.sleeping_tags = executor.sleeping_tags, {"weights"}
    found = {"refit": refused(refitter.refit, make_policy("qwen3", 2)), "dirty": refitter.is_dirty}
    executor.sleeping_tags = awake
    return found | {"live_untouched": live_bytes(llm) == before}


def try_held_block(llm, refitter: Refitter) -> dict:
    """A block of the KV cache that somebody keeps: vLLM's own flush then does nothing and says False."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(1)
    before = live_bytes(llm)
    found = {"refit": refused(refitter.refit, make_policy("qwen3", 2)), "dirty": refitter.is_dirty}
    found |= {"generate": refused(generate, llm), "live_untouched": live_bytes(llm) == before}
    pool.free_blocks(blocks)
    return found


def try_two_refitters(llm, refitter: Refitter) -> dict:
    """Another refitter of the same engine, while the first exists."""
    other = Refitter(llm, validate="strict")
    versions = [refitter.version, other.version, other.refit(make_policy("qwen3", 2)).version]
    return {"versions": [*versions, refitter.version]}


def try_writers(llm, refitter: Refitter) -> dict:
    """Two at a time: through the LLM, its worker, the worker's wrapper, its network, and a host of orders."""
    wrapper = llm.llm_engine.model_executor.driver_worker
    host = EngineHost(llm)
    ways = {
        "llm": llm,
        "worker": wrapper.worker,
        "wrapper": wrapper,
        "network": wrapper.worker.model_runner.get_model(),
        "host": HostedEngine(lambda message, _: host.answer(message)),
    }
    return {
        f"{one} and {two}": try_two_writers(llm, ways[one], ways[two]) for one in ways for two in ways if one != two
    }


def try_two_writers(llm, one, two) -> dict:
    """A stream by one way, and in its middle a refit by another."""
    policy, refusals = make_policy("qwen3", 3), []

    def stream():
        for number, item in enumerate(policy.items()):
            if number == 5:
                refusals.append(refused(Refitter(two).refit, make_policy("qwen3", 2)))
            yield item

    Refitter(one).refit(stream())
    return {
        "refused": [refusal and refusal["error"] for refusal in refusals],
        "wrong": wrong_tensors(llm, policy, "fp32"),
        "serves": refused(generate, llm) is None,
    }


def try_threads(llm, refitter: Refitter) -> dict:
    """Twenty times, the LLM and its worker at once: each refit that returned was whole until the next."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    policies, found = [make_policy("qwen3", seed) for seed in (2, 3)], []
    for _ in range(20):
        start = threading.Barrier(2)

        def refit(index, engine, start=start):
            start.wait()
            return Refitter(engine).refit(iter(policies[index].items())).version

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(refit, index, engine) for index, engine in enumerate((llm, worker))]
        errors = [type(writer.exception()).__name__ for writer in writers if writer.exception() is not None]
        done = {writer.result(): index for index, writer in enumerate(writers) if writer.exception() is None}
        last = policies[done[max(done)]] if done else None
        found.append((errors, wrong_tensors(llm, last, "fp32") if last is not None else []))
    return {"errors": [errors for errors, _ in found], "wrong": [wrong for _, wrong in found if wrong]}


ATTEMPTS = {
    "bad_values": try_bad_values,
    "bad_names": try_bad_names,
    "busy": try_busy,
    "asleep": try_asleep,
    "held_block": try_held_block,
    "two_refitters": try_two_refitters,
    "writers": try_writers,
    "threads": try_threads,
}


def try_streams(llm, refitter: Refitter, folder: Path) -> dict:
    """Policy 1 as files, iterators, wrapped names, fp32 and FP8, each over other bytes."""
    policy = make_policy("qwen3", 1)
    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    quantize_checkpoint(folder, folder.with_name("fp8"), like=refitter.layout())
    sources = {
        "safetensors": (folder, None),
        "block-FP8 safetensors": (folder.with_name("fp8"), None),
        "function": (lambda: iter(policy.items()), None),
        "one-shot iterator": (iter(policy.items()), None),
        "one-shot iterator with manifest": (iter(policy.items()), manifest),
        "list of pairs": (list(policy.items()), None),
        "fp32": ({name: tensor.float() for name, tensor in policy.items()}, None),
        "wrapped names": ({f"module._orig_mod.{name}": tensor for name, tensor in policy.items()}, None),
    }
    found = {}
    for kind, (source, announced) in sources.items():
        scribble(llm)
        refitter.refit(source, manifest=announced)
        found[kind] = live_bytes(llm)
    return found
