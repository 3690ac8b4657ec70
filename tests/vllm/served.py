"""One `vllm serve`, refitted over HTTP: idle, under load, by drivers that fail, die and collide."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import PROMPTS, booted, live_bytes, make_policy, refused
from fp8refit_vllm import VllmServer
from servers import EXAMPLES, FAMILY, KEY, TOKEN, Server, run_script
from typer.testing import CliRunner

from fp8refit import Refitter
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.cli import commands as cli
from fp8refit.remote.servers.server_driver import ServerDriver
from tests.engines.attempts import bad_policy
from tests.serving import ask_rawly, die, interrupted, read_metrics, run_driver
from tests.tiny_models import save_model

NUM_ASKED = 12
"""Requests of which some come to each process of a server."""


def run_served(work: str, options: dict[str, Any]) -> dict:
    """Policies over noise, then every attempt and the refit that heals it, on a server with these options."""
    folder = Path(work) / "bf16"
    save_model(FAMILY, 2, folder)
    quantize_checkpoint(folder, folder.with_name("fp8"))
    os.environ |= {"FP8REFIT_API_KEY": KEY, "FP8REFIT_TOKEN": TOKEN}
    with Server(folder, **options) as server:
        with booted(folder.with_name("fp8"), "fp32") as llm:  # while the server starts
            fresh = {"live": [live_bytes(llm)], "fingerprints": Refitter(llm).fingerprints()}
        server.wait()
        refitter = Refitter(server.url)
        found = {"fresh": fresh, "policies": try_policies(server, refitter)}
        for name, attempt in ATTEMPTS.items():
            found[name] = attempt(server, refitter, folder)
            Refitter(server.url).refit(make_policy(FAMILY, 2))
            found[name]["healed"] = server.live() == fresh["live"] and server.says() == found["policies"]["new"]
        return found


def try_policies(server: Server, refitter: Refitter) -> dict:
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
        "metrics": read_metrics(server.url),
    }


def try_files(server: Server, refitter: Refitter, folder: Path) -> dict:
    """A folder, which the server reads."""
    server.call("observe", "scribble")
    refitter.refit(folder)
    return {"live": server.live()}


def try_push(server: Server, refitter: Refitter, folder: Path) -> dict:
    """The same by the command line."""
    server.call("observe", "scribble")
    result = CliRunner().invoke(cli.app, ["push", str(folder), "--to", server.url, "--json"])
    doctor = CliRunner().invoke(cli.app, ["doctor", server.url, "--json"])
    found = {"live": server.live(), "code": result.exit_code, "said": result.stdout, "log": result.stderr}
    return found | {"doctor": doctor.stdout}


BARE = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("fastapi", "sglang", "transformers", "triton", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from pathlib import Path

from safetensors.torch import load_file

from fp8refit import Refitter
from fp8refit.checkpoint import push_checkpoint

url, folder = sys.argv[1:]
policy = {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
with Refitter(url) as refitter:
    print(refitter.refit(policy).version)
print(push_checkpoint(Path(folder), [url]).failed)
"""
"""A trainer's process that has torch and fp8refit, and no engine."""


def try_bare(server: Server, refitter: Refitter, folder: Path) -> dict:
    """From a process without any engine."""
    server.call("observe", "scribble")
    done = subprocess.run([sys.executable, "-c", BARE, server.url, str(folder)], capture_output=True, text=True)
    return {"live": server.live(), "code": done.returncode, "lines": done.stdout.split(), "log": done.stderr}


def try_example(server: Server, refitter: Refitter, folder: Path) -> dict:
    """What a user copies."""
    return run_script(EXAMPLES / "vllm_server.py", folder, server.url)


def try_meanwhile(server: Server, refitter: Refitter, folder: Path) -> dict:
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

    refitter.refit(interrupted(make_policy(FAMILY, 1), between))
    thread.join()
    return {"late": late[0], "new": server.complete(PROMPTS[0]), **other}


def try_bad_values(server: Server, refitter: Refitter, folder: Path) -> dict:
    """NaN, which is seen while it is written."""
    found = {"refit": refused(lambda: refitter.refit(bad_policy(FAMILY))), "metrics": read_metrics(server.url)}
    start_s = time.perf_counter()
    found |= {"status": server.complete(PROMPTS[0]), "seconds": time.perf_counter() - start_s}
    return found | {"statuses": [server.complete(PROMPTS[0])["status"] for _ in range(NUM_ASKED)]}


def try_killed_while_it_writes(server: Server, refitter: Refitter, folder: Path) -> dict:
    code = run_driver(lambda: Refitter(server.url).refit(interrupted(make_policy(FAMILY, 1), die)))
    return {"code": code, "status": server.complete(PROMPTS[0])}


def try_killed_before_it_writes(server: Server, refitter: Refitter, folder: Path) -> dict:
    """It dies while requests wait."""

    def refit() -> None:
        ServerDriver.flush_caches = die
        Refitter(server.url).refit(make_policy(FAMILY, 1))

    before = server.live()
    code = run_driver(refit)
    return {"code": code, "status": server.complete(PROMPTS[0]), "untouched": server.live() == before}


def try_strangers(server: Server, refitter: Refitter, folder: Path) -> dict:
    """Those that may not refit it, and those that nobody understands."""
    return {
        "key": refused(lambda: Refitter(VllmServer(server.url, api_key="another"))),
        "token": refused(lambda: Refitter(VllmServer(server.url, token=TOKEN[::-1]))),
        "no key": server.post("/v1/fp8refit", "{}", headers={}),
        "raw": ask_rawly(server.url, "/v1/fp8refit", token=TOKEN, key=KEY),
    }


ATTEMPTS: dict[str, Callable[[Server, Refitter, Path], dict]] = {
    "files": try_files,
    "push": try_push,
    "bare": try_bare,
    "example": try_example,
    "meanwhile": try_meanwhile,
    "bad values": try_bad_values,
    "killed while it writes": try_killed_while_it_writes,
    "killed before it writes": try_killed_before_it_writes,
    "strangers": try_strangers,
}
