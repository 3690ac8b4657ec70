"""Engines of several replicas, refitted as one. `test_replicas_stubbed_kernels.py` says what must come of it."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import engines
import psutil
import sglang
from engines import ASKED, NOISE, PROMPTS, SAMPLING, bf16_of, booted, make_policy, said
from fresh import fp8_of
from served import Server
from subject import Subject, refused

from fp8refit import Refitter
from tests.engines.attempts import ATTEMPTS, bad_policy, try_policies
from tests.serving import free_port

LONG = SAMPLING | {"max_new_tokens": 240}
IN_FLIGHT = {"wait": [1], "keep": [0, 1], "continue": [1, 0]}
"""Which replicas run a request meanwhile; others are idle."""
BEGINS_S = 60


class Replicas(Subject):
    """An engine of several replicas, each of which answers every prompt."""

    def state(self) -> dict:
        engines.drop_caches(self.engine)
        return {"live": self.live(), "outputs": self.generate()}

    def generate(self) -> list[dict]:
        asked = [(prompt, replica) for replica in range(self.engine.server_args.dp_size) for prompt in PROMPTS]
        return [said(self.engine.generate(input_ids=p, routed_dp_rank=replica, **ASKED)) for p, replica in asked]


def run_replicas(
    family: str,
    in_flight: list[str],
    ending: str,
    work: Path,
    *,
    has_fresh: bool = False,
    drop_in: bool = False,
    **options: Any,
) -> dict:
    """Policies over noise, and what else is asked for.

    Args:
        family: Of models.
        in_flight: Ways to treat requests that run.
        ending: What goes wrong in the end.
        work: Folder for checkpoints.
        has_fresh: Whether an engine of policy 2 is booted afterwards, laid out as this one.
        drop_in: Whether the drop-in is switched on, which may not keep an engine from serving that it cannot be put into.
        options: Of the engine.
    """
    os.environ["FP8REFIT_DROP_IN"] = str(int(drop_in))
    num_ranks = options.get("tp_size", 1)
    with booted(bf16_of(family, 1, work), num_ranks, port=free_port(), **NOISE | options) as engine:
        subject = Replicas(engine)
        found: dict[str, Any] = {"policies": try_policies(subject, family)}
        for seed, way in zip((2, 1, 2), in_flight, strict=False):
            steps = go_on(engine, make_policy(family, seed), way, IN_FLIGHT[way])
            found[way] = engine.loop.run_until_complete(steps) | {"live": subject.live()}
        found |= ENDINGS[ending](subject, family, work)
    if has_fresh:
        with booted(fp8_of(family, 1, work), num_ranks, port=free_port(), **options) as engine:
            found["fresh"] = Replicas(engine).state()
    return found


def run_served_replicas(family: str, work: Path) -> dict:
    """A server of two replicas: policy 1 over policy 2, a policy with NaN, and policy 2 again; what each replica says."""
    engines.bind(dp_size=2)
    with Server(fp8_of(family, 1, work), dp_size=2) as server:
        refitter, found = Refitter(server.url), {"booted": ask_each(server)}
        report = refitter.refit(make_policy(family, 1))
        found["other"] = {"version": report.version, "ranks": [rank.rank for rank in report.ranks]} | ask_each(server)
        found["bad"] = refused(lambda: refitter.refit(bad_policy(family)))
        found["dirty"] = ask_each(server)
        refitter.refit(make_policy(family, 2))
        return found | {"healed": ask_each(server)}


def ask_each(server: Server) -> dict:
    """Status and answer of each replica."""
    bodies = [{"input_ids": prompt, "routed_dp_rank": rank, **ASKED} for rank in (0, 1) for prompt in PROMPTS]
    answers = [server.post("/generate", body) for body in bodies]
    outputs = [said(body) | {"num_cached": None} if status == 200 else None for status, body in answers]
    return {"statuses": [status for status, _ in answers], "outputs": outputs}


def try_faults(subject: Replicas, family: str, work: Path, attempts: Iterable[str] = ATTEMPTS) -> dict:
    """Attempts, and the refit that heals each."""
    subject.refit(make_policy(family, 1))
    found, good = {}, subject.state()
    for name in attempts:
        found[name] = ATTEMPTS[name](subject, family, work)
        subject.refit(make_policy(family, 1))
        found[name]["healed"] = subject.state() == good and not subject.is_dirty
    return found


async def go_on(engine: sglang.Engine, policy: dict, in_flight: str, busy: list[int]) -> dict:
    """Refit while some replicas run a request."""
    begun = [asyncio.Event() for _ in busy]

    async def run(replica: int, has_begun: asyncio.Event) -> int:
        asked = {"input_ids": PROMPTS[0], "sampling_params": LONG, "routed_dp_rank": replica, "stream": True}
        async for output in await engine.async_generate(**asked):
            has_begun.set()
            num_tokens = output["meta_info"]["completion_tokens"]
        return num_tokens

    running = [asyncio.ensure_future(run(*each)) for each in zip(busy, begun, strict=True)]
    async with asyncio.timeout(BEGINS_S):
        await asyncio.gather(*(each.wait() for each in begun))
    report = await Refitter(engine, in_flight=in_flight).refit_async(policy)
    return {"num_interrupted": report.num_interrupted, "lengths": await asyncio.gather(*running)}


def kill(subject: Replicas, family: str, work: Path) -> dict:
    """A scheduler dies that SGLang does not miss: refits that wait for its request, and for its answer."""
    engine, policy = subject.engine, make_policy(family, 1)

    async def begin_and_refit() -> None:
        stream = await engine.async_generate(input_ids=PROMPTS[0], sampling_params=LONG, routed_dp_rank=1, stream=True)
        await anext(stream)
        replica.send_signal(signal.SIGKILL)
        await Refitter(engine).refit_async(policy)

    def run(steps: Coroutine[Any, Any, object]) -> dict | None:
        return refused(lambda: engine.loop.run_until_complete(steps))

    processes = psutil.Process().children(recursive=True)
    (replica,) = (process for process in processes if "_DP1" in "".join(process.cmdline()))
    found = {"request": run(begin_and_refit()), "answer": run(Refitter(engine, in_flight="keep").refit_async(policy))}
    return {"killed": found | {"entries": {name: refused(enter) for name, enter in subject.entries.items()}}}


ENDINGS = {
    "nothing": lambda *_: {},
    "faults": try_faults,
    "rank fault": lambda *found: try_faults(*found, attempts=["rank fault"]),
    "killed": kill,
}
