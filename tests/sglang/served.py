"""One server in a process of its own, refitted over HTTP, idle and under load."""

import json
import os
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import ASKED, PROMPTS, SAMPLING, bf16_of, make_policy, said, settings
from fp8refit_sglang import SglangServer
from fresh import fp8_of
from safetensors.torch import save_file
from subject import refused
from typer.testing import CliRunner

from fp8refit import Refitter
from fp8refit.cli import commands as cli
from tests.engines.attempts import bad_policy
from tests.serving import FORK, ask, ask_rawly, die, free_port, interrupted, option, read_metrics, run_driver

START_S = 180
STUCK_S = 20
TOKEN = "a-token-of-this-test"
LONG = SAMPLING | {"max_new_tokens": 200}


def run_served(family: str, work: Path) -> dict:
    """Policy 2 as booted, policy 1, policy 2 again; then a request that is kept, and a policy with NaN."""
    os.environ["FP8REFIT_TOKEN"] = TOKEN
    with Server(fp8_of(family, 1, work), enable_metrics=True) as server:
        refitter = Refitter(server.url, in_flight="keep")
        found: dict[str, Any] = {"booted": server.state()}
        report = refitter.refit(make_policy(family, 1))
        found["version"] = {"reported": report.version, "on outputs": server.version()}
        found["other"] = server.state()
        refitter.refit(make_policy(family, 2))
        found["again"] = server.state()
        found["continued"] = go_on(
            server, lambda: Refitter(server.url, in_flight="continue").refit(make_policy(family, 1)).num_interrupted
        )
        refitter.refit(make_policy(family, 2))
        found["kept"] = keep(server, refitter, family)
        refitter.refit(make_policy(family, 2))
        found["after load"] = server.state()
        fails = lambda: refused(lambda: Refitter(server.url, in_flight="continue").refit(bad_policy(family)))  # noqa: E731
        found["bad"] = under_way(server, fails) | {"metrics": read_metrics(server.url)}
        start_s = time.perf_counter()
        status, body = server.post("/generate", {"input_ids": PROMPTS[0], **ASKED})
        found["dirty"] = {"status": status, "body": json.dumps(body), "s": time.perf_counter() - start_s}
        refitter.refit(make_policy(family, 2))
        found["healed"] = server.state()
        found["killed"] = run_driver(lambda: Refitter(server.url).refit(interrupted(make_policy(family, 1), die)))
        found["refused"] = server.post("/generate", {"input_ids": PROMPTS[0], **ASKED})
        refitter.refit(interrupted(make_policy(family, 1), lambda: found.update(collide(server, family))))
        found["push"] = push(bf16_of(family, 2, work), server.url)
        found["after drivers"] = server.state()
        refitter.refit(make_policy(family, 1))
        found["broadcast"] = push(bf16_of(family, 2, work), server.url, "--transport", "collective")
        found["after broadcast"] = server.state()
        return found


def push(checkpoint: Path, url: str, *options: str) -> dict:
    """By the command line."""
    pushed = CliRunner().invoke(cli.app, ["push", str(checkpoint), "--to", url, "--json", *options])
    return {"code": pushed.exit_code, "said": pushed.stdout, "log": pushed.stderr}


def collide(server: "Server", family: str) -> dict:
    """Drivers that come while another one refits the server: one like it, and one that may not refit it at all."""
    return {
        "second": refused(lambda: Refitter(server.url).refit(make_policy(family, 2))),
        "stranger": refused(lambda: Refitter(SglangServer(server.url, token=TOKEN[::-1]))),
        "raw": ask_rawly(server.url, "/update_weights_from_ipc", token=TOKEN),
    }


def keep(server: "Server", refitter: Refitter, family: str) -> dict:
    """Refit while a request runs and another arrives."""
    outputs: list = [None, None]

    def generate(index: int) -> None:
        outputs[index] = server.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": LONG})

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(2)]
    threads[0].start()
    time.sleep(1)
    # The second arrives while the policy is read, when requests wait.
    report = refitter.refit(interrupted(make_policy(family, 1), threads[1].start))
    for thread in threads:
        thread.join()
    return {
        "num_interrupted": report.num_interrupted,
        "statuses": [status for status, _ in outputs],
        "lengths": [len(body["output_ids"]) for _, body in outputs],
    }


def run_drop_in_going_on(family: str, work: Path) -> dict:
    """A trainer that knows nothing of fp8refit pauses requests in place, and loads another policy from files."""
    os.environ |= {"FP8REFIT_DROP_IN": "1", "FP8REFIT_IN_FLIGHT": "continue"}

    def load(policy: Path) -> dict:
        server.post("/pause_generation", {"mode": "in_place"})
        _, said = server.post("/update_weights_from_disk", {"model_path": str(policy), "flush_cache": False})
        server.post("/continue_generation", {})
        return said

    bad = work / "bad"
    shutil.copytree(bf16_of(family, 1, work), bad)
    save_file({name: tensor.contiguous() for name, tensor in bad_policy(family).items()}, bad / "model.safetensors")
    with Server(fp8_of(family, 1, work)) as server:
        failed = under_way(server, lambda: load(bad))
        healed = load(bf16_of(family, 2, work))
        return {"failed": failed, "healed": healed} | go_on(server, lambda: load(bf16_of(family, 1, work)))


def go_on(server: "Server", refit: Callable[[], Any]) -> dict:
    """Refit while a request runs, which goes on with its KV; then others that begin as it did."""
    ended: list[Any] = []

    def generate() -> None:
        ended.append(server.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": LONG})[1]["output_ids"])

    running = threading.Thread(target=generate)
    running.start()
    time.sleep(1)
    refitted = refit()
    running.join()
    prompts = [PROMPTS[0], PROMPTS[0] + ended[0][:-1]]
    later = [server.post("/generate", {"input_ids": prompt, **ASKED})[1] for prompt in prompts]
    server.post("/flush_cache", {})
    alone = [server.post("/generate", {"input_ids": prompt, **ASKED})[1] for prompt in prompts]
    return {
        "refitted": refitted,
        "length": len(ended[0]),
        "num_cached": [body["meta_info"]["cached_tokens"] for body in later],
        "num_cached_alone": [body["meta_info"]["cached_tokens"] for body in alone],
        "later": list(map(said, later)),
        "alone": list(map(said, alone)),
    }


def under_way(server: "Server", refit: Callable[[], dict]) -> dict:
    """A refit that fails, while a request runs that would go on with its KV: what is found, and what becomes of the request."""
    ended: list[Any] = []
    asked = {"input_ids": PROMPTS[0], "sampling_params": LONG}
    running = threading.Thread(target=lambda: ended.append(server.post("/generate", asked)))
    running.start()
    time.sleep(1)
    found = refit()
    running.join(STUCK_S)
    return found | {"running": ended}


class Server:
    """`sglang.launch_server` on a checkpoint. Its process is a fork of this one, which has imported SGLang.

    Args:
        model: The checkpoint.
        options: Of `sglang.launch_server`.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        asked = settings(model) | {"port": port, "skip_server_warmup": True} | options
        arguments = [option(name, value) for name, value in asked.items()]
        self._process = FORK.Process(target=_launch, args=([part for pair in arguments for part in pair],))

    def __enter__(self) -> "Server":
        self._process.start()
        deadline_s = time.monotonic() + START_S
        while ask(self.url + "/health")[0] != 200:
            assert self._process.is_alive() and time.monotonic() < deadline_s, "the server does not start"
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def state(self) -> dict:
        """What it says with an empty cache, and SGLang's own checksum of every weight."""
        self.post("/flush_cache", {})
        outputs = [said(self.post("/generate", {"input_ids": prompt, **ASKED})[1]) for prompt in PROMPTS]
        return {"outputs": outputs, "checksum": self.post("/weights_checker", {"action": "checksum"})[1]["ranks"]}

    def version(self) -> str:
        """Of the weights, as it says with its outputs."""
        _, body = self.post("/generate", {"input_ids": PROMPTS[0], **ASKED})
        return body["meta_info"]["weight_version"]

    def post(self, route: str, body: dict) -> tuple[int, Any]:
        """Status and answer."""
        return ask(self.url + route, json.dumps(body))


def _launch(arguments: list[str]) -> None:
    sys.argv = ["sglang.launch_server", *arguments]
    os.environ["SGL_FORCE_SHUTDOWN"] = "1"  # 0.5.12 waits at its end for requests that it aborted in its queue
    runpy.run_module("sglang.launch_server", run_name="__main__")
