"""Refits by several builds of fp8refit, in turn, on one GPU: has a commit made them slower? Writes JSON.

    pip wheel . --no-deps -w COMMIT/        # each in a folder named after its commit, so that the result says what ran
    python tests/gpu/run_interleaved.py --out FILE before=COMMIT/fp8refit-0.1.0-py3-none-any.whl after=COMMIT/fp8refit-...whl
    ... --place outside                               # vLLM's engine in a process of its own
    ... --place stream                                # outside, and a generator gives the policy tensor by tensor
    ... --place server                                # behind vLLM's HTTP server
    ... --place broadcast                             # outside, and policies come by NCCL, from the second GPU if there is one
    ... --engine sglang

Every build has an engine in a process of its own. All live side by side and take turns, refit by refit, so that whatever slows
the machine slows them all. The Qwen3-8B shape takes 26 GiB per build. `--shape tiny` tries it on a CPU.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from run import VLLM
from scripts import wait_for_turn

HERE = Path(__file__).parent
ON_ONE_GPU = {"NCCL_HOSTID": "engine", "NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_ENABLE": "0"}
"""NCCL refuses two ranks on one GPU of one host. On two hosts they meet over sockets."""
PLACES = ("inside", "outside", "stream", "server", "broadcast")
NUM_ROUNDS, NUM_WARM_UP = 40, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", metavar="NAME=WHEEL")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--place", choices=PLACES, default="inside", help="of vLLM's engine")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Start an engine per build, then ask each in turn."""
    builds = dict(build.split("=", 1) for build in options.builds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        children = {name: start(name, Path(wheel), Path(folder), options) for name, wheel in builds.items()}
        try:
            about = {name: answer_of(child, name, options) for name, child in children.items()}
            wait_for_turn()
            for name, child in children.items():
                print("allocate", file=child.stdin, flush=True)
                answer_of(child, name, options)
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
            names = list(children)
            for round_ in range(NUM_WARM_UP + options.rounds):
                first = round_ % len(names)
                for name in names[first:] + names[:first]:  # none always follows the same one
                    print("refit", file=children[name].stdin, flush=True)
                    answers[name].append(answer_of(children[name], name, options))
                if round_ >= NUM_WARM_UP:
                    milliseconds = save(options.out, about, answers)
        finally:
            for child in children.values():
                os.killpg(child.pid, signal.SIGKILL)  # with its engine or server
    first = milliseconds[next(iter(builds))]
    for name, found in milliseconds.items():
        print(f"{name:20} {found:8.2f} ms  {found / first:6.3f} x")


def save(out: Path, about: dict[str, Any], answers: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Write what was found until now; medians in milliseconds."""
    seconds = {name: [answer["wall_s"] for answer in found] for name, found in answers.items()}
    milliseconds = {name: 1e3 * statistics.median(found[NUM_WARM_UP:]) for name, found in seconds.items()}
    first = milliseconds[next(iter(seconds))]
    result = {
        "command": shlex.join(["python", "tests/gpu/run_interleaved.py", *sys.argv[1:]]),
        "about": about,
        "first_refit_s": {name: found[0] for name, found in seconds.items()},
        "median_ms": milliseconds,
        "against_the_first": {name: found / first for name, found in milliseconds.items()},
        "phases_ms": {name: phases_of(found[NUM_WARM_UP:]) for name, found in answers.items()},
        "seconds": seconds,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    return milliseconds


def phases_of(answers: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each phase, as the reports have them; a name that a build lacks counts as nothing."""
    names = dict.fromkeys(phase for answer in answers for phase in answer["phases_s"])
    return {phase: 1e3 * statistics.median(answer["phases_s"].get(phase, 0.0) for answer in answers) for phase in names}


def start(name: str, wheel: Path, folder: Path, options: argparse.Namespace) -> "subprocess.Popen[str]":
    """A process that has one build before all others on its path."""
    site = folder / name
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    path = [str(site), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | VLLM
    environment |= {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", "fp8refit"),  # or a server adds no routes
        "NCCL_NVLS_ENABLE": "0",
    }
    with open(options.out.with_suffix(f".{name}.log"), "w") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "--child", *sys.argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
            start_new_session=True,
        )


def answer_of(child: "subprocess.Popen[str]", name: str, options: argparse.Namespace) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"{name} has ended; see {options.out.with_suffix(f'.{name}.log')}")
    return json.loads(line)


def serve(options: argparse.Namespace) -> None:
    """Boot an engine; then do what each line on standard input says: allocate a policy, or refit it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output
    sys.path += [str(HERE.parent), str(HERE.parents[1])]
    import policies
    import torch
    from harness import wait_for_gpu

    import fp8refit

    is_alone = torch.cuda.device_count() < 2
    if options.place == "broadcast" and is_alone:
        os.environ |= ON_ONE_GPU
    with tempfile.TemporaryDirectory() as folder:
        policies.write_config(options.shape, Path(folder))
        engine = serve_vllm(folder) if options.place == "server" else boot(options, Path(folder))
    policy: dict[str, torch.Tensor] = {}
    if options.place == "broadcast":
        if is_alone:
            os.environ |= {"NCCL_HOSTID": "trainer"}
        else:
            torch.cuda.set_device(1)
        refit = fp8refit.Broadcaster([engine], timeout_s=120).push
    else:
        refit = fp8refit.Refitter(engine).refit

    def tell(answer: dict) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    tell(
        {
            "fp8refit": fp8refit.__file__,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "num_gpus": 1 if is_alone else 2,
            "shape": options.shape,
        }
    )
    for line in sys.stdin:
        if line.strip() == "allocate":
            policy = policies.fill_policy(policies.allocate(options.shape), 1)
            tell({})
            continue
        source = iter(policy.items()) if options.place == "stream" else policy
        wait_for_gpu()
        start_s = time.perf_counter()
        report = refit(source)
        wait_for_gpu()
        wall_s = time.perf_counter() - start_s
        tell({"wall_s": wall_s, "phases_s": report.phases_s})


def serve_vllm(model: str) -> str:
    """Start a server, and return its URL once it answers. It ends with this process."""
    from fp8refit.bench.shapes import block_fp8

    # Not `tests.serving.free_port`: that module imports what old builds lack.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    room = {"gpu-memory-utilization": 0.05, "kv-cache-memory-bytes": 1 << 30}
    if not Path("/dev/nvidiactl").exists():
        room = {"gpu-memory-utilization": 0.1, "num-gpu-blocks-override": 64, "dtype": "bfloat16"}
    settings = {
        "model": model,
        "load-format": "dummy",
        "hf-overrides": json.dumps({"quantization_config": block_fp8(Path(model))}),
        "max-num-seqs": 16,
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": 512,
        **room,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *flags]
    server = subprocess.Popen([*command, "--skip-tokenizer-init", "--enforce-eager"], stdout=2)
    url = f"http://127.0.0.1:{port}"
    while True:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        except OSError:
            time.sleep(0.5)


def boot(options: argparse.Namespace, model: Path) -> Any:
    from live_engines import SMALL, Sglang, Vllm

    if options.engine == "vllm":
        settings = SMALL | {"max_model_len": 512, "enforce_eager": True}
        return Vllm(model, is_inside=options.place == "inside", is_noise=True, **settings).candidate
    settings = {"context_length": 512, "max_total_tokens": 4096, "mem_fraction_static": 0.5, "disable_cuda_graph": True}
    return Sglang(model, is_noise=True, **settings).candidate


if __name__ == "__main__":
    main()
