"""One `vllm serve` in a process of its own, refitted over HTTP: idle, under load, by drivers that fail, die and collide."""

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attempts import bad_policy
from engines import CONFIG, PROMPTS, booted, live_bytes, make_policy, refused, settings
from fp8refit_vllm import VllmServer
from processes import free_port
from typer.testing import CliRunner

from fp8refit import Refitter, cli
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.served import ServerDriver
from tests.tiny_models import save_model

FAMILY = "qwen3"
KEY, TOKEN = "a key", "a token"
START_S = 90
FORK = multiprocessing.get_context("fork")
"""vLLM is imported here already. No process that is forked has booted an engine before."""


def run_served(work: str) -> dict:
    """Policies over noise, then every attempt and the refit that heals it."""
    folder = Path(work) / "bf16"
    save_model(FAMILY, 2, folder)
    quantize_checkpoint(folder, folder.with_name("fp8"))
    os.environ |= {"FP8REFIT_API_KEY": KEY, "FP8REFIT_TOKEN": TOKEN}
    with Server(folder) as server:
        with booted(folder.with_name("fp8"), "fp32") as llm:  # while the server starts
            fresh = {"live": live_bytes(llm), "fingerprints": Refitter(llm).fingerprints()}
        server.wait()
        refitter = Refitter(server.url)
        found = {"fresh": fresh, "policies": try_policies(server, refitter)}
        for name, attempt in ATTEMPTS.items():
            found[name] = attempt(server, refitter, folder)
            Refitter(server.url).refit(make_policy(FAMILY, 2))
            found[name]["healed"] = server.live() == fresh["live"] and server.says() == found["policies"]["new"]
        return found


def try_policies(server: "Server", refitter: Refitter) -> dict:
    """Policy 1, then 2."""
    refitter.refit(make_policy(FAMILY, 1))
    old = server.says()
    report = refitter.refit(make_policy(FAMILY, 2))
    return {
        "old": old,
        "new": server.says(),
        "again": server.says(),
        "version": report.version,
        "live": server.live(),
        "fingerprints": refitter.fingerprints(),
    }


def try_files(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """A folder, which the server reads."""
    server.call("observe", "scribble")
    refitter.refit(folder)
    return {"live": server.live()}


def try_push(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """The same by the command line."""
    server.call("observe", "scribble")
    result = CliRunner().invoke(cli.app, ["push", str(folder), "--to", server.url, "--json"])
    return {"live": server.live(), "code": result.exit_code, "said": result.stdout, "log": result.stderr}


def try_example(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """What a user copies."""
    script = Path(__file__).parents[2] / "examples" / "vllm_server.py"
    result = subprocess.run([sys.executable, script, folder, server.url], capture_output=True, text=True)
    return {"code": result.returncode, "lines": result.stdout.splitlines(), "log": result.stderr}


def try_collective(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """By a broadcast, as from another host."""
    server.call("observe", "scribble")
    with Refitter(server.url, transport="collective") as broadcasting:
        broadcasting.refit(make_policy(FAMILY, 2))
    return {"live": server.live()}


def try_meanwhile(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """A request that comes while the policy is written, and another driver."""
    late: list = []
    other: dict = {}

    def come() -> None:
        late.append(server.complete(PROMPTS[0]))

    thread = threading.Thread(target=come)

    def between() -> None:
        thread.start()
        other["refused"] = refused(lambda: Refitter(server.url).refit(make_policy(FAMILY, 1)))
        other["waits"] = not late

    refitter.refit(policy(1, half_way=between))
    thread.join()
    return {"late": late[0], "new": server.complete(PROMPTS[0]), **other}


def try_bad_values(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """NaN, which is seen while it is written."""
    found = {"refit": refused(lambda: refitter.refit(bad_policy(FAMILY)))}
    start_s = time.perf_counter()
    return found | {"status": server.complete(PROMPTS[0]), "seconds": time.perf_counter() - start_s}


def try_bad_names(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """A policy with a name too many: nothing is written."""
    named = make_policy(FAMILY, 1) | {"model.layers.9.mlp.up_proj.weight": next(iter(make_policy(FAMILY, 1).values()))}
    before = server.live()
    return {"refit": refused(lambda: refitter.refit(named)), "untouched": server.live() == before}


def try_killed_while_it_writes(server: "Server", refitter: Refitter, folder: Path) -> dict:
    code = run_driver(lambda: Refitter(server.url).refit(policy(1, half_way=die)))
    return {"code": code, "status": server.complete(PROMPTS[0])}


def try_killed_before_it_writes(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """It dies while requests wait."""

    def refit() -> None:
        ServerDriver.flush_caches = die
        Refitter(server.url).refit(make_policy(FAMILY, 1))

    before = server.live()
    code = run_driver(refit)
    return {"code": code, "status": server.complete(PROMPTS[0]), "untouched": server.live() == before}


def try_strangers(server: "Server", refitter: Refitter, folder: Path) -> dict:
    """Those that may not refit it, and those that nobody understands."""
    return {
        "key": refused(lambda: Refitter(VllmServer(server.url, api_key="another"))),
        "token": refused(lambda: Refitter(VllmServer(server.url, token="another"))),
        "no key": server.post("/v1/fp8refit", "{}", headers={}),
        "truncated": server.post("/v1/fp8refit", '{"driver": {"pla'),
    }


ATTEMPTS: dict[str, Callable[["Server", Refitter, Path], dict]] = {
    "files": try_files,
    "push": try_push,
    "example": try_example,
    "collective": try_collective,
    "meanwhile": try_meanwhile,
    "bad values": try_bad_values,
    "bad names": try_bad_names,
    "killed while it writes": try_killed_while_it_writes,
    "killed before it writes": try_killed_before_it_writes,
    "strangers": try_strangers,
}


def policy(seed: int, half_way: Callable[[], object]) -> Iterator:
    """A policy that is read once, with something that happens on the way."""
    named = list(make_policy(FAMILY, seed).items())
    for index, pair in enumerate(named):
        if index == len(named) // 2:
            half_way()
        yield pair


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_driver(refit: Callable[[], object]) -> int:
    """In a process of its own; its exit status."""
    process = FORK.Process(target=refit)
    process.start()
    process.join(60)
    return process.exitcode


class Server:
    """`vllm serve` on noise of a model's shape.

    Args:
        model: The model.
    """

    def __init__(self, model: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = settings(model) | {"port": port, "host": "127.0.0.1", "api_key": KEY, "load_format": "dummy"}
        options |= {"hf_overrides": json.dumps({"quantization_config": CONFIG}), "served_model_name": FAMILY}
        arguments = [part for name, value in options.items() for part in _option(name, value)]
        self._process = FORK.Process(target=_serve, args=(arguments,))

    def __enter__(self) -> "Server":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def wait(self) -> None:
        """Until it takes requests."""
        deadline_s = time.monotonic() + START_S
        while self.post("/health", None)["status"] != 200:
            assert self._process.is_alive() and time.monotonic() < deadline_s, "the server does not start"
            time.sleep(0.1)

    def complete(self, prompt: list[int]) -> dict:
        """Status, and greedy tokens or what is said instead."""
        asked = {"model": FAMILY, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", json.dumps(asked | {"return_token_ids": True}))
        if answer["status"] == 200:
            return {"status": 200, "tokens": answer["body"]["choices"][0]["token_ids"]}
        return answer

    def says(self) -> list[dict]:
        return [self.complete(prompt) for prompt in PROMPTS]

    def call(self, method: str, *arguments: str) -> list:
        """vLLM's `collective_rpc`."""
        return self.post("/collective_rpc", json.dumps({"method": method, "args": arguments}))["body"]["results"]

    def live(self) -> dict[str, str]:
        return self.call("observe", "live_bytes")[0]["found"]

    def post(self, route: str, body: str | None, headers: dict | None = None) -> dict:
        """Status and answer; status 0 if nobody answers."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {KEY}"} if headers is None else headers
        )
        data = None if body is None else body.encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + route, data, headers), timeout=60) as said:
                return {"status": said.status, "body": _read(said.read())}
        except urllib.error.HTTPError as error:
            return {"status": error.code, "body": _read(error.read())}
        except OSError:
            return {"status": 0}


def _serve(arguments: list[str]) -> None:
    os.environ |= {
        "FP8REFIT_TEST_KERNEL": "fp32",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_PLUGINS": "fp8refit,fp8refit_cpu_kernel",
        "VLLM_SERVER_DEV_MODE": "1",  # for `live` alone
    }
    sys.argv = ["vllm", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _read(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        return answer.decode()


def _option(name: str, value: Any) -> list[str]:
    """As the command line takes it."""
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]
