"""One vLLM engine in this process, doing one of the things that `test_vllm.py` compares. Prints nothing of its own; the
result is a JSON file.

    python run_vllm.py refit    --shape S --work DIR --out FILE    refit a dummy engine to 50 policies; write checkpoints
    python run_vllm.py fresh    --shape S --work DIR --out FILE    boot from the FP8 checkpoint that `refit` wrote
    python run_vllm.py baseline --shape S --work DIR --out FILE    vLLM's own reload_weights beside our refit
    python run_vllm.py sleep    --shape S --work DIR --out FILE    refit between sleep and wake-up
    python run_vllm.py families --shape - --work DIR --out FILE    refit small eager engines of the other dense families
    python run_vllm.py fresh_families ...                          boot them from the FP8 checkpoints that `families` wrote
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

sys.path.append(str(Path(__file__).parents[1]))

import policies
import torch
import vllm
from measuring import PROMPTS, generate, measure_copy_gb_per_s, vllm_sampling
from safetensors.torch import save_file
from tiny_models import FP8_CONFIG, make_model, save_model
from vllm import LLM, SamplingParams

from fp8refit import EngineAsleepError, EngineBusyError, EngineDirtyError, NonFiniteError, Refitter
from fp8refit.checkpoint import quantize_checkpoint
from fp8refit.kernels.reference import quantize_reference
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.live.layout import EngineLayout


class GraphCounter:
    """Counts CUDA graph replays in this process."""

    def __init__(self) -> None:
        self.replays = 0
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph):
            self.replays += 1
            return replay(graph)

        torch.cuda.CUDAGraph.replay = counted


def boot(model: Path, **options) -> LLM:
    settings = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.35,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    }
    return LLM(**settings | options)


def live_state(llm: LLM) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer of the live model, by the engine's own name."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model().state_dict()


def hash_live(llm: LLM) -> dict[str, str]:
    def digest(item):
        name, tensor = item
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        return name, hashlib.sha256(raw).hexdigest()

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(digest, sorted(live_state(llm).items())))


def pointers(llm: LLM) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in live_state(llm).items()}


def count_wrong_slots(refitter: Refitter, policy: dict[str, torch.Tensor]) -> int:
    """Slots whose live bytes differ from what the torch specification makes of the policy."""
    slots = refitter._engine.ranks._rank.target.live.inventory.slots
    wrong = 0
    for slot in slots:
        source = policy[slot.name]
        if slot.is_quantized:
            codes, scale, _ = quantize_reference(source, slot.format)
            same = torch.equal(codes.view(torch.uint8), slot.weight.view(torch.uint8)) and torch.equal(
                scale, slot.scale
            )
        else:
            same = torch.equal(source.view(torch.int16), slot.weight.view(torch.int16))
        wrong += not same
    return wrong


class FirstLaunchClock:
    """Host seconds from the call of `refit` to the return of its first launch, of a kernel or a graph of them."""

    def __init__(self) -> None:
        self.at_s: float | None = None
        launch = TritonTable.launch

        def timed(table, **kwargs):
            launch(table, **kwargs)
            if self.at_s is None:
                self.at_s = time.perf_counter()

        TritonTable.launch = timed

    def time(self, refitter: Refitter, policy: dict[str, torch.Tensor]):
        self.at_s = None
        start_s = time.perf_counter()
        report = refitter.refit(policy)
        return report, self.at_s - start_s, time.perf_counter() - start_s


def save_checkpoint(shape: str, policy: dict[str, torch.Tensor], folder: Path) -> None:
    policies.write_config(shape, folder)
    names = list(policy)
    weight_map = {}
    half = len(names) // 2
    for index, part in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{index:05d}-of-00002.safetensors"
        save_file({name: policy[name].cpu() for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def run_refit(shape: str, work: Path) -> dict:
    graphs = GraphCounter()
    policies.write_config(shape, work / "dummy")
    llm = boot(work / "dummy", load_format="dummy", hf_overrides={"quantization_config": FP8_CONFIG})
    clock = FirstLaunchClock()
    sets = [policies.allocate(shape), policies.allocate(shape)]
    result: dict = {"steps": []}

    refitter = Refitter(llm)
    policy = policies.fill_policy(sets[0], 1)
    before = pointers(llm)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    report, first_launch_s, wall_s = clock.time(refitter, policy)
    result["first_refit"] = {
        "wall_s": wall_s,
        "first_launch_s": first_launch_s,
        "phases_s": report.phases_s,
        "peak_extra_bytes": torch.cuda.max_memory_allocated() - allocated,
    }
    result["wrong_slots_first"] = count_wrong_slots(refitter, policy)
    replays = graphs.replays
    result["generated"] = generate(llm)
    result["graph_replays_in_generate"] = graphs.replays - replays
    result["live"] = hash_live(llm)

    layout = refitter.layout()
    result["kernels"] = sorted({(slot.kernel, str(slot.scale_format)) for slot in layout.slots if slot.scale_format})
    (work / "layout.json").write_text(layout.model_dump_json())
    save_checkpoint(shape, policy, work / "bf16")
    quantize_checkpoint(work / "bf16", work / "fp8", like=EngineLayout.model_validate_json(layout.model_dump_json()))
    torch.cuda.empty_cache()

    free_bytes = None
    for step in range(2, 52):
        policy = policies.fill_policy(sets[step % 2], step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        report, first_launch_s, wall_s = clock.time(refitter, policy)
        peak = torch.cuda.max_memory_allocated() - allocated
        wrong = count_wrong_slots(refitter, policy)
        tokens = llm.generate(
            [{"prompt_token_ids": PROMPTS[0]}],
            SamplingParams(max_tokens=4, temperature=0, detokenize=False),
            use_tqdm=False,
        )
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        free_bytes = free_bytes if free_bytes is not None else free
        result["steps"].append(
            {
                "wall_s": wall_s,
                "first_launch_s": first_launch_s,
                "fill_device_s": report.fill_device_s,
                "phases_s": report.phases_s,
                "peak_extra_bytes": peak,
                "wrong_slots": wrong,
                "grown_bytes": free_bytes - free,
                "token": tokens[0].outputs[0].token_ids[0],
            }
        )
    result["num_bytes"] = report.bytes_read + report.bytes_written
    result["num_tensors"] = report.num_tensors
    result["copy_gb_per_s"] = measure_copy_gb_per_s(torch.cuda.current_device())
    result["moved"] = [name for name, pointer in pointers(llm).items() if before[name] != pointer]

    refitter.refit(policies.fill_policy(sets[0], 1))
    result["live_again"] = hash_live(llm)
    result["generated_again"] = generate(llm)
    result["bad_input"] = try_bad_input(llm, refitter, sets[0])
    result["streams"] = try_streams(llm, refitter, sets[0], work, result["live"])
    return result


def try_bad_input(llm: LLM, refitter: Refitter, policy: dict[str, torch.Tensor]) -> dict:
    """NaN in one tensor of all, in every mode; unfinished requests."""
    outcome = {}
    name = "model.layers.7.mlp.up_proj.weight"
    saved = policy[name][300, 200].clone()
    policy[name][300, 200] = float("nan")
    before = hash_live(llm)
    strict = Refitter(llm, validate="strict")
    try:
        strict.refit(policy)
    except NonFiniteError as error:
        outcome["strict"] = {"names": error.names, "untouched": hash_live(llm) == before, "dirty": strict.is_dirty}
    try:
        refitter.refit(policy)
    except NonFiniteError as error:
        outcome["fused"] = {"names": error.names, "dirty": refitter.is_dirty}
    start_s = time.perf_counter()
    try:
        generate(llm)
    except EngineDirtyError:
        outcome["refused_s"] = time.perf_counter() - start_s
    outcome["left_behind"] = llm.llm_engine.get_num_unfinished_requests()
    policy[name][300, 200] = saved
    refitter.refit(policy)
    outcome["healed"] = hash_live(llm) == before and not refitter.is_dirty
    llm.llm_engine.add_request("held", {"prompt_token_ids": PROMPTS[0]}, vllm_sampling())
    try:
        refitter.refit(policy)
    except EngineBusyError:
        outcome["busy"] = True
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    refitter.refit(policy)
    return outcome


def try_streams(llm: LLM, refitter: Refitter, policy: dict, work: Path, expected: dict[str, str]) -> dict:
    """The same policy from CPU tensors, files and iterators; seconds, and whether the bytes are the same."""
    cpu = {name: tensor.cpu() for name, tensor in policy.items()}
    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    scratch = torch.empty(max(tensor.numel() for tensor in policy.values()), dtype=torch.bfloat16, device="cuda")

    def reused_buffer():
        for name, tensor in policy.items():
            view = scratch[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    half = {name: (tensor if index % 2 else cpu[name]) for index, (name, tensor) in enumerate(policy.items())}
    sources = {
        "cpu": (cpu, None),
        "cpu_and_cuda": (half, None),
        "safetensors": (work / "bf16", None),
        "one_shot": (reused_buffer(), None),
        "one_shot_manifest": (reused_buffer(), manifest),
        "prequantized": (work / "fp8", None),
        "fp32": ({name: tensor.float() for name, tensor in policy.items()}, None) if len(policy) < 350 else (cpu, None),
    }
    outcome = {}
    for kind, (source, manifest_) in sources.items():
        for slot in refitter._engine.ranks._rank.target.live.inventory.slots:
            with torch.inference_mode():
                slot.weight.view(torch.uint8).fill_(0x55)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        start_s = time.perf_counter()
        refitter.refit(source, manifest=manifest_)
        outcome[kind] = {
            "s": time.perf_counter() - start_s,
            "peak_extra_bytes": torch.cuda.max_memory_allocated() - allocated,
            "same_bytes": hash_live(llm) == expected,
        }
    return outcome


def run_fresh(shape: str, work: Path) -> dict:
    graphs = GraphCounter()
    llm = boot(work / "fp8")
    replays = graphs.replays
    generated = generate(llm)
    return {
        "generated": generated,
        "graph_replays_in_generate": graphs.replays - replays,
        "live": hash_live(llm),
    }


def run_baseline(shape: str, work: Path) -> dict:
    """Interleaved on one engine and the same CUDA tensors: our refit and vLLM's own `reload_weights`."""
    policies.write_config(shape, work / "dummy")
    llm = boot(work / "dummy", load_format="dummy", quantization="fp8_per_block")
    clock = FirstLaunchClock()
    sets = [policies.fill_policy(policies.allocate(shape), seed) for seed in (1, 2)]
    refitter = Refitter(llm)
    report, first_launch_s, wall_s = clock.time(refitter, sets[0])
    result: dict = {"first_refit": {"wall_s": wall_s, "phases_s": report.phases_s}, "ours": [], "reload_weights": []}
    copy_rates = []
    for round_ in range(12):
        policy = sets[round_ % 2]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        start_s = time.perf_counter()
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(policy.items())})
        torch.cuda.synchronize()
        result["reload_weights"].append(
            {
                "s": time.perf_counter() - start_s,
                "peak_extra_bytes": torch.cuda.max_memory_allocated() - allocated,
                "wrong_slots": count_wrong_reloaded(llm, policy) if round_ in (0, 11) else None,
            }
        )
        if round_ % 4 == 0:
            # Its 8 GiB stay in torch's cache: a fill right after memory went back to the driver is 5 to 20 % slower.
            copy_rates.append(measure_copy_gb_per_s(torch.cuda.current_device()))
        refitter.refit(sets[(round_ + 1) % 2])  # whatever the reload replaced is read again here
        torch.cuda.synchronize()
        report, first_launch_s, wall_s = clock.time(refitter, policy)
        phases = report.phases_s
        result["ours"].append(
            {
                "s": phases["plan"] + phases["fill"] + phases["verify"],
                "wall_s": wall_s,
                "phases_s": phases,
                "first_launch_s": first_launch_s,
                "fill_device_s": report.fill_device_s,
                "wrong_slots": count_wrong_slots(refitter, policy) if round_ in (0, 11) else None,
            }
        )
    start_s = time.perf_counter()
    llm.reset_prefix_cache()
    result["flush_s"] = time.perf_counter() - start_s
    result["copy_gb_per_s"] = statistics.median(copy_rates)
    result["num_bytes"] = report.bytes_read + report.bytes_written
    result["num_tensors"] = report.num_tensors
    return result


def count_wrong_reloaded(llm: LLM, policy: dict[str, torch.Tensor]) -> int:
    """Fused matrices whose live bytes differ from vLLM's own cast and power-of-two requantization of the policy."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    live = live_state(llm)
    wrong = 0
    for name in (name for name in live if name.endswith("weight_scale_inv")):
        module = name.removesuffix(".weight_scale_inv")
        parent, _, leaf = module.rpartition(".")
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(
            leaf, (leaf,)
        )
        source = torch.cat([policy[f"{parent}.{part}.weight"] for part in parts])
        codes, scale = per_block_cast_to_fp8(source, [128, 128], use_ue8m0=False)
        requant_weight_ue8m0_inplace(codes, scale, [128, 128])
        same = torch.equal(codes.view(torch.uint8), live[f"{module}.weight"].view(torch.uint8))
        wrong += not (same and torch.equal(scale, live[name]))
    return wrong


def run_sleep(shape: str, work: Path) -> dict:
    """Levels 1 and 2, tags in both orders: asleep is refused, awake is refitted to the same bytes.

    Not level 2 with the KV cache first: vLLM 0.26 then restores buffers into weights that are not mapped, a CUDA fault of
    its own.
    """
    policies.write_config(shape, work / "dummy")
    llm = boot(
        work / "dummy",
        load_format="dummy",
        hf_overrides={"quantization_config": FP8_CONFIG},
        enable_sleep_mode=True,
    )
    policy = policies.fill_policy(policies.allocate(shape), 1)
    refitter = Refitter(llm)
    refitter.refit(policy)
    expected = hash_live(llm)
    generated = generate(llm)
    result = {}
    for level in (1, 2):
        for first in ("weights", "kv_cache")[: 3 - level]:
            llm.sleep(level=level)
            refused = []
            try:
                refitter.refit(policy)
            except EngineAsleepError:
                refused.append("asleep")
            if first == "kv_cache":
                llm.wake_up(tags=["kv_cache"])
                try:
                    refitter.refit(policy)
                except EngineAsleepError:
                    refused.append("kv_cache awake")
                llm.wake_up(tags=["weights"])
                refitter.refit(policy)
            else:
                llm.wake_up(tags=["weights"])
                refitter.refit(policy)
                llm.wake_up(tags=["kv_cache"])
            result[f"level {level}, {first} first"] = {
                "refused": refused,
                "same_bytes": hash_live(llm) == expected,
                "same_output": generate(llm) == generated,
            }
    return result


FAMILIES = ("llama", "llama_tied", "qwen2", "mistral")
SHORT_PROMPT = {"prompt_token_ids": [5, 80, 17, 200, 33, 101]}


def boot_small(model: Path, order: int, **options) -> LLM:
    """An eager engine beside those that this process booted before it."""
    return boot(model, enforce_eager=True, max_model_len=256, gpu_memory_utilization=0.08 * (order + 1), **options)


def observe_small(llm: LLM) -> dict:
    output = llm.generate(SHORT_PROMPT, vllm_sampling(), use_tqdm=False)[0].outputs[0]
    logprobs = [{str(token): entry.logprob.hex() for token, entry in step.items()} for step in output.logprobs]
    return {"live": hash_live(llm), "tokens": list(output.token_ids), "logprobs": logprobs}


def run_families(_: str, work: Path) -> dict:
    result = {}
    for order, family in enumerate(FAMILIES):
        save_model(family, 1, work / family / "bf16")
        llm = boot_small(
            work / family / "bf16", order, load_format="dummy", hf_overrides={"quantization_config": FP8_CONFIG}
        )
        refitter = Refitter(llm)
        for seed in (2, 1):
            model = make_model(family, seed).cuda()
            refitter.refit(model.state_dict())
        layout = refitter.layout()
        quantize_checkpoint(work / family / "bf16", work / family / "fp8", like=layout)
        kernels = sorted({f"{slot.kernel} {slot.scale_format}" for slot in layout.slots if slot.scale_format})
        result[family] = observe_small(llm) | {"kernels": kernels, "aliases": layout.aliases}
    return result


def run_fresh_families(_: str, work: Path) -> dict:
    return {family: observe_small(boot_small(work / family / "fp8", order)) for order, family in enumerate(FAMILIES)}


MODES = {
    "refit": run_refit,
    "fresh": run_fresh,
    "baseline": run_baseline,
    "sleep": run_sleep,
    "families": run_families,
    "fresh_families": run_fresh_families,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--shape", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    result = MODES[args.mode](args.shape, args.work)
    result["versions"] = {"vllm": vllm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    result["gpu"] = torch.cuda.get_device_name()
    result["seconds"] = time.perf_counter() - start_s
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
