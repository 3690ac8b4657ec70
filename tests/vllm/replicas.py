"""Two `vllm serve` of two ranks each that are refitted together; a driver that dies, and a server that dies and comes back."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from engines import PROMPTS, make_policy, refused
from servers import EXAMPLES, FAMILY, KEY, TOKEN, Server, run_script
from tokens import tokenizer_of_bytes
from typer.testing import CliRunner

from fp8refit import Broadcaster, Refitter
from fp8refit.cli import commands as cli
from tests.serving import die, run_driver
from tests.tiny_models import save_model

TIMEOUT_S = 20.0
LAST = "model.layers.1.mlp.down_proj.weight"
SMALL = {"bucket_bytes": 1 << 20, "timeout_s": TIMEOUT_S}
"""So that some of a policy is written before the last of it is read."""


def run_replicas(work: str, tensor_parallel_size: int) -> dict:
    """Policy 2 by ordinary refits and by broadcasts, as the command line and a script send it; then what goes wrong."""
    folder = Path(work) / "bf16"
    save_model(FAMILY, 2, folder)
    os.environ |= {"FP8REFIT_API_KEY": KEY, "FP8REFIT_TOKEN": TOKEN}
    options = {"tensor_parallel_size": tensor_parallel_size}
    with (
        Server(folder, **options) as one,
        Server(folder, **options) as other,
        Server(folder, port=other.port, is_held=True, **options) as successor,
    ):
        one.wait()
        other.wait()
        found = {"killed driver": kill_driver([one, other])}  # before this process has threads that a fork has not
        for server in (one, other):
            server.call("observe", "scribble")
            Refitter(server.url).refit(make_policy(FAMILY, 2))
        found["ordinary"] = state(one, other)
        found["push"] = push(folder, one, other)
        found["example"] = run_script(EXAMPLES / "two_replicas.py", folder, one.url, other.url)
        found |= kill_server(one, other, successor)
        return found


def run_explore(work: str) -> dict:
    """The example with one server in FP8 and one in BF16, the policy that it leaves on both, and one that neither takes."""
    folder = Path(work) / "bf16"
    save_model(FAMILY, 2, folder)
    os.environ |= {"FP8REFIT_API_KEY": KEY, "FP8REFIT_TOKEN": TOKEN}
    tokenizer_of_bytes().save_pretrained(folder)  # vLLM's API names the tokens of log-probabilities
    options = {"skip_tokenizer_init": False}
    with Server(folder, **options) as explorer, Server(folder, hf_overrides="{}", **options) as scorer:
        explorer.wait()
        scorer.wait()
        asked = [folder, explorer.url, scorer.url, "--steps", 2, "--prompts", 2, "--answers", 6, "--kept", 1]
        found = {"script": run_script(EXAMPLES / "explore.py", *asked)}
        bad = make_policy(FAMILY, 1)
        bad[LAST][0, 0] = float("nan")
        with Broadcaster([explorer.url, scorer.url], validate="strict") as broadcaster:
            broadcaster.push(make_policy(FAMILY, 2))
            found["together"] = state(explorer, scorer)
            found["refused"] = refused(broadcaster.push, bad)
            found["after"] = state(explorer, scorer)
        for server in (explorer, scorer):
            server.call("observe", "scribble")
            Refitter(server.url).refit(make_policy(FAMILY, 2))
        return found | {"alone": state(explorer, scorer)}


def state(*servers: Server) -> list[dict]:
    """What every server holds and says."""
    return [{"live": server.live(), "says": server.says()} for server in servers]


def push(folder: Path, *servers: Server) -> dict:
    """By the command line, together."""
    to = [part for server in servers for part in ("--to", server.url)]
    said = ["push", str(folder), *to, "--transport", "collective", "--json"]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, said)
    found = {"code": result.exit_code, "said": result.stdout, "log": result.stderr}
    return found | {"state": state(*servers)}


def stream(seed: int, at_last: Callable[[], object]) -> Iterator:
    """A policy, and something that happens before its last matrix is read."""
    for name, tensor in make_policy(FAMILY, seed).items():
        if name == LAST:
            at_last()
        yield name, tensor


def manifest() -> dict:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in make_policy(FAMILY, 1).items()}


def kill_driver(servers: list[Server]) -> dict:
    """A trainer that dies in the middle of a broadcast, and another one that comes after it."""
    urls = [server.url for server in servers]
    code = run_driver(lambda: Broadcaster(urls, **SMALL).push(stream(1, die), manifest=manifest()))
    start_s = time.monotonic()
    statuses = [server.complete(PROMPTS[0]) for server in servers]
    seconds = time.monotonic() - start_s
    healed = run_driver(lambda: Broadcaster(urls, **SMALL).push(make_policy(FAMILY, 2)))
    return {"code": code, "statuses": statuses, "seconds": seconds, "next": healed, "state": state(*servers)}


def kill_server(one: Server, other: Server, successor: Server) -> dict:
    """One of two dies between two broadcasts, comes back, and dies in the middle of one."""
    alone = Refitter(other.url)
    fleet = Broadcaster([one.url, other.url], on_lost="drop", **SMALL)
    with Broadcaster([one.url, other.url], **SMALL) as broadcaster:
        broadcaster.push(make_policy(FAMILY, 2))
        alone.refit(make_policy(FAMILY, 2))
        before = state(one)
        other.kill()
        gone = refused(broadcaster.push, make_policy(FAMILY, 1)) | {"untouched": state(one) == before}
        fleet.push(make_policy(FAMILY, 1))
        left = {"engines": [str(engine) == one.url for engine in fleet.engines], "one": state(one)}
        successor.release()
        successor.wait()
        report = fleet.add(successor.url, make_policy(FAMILY, 1))
        left |= {"both": state(one, successor), "versions": [report.version, fleet.version] if report else None}
        fleet.remove(successor.url)
        broadcaster.push(make_policy(FAMILY, 2))
        back = {"together": state(one, successor)}
        successor.call("observe", "scribble")
        alone.refit(make_policy(FAMILY, 2))
        back["alone"] = state(successor)
        killed = refused(lambda: broadcaster.push(stream(1, successor.kill), manifest=manifest()))
        killed["status"] = one.complete(PROMPTS[0])
    Refitter(one.url).refit(make_policy(FAMILY, 2))
    return {"gone": gone, "left": left, "back": back, "killed server": killed | {"healed": state(one)}}
