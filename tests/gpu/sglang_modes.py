"""What `run_sglang.py` does in each of its modes."""

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import live_model
import policies
import sglang_observer
import torch
from checkpoints import fp8_folder, write_checkpoints
from measuring import PROMPTS, is_refused, log, measure_copy_gb_per_s, timed_refit, wait_for_gpu
from safetensors.torch import load_file
from sglang_observer import ask
from tiny_models import FP8_CONFIG, make_model, save_model
from torch import Tensor

from fp8refit import EngineDirtyError, NonFiniteError, Refitter
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.kernels.reference import quantize_reference
from fp8refit.live.layout import EngineLayout

NUM_WARM_UP = 6
"""Refits and generations after which nothing is allocated for the first time."""
SAMPLING = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
SHORT = SAMPLING | {"max_new_tokens": 4}
SHORT_PROMPT = [5, 80, 17, 200, 33, 101]
"""For the vocabulary of `tiny_models`."""
DUMMY = {"load_format": "dummy", "json_model_override_args": json.dumps({"quantization_config": FP8_CONFIG})}
FAMILIES = ("qwen2", "llama_tied")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

ON_GPU = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "cuda_graph_max_bs_decode": 4,
    "disable_prefill_cuda_graph": True,
    # Both policies of the trainer, its buckets and the copies that are timed live on the same GPU.
    "mem_fraction_static": 0.25,
}
ON_CPU = {"device": "cpu", "dtype": "bfloat16", "disable_cuda_graph": True, "max_total_tokens": 2048}

MIB = 1 << 20
BUCKETS = {"512 MiB": 512 * MIB, "2 GiB": 2048 * MIB, "one": None}
"""Bytes after which a bucket of SGLang's is full: what slime and verl take, more of it, and all at once."""
READY = "one, flattened beforehand"
USUAL = "512 MiB"


def boot(model: Path, **options):
    """An engine whose scheduler can be looked at."""
    import sglang

    log(f"boot {model.name}")
    sglang_observer.install(model.parent / "plugin")
    settings = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "context_length": 2048,
        "max_running_requests": 16,
        "random_seed": 0,
        "log_level": "info",
        **(ON_GPU if torch.cuda.is_available() else ON_CPU),
    }
    engine = sglang.Engine(**settings | options)
    log("booted")
    return engine


def boot_dummy(args, **options):
    policies.write_config(args.shape, args.work / "dummy")
    return boot(args.work / "dummy", **DUMMY | options)


def generate(engine, prompts: list[list[int]] = PROMPTS) -> dict:
    """Greedy tokens and every log-probability, as exact hexadecimal floats.

    One prompt after another: how requests fall into batches is a matter of time, and moves the last bits.
    """
    asked = {"sampling_params": SAMPLING, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 4}
    outputs = [engine.generate(input_ids=prompt, **asked) for prompt in prompts]
    metas = [output["meta_info"] for output in outputs]
    return {
        "tokens": [list(output["output_ids"]) for output in outputs],
        "logprobs": [[exact(step) for step in meta["output_top_logprobs"]] for meta in metas],
        "prompt_logprobs": [exact(meta["input_token_logprobs"]) for meta in metas],
    }


def exact(entries: list) -> list:
    """Tokens and log-probabilities; the first token of a prompt has none."""
    return [[token, None if logprob is None else float(logprob).hex()] for logprob, token, *_ in entries]


def drop_caches(engine) -> None:
    """And so wait until the scheduler has noticed that its last request is over."""
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.02)
    raise AssertionError("the scheduler does not come to rest")


def observe(engine, prompts: list[list[int]] = PROMPTS) -> dict:
    """What it says, and every rank's live bytes."""
    log("observe")
    drop_caches(engine)
    before = ask(engine, "replays")
    generated = generate(engine, prompts)
    after = ask(engine, "replays")
    return {
        "generated": generated,
        "graph_replays": [b - a for a, b in zip(before, after, strict=True)],
        "live": ask(engine, "live_bytes"),
    }


def run_refit(args) -> dict:
    engine = boot_dummy(args)
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    places = ask(engine, "places")
    refitter = Refitter(engine)
    result: dict = {"first_refit": timed_refit(refitter, policy), **observe(engine)}
    layout = refitter.layout()
    (args.work / "layout-1.json").write_text(layout.model_dump_json())
    result["kernels"] = sorted({f"{slot.kernel} {slot.scale_format}" for slot in layout.slots if slot.scale_format})
    result["attention_backend"] = engine.server_args.attention_backend
    result["num_tensors"] = len(policy)
    checksums = {0: ask(engine, "checksum")}
    result["steps"], num_free = [], None
    for step in range(1, args.refits + 1):
        # In place, as an optimizer writes: the memory stays where it is, and mapped.
        found = timed_refit(refitter, policies.fill_policy(policy, 1 + step % 2))
        checksum = ask(engine, "checksum")
        found["same_bytes"] = checksums.setdefault(step % 2, checksum) == checksum
        outputs = engine.generate(input_ids=PROMPTS, sampling_params=SHORT) if step % 3 else []
        found["tokens"] = [list(output["output_ids"]) for output in outputs]
        memory = ask(engine, "memory")
        if step == NUM_WARM_UP:
            num_free = memory[0]["free"]
        found["grown_bytes"] = 0 if num_free is None else num_free - memory[0]["free"]
        found["num_files"] = [memory[0]["num_files"], len(os.listdir("/proc/self/fd"))]
        result["steps"].append(found)
    result["policies_differ"] = checksums[0] != checksums[1]
    result["moved"] = places != ask(engine, "places")
    log("refitted")
    refitter.refit(policies.fill_policy(policy, 1))
    result["again"] = observe(engine)
    result["copy_gb_per_s"] = copy_gb_per_s()
    save(args, result)
    result["peer"] = time_peer(engine, refitter, policy, layout, checksums, args.rounds)
    save(args, result)
    log("bad input")
    result["bad_input"] = try_bad_input(engine, refitter, policy, checksums[0])
    refitter.close()
    engine.shutdown()
    return result


def copy_gb_per_s() -> float | None:
    return measure_copy_gb_per_s(0) if torch.cuda.is_available() else None


def time_peer(engine, refitter: Refitter, policy: dict, layout: EngineLayout, checksums: dict, rounds: int) -> dict:
    """Interleaved on one engine: SGLang's own update to policy 2, quantized before, and our refit to policy 1, from BF16.

    Both are timed from call to return, with and without the flush of the radix cache; the live bytes are looked at after each.
    """
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    if torch.cuda.is_available():
        monkey_patch_torch_reductions()
    log("quantize for the peer")
    quantized = prequantize(policies.fill_policy(policy, 2), layout)
    policies.fill_policy(policy, 1)
    buckets = {name: list(fill_buckets(quantized, max_bytes)) for name, max_bytes in BUCKETS.items()}
    found: dict = {"ours": [], "theirs": [], "copy_gb_per_s": [], "end_of_work_s": [], "from_bf16_s": []}
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in quantized)
    for round_ in range(rounds):
        log(f"round {round_}")
        found["copy_gb_per_s"].append(copy_gb_per_s())
        for name, is_flushed in [(name, is_flushed) for name in (*buckets, READY) for is_flushed in (True, False)]:
            ask(engine, "end_of_work")
            if name == READY:
                theirs = time_update(engine, [flatten(quantized)], is_flushed)
            else:
                theirs = time_update(engine, buckets[name], is_flushed)
            theirs |= {"round": round_, "buckets": name, "is_flushed": is_flushed}
            found["theirs"].append(theirs | {"same_bytes": ask(engine, "checksum") == checksums[1]})
            ours = timed_refit(refitter, policy) | {"round": round_}
            found["ours"].append(ours | {"same_bytes": ask(engine, "checksum") == checksums[0]})
        if torch.cuda.is_available():  # what a trainer with BF16 weights waits for; other scales, so other bytes
            start_s = time.perf_counter()
            named = list(quantize_by_sglang(policy, layout))
            torch.cuda.synchronize()
            quantized_s = time.perf_counter() - start_s
            theirs = time_update(engine, list(fill_buckets(named, BUCKETS[USUAL])), True)
            found["from_bf16_s"].append(quantized_s + theirs["s"])
            del named
            refitter.refit(policy)
        start_s = time.perf_counter()
        ask(engine, "end_of_work")
        found["end_of_work_s"].append(time.perf_counter() - start_s)
    return found | {"num_bytes": num_bytes, "num_buckets": {name: len(parts) for name, parts in buckets.items()}}


def prequantize(policy: dict[str, Tensor], layout: EngineLayout) -> list[tuple[str, Tensor]]:
    """The tensors of a block-FP8 checkpoint, by the torch specification."""
    named = []
    for slot in layout.slots:
        if slot.scale_format is None:
            named.append((slot.name, policy[slot.name].clone()))
            continue
        codes, scale, _ = quantize_reference(policy[slot.name], slot.format)
        named += [(slot.name, codes), (f"{slot.name}_scale_inv", scale)]
    return named


def quantize_by_sglang(policy: dict[str, Tensor], layout: EngineLayout) -> Iterator[tuple[str, Tensor]]:
    """The same by SGLang's own quantizer of weights, which rounds scales to powers of two."""
    from sglang.srt.layers.quantization.fp8_utils import quant_weight_ue8m0

    for slot in layout.slots:
        if slot.scale_format is None:
            yield slot.name, policy[slot.name]
        else:
            codes, scale = quant_weight_ue8m0(policy[slot.name], list(slot.block_size))
            yield slot.name, codes
            yield f"{slot.name}_scale_inv", scale


def fill_buckets(named: list[tuple[str, Tensor]], max_bytes: int | None) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in order, a new bucket before one would be larger; a larger tensor is a bucket of its own."""
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if bucket and max_bytes is not None and num_bytes + size > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += size
    yield bucket


def flatten(bucket: list[tuple[str, Tensor]]):
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return FlattenedTensorBucket(named_tensors=bucket)


def time_update(engine, buckets: list, is_flushed: bool) -> dict:
    """SGLang's own update, as slime and verl do it: flatten a bucket, hand over its IPC handle, wait, go on to the next."""
    from sglang.srt.utils import MultiprocessingSerializer

    has_sessions = hasattr(engine, "begin_weight_update")  # 0.5.17 has none
    wait_for_gpu()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    start_s = time.perf_counter()
    if has_sessions:
        engine.begin_weight_update()
    for index, bucket in enumerate(buckets, start=1):
        flat = flatten(bucket) if isinstance(bucket, list) else bucket
        payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        serialized = [MultiprocessingSerializer.serialize(payload) for _ in range(engine.server_args.tp_size)]
        success, message = engine.update_weights_from_tensor(
            serialized, load_format="flattened_bucket", flush_cache=is_flushed and index == len(buckets)
        )
        assert success, message
        del flat, payload
    if has_sessions:
        engine.end_weight_update()
    wall_s = time.perf_counter() - start_s
    ask(engine, "end_of_work")
    total_s = time.perf_counter() - start_s
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
    return {"s": wall_s, "with_end_of_work_s": total_s, "extra_bytes": torch.cuda.max_memory_allocated() - held}


def try_bad_input(engine, refitter: Refitter, policy: dict[str, Tensor], expected: list[int]) -> dict:
    """NaN in one tensor of all."""
    name = "model.layers.0.mlp.up_proj.weight"
    saved = policy[name][-1, 200].clone()
    policy[name][-1, 200] = float("nan")
    outcome: dict = {}
    try:
        Refitter(engine, validate="strict").refit(policy)
    except NonFiniteError as error:
        untouched = ask(engine, "checksum") == expected
        outcome["strict"] = {"names": error.names, "untouched": untouched, "dirty": refitter.is_dirty}
    try:
        refitter.refit(policy)
    except NonFiniteError as error:
        outcome["fused"] = {"names": error.names, "dirty": refitter.is_dirty}
    start_s = time.perf_counter()
    try:
        generate(engine)
    except EngineDirtyError:
        outcome["refused_s"] = time.perf_counter() - start_s
    policy[name][-1, 200] = saved
    refitter.refit(policy)
    outcome["healed"] = ask(engine, "checksum") == expected and not refitter.is_dirty
    outcome["answers"] = len(generate(engine)["tokens"]) == len(PROMPTS)
    return outcome


def run_checkpoint(args) -> dict:
    """No engine."""
    write_checkpoints(args.shape, args.work)
    return {}


def run_fresh(args) -> dict:
    layout = EngineLayout.model_validate_json((args.work / "layout-1.json").read_text())
    engine = boot(fp8_folder(args.work, layout))
    found = observe(engine)
    engine.shutdown()
    return found


def run_sleep(args) -> dict:
    """Tags in both orders: asleep is refused, awake is refitted to the same bytes."""
    try:
        import torch_memory_saver  # noqa: F401
    except ImportError as error:
        return {"unavailable": str(error)}
    make_cuda_runtime_findable()
    engine = boot_dummy(args, enable_memory_saver=True)
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    refitter = Refitter(engine)
    refitter.refit(policy)
    expected = observe(engine)
    result = {}
    for order in (["weights", "kv_cache"], ["kv_cache", "weights"]):
        log(f"sleep, {order[0]} first")
        drop_caches(engine)
        awake_bytes = free_bytes()
        engine.release_memory_occupation(tags=["kv_cache", "weights"])
        check = {"released_bytes": free_bytes() - awake_bytes, "refused": [is_refused(refitter, policy)]}
        for tag in order:
            engine.resume_memory_occupation(tags=[tag])
            if tag == "weights":
                refitter.refit(policy)
            elif order[0] == "kv_cache":
                check["refused"].append(is_refused(refitter, policy))
        found = observe(engine)
        check["unlike"] = [name for name in expected["live"][0] if found["live"][0][name] != expected["live"][0][name]]
        check["same_output"] = found["generated"] == expected["generated"]
        result[f"{order[0]} first"] = check
    engine.shutdown()
    return {"sleep": result, "graph_replays": expected["graph_replays"]}


def make_cuda_runtime_findable() -> None:
    """The memory saver is preloaded, before torch has loaded the CUDA runtime that it needs from a folder of its own."""
    if not torch.cuda.is_available():
        return
    torch.cuda.init()
    lines = Path("/proc/self/maps").read_text().splitlines()
    folders = {str(Path(line.split()[-1]).parent) for line in lines if "libcudart.so" in line}
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*sorted(folders), os.environ.get("LD_LIBRARY_PATH", "")])


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def run_families(args) -> dict:
    """Each refitted from noise, then booted afresh; every engine's scheduler is a process of its own."""
    result = {}
    for family in FAMILIES:
        folder = args.work / family
        save_model(family, 1, folder / "bf16")
        engine = boot(folder / "bf16", context_length=256, **DUMMY)
        refitter = Refitter(engine)
        for seed in (2, 1):
            refitter.refit(make_model(family, seed).to(policies.DEVICE).state_dict())
        layout = refitter.layout()
        refitted = observe(engine, [SHORT_PROMPT])
        refitter.close()
        engine.shutdown()
        if not (folder / "fp8").exists():
            quantize_checkpoint(folder / "bf16", folder / "fp8", like=layout)
        engine = boot(folder / "fp8", context_length=256)
        fresh = observe(engine, [SHORT_PROMPT])
        engine.shutdown()
        result[family] = {
            "refitted": refitted,
            "fresh": fresh,
            "scales": hash_scales(folder / "fp8", refitted["live"][0]),
            "kernels": sorted({f"{slot.kernel} {slot.scale_format}" for slot in layout.slots if slot.scale_format}),
            "aliases": layout.aliases,
        }
        save(args, {"families": result})
    return {"families": result}


def hash_scales(checkpoint: Path, live: Iterable[str]) -> dict[str, str]:
    """What the live scales should be, by the names of `live`: those of the checkpoint, put together."""
    tensors: dict[str, Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    scales = {}
    for name in live:
        module, _, leaf = name.removesuffix(".weight_scale_inv").rpartition(".")
        if name.endswith(".weight_scale_inv"):
            parts = FUSED.get(leaf, (leaf,))
            scales[name] = torch.cat([tensors[f"{module}.{part}.weight_scale_inv"] for part in parts])
    return live_model.hash_bytes(scales)


MODES = {
    "refit": run_refit,
    "checkpoint": run_checkpoint,
    "fresh": run_fresh,
    "sleep": run_sleep,
    "families": run_families,
}


def save(args, result: dict) -> None:
    """Also what is not complete yet: machines are dear."""
    versions = {name: metadata.version(name) for name in ("sglang", "sglang-kernel") if is_installed(name)}
    result["versions"] = versions | {"torch": torch.__version__, "cuda": torch.version.cuda}
    result["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    result["arguments"] = {key: str(value) for key, value in vars(args).items()}
    args.out.write_text(json.dumps(result))


def is_installed(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--shape", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--refits", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    result = MODES[args.mode](args)
    result["seconds"] = time.perf_counter() - start_s
    save(args, result)
    log("done")
    os._exit(0)  # what Python and SGLang take down after this says nothing
