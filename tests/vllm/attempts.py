"""What may go wrong with a refit, in any process layout, and be healed by the next. Each attempt gives what it found."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engines import make_policy
from safetensors.torch import save_file
from subject import AsyncSubject, Subject
from vllm.v1.engine import EngineCoreRequestType

from fp8refit import Broadcaster, RefitError, RefitReport, Refitter, gathered
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.remote import channel
from fp8refit.remote.messages import Reply, Request

DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
LAST_COLUMN = -1
"""Of `DOWN_PROJ`: under tensor parallelism the last rank alone holds it."""


def bad_policy(family: str) -> dict[str, torch.Tensor]:
    """Policy 2 with a NaN that the last rank alone can see."""
    policy = make_policy(family, 2)
    policy[DOWN_PROJ] = policy[DOWN_PROJ].clone()
    policy[DOWN_PROJ][3, LAST_COLUMN] = torch.nan
    return policy


def try_policies(subject: Subject, family: str) -> dict:
    """Policy 1, 2 and 1 again, over noise."""
    before = subject.look("places")
    booted = {"kv_scales": subject.look("kv_scales"), "padding": subject.look("padding")}
    rounds = []
    for seed in (1, 2, 1):
        report = subject.refit(make_policy(family, seed))
        rounds.append({"version": report.version, "ranks": [r.rank for r in report.ranks], **subject.state()})
        rounds[-1] |= {"kv_scales": subject.look("kv_scales"), "padding": subject.look("padding")}
    after = subject.look("places")
    return {
        "booted": booted,
        "rounds": rounds,
        "num_tensors": [len(places) for places in before],
        "moved": [[n for n in one if one[n] != two.get(n)] for one, two in zip(before, after, strict=True)],
        "traces": subject.traces,
    }


def note_calls(subject: Subject, refit: Callable[[], RefitReport]) -> dict:
    """What a refit calls in an engine core of another process, and what the ranks hold after it."""
    client, calls, start_s = subject.engine.engine_core, [], time.monotonic()
    send = client._send_input

    def note(kind: EngineCoreRequestType, request: Any) -> None:
        if kind is EngineCoreRequestType.UTILITY:
            calls.append(request[2])
        send(kind, request)

    client._send_input = note
    report = refit()
    del client._send_input
    found = {
        "calls": calls,
        "phases_s": report.phases_s,
        "waits_for_flush": [rank.flush_s > 0 for rank in report.ranks],
        "seconds": time.monotonic() - start_s,
    }
    return found | subject.state()


def try_steady(subject: Subject, family: str, work: Path) -> dict:
    """Broadcasts of policies that are laid out as the last one; and one after another trainer came between."""
    options = {"transport": "collective", "timeout_s": 20.0}
    policies = {seed: make_policy(family, seed) for seed in (1, 2)}
    subject.refit(policies[1], **options)
    found = {
        str(seed): note_calls(subject, partial(subject.refit, policy, **options)) for seed, policy in policies.items()
    }
    with Broadcaster([subject.llm], timeout_s=20.0) as other:
        other.push(policies[1])
        found["after another trainer"] = note_calls(subject, partial(subject.refit, policies[2], **options))
    return found


def after_failure(subject: Subject, before: list[dict[str, str]]) -> dict:
    """What a failed refit left: on which ranks bytes changed, and whether requests are admitted."""
    return {
        "dirty": subject.is_dirty,
        "changed": [one != two for one, two in zip(before, subject.live(), strict=True)],
        "generate": subject.refused(subject.generate),
        "add_request": subject.refused(subject.add_request),
        "num_unfinished": subject.num_unfinished,
    }


def try_rank_fault(subject: Subject, family: str, work: Path) -> dict:
    """The last rank fails after its slots were written."""
    before = subject.live()
    armed = subject.look("arm", subject.num_ranks - 1, "fail")
    found = {"armed": armed, "refit": subject.refused(subject.refit, make_policy(family, 2))}
    return found | after_failure(subject, before)


def try_bad_values(subject: Subject, family: str, work: Path) -> dict:
    """NaN that one rank sees, in the pass that writes."""
    before = subject.live()
    found = {"refit": subject.refused(subject.refit, bad_policy(family))}
    return found | after_failure(subject, before)


def try_strict(subject: Subject, family: str, work: Path) -> dict:
    """The same, looked for before: in tensors, and in files that every rank reads for itself."""
    file = work / f"bad-{os.getpid()}.safetensors"
    policy = bad_policy(family)
    save_file({name: tensor.clone() for name, tensor in policy.items()}, file)
    before = subject.state()
    found: dict[str, Any] = {"refit": subject.refused(subject.refit, policy, validate="strict")}
    found["files"] = subject.refused(subject.refit, file, validate="strict")
    return found | {"dirty": subject.is_dirty, "untouched": subject.state() == before}


def try_bad_names(subject: Subject, family: str, work: Path) -> dict:
    """A missing, an unexpected and a misshapen tensor at once."""
    policy = make_policy(family, 2)
    policy["model.layers.9.mlp.up_proj.weight"] = policy.pop(NORM)
    policy[DOWN_PROJ] = policy[DOWN_PROJ][:128]
    before = subject.state()
    found = {"refit": subject.refused(subject.refit, policy), "dirty": subject.is_dirty}
    return found | {"untouched": subject.state() == before}


def try_interrupt(subject: Subject, family: str, work: Path) -> dict:
    """Control-C in the driver when every rank is prepared and none has written. A stream after a state dict is not like the
    last, so the driver itself drops the caches.
    """
    before = subject.state()

    def reset_prefix_cache(*_: Any) -> None:
        raise KeyboardInterrupt

    with replaced(subject.engine, reset_prefix_cache):
        raised = interrupted(subject, iter(make_policy(family, 2).items()))
    return {"raised": raised, "dirty": subject.is_dirty, "untouched": subject.state() == before}


def try_late_interrupt(subject: Subject, family: str, work: Path) -> dict:
    """Control-C in the driver when every rank has written and committed, and the driver has not heard of it."""
    policy, version = make_policy(family, 2), subject.version
    read = channel._replies

    def lose_the_last(answers: Sequence[str], request: Request) -> list[Reply]:
        replies = read(answers, request)
        if any(reply.reports for reply in replies):
            raise KeyboardInterrupt
        return replies

    with patch.object(channel, "_replies", lose_the_last):
        raised = interrupted(subject, policy)
    found = {"raised": raised, "dirty": subject.is_dirty, "versions": [version, subject.version]}
    found["written"] = subject.state()
    subject.refit(policy)
    return found | {"again": subject.state()}


@contextmanager
def replaced(engine: Any, method: Callable) -> Iterator[None]:
    """Put a function instead of the engine's method of its name."""
    setattr(engine, method.__name__, method)
    try:
        yield
    finally:
        del engine.__dict__[method.__name__]


def interrupted(subject: Subject, policy: dict | Iterator) -> str | None:
    """What a refit raised, ours or not."""
    try:
        subject.refit(policy)
    except BaseException as error:  # noqa: BLE001
        return type(error).__name__
    return None


def try_two_at_once(subject: Subject, family: str, work: Path) -> dict:
    """A refit while another one writes."""
    policy = make_policy(family, 2)
    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    if isinstance(subject, AsyncSubject):
        return subject.run(_two_tasks(subject, policy))
    began, may_end = threading.Event(), threading.Event()
    first: dict[str, Any] = {}

    def slow():
        began.set()
        assert may_end.wait(60)
        yield from policy.items()

    def refit() -> None:
        first.update(version=subject.refit(slow, manifest=manifest).version)

    version = subject.version
    thread = threading.Thread(target=refit)
    thread.start()
    assert began.wait(60)
    second = subject.refused(subject.refit, policy)
    closed = subject.refused(subject.close)
    may_end.set()
    thread.join(60)
    return {"second": second, "close": closed, "version": version, "first": first, "dirty": subject.is_dirty}


async def _two_tasks(subject: AsyncSubject, policy: dict) -> dict:
    async def attempt(step) -> dict | None:
        try:
            await step
        except RefitError as error:
            return {"error": type(error).__name__}
        return None

    version = subject.version
    first = asyncio.create_task(Refitter(subject.llm).refit_async(policy))
    await asyncio.sleep(0)
    second = await attempt(Refitter(subject.llm).refit_async(policy))
    closed = await attempt(Refitter(subject.llm).close_async())
    report = await first
    return {
        "second": second,
        "close": closed,
        "version": version,
        "first": {"version": report.version},
        "dirty": subject.is_dirty,
    }


def try_close(subject: Subject, family: str, work: Path) -> dict:
    """What is held is given back, and compiled again when it is needed."""
    version = subject.version
    subject.close()
    subject.close()
    report = subject.refit(make_policy(family, 2))
    return {"version": version, "next": report.version, "is_first": [rank.is_first for rank in report.ranks]}


ATTEMPTS: dict[str, Callable[[Subject, str, Path], dict]] = {
    "rank fault": try_rank_fault,
    "bad values": try_bad_values,
    "strict": try_strict,
    "bad names": try_bad_names,
    "interrupt": try_interrupt,
    "late interrupt": try_late_interrupt,
    "two at once": try_two_at_once,
    "close": try_close,
}


def try_sources(subject: Subject, family: str, bf16: Path, fp8: Path) -> dict:
    """Policy 1 as files, iterators, wrapped names, fp32 and FP8, each over other bytes, through small buckets."""
    policy = make_policy(family, 1)
    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    fp8 = fp8.with_name(f"{fp8.name}-{os.getpid()}")  # every driver of an external launcher writes its own
    quantize_checkpoint(bf16, fp8, like=subject.layout())
    sources: dict[str, tuple[Any, Any]] = {
        "mapping": (policy, None),
        "safetensors": (bf16, None),
        "block-FP8 safetensors": (fp8, None),
        "function": (lambda: iter(policy.items()), None),
        "one-shot iterator": (iter(policy.items()), None),
        "one-shot iterator with manifest": (iter(policy.items()), manifest),
        "gathered": (gathered(policy), None),
        "fp32": ({name: tensor.float() for name, tensor in policy.items()}, None),
        "wrapped names": ({f"module._orig_mod.{name}": tensor for name, tensor in policy.items()}, None),
    }
    found = {"largest_bytes": max(tensor.nbytes for tensor in policy.values())}
    for kind, (source, announced) in sources.items():
        subject.look("scribble")
        subject.refit(source, manifest=announced, bucket_bytes=1 << 20)
        found[kind] = subject.live()
    return found
