"""Refits of an `AsyncLLM` that answers: requests that run when a refit begins, and requests that come meanwhile."""

import asyncio
import time
from pathlib import Path
from typing import Any

import torch
from engines import PROMPTS, SAMPLING, make_policy, said
from subject import AsyncSubject
from vllm import SamplingParams
from vllm.outputs import CompletionOutput

from fp8refit import RefitError, Refitter
from tests.engines.attempts import bad_policy

LONG = SamplingParams(max_tokens=80, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
"""So long that a refit finds it running."""
SHORT = SAMPLING
TIMEOUT_S = 60
SAYS_VERSIONS = "weight_versions" in CompletionOutput.__dataclass_fields__
"""Since 0.32."""


def outcome(task: asyncio.Task) -> dict:
    """How one request ended."""
    error = task.exception()
    if error is not None:
        return {"error": type(error).__name__, "message": str(error)}
    output = task.result()
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "reason": completion.finish_reason,
        "versions": [span.version for span in completion.weight_versions or ()] if SAYS_VERSIONS else None,
    }


async def refit_under_way(
    subject: AsyncSubject, policy: dict, calibration: Any = None, sampling: SamplingParams = LONG, **options: Any
) -> dict:
    """Refit while two requests run, with a third that comes in between. Nothing may be stuck."""
    running = []
    for prompt in PROMPTS[:2]:
        started = asyncio.Event()
        running.append(asyncio.create_task(subject.answer(prompt, sampling, started=started)))
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
    refitter = Refitter(subject.llm, **options)
    refit = asyncio.create_task(refitter.refit_async(policy, calibration=calibration))
    while "add_request" not in vars(subject.llm) and not refit.done():
        await asyncio.sleep(0)
    late = asyncio.create_task(subject.answer(PROMPTS[2], SHORT))
    _, stuck = await asyncio.wait([refit, *running, late], timeout=TIMEOUT_S)
    found: dict[str, Any] = {"stuck": len(stuck), "dirty": refitter.is_dirty}
    if stuck:
        for task in stuck:
            task.print_stack()
        return found
    error = refit.exception()
    found["refit"] = {"error": type(error).__name__, "message": str(error)} if error is not None else None
    if error is None:
        report = refit.result()
        found |= {"version": report.version, "num_interrupted": report.num_interrupted}
        found |= {"standstill_s": report.standstill_s, "still_s": report.ranks[0].still_s, "total_s": report.total_s}
    elif not isinstance(error, RefitError):
        raise error
    return found | {"running": [outcome(task) for task in running], "late": outcome(late)}


async def alone(subject: AsyncSubject) -> dict:
    """What the same requests say undisturbed."""
    running = await asyncio.gather(*(subject.answer(prompt, LONG) for prompt in PROMPTS[:2]))
    late = await subject.answer(PROMPTS[2], SHORT)
    return {"running": [list(o.outputs[0].token_ids) for o in running], "late": list(late.outputs[0].token_ids)}


def try_undisturbed(subject: AsyncSubject, family: str, work: Path) -> dict:
    """What either policy says to the requests of the attempts below."""
    old = subject.run(alone(subject))
    subject.refit(make_policy(family, 2))
    return {"old": old, "new": subject.run(alone(subject))}


def try_in_flight(mode: str, seed: int = 2):
    def attempt(subject: AsyncSubject, family: str, work: Path) -> dict:
        return subject.run(refit_under_way(subject, make_policy(family, seed), in_flight=mode))

    return attempt


async def begin_as(subject: AsyncSubject, prompt: list[int], tokens: list[int]) -> dict:
    """What requests say that begin as another did, after it and with an empty cache: with its prompt, then its answer too."""

    async def said_by(prompt: list[int]) -> dict:
        output = await subject.answer(prompt, SHORT)
        return {"said": said(output), "num_cached": output.num_cached_tokens}

    prompts = [prompt, prompt + tokens]
    later = [await said_by(each) for each in prompts]
    await subject.llm.reset_prefix_cache()
    return {"later": later, "alone": [await said_by(each) for each in prompts]}


NUM_UNATTENDED = 8
"""A rank leaves a stream of which nothing comes for 5 ms, as on a busy machine: then the driver lets requests go on. No
machine is that busy eight times in a row."""


def try_unattended(mode: str):
    """Refits while two requests run, and nobody says anything to the engine afterwards, until the core of its one rank let
    them go on by itself.
    """

    async def steps(subject: AsyncSubject, family: str) -> dict:
        started = asyncio.Event()
        running = [asyncio.create_task(subject.answer(prompt, LONG, started=started)) for prompt in PROMPTS[:2]]
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        report = await Refitter(subject.llm, in_flight=mode).refit_async(make_policy(family, 2))
        _, stuck = await asyncio.wait(running, timeout=TIMEOUT_S / 2)
        for task in stuck:
            task.cancel()
        return {
            "stuck": len(stuck),
            "num_interrupted": report.num_interrupted,
            "still_s": report.ranks[0].still_s,
            "standstill_s": report.standstill_s,
            "total_s": report.total_s,
        }

    def attempt(subject: AsyncSubject, family: str, work: Path) -> dict:
        for _ in range(NUM_UNATTENDED):
            found = subject.run(steps(subject, family))
            if found["stuck"] or found["still_s"] or subject.num_ranks > 1:
                break
        return found

    return attempt


def try_sharing(subject: AsyncSubject, family: str, work: Path) -> dict:
    """A request that goes on with its KV, and later ones that begin as it did: first its prompt, then what it said too."""

    async def steps() -> dict:
        started, prompt = asyncio.Event(), PROMPTS[2]
        running = asyncio.create_task(subject.answer(prompt, LONG, started=started))
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        await Refitter(subject.llm, in_flight="continue").refit_async(make_policy(family, 2))
        completion = (await asyncio.wait_for(running, TIMEOUT_S)).outputs[0]
        tokens = list(completion.token_ids)
        spans = completion.weight_versions or () if SAYS_VERSIONS else ()
        num_old = spans[-1].start if len(spans) > 1 else None
        found = await begin_as(subject, prompt, tokens)
        if num_old is not None:
            await subject.llm.reset_prefix_cache()
            found["went_on"] = tokens[num_old : num_old + SHORT.max_tokens]
            found["recomputed"] = said(await subject.answer(prompt + tokens[:num_old], SHORT))["tokens"]
        return found

    return subject.run(steps())


def try_new_scales(subject: AsyncSubject, family: str, work: Path) -> dict:
    """What would change KV scales while KV of the old ones stays in use."""
    refitter, policy = Refitter(subject.llm, in_flight="continue"), make_policy(family, 2)
    scaled = policy | {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}
    steps = {
        "calibration": lambda: refitter.refit_async(policy, calibration=[PROMPTS[0]]),
        "alone": lambda: refitter.calibrate_async([PROMPTS[0]]),
        "in the policy": lambda: refitter.refit_async(scaled),
    }
    before, found = subject.live(), {}
    for name, step in steps.items():
        try:
            subject.run(step())
        except RefitError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {"refused": found, "untouched": subject.live() == before, "dirty": refitter.is_dirty}


def try_failing(mode: str):
    """A refit that fails part way, with requests in flight that are frozen."""

    async def steps(subject: AsyncSubject, family: str) -> dict:
        found = await refit_under_way(subject, bad_policy(family), in_flight=mode)
        start_s = time.perf_counter()
        after = asyncio.create_task(subject.answer(PROMPTS[0], SHORT))
        await asyncio.wait([after], timeout=TIMEOUT_S)
        return found | {"after": outcome(after), "after_s": time.perf_counter() - start_s}

    def attempt(subject: AsyncSubject, family: str, work: Path) -> dict:
        return subject.run(steps(subject, family)) | {"num_unfinished": subject.num_unfinished}

    return attempt


def try_too_slow(
    subject: AsyncSubject, family: str, work: Path, *, timeout_s: float = 0.15, sampling: SamplingParams = LONG
) -> dict:
    """`wait` that is told to wait for less than requests take, and for more than the engine does to answer a call."""
    before = subject.live()
    found = subject.run(refit_under_way(subject, make_policy(family, 2), sampling=sampling, timeout_s=timeout_s))
    return found | {"untouched": subject.live() == before, "traces": subject.traces}


def try_paused_by_the_user(subject: AsyncSubject, family: str, work: Path) -> dict:
    """A scheduler that was paused before stays paused."""

    async def steps() -> dict:
        await subject.llm.pause_generation(mode="keep")
        waiting = asyncio.create_task(subject.answer(PROMPTS[0], SHORT))
        while not subject.llm.output_processor.request_states:
            await asyncio.sleep(0)
        report = await Refitter(subject.llm, in_flight="keep").refit_async(make_policy(family, 2))
        found: dict[str, Any] = {"version": report.version, "paused": await subject.llm.is_paused()}
        found["answered"] = waiting.done()
        await subject.llm.resume_generation()
        output = await asyncio.wait_for(waiting, TIMEOUT_S)
        return found | {"said": said(output), "new": said(await subject.answer(PROMPTS[0], SHORT))}

    return subject.run(steps())


def try_cancelled(subject: AsyncSubject, family: str, work: Path) -> dict:
    """The task that refits is cancelled once bytes may be written."""

    async def steps() -> dict:
        started = asyncio.Event()
        running = asyncio.create_task(subject.answer(PROMPTS[0], LONG, started=started))
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        refitter = Refitter(subject.llm, in_flight="abort")
        refit = asyncio.create_task(refitter.refit_async(make_policy(family, 2)))
        while not refitter.is_dirty:
            await asyncio.sleep(0)
        late = asyncio.create_task(subject.answer(PROMPTS[2], SHORT))
        await asyncio.sleep(0)
        refit.cancel()
        _, stuck = await asyncio.wait([refit, running, late], timeout=TIMEOUT_S)
        found: dict[str, Any] = {"stuck": len(stuck), "cancelled": refit.cancelled(), "dirty": refitter.is_dirty}
        return found if stuck else found | {"running": outcome(running), "late": outcome(late)}

    return subject.run(steps()) | {"num_unfinished": subject.num_unfinished}


ASYNC_ATTEMPTS = {
    "undisturbed": try_undisturbed,
    "in flight: wait": try_in_flight("wait"),
    "in flight: abort": try_in_flight("abort"),
    "in flight: keep": try_in_flight("keep"),
    "in flight: continue": try_in_flight("continue"),
    "unattended: keep": try_unattended("keep"),
    "unattended: continue": try_unattended("continue"),
    "kept under the same policy": try_in_flight("keep", seed=1),
    "continued under the same policy": try_in_flight("continue", seed=1),
    "sharing": try_sharing,
    "new scales": try_new_scales,
    "failing: keep": try_failing("keep"),
    "failing: continue": try_failing("continue"),
    "too slow": try_too_slow,
    "paused by the user": try_paused_by_the_user,
    "cancelled while it writes": try_cancelled,
}
