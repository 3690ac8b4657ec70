"""One live vLLM engine that is written in several ways at once. `test_live_engine.py` says what must come of it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines import booted_dummy, generate, make_policy, refused, state, wrong_tensors

from fp8refit import EngineHost, HostedEngine, Refitter
from tests.tiny_models import save_model


def run_live(work: str) -> dict:
    """Two writers at a time, by every pair of ways and in threads, and the refit after each attempt."""
    folder = Path(work) / "bf16"
    save_model("qwen3", 1, folder)
    with booted_dummy(folder, "fp32") as llm:
        refitter, found = Refitter(llm), {}
        refitter.refit(make_policy("qwen3", 1))
        good = state(llm)
        for name, attempt in {"writers": try_writers, "threads": try_threads}.items():
            found[name] = attempt(llm)
            refitter.refit(make_policy("qwen3", 1))
            found[name]["healed"] = state(llm) == good and not refitter.is_dirty
        return found


def try_writers(llm) -> dict:
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


def try_threads(llm) -> dict:
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
