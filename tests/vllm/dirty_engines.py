"""Engines that are dirty, or in which a trainer's own calls fail. `test_dirty_engines.py` says what must come of it."""

import asyncio
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from async_engine import outcome
from engines import PROMPTS, SAMPLING, make_policy, refused
from subject import NOISE, AsyncSubject, Subject, booted_as
from vllm import SamplingParams

LAYOUT = "core in process"
"""Two ranks; that the core is in this process too, the environment says."""
LONG = SamplingParams(max_tokens=400, temperature=0, detokenize=False, ignore_eos=True)
TIMEOUT_S = 60

_policy = cache(make_policy)


class TrainerExtension:
    """A worker of OpenRLHF's: one weight a call, and what that raises goes to vLLM."""

    def update_weight(self, family: str, seed: int, name: str, is_bad: bool = False) -> None:
        weight = _policy(family, seed)[name]
        self.model_runner.model.load_weights(weights=[(name, torch.full_like(weight, torch.nan) if is_bad else weight)])

    def reply(self, said: str) -> list:
        return [self.rank, said]

    def fail(self, ranks: list[int]) -> list:
        if self.rank in ranks:
            raise ValueError("of the trainer's own")
        return [self.rank, "did not fail"]

    def reply_late(self, seconds: float) -> list:
        time.sleep(seconds)
        return [self.rank, "late"]


def run_trainer_errors(model: str, family: str) -> dict:
    extension = f"{__name__}.{TrainerExtension.__qualname__}"
    with booted_as(LAYOUT, Path(model), "fp32", worker_extension_cls=extension, **NOISE) as subject:
        names = list(_policy(family, 1))
        found: dict[str, Any] = {"first": sync(subject, family, 1, names)}
        good = subject.state()
        found["bad"] = sync(subject, family, 2, names, bad=names[3])
        found["replies"] = {"after the bad": replies(subject)}
        found["generate"] = subject.refused(subject.generate)
        found["again"] = sync(subject, family, 1, names)
        found["same"] = subject.state() == good
        calls = {
            "start": ("start_weight_update",),
            "finish": ("finish_weight_update",),
            "all": ("fail", [0, 1]),
            "first": ("fail", [0]),
            "last": ("fail", [1]),
            "reload": ("reload_weights",),
        }
        for name, call in calls.items():
            found["replies"][name] = [subject.refused(subject.call, *call), replies(subject)]
        late = refused(lambda: subject.llm.collective_rpc("reply_late", timeout=0.1, args=(0.5,)), error_type=Exception)
        found["replies"]["late"] = [late, replies(subject)]
        found["still"] = sync(subject, family, 1, names)
        return found | {"still the same": subject.state() == good}


def sync(subject: Subject, family: str, seed: int, names: list[str], bad: str = "") -> list[str]:
    """What the calls raised, one call a weight."""
    found = [refused(subject.call, "update_weight", family, seed, n, n == bad, error_type=Exception) for n in names]
    return [one["message"] for one in found if one is not None]


def replies(subject: Subject) -> list:
    """To calls that say which they are."""
    return [subject.call("reply", str(number)) for number in range(3)]


def run_dirty_async(model: str, family: str) -> dict:
    """An `AsyncLLM` that an update from within its worker leaves dirty, with requests at every place."""
    with booted_as("asynchronous", Path(model), "fp32", **NOISE) as subject:
        subject.refit(make_policy(family, 1))
        good = subject.state()
        found = subject.run(dirty(subject, family))
        found["num_unfinished"] = subject.num_unfinished
        found["healed"] = subject.look("update", family, 1, "buckets")
        return found | {"same": subject.state() == good}


async def dirty(subject: AsyncSubject, family: str) -> dict:
    several = SamplingParams(max_tokens=6, temperature=1, n=3, detokenize=False, ignore_eos=True)
    started = asyncio.Event()
    running = [asyncio.create_task(subject.answer(PROMPTS[0], LONG, started=started))]
    running += [asyncio.create_task(subject.answer(prompt, LONG)) for prompt in PROMPTS for _ in range(2)]  # some wait
    await asyncio.wait_for(started.wait(), TIMEOUT_S)
    arguments = ("update", family, 2, "buckets", "nan 1")
    updated = await subject.llm.collective_rpc("observe", args=arguments)
    new = [asyncio.create_task(subject.answer(PROMPTS[1], sampling)) for sampling in (SAMPLING, several)]
    collector = await subject.llm.add_request("collected", {"prompt_token_ids": PROMPTS[2]}, SAMPLING)
    new.append(asyncio.create_task(collector.get()))
    _, stuck = await asyncio.wait([*running, *new], timeout=TIMEOUT_S)
    found: dict[str, Any] = {"updated": updated, "stuck": len(stuck)}
    if not stuck:
        found |= {"running": [outcome(task) for task in running], "new": [outcome(task) for task in new]}
        found["is ours"] = [is_ours(task.exception()) for task in [*running, *new]]
    return found


def is_ours(error: BaseException | None) -> bool:
    """Whether users can catch it, and send it to another process."""
    import pickle

    from fp8refit import EngineDirtyError

    sent = pickle.loads(pickle.dumps(error))
    return isinstance(error, EngineDirtyError) and type(sent) is EngineDirtyError and str(sent) == str(error)
