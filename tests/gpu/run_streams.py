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
import pstats
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import side_by_side

PLACES = {place: {"VLLM_USE_DEEP_GEMM": "0"} for place in ("inside", "outside")}
"""DeepGEMM compiles for minutes."""
PROMPTS = [list(range(100, 140))]
FIRST_ROUNDS = 3


def main() -> None:
    parser = side_by_side.parser_of("place", PLACES, rounds=9)
    parser.add_argument(
        "--bucket-mib", type=int, help="of an update, 512; into another process that of the refitter, 256"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print what the host does, after everything was measured"
    )
    side_by_side.run(parser.parse_args(), "place", PLACES, measure, show)


def show(results: dict) -> None:
    for place, result in results.items():
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
    import policies
    import torch
    from harness import about, timed
    from live_engines import SMALL, Vllm
    from scripts import wait_for_turn

    import fp8refit
    from fp8refit import Refitter
    from fp8refit.bench.policies import in_buckets
    from fp8refit.training.peft import merged

    shape = arguments.shape
    with tempfile.TemporaryDirectory() as folder:
        policies.write_config(shape, Path(folder))
        is_sparse = "num_experts" in policies.SHAPES[shape]
        options = {"load_format": "dummy", "quantization": "fp8_per_block", "enforce_eager": True}
        engine = Vllm(Path(folder), is_inside=arguments.place == "inside", **SMALL | options)
    llm = engine.candidate
    wait_for_turn()
    policy = policies.fill_policy(policies.allocate(shape), 1)
    if is_sparse:
        policy = policies.expert_by_expert(policy)
    items = list(policy.items())
    num_bytes = sum(tensor.nbytes for tensor in policy.values())
    is_cut = arguments.place == "outside" and arguments.bucket_mib
    refitter = Refitter(llm, **({"bucket_bytes": arguments.bucket_mib << 20} if is_cut else {}))
    bucket_mib = arguments.bucket_mib or 512
    buckets = list(in_buckets(items, bucket_mib << 20))
    ways: dict[str, Callable[[], object]] = {
        "tensors at rest": lambda: refitter.refit(policy),
        "generator": lambda: refitter.refit(iter(items)),
        "function that gives a generator": lambda: refitter.refit(lambda: iter(items)),
        "verify": lambda: refitter.verify(policy),
    }
    if not is_sparse:
        models = {suffix: lora_over(policy, dtype) for suffix, dtype in (("", None), (", of FP32", torch.float32))}
        for suffix, model in models.items():
            ways[f"merged LoRA, rank 64{suffix}"] = lambda model=model: refitter.refit(merged(model))
    if arguments.place == "inside":
        worker, counting = engine.worker, Refitter(llm, count_changes=True)
        ways["tensors at rest, changes counted"] = lambda: counting.refit(policy)

        def update(parts: list) -> None:
            with fp8refit.update(worker) as update:
                for part in parts:
                    update.load(part)

        ways[f"update in buckets of {bucket_mib} MiB"] = lambda: update(buckets)
        ways["update tensor by tensor"] = lambda: update([[item] for item in items])
        ways["update by one generator"] = lambda: update([iter(items)])

        def reload_weights() -> None:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(items)})

        ways["vLLM's reload_weights of the same stream"] = reload_weights
    if not is_sparse:
        twin = {name: tensor.clone() for name, tensor in policy.items()}
        ways["another state dict"] = lambda: refitter.refit(twin)
    if arguments.place == "outside":
        pageable = {name: tensor.cpu() for name, tensor in policy.items()}
        pinned = {name: tensor.pin_memory() for name, tensor in pageable.items()} if torch.cuda.is_available() else {}
        ways["CPU tensors"] = lambda: refitter.refit(pageable)
        ways["pinned CPU tensors"] = lambda: refitter.refit(pinned or pageable)
    scratch = torch.empty(min(256 << 20, num_bytes), dtype=torch.uint8, device=policies.DEVICE)
    scratch_from = torch.empty_like(scratch)

    def copy() -> None:
        for _ in range(num_bytes // scratch.numel()):
            scratch.copy_(scratch_from)

    ways["copy of as many bytes"] = copy
    again = [name for name in ways if not name.startswith(("another", "vLLM's", "copy"))]
    checks: dict[str, object] = {"bytes": num_bytes, "tensors": len(policy)}
    refitter.refit(policy)
    expected, told = refitter.fingerprints(), engine.say(PROMPTS, 8)
    ms: dict[str, list[float]] = {name: [] for name in ways}
    first_ms: dict[str, list[float]] = {name: [] for name in ways}
    found = about() | {"ms": ms, "first_ms": first_ms, "checks": checks}

    def measure_once(name: str, into: dict[str, list[float]]) -> None:
        if into is ms and name in again:
            ways[name]()  # so that it is the same one again, not the next after another source
        gc.collect()
        seconds, extra_bytes, result = timed(ways[name])
        into[name].append(1e3 * seconds)
        checks[f"peak extra MiB of {name}"] = extra_bytes >> 20
        if name == "another state dict":
            checks[f"same bytes after {name}"] = refitter.fingerprints() == expected
            refitter.refit(policy)  # so that each time it is another one than before
        if name == "verify":
            checks["verify finds none"] = checks.get("verify finds none", True) and result.is_equal

    def put_right(name: str) -> None:
        if name.startswith("merged"):
            found = refitter.fingerprints()
            refitter.refit(dict(merged(models[name.removeprefix("merged LoRA, rank 64")])))
            checks[f"same bytes after {name}"] = refitter.fingerprints() == found
            refitter.refit(policy)
        elif name.startswith("vLLM's"):
            refitter.refit(policy)
        elif not name.startswith("copy"):
            checks[f"same bytes after {name}"] = refitter.fingerprints() == expected
            checks[f"same tokens after {name}"] = engine.say(PROMPTS, 8) == told

    for name in ways:
        for _ in range(1 if name.startswith("vLLM's") else FIRST_ROUNDS):  # which compile
            measure_once(name, first_ms)
        put_right(name)
        side_by_side.save(arguments.out, found)
    own = [name for name in ways if name.startswith("vLLM's")]
    for round_ in range(arguments.rounds):
        for name in (name for name in ways if name not in own):
            measure_once(name, ms)
            put_right(name) if round_ == arguments.rounds - 1 else None
        side_by_side.save(arguments.out, found)
    for name in own:  # after all others: what it replaces is read anew
        for _ in range(2):
            measure_once(name, ms)
        side_by_side.save(arguments.out, found)
    for name, call in ways.items() if arguments.profile else ():
        profile = cProfile.Profile()
        profile.runcall(call)
        print(f"\n{arguments.place}: {name}")
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    refitter.refit(policy)
    policy[items[-1][0]].view(-1)[-1] += 1.0
    checks["verify finds one"] = list(refitter.verify(policy).differing) == [items[-1][0]]
    side_by_side.save(arguments.out, found)
    refitter.close()


def lora_over(policy: dict, dtype):
    """Modules such as `peft` makes, around the matrices of a policy: rank 64, small values; of their dtype if None is said."""
    from torch import nn

    class Layer(nn.Module):
        disable_adapters, merged_adapters, active_adapters = False, (), ("default",)
        scaling = {"default": 0.5}  # noqa: RUF012

        def __init__(self, base):
            super().__init__()
            self.base_layer = base
            rows, columns = base.weight.shape
            options = {"device": base.weight.device, "dtype": dtype or base.weight.dtype}
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
