"""What `run_layouts.py` does in each of its modes."""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

import policies
import torch
import vllm
from checkpoints import fp8_folder, write_checkpoints
from measuring import PROMPTS, generate, is_refused, log, measure_copy_gb_per_s, timed_refit
from tiny_models import FP8_CONFIG
from vllm import LLM, SamplingParams

from fp8refit import EngineDirtyError, NonFiniteError, Refitter
from fp8refit.live.layout import EngineLayout

NUM_REFITS = 50
NUM_WARM_UP = 6
"""Refits and generations after which nothing is allocated for the first time."""
SHORT = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
DUMMY = {"load_format": "dummy", "hf_overrides": {"quantization_config": FP8_CONFIG}}


def settings(model: Path, **options) -> dict:
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.35,
        "max_num_batched_tokens": 2048,
        # CUDA graphs without torch.compile, which would take most of the time; `run_vllm.py` has both.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        },
        "worker_extension_cls": "observer.Observer",
        **options,
    }


def observe(llm: LLM) -> dict:
    """What it says, and every rank's live bytes."""
    log("observe")
    before = llm.collective_rpc("observe_replays")
    generated = generate(llm)
    after = llm.collective_rpc("observe_replays")
    return {
        "generated": generated,
        "graph_replays": [b - a for a, b in zip(before, after, strict=True)],
        "live": llm.collective_rpc("observe_live_bytes"),
    }


def run_refit(args) -> dict:
    policies.write_config(args.shape, args.work / f"dummy-{args.tp}")
    llm = LLM(**settings(args.work / f"dummy-{args.tp}", tensor_parallel_size=args.tp, **DUMMY))
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    log("booted")
    places = llm.collective_rpc("observe_places")
    refitter = Refitter(llm)
    result: dict = {"first_refit": timed_refit(refitter, policy), **observe(llm)}
    (args.work / f"layout-{args.tp}.json").write_text(refitter.layout().model_dump_json())
    checksums = {0: llm.collective_rpc("observe_checksum")}
    llm.collective_rpc("observe_memory")
    result["steps"], free = [], None
    for step in range(1, NUM_REFITS + 1):
        # In place, as an optimizer writes: the memory stays where it is, and mapped.
        found = timed_refit(refitter, policies.fill_policy(policy, 1 + step % 2))
        checksum = llm.collective_rpc("observe_checksum")
        found["same_bytes"] = checksums.setdefault(step % 2, checksum) == checksum
        load = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(load, SHORT, use_tqdm=False) if step % 3 else []
        found["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        memory = llm.collective_rpc("observe_memory")
        if step == NUM_WARM_UP:
            free = [rank["free"] for rank in memory]
        found["grown_bytes"] = [was - rank["free"] for was, rank in zip(free, memory, strict=True)] if free else []
        found["num_files"] = [rank["num_files"] for rank in memory]
        result["steps"].append(found)
    log("refitted")
    result["policies_differ"] = checksums[0] != checksums[1]
    result["moved"] = places != llm.collective_rpc("observe_places")
    refitter.refit(policies.fill_policy(policy, 1))
    result["again"] = observe(llm)
    log("bad input")
    result["bad_input"] = try_bad_input(llm, refitter, policy, checksums[0])
    log("sources")
    result["sources"] = try_sources(llm, refitter, policy, checksums[0])
    log("copy")
    result["copy_gb_per_s"] = [measure_copy_gb_per_s(device) for device in range(args.tp)]
    refitter.close()
    llm.llm_engine.engine_core.shutdown()
    return result


def try_bad_input(llm: LLM, refitter: Refitter, policy: dict, expected: list[int]) -> dict:
    """NaN where the last rank alone holds it."""
    name = "model.layers.7.mlp.up_proj.weight"
    saved = policy[name][-1, 200].clone()
    policy[name][-1, 200] = float("nan")
    outcome: dict = {}
    try:
        Refitter(llm, validate="strict").refit(policy)
    except NonFiniteError as error:
        outcome["strict"] = {
            "names": error.names,
            "untouched": llm.collective_rpc("observe_checksum") == expected,
            "dirty": refitter.is_dirty,
        }
    try:
        refitter.refit(policy)
    except NonFiniteError as error:
        outcome["fused"] = {"names": error.names, "dirty": refitter.is_dirty}
    start_s = time.perf_counter()
    try:
        generate(llm)
    except EngineDirtyError:
        outcome["refused_s"] = time.perf_counter() - start_s
    policy[name][-1, 200] = saved
    refitter.refit(policy)
    outcome["healed"] = llm.collective_rpc("observe_checksum") == expected and not refitter.is_dirty
    return outcome


def try_sources(llm: LLM, refitter: Refitter, policy: dict, expected: list[int]) -> dict:
    """The same policy otherwise: memory that the trainer freed and took anew, CPU tensors, a reused CUDA buffer."""
    scratch = torch.empty(max(tensor.numel() for tensor in policy.values()), dtype=torch.bfloat16, device="cuda")

    def reused_buffer():
        for name, tensor in policy.items():
            view = scratch[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    def freed_and_taken_anew():
        twin = {name: tensor.clone() for name, tensor in policy.items()}
        refitter.refit(twin)
        del twin
        torch.cuda.empty_cache()
        return {name: tensor.clone() for name, tensor in policy.items()}

    last_gpu = f"cuda:{torch.cuda.device_count() - 1}"
    sources = {
        "memory taken anew": freed_and_taken_anew,
        "CPU tensors": lambda: {name: tensor.cpu() for name, tensor in policy.items()},
        "reused CUDA buffer": reused_buffer,
        "last GPU": lambda: {name: tensor.to(last_gpu) for name, tensor in policy.items()},
    }
    if len(expected) > 1:
        del sources["CPU tensors"]  # takes the host 20 s, and nothing else than on one rank
    found = {}
    for kind, make in sources.items():
        log(kind)
        source = make()
        start_s = time.perf_counter()
        refitter.refit(source)
        seconds = time.perf_counter() - start_s
        found[kind] = {"s": seconds, "same_bytes": llm.collective_rpc("observe_checksum") == expected}
        del source
    return found


def run_checkpoint(args) -> dict:
    """No engine."""
    write_checkpoints(args.shape, args.work)
    return {}


def run_fresh(args) -> dict:
    layout = EngineLayout.model_validate_json((args.work / f"layout-{args.tp}.json").read_text())
    llm = LLM(**settings(fp8_folder(args.work, layout), tensor_parallel_size=args.tp))
    found = observe(llm)
    llm.llm_engine.engine_core.shutdown()
    return found


def boot_external(model: Path, tp: int, **options) -> LLM:
    return LLM(
        **settings(model, tensor_parallel_size=tp, distributed_executor_backend="external_launcher", seed=0, **options)
    )


def run_external(args) -> dict:
    rank = int(os.environ["RANK"])
    policies.write_config(args.shape, args.work / f"external-{rank}")
    llm = boot_external(args.work / f"external-{rank}", args.tp, **DUMMY)
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    refitter = Refitter(llm)
    steps = [timed_refit(refitter, policies.fill_policy(policy, step)) for step in range(20)]
    refitter.refit(policies.fill_policy(policy, 1))
    found = observe(llm)
    bad = dict(policy)
    if rank == args.tp - 1:
        name = "model.norm.weight"
        bad[name] = torch.full_like(bad[name], float("nan"))
    try:
        refitter.refit(bad)
    except NonFiniteError as error:
        found["bad"] = {"names": error.names, "dirty": refitter.is_dirty}
    refitter.refit(policy)
    again = observe(llm)
    found["healed"] = (again["live"], again["generated"]) == (found["live"], found["generated"])
    return found | {"steps": steps, "copy_gb_per_s": measure_copy_gb_per_s(torch.cuda.current_device())}


def run_served(args) -> dict:
    return asyncio.run(serve(args))


async def serve(args) -> dict:
    """AsyncLLM: requests run all the time, and are kept through every refit."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    policies.write_config(args.shape, args.work / "served")
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings(args.work / "served", **DUMMY)))
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    refitter = Refitter(llm, in_flight="keep")
    await refitter.refit_async(policy)
    expected = await llm.collective_rpc("observe_checksum")
    finished: list[tuple[str, int]] = []
    is_over = False

    async def ask(lane: int) -> None:
        count = 0
        while not is_over:
            count += 1
            sampling = SamplingParams(max_tokens=40 + 17 * lane, temperature=0, detokenize=False, ignore_eos=True)
            async for output in llm.generate({"prompt_token_ids": PROMPTS[lane]}, sampling, f"{lane}-{count}"):
                last = output
            finished.append((last.outputs[0].finish_reason, len(last.outputs[0].token_ids) - sampling.max_tokens))

    lanes = [asyncio.create_task(ask(lane)) for lane in range(4)]
    steps = []
    for step in range(1, NUM_REFITS + 1):
        await asyncio.sleep(0.1)
        start_s = time.perf_counter()
        report = await refitter.refit_async(policies.fill_policy(policy, 1 + step % 2))
        memory = await llm.collective_rpc("observe_memory")
        steps.append(
            {
                "wall_s": time.perf_counter() - start_s,
                "phases_s": report.phases_s,
                "num_interrupted": report.num_interrupted,
                "free_bytes": memory[0]["free"],
            }
        )
    is_over = True
    await asyncio.gather(*lanes)
    same = await llm.collective_rpc("observe_checksum") == expected
    llm.shutdown()
    return {
        "steps": steps,
        "num_finished": len(finished),
        "unlike_asked": [entry for entry in finished if entry != ("length", 0)],
        "same_bytes": same,
    }


def run_sleep(args) -> dict:
    """Levels 1 and 2, tags in both orders: asleep is refused, awake is refitted to the same bytes.

    Not level 2 with the KV cache first: vLLM 0.26 then restores buffers into weights that are not mapped, a CUDA fault of
    its own.
    """
    policies.write_config(args.shape, args.work / "sleep")
    llm = LLM(**settings(args.work / "sleep", tensor_parallel_size=args.tp, enable_sleep_mode=True, **DUMMY))
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    refitter = Refitter(llm)
    refitter.refit(policy)
    expected, generated = llm.collective_rpc("observe_live_bytes"), generate(llm)
    result = {}
    for level in (1, 2):
        for first in ("weights", "kv_cache")[: 3 - level]:
            llm.sleep(level=level)
            refused = [is_refused(refitter, policy)]
            if first == "kv_cache":
                llm.wake_up(tags=["kv_cache"])
                refused.append(is_refused(refitter, policy))
                llm.wake_up(tags=["weights"])
                refitter.refit(policy)
            else:
                llm.wake_up(tags=["weights"])
                refitter.refit(policy)
                llm.wake_up(tags=["kv_cache"])
            result[f"level {level}, {first} first"] = {
                "refused": refused,
                "same_bytes": llm.collective_rpc("observe_live_bytes") == expected,
                "same_output": generate(llm) == generated,
            }
    llm.llm_engine.engine_core.shutdown()
    return {"sleep": result}


MODES = {
    "refit": run_refit,
    "fresh": run_fresh,
    "checkpoint": run_checkpoint,
    "external": run_external,
    "served": run_served,
    "sleep": run_sleep,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--shape", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    result = MODES[args.mode](args)
    result["versions"] = {"vllm": vllm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    result["gpu"] = torch.cuda.get_device_name()
    result["seconds"] = time.perf_counter() - start_s
    args.out.write_text(json.dumps(result))
    os._exit(0)  # what Python and vLLM take down after this takes seconds, and says nothing
