"""How fast streams reach a vLLM engine on a GPU, in its own process and in another. Prints a table and writes JSON, row by row.

    python tests/gpu/run_streams.py --out benchmarks/results/streams.json                        # both, about 3 minutes
    python tests/gpu/run_streams.py --out FILE --shape qwen3-30b-a3b --place inside --bucket-mib 2048   # needs 110 GiB

Each place has an engine of its own, in a process of its own. They boot side by side and measure one after the other. Times are
of the whole call, everything synchronised before and after; medians of interleaved rounds. `--shape tiny` tries the script
where vLLM runs on a CPU.
"""

import argparse
import cProfile
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PLACES = {"inside": "0", "outside": "1"}
ROUNDS = 9
FIRST_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument(
        "--bucket-mib", type=int, help="of an update, 512; into another process that of the refitter, 256"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--profile", action="store_true", help="print what the host does, after everything was measured"
    )
    parser.add_argument("--here", action="store_true", help="in this process, which then is the engine's")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        measure(arguments)
        return
    found = {"command": f"python {' '.join(sys.argv)}", "shape": arguments.shape, "places": {}}
    os.environ.setdefault("FP8REFIT_TURN", str(arguments.out.with_suffix(".turn")))
    started = {place: start(place, arguments) for place in ([arguments.place] if arguments.place else PLACES)}
    codes = []
    for place, (process, part) in started.items():
        codes.append(abs(process.wait()))
        found["places"][place] = json.loads(part.read_text()) if part.exists() else {}
        part.unlink(missing_ok=True)
        save(arguments.out, found)
    show(found)
    sys.exit(max(codes))


def save(out: Path, found: dict) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")


def start(place: str, arguments: argparse.Namespace) -> tuple[subprocess.Popen[bytes], Path]:
    """Its process, and the file in which it writes what it finds."""
    out = arguments.out.with_name(f"{arguments.out.stem}.{place}.part.json")
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--here", "--place", place, "--out", str(out), "--shape", arguments.shape]
    command += ["--rounds", str(arguments.rounds)]
    command += ["--bucket-mib", str(arguments.bucket_mib)] if arguments.bucket_mib else []
    command += ["--profile"] if arguments.profile else []
    return subprocess.Popen(command, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": PLACES[place]}), out


def show(found: dict) -> None:
    for place, result in found["places"].items():
        if not result:
            print(f"\n{place}: nothing")
            continue
        print(f"\n{place}: {result['gpu']}, vLLM {result['vllm']}, torch {result['torch']}")
        for name, seconds in result["ms"].items():
            if not seconds:
                continue
            print(f"  {name:42} {statistics.median(seconds):8.2f} ms   best {min(seconds):8.2f}")
        for name, value in result["checks"].items():
            print(f"  {name:42} {value}")


def measure(arguments: argparse.Namespace) -> None:
    """Write what was found after every row."""
    os.environ |= {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",  # it compiles for minutes
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
    }
    sys.path.append(str(Path(__file__).parents[2]))
    import policies
    import torch
    import vllm
    from measuring import gpu_name, timed
    from scripts import wait_for_turn
    from surroundings import cpu_options
    from vllm import LLM

    import fp8refit
    from fp8refit import Refitter
    from fp8refit.training.peft import merged

    shape = arguments.shape
    with tempfile.TemporaryDirectory() as folder:
        policies.write_config(shape, Path(folder))
        is_sparse = "num_experts" in policies.SHAPES[shape]
        memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
        options = {"max_model_len": 2048} | (cpu_options() or memory)
        llm = LLM(
            model=folder,
            load_format="dummy",
            quantization="fp8_per_block",
            skip_tokenizer_init=True,
            max_num_seqs=16,
            enforce_eager=True,
            **options,
        )
    wait_for_turn()
    policy = policies.fill_policy(policies.allocate(shape), 1)
    if is_sparse:
        policy = policies.expert_by_expert(policy)
    items = list(policy.items())
    num_bytes = sum(tensor.nbytes for tensor in policy.values())
    is_cut = arguments.place == "outside" and arguments.bucket_mib
    refitter = Refitter(llm, **({"bucket_bytes": arguments.bucket_mib << 20} if is_cut else {}))
    bucket_mib = arguments.bucket_mib or 512
    buckets = in_buckets(items, bucket_mib << 20)
    prompt = {"prompt_token_ids": list(range(100, 140))}
    sampling = vllm.SamplingParams(max_tokens=8, temperature=0, detokenize=False)

    def tokens() -> list[int]:
        return list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    ways: dict[str, Callable[[], object]] = {
        "tensors at rest": lambda: refitter.refit(policy),
        "generator": lambda: refitter.refit(iter(items)),
        "function that gives a generator": lambda: refitter.refit(lambda: iter(items)),
        "verify": lambda: refitter.verify(policy),
    }
    model = lora_over(policy)
    if not is_sparse:
        ways["merged LoRA, rank 64"] = lambda: refitter.refit(merged(model))
    if arguments.place == "inside":
        worker = llm.llm_engine.model_executor.driver_worker.worker

        def update(parts: list) -> None:
            with fp8refit.update(worker) as update:
                for part in parts:
                    update.load(part)

        ways[f"update in buckets of {bucket_mib} MiB"] = lambda: update(buckets)
        ways["update tensor by tensor"] = lambda: update([[item] for item in items])
        ways["update by one generator"] = lambda: update([iter(items)])
        reload = {"weights_iterator": iter(())}

        def reload_weights() -> None:
            llm.collective_rpc("reload_weights", kwargs=reload | {"weights_iterator": iter(items)})

        ways["vLLM's reload_weights of the same stream"] = reload_weights
    scratch = torch.empty(min(256 << 20, num_bytes), dtype=torch.uint8, device=policies.DEVICE)
    scratch_from = torch.empty_like(scratch)

    def copy() -> None:
        for _ in range(num_bytes // scratch.numel()):
            scratch.copy_(scratch_from)

    ways["copy of as many bytes"] = copy
    checks: dict[str, object] = {"bytes": num_bytes, "tensors": len(policy)}
    refitter.refit(policy)
    expected, told = refitter.fingerprints(), tokens()
    ms: dict[str, list[float]] = {name: [] for name in ways}
    first_ms: dict[str, list[float]] = {name: [] for name in ways}
    found = {"gpu": gpu_name(), "vllm": vllm.__version__, "torch": torch.__version__}
    found |= {"ms": ms, "first_ms": first_ms, "checks": checks}

    def measure_once(name: str, into: dict[str, list[float]]) -> None:
        gc.collect()
        result, seconds, extra_bytes = timed(ways[name])
        into[name].append(1e3 * seconds)
        checks[f"peak extra MiB of {name}"] = extra_bytes >> 20
        if name == "verify":
            checks["verify finds none"] = checks.get("verify finds none", True) and result.is_equal

    def put_right(name: str) -> None:
        if name.startswith("merged"):
            found = refitter.fingerprints()
            refitter.refit(dict(merged(model)))
            checks[f"same bytes after {name}"] = refitter.fingerprints() == found
            refitter.refit(policy)
        elif name.startswith("vLLM's"):
            refitter.refit(policy)
        elif not name.startswith("copy"):
            checks[f"same bytes after {name}"] = refitter.fingerprints() == expected
            checks[f"same tokens after {name}"] = tokens() == told

    for name in ways:
        for _ in range(1 if name.startswith("vLLM's") else FIRST_ROUNDS):  # which compile
            measure_once(name, first_ms)
        put_right(name)
        save(arguments.out, found)
    for round_ in range(arguments.rounds):
        for name in ways:
            if not (name.startswith("vLLM's") and round_ > 1):
                measure_once(name, ms)
                put_right(name) if round_ == arguments.rounds - 1 else None
        save(arguments.out, found)
    for name, call in ways.items() if arguments.profile else ():
        profile = cProfile.Profile()
        profile.runcall(call)
        print(f"\n{arguments.place}: {name}")
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    refitter.refit(policy)
    policy[items[-1][0]].view(-1)[-1] += 1.0
    checks["verify finds one"] = list(refitter.verify(policy).differing) == [items[-1][0]]
    save(arguments.out, found)
    refitter.close()


def in_buckets(items: list, num_bytes: int) -> list[list]:
    buckets: list[list] = [[]]
    held = 0
    for name, tensor in items:
        if buckets[-1] and held + tensor.nbytes > num_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append((name, tensor))
        held += tensor.nbytes
    return buckets


def lora_over(policy: dict):
    """Modules such as `peft` makes, around the matrices of a policy: rank 64, small values."""
    from torch import nn

    class Layer(nn.Module):
        disable_adapters, merged_adapters, active_adapters = False, (), ("default",)
        scaling = {"default": 0.5}  # noqa: RUF012

        def __init__(self, base):
            super().__init__()
            self.base_layer = base
            rows, columns = base.weight.shape
            options = {"device": base.weight.device, "dtype": base.weight.dtype}
            self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, 64, bias=False, **options)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(64, rows, bias=False, **options)})

    root = nn.Module()
    for name, tensor in policy.items():
        *path, leaf, key = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        if leaf not in module._modules:
            is_matrix = tensor.ndim == 2 and leaf.endswith("_proj")
            child = nn.Linear(1, 1, bias=False, device="meta") if is_matrix else nn.Module()
            setattr(child, key, nn.Parameter(tensor, requires_grad=False))
            module.add_module(leaf, Layer(child) if is_matrix else child)
        else:
            child = module._modules[leaf]
            setattr(getattr(child, "base_layer", child), key, nn.Parameter(tensor, requires_grad=False))
    return root


if __name__ == "__main__":
    main()
