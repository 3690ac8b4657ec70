"""Servers on some GPUs that answer without end, a trainer on another. With `--kills N` one is attacked (`tests/oracle`)."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import policies
import torch
from harness import WHOLE, free_bytes, log, save
from live_engines import HAS_GPU, PROMPTS

from fp8refit import Broadcaster, Refitter
from fp8refit.bench.shapes import block_fp8
from tests.oracle.campaign import WAYS as ALL_WAYS
from tests.oracle.campaign import Campaign, Plan
from tests.oracle.judge import Answer
from tests.oracle.load import Heard, Load
from tests.oracle.trainers import Setup
from tests.serving import free_port

NUM_CLIENTS = 16
"""Each asks for the next answer once it has one."""
NUM_TOKENS = 64
TIMEOUT_S = 120.0
START_S = 300.0
STOP_S = 15.0
STEP_S = 0.1
"""Between pushes, in which requests run."""
WAYS = ("wait", "keep")


class Served:
    """One server on noise of a model's shape, on GPUs of its own."""

    def __init__(self, args, replica: int) -> None:
        self.engine = args.engine
        self._log = args.out.with_name(f"{args.out.stem}-server-{replica}.log")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = dict(os.environ)
        if HAS_GPU:
            all_gpus = environment.get("CUDA_VISIBLE_DEVICES")
            names = all_gpus.split(",") if all_gpus else list(map(str, range(torch.cuda.device_count())))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[replica * args.tp : (replica + 1) * args.tp])
        command = {"vllm": vllm_command, "sglang": sglang_command}[args.engine](args.work / "dummy", args.tp)
        with open(self._log, "w") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait(self) -> None:
        """Until it takes requests."""
        deadline_s = time.monotonic() + START_S
        while self.post("/health", None)[0] != 200:
            assert self._process.poll() is None, f"the server ended; see {self._log}"
            assert time.monotonic() < deadline_s, "the server does not start"
            time.sleep(0.5)

    def complete(self, prompt: Sequence[int], num_tokens: int) -> Heard:
        """Go on greedily."""
        options = {"temperature": 0, "ignore_eos": True}
        if self.engine == "vllm":
            asked = {"model": "policy", "prompt": prompt, "max_tokens": num_tokens, **options, "return_token_ids": True}
            status, answer = self.post("/v1/completions", asked)
            return Heard(status, answer["choices"][0]["token_ids"] if status == 200 else ())
        asked = {"input_ids": prompt, "sampling_params": {"max_new_tokens": num_tokens, **options}}
        status, answer = self.post("/generate", asked)
        if status != 200:
            return Heard(status)
        return Heard(status, answer["output_ids"], answer["meta_info"].get("weight_version"))

    def post(self, route: str, body: dict | None) -> tuple[int, dict]:
        """Status and answer; status 0 if nobody answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as said:
                return said.status, json.loads(said.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, {}
        except OSError:
            return 0, {}

    def terminate(self) -> None:
        self._process.terminate()

    def wait_for_end(self) -> None:
        """What it leaves is ended by `scripts.run_scenario`."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log(f"the server does not end; see {self._log}")
            self._process.kill()


def vllm_command(model: Path, tp: int) -> list[str]:
    options = {
        "model": model,
        "served-model-name": "policy",
        "load-format": "dummy",
        "hf-overrides": json.dumps({"quantization_config": block_fp8(model)}),
        "max-model-len": 512,
        "max-num-seqs": 32,
        "gpu-memory-utilization": 0.35,
        "tensor-parallel-size": tp,
        "compilation-config": json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return ["vllm.entrypoints.openai.api_server", *flags, "--skip-tokenizer-init"]


def sglang_command(model: Path, tp: int) -> list[str]:
    options = {
        "model-path": model,
        "load-format": "dummy",
        "json-model-override-args": json.dumps({"quantization_config": block_fp8(model)}),
        "context-length": 512,
        "max-running-requests": 32,
        "mem-fraction-static": 0.35,
        "tp-size": tp,
        **(
            {"cuda-graph-max-bs-decode": NUM_CLIENTS, "attention-backend": "fa3", "sampling-backend": "pytorch"}
            if HAS_GPU
            else {"device": "cpu", "max-total-tokens": 8192}
        ),
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    graphs = "--disable-prefill-cuda-graph" if HAS_GPU else "--disable-cuda-graph"
    return ["sglang.launch_server", *flags, "--skip-tokenizer-init", graphs]


def run_servers(args) -> dict:
    policies.write_config(args.shape, args.work / "dummy")
    servers = [Served(args, replica) for replica in range(args.replicas)]
    found: dict = {}
    try:
        for server in servers:
            server.wait()
        log("booted")
        if HAS_GPU and not args.kills:
            torch.cuda.set_device(args.replicas * args.tp)
        for part in attack(servers[0], args) if args.kills else push_by_all(servers, args):
            found |= part
            save(args, found)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait_for_end()
    return found


def attack(server: Served, args) -> Iterator[dict]:
    """The content oracle's campaign, by trainers on the GPU after those of the server."""
    setup = Setup(
        url=server.url,
        shape=args.shape,
        device=f"cuda:{args.tp}" if HAS_GPU else "cpu",
        bucket_bytes=(32 if HAS_GPU else 1) << 20,
        timeout_s=60.0,
    )
    plan = Plan(
        pushes=args.pushes,
        poisoned=args.pushes,
        kills=3 * args.kills,
        kills_inside=args.kills,
        seconds=args.seconds,
        clients=NUM_CLIENTS if HAS_GPU else 3,
        tokens=24 if HAS_GPU else 16,
        prompts=(24, 200, 400, 120) if HAS_GPU else (24, 200),
        ways=tuple(args.by.split(",")),
        ahead=5 if HAS_GPU else 2,
    )
    return Campaign(setup, server.complete, plan, log).run()


def push_by_all(servers: list[Served], args) -> Iterator[dict]:
    policy = policies.allocate(args.shape)
    yield {"fingerprints": pull(servers, policy)}
    log("pulled")
    for way in WAYS:
        options = {"timeout_s": TIMEOUT_S, "in_flight": way}
        with Broadcaster([server.url for server in servers], **options) as broadcaster:
            yield {way: push(servers, broadcaster, policy, args)}
        log(f"pushed, in flight: {way}")


def pull(servers: list[Served], policy: dict) -> dict[int, list[str]]:
    """Both policies by mapped memory, while nobody asks: what every rank holds."""
    refitters = [Refitter(server.url, timeout_s=TIMEOUT_S) for server in servers]
    digests = {}
    for seed in (2, 1):
        policies.fill_policy(policy, seed)
        for refitter in refitters:
            refitter.refit(policy)
        digests[seed] = [digest for refitter in refitters for digest in refitter.fingerprints()]
    for refitter in refitters:
        refitter.close()
    return digests


def push(servers: list[Served], broadcaster: Broadcaster, policy: dict, args) -> dict:
    """Pushes while requests run, and what every rank holds after each."""
    broadcaster.push(policies.fill_policy(policy, 2))  # joins
    prompts = [[token % policies.SHAPES[args.shape]["vocab_size"] for token in prompt] for prompt in PROMPTS]
    loads = [Load(server.complete, prompts, num_clients=NUM_CLIENTS, num_tokens=NUM_TOKENS) for server in servers]
    steps: list[dict] = []
    for load in loads:
        load.__enter__()
    try:
        for step in range(args.pushes):
            policies.fill_policy(policy, 1 + step % 2)
            broadcaster.push(policy)
            steps.append(
                {
                    "seed": 1 + step % 2,
                    "fingerprints": broadcaster.fingerprints(),
                    "free_bytes": [free_bytes(gpu) for gpu in range(torch.cuda.device_count())],
                }
            )
            time.sleep(STEP_S)
    finally:
        for load in loads:
            load.__exit__()
    return {"steps": steps, "answers": [heard(load.answers) for load in loads]}


def heard(answers: Sequence[Answer]) -> dict:
    """What the clients of one server heard."""
    return {
        "statuses": [answer.status for answer in answers],
        "num_tokens": [len(answer.tokens) for answer in answers],
    }


OPTIONS = {
    "engine": {"choices": ("vllm", "sglang"), "required": True},
    "tp": WHOLE,
    "replicas": WHOLE,
    "pushes": WHOLE | {"default": 50},
    "kills": WHOLE | {"default": 0, "help": "attack one server until so many trainers died as they wrote"},
    "seconds": {"type": float, "default": 460.0, "help": "of the attack, at most"},
    "by": {"default": ",".join(ALL_WAYS), "help": "how policies come to a server that is attacked"},
}
MODES = {"servers": run_servers}
