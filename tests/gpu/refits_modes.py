"""One engine that is refitted again and again, and others that it is compared with.

    refit         a noise engine, refitted between generations
    checkpoint    no engine: policy 1 as block FP8, by the layouts that engines left in the folder
    fresh         boots from the checkpoint
    sleep         refits between sleep and wake-up
    families      small engines of other dense families, each refitted, and booted afresh
    external      vLLM: one rank of an external launcher (RANK in the environment)
    served        vLLM: `AsyncLLM` under load, requests kept

`--online fp8_per_tensor`, or another name: the engine quantizes by itself, the fresh one too. `--checkpoint nvfp4`: its
checkpoints hold that. `--inside`: vLLM is in this
process, compiled by torch.compile, and what its rank holds is held against the specification.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import live_model
import policies
import torch
from checkpoints import count_wrong, fp8_folder, kernels_of, slots_of, write_checkpoints, write_layout
from harness import FLAG, WHOLE, free_bytes, log, measure_copy_gb_per_s, save, timed, timed_refit
from live_engines import HAS_GPU, PROMPTS, SMALL, Engine, Sglang, Vllm, as_prompts, greedy, vllm_settings
from safetensors.torch import load_file
from tiny_models import make_model, save_model
from torch import Tensor

from fp8refit import EngineAsleepError, EngineBusyError, EngineDirtyError, NonFiniteError, Refitter
from fp8refit.bench.shapes import CHECKPOINTS
from fp8refit.checkpoint import quantize_checkpoint

NUM_WARM_UP = 6
"""Refits and generations after which nothing is allocated for the first time."""
NUM_SHORT = 4
BAD = "model.layers.0.mlp.up_proj.weight"
SHORT_PROMPT = [5, 80, 17, 200, 33, 101]
"""For the vocabulary of `tiny_models`."""
FAMILIES = {"vllm": ("llama", "llama_tied", "qwen2", "mistral"), "sglang": ("qwen2", "llama_tied")}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def boot(args, model: Path, *, is_noise: bool = False, **options: Any) -> Engine:
    if args.engine == "sglang":
        return Sglang(model, is_noise=is_noise, tp_size=args.tp, **options)
    place = {"is_inside": args.inside, "is_compiled": args.inside, "tensor_parallel_size": args.tp}
    return Vllm(model, is_noise=is_noise, **place | options)


def boot_noise(args, **options: Any) -> Engine:
    folder = args.work / f"dummy-{os.environ.get('RANK', 0)}-{args.tp}"
    policies.write_config(args.shape, folder)
    if args.online:
        config = {"json_model_override_args": "{}"} if args.engine == "sglang" else {"hf_overrides": {}}
        options |= {"quantization": args.online} | config
    if args.checkpoint:
        options["checkpoint"] = args.checkpoint
    return boot(args, folder, is_noise=True, **options)


class FirstLaunchClock:
    """Host seconds from the call of `refit` to the return of its first launch in this process, of a kernel or a graph."""

    def __init__(self) -> None:
        self.first_launch_s: float | None = None
        if not HAS_GPU:
            return
        from fp8refit.kernels.triton_table import TritonTable

        launch, refit, start_s = TritonTable.launch, Refitter.refit, [0.0]

        def timed_launch(table, **options):
            launch(table, **options)
            if self.first_launch_s is None:
                self.first_launch_s = time.perf_counter() - start_s[0]

        def timed_call(refitter, *arguments, **options):
            self.first_launch_s, start_s[0] = None, time.perf_counter()
            return refit(refitter, *arguments, **options)

        TritonTable.launch, Refitter.refit = timed_launch, timed_call


def run_refit(args) -> dict:
    """In place, as an optimizer writes, so that memory stays where it is, and mapped; inside in two sets of memory in turn, and
    to as many policies as there are refits.
    """
    engine, clock = boot_noise(args), FirstLaunchClock()
    is_here = engine.worker is not None
    sets = [policies.allocate(args.shape) for _ in range(1 + is_here)]
    refitter, places = Refitter(engine.candidate), engine.ask("places")

    def step_to(seed: int) -> dict:
        policy = policies.fill_policy(sets[seed % len(sets)], seed)
        found = timed_refit(refitter, policy) | {"first_launch_s": clock.first_launch_s}
        return found | {"wrong_slots": count_wrong(refitter, policy) if is_here else None}

    result: dict = {"first_refit": step_to(1), **engine.observe()}
    layout = refitter.layout()
    if not args.online:
        write_layout(layout, args.work, args.tp)
    result |= {"kernels": kernels_of(layout), "num_tensors": len(sets[0]), "steps": []}
    if is_here:
        write_checkpoints(args.shape, args.work, sets[1])
    checksums, free = {1: engine.ask("checksum")}, None
    for step in range(1, args.refits + 1):
        seed = 1 + (step if is_here else step % 2)
        found = step_to(seed)
        checksum = engine.ask("checksum")
        found["same_bytes"] = checksums.setdefault(seed, checksum) == checksum
        found["tokens"] = engine.say(PROMPTS, NUM_SHORT) if is_here or step % 3 else []
        if is_here and HAS_GPU:
            torch.cuda.empty_cache()
        memory = engine.ask("memory")
        if step == NUM_WARM_UP:
            free = [rank["free"] for rank in memory]
        found["grown_bytes"] = [was - rank["free"] for was, rank in zip(free, memory, strict=True)] if free else []
        found["num_files"] = [*(rank["num_files"] for rank in memory), live_model.memory()["num_files"]]
        result["steps"].append(found)
    log("refitted")
    result["policies_differ"] = len(set(map(str, checksums.values()))) == len(checksums)
    now = engine.ask("places")
    result["moved"] = [
        name for was, rank in zip(places, now, strict=True) for name in was if rank.get(name) != was[name]
    ]
    policy = policies.fill_policy(sets[-1], 1)
    refitter.refit(policy)
    result["again"] = engine.observe()
    result["copy_gb_per_s"] = [measure_copy_gb_per_s(index) for index in range(args.tp)]
    save(args, result)
    if isinstance(engine, Sglang):
        result["attention_backend"] = engine.candidate.server_args.attention_backend
    log("bad input")
    result["bad_input"] = try_bad_input(engine, refitter, policy, checksums[1])
    if isinstance(engine, Vllm):
        log("sources")
        result["sources"] = try_sources(engine, refitter, policy, checksums[1], args)
    refitter.close()
    engine.shutdown()
    return result


def try_bad_input(engine: Engine, refitter: Refitter, policy: dict[str, Tensor], expected: list[int]) -> dict:
    """NaN in one tensor of all, where the last rank alone holds it; inside, unfinished requests too."""
    saved = policy[BAD][-1, 200].clone()
    policy[BAD][-1, 200] = float("nan")
    outcome: dict = {}
    strict = Refitter(engine.candidate, validate="strict")
    try:
        strict.refit(policy)
    except NonFiniteError as error:
        is_untouched = engine.ask("checksum") == expected
        is_dirty = strict.is_dirty or refitter.is_dirty
        outcome["strict"] = {"names": error.names, "untouched": is_untouched, "dirty": is_dirty}
    try:
        refitter.refit(policy)
    except NonFiniteError as error:
        outcome["fused"] = {"names": error.names, "dirty": refitter.is_dirty}
    start_s = time.perf_counter()
    try:
        engine.generate()
    except EngineDirtyError:
        outcome["refused_s"] = time.perf_counter() - start_s
    if engine.worker is not None:
        outcome["left_behind"] = engine.candidate.llm_engine.get_num_unfinished_requests()
    policy[BAD][-1, 200] = saved
    refitter.refit(policy)
    outcome["healed"] = engine.ask("checksum") == expected and not refitter.is_dirty
    outcome["answers"] = len(engine.generate()["tokens"]) == len(PROMPTS)
    if engine.worker is not None:
        outcome["busy"] = is_refused_while_busy(engine.candidate.llm_engine, refitter, policy)
    return outcome


def is_refused_while_busy(llm_engine: Any, refitter: Refitter, policy: dict[str, Tensor]) -> bool:
    llm_engine.add_request("held", *as_prompts(PROMPTS[:1]), greedy(24))
    is_refused = is_raised(EngineBusyError, lambda: refitter.refit(policy))
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    refitter.refit(policy)
    return is_refused


def is_raised(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def try_sources(engine: Vllm, refitter: Refitter, policy: dict[str, Tensor], expected: list[int], args) -> dict:
    """The same policy otherwise: memory that the trainer freed and took anew, a reused buffer, and what is not on the GPU."""
    scratch = torch.empty(max(map(Tensor.numel, policy.values())), dtype=torch.bfloat16, device=policies.DEVICE)

    def reused_buffer() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in policy.items():
            view = scratch[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    def taken_anew() -> dict[str, Tensor]:
        twin = {name: tensor.clone() for name, tensor in policy.items()}
        refitter.refit(twin)
        del twin
        torch.cuda.empty_cache()
        return {name: tensor.clone() for name, tensor in policy.items()}

    def on_cpu() -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in policy.items()}

    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    last_gpu = f"cuda:{torch.cuda.device_count() - 1}" if HAS_GPU else "cpu"
    sources: dict[str, Callable[[], Any]] = {"memory taken anew": taken_anew, "one_shot": reused_buffer}
    if engine.worker is None:
        sources["last GPU"] = lambda: {name: tensor.to(last_gpu) for name, tensor in policy.items()}
    if args.tp == 1:  # takes the host 20 s, and nothing else than on one rank
        sources["cpu"] = on_cpu
    if engine.worker is not None:
        sources |= {
            "cpu_and_cuda": lambda: {
                name: tensor if index % 2 else tensor.cpu() for index, (name, tensor) in enumerate(policy.items())
            },
            "safetensors": lambda: args.work / "bf16",
            "one_shot_manifest": reused_buffer,
        }
        if not args.online and not args.checkpoint:
            sources["prequantized"] = lambda: fp8_folder(args.work, args.tp)
        if len(policy) < 350:
            sources["fp32"] = lambda: {name: tensor.float() for name, tensor in policy.items()}
    found = {}
    for kind, make in sources.items():
        log(kind)
        source = make()
        for slot in slots_of(refitter) if engine.worker is not None else ():
            with torch.inference_mode():
                slot.weight.view(torch.uint8).fill_(0x55)
        options = {"manifest": manifest} if kind == "one_shot_manifest" else {}
        seconds, extra_bytes, _ = timed(partial(refitter.refit, source, **options))
        is_same = engine.ask("checksum") == expected
        found[kind] = {"s": seconds, "peak_extra_bytes": extra_bytes, "same_bytes": is_same}
        del source
    return found


def run_checkpoint(args) -> dict:
    write_checkpoints(args.shape, args.work)
    return {}


def run_fresh(args) -> dict:
    if args.online:
        engine = boot(args, args.work / "bf16", quantization=args.online)
    else:
        engine = boot(args, fp8_folder(args.work, args.tp))
    found = engine.observe()
    engine.shutdown()
    return found


def run_sleep(args) -> dict:
    """Asleep is refused, awake is refitted to the same bytes."""
    if args.engine == "sglang":
        try:
            import torch_memory_saver  # noqa: F401
        except ImportError as error:
            return {"unavailable": str(error)}
        make_cuda_runtime_findable()
    engine = boot_noise(args, **{"enable_memory_saver" if args.engine == "sglang" else "enable_sleep_mode": True})
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    refitter = Refitter(engine.candidate)
    refitter.refit(policy)
    expected, result = engine.observe(), {}
    for name, how, order in engine.naps():
        log(f"sleep: {name}")
        engine.drop_caches()
        awake_bytes = free_bytes()
        engine.sleep(**how)
        refused = [is_raised(EngineAsleepError, lambda: refitter.refit(policy))]
        check: dict = {"released_bytes": free_bytes() - awake_bytes, "refused": refused}
        for tag in order:
            engine.wake(tag)
            if tag == "weights":
                refitter.refit(policy)
            elif order[0] == "kv_cache":
                refused.append(is_raised(EngineAsleepError, lambda: refitter.refit(policy)))
        found = engine.observe()
        pairs = zip(found["live"], expected["live"], strict=True)
        check["unlike"] = [name for now, was in pairs for name in was if now.get(name) != was[name]]
        check["same_bytes"] = found["live"] == expected["live"]
        check["same_output"] = found["generated"] == expected["generated"]
        result[name] = check
    engine.shutdown()
    return {"sleep": result, "graph_replays": expected["graph_replays"]}


def make_cuda_runtime_findable() -> None:
    """SGLang's memory saver is preloaded, before torch has loaded the CUDA runtime that it needs from a folder of its own."""
    if not HAS_GPU:
        return
    torch.cuda.init()
    lines = Path("/proc/self/maps").read_text().splitlines()
    folders = {str(Path(line.split()[-1]).parent) for line in lines if "libcudart.so" in line}
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*sorted(folders), os.environ.get("LD_LIBRARY_PATH", "")])


def run_families(args) -> dict:
    """Each refitted from noise, then booted afresh; every engine has a process of its own."""
    small = (
        {"context_length": 256} if args.engine == "sglang" else {"max_model_len": 256, "enforce_eager": True, **SMALL}
    )
    result = {}
    for family in FAMILIES[args.engine]:
        folder = args.work / family
        save_model(family, 1, folder / "bf16")
        engine = boot(args, folder / "bf16", is_noise=True, **small)
        refitter = Refitter(engine.candidate)
        for seed in (2, 1):
            refitter.refit(make_model(family, seed).to(policies.DEVICE).state_dict())
        layout = refitter.layout()
        refitted = engine.observe([SHORT_PROMPT])
        refitter.close()
        engine.shutdown()
        if not (folder / "fp8").exists():
            quantize_checkpoint(folder / "bf16", folder / "fp8", like=layout)
        engine = boot(args, folder / "fp8", **small)
        fresh = engine.observe([SHORT_PROMPT])
        engine.shutdown()
        result[family] = {
            "refitted": refitted,
            "fresh": fresh,
            "scales": hash_scales(folder / "fp8", refitted["live"][0]),
            "kernels": [" ".join(kernel) for kernel in kernels_of(layout)],
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


def run_external(args) -> dict:
    args.inside = True
    options = {"distributed_executor_backend": "external_launcher", "seed": 0, "is_compiled": False}
    engine = boot_noise(args, **options)
    policy = policies.allocate(args.shape)
    refitter = Refitter(engine.candidate)
    steps = [timed_refit(refitter, policies.fill_policy(policy, step)) for step in range(20)]
    refitter.refit(policies.fill_policy(policy, 1))
    found = engine.observe()
    bad = dict(policy)
    if int(os.environ["RANK"]) == args.tp - 1:
        name = "model.norm.weight"
        bad[name] = torch.full_like(bad[name], float("nan"))
    try:
        refitter.refit(bad)
    except NonFiniteError as error:
        found["bad"] = {"names": error.names, "dirty": refitter.is_dirty}
    refitter.refit(policy)
    again = engine.observe()
    found["healed"] = (again["live"], again["generated"]) == (found["live"], found["generated"])
    return found | {"steps": steps, "copy_gb_per_s": measure_copy_gb_per_s()}


def run_served(args) -> dict:
    return asyncio.run(serve(args))


async def serve(args) -> dict:
    """AsyncLLM: requests run all the time, and are kept through every refit."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    policies.write_config(args.shape, args.work / "served")
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**vllm_settings(args.work / "served", is_noise=True)))
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    refitter = Refitter(llm, in_flight="keep")
    await refitter.refit_async(policy)
    expected = await llm.collective_rpc("observe_rank", args=("checksum",))
    finished: list[tuple[str, int]] = []
    is_over = False

    async def ask(lane: int) -> None:
        count = 0
        while not is_over:
            count += 1
            sampling = greedy(40 + 17 * lane)
            async for output in llm.generate(as_prompts(PROMPTS)[lane], sampling, f"{lane}-{count}"):
                last = output
            finished.append((last.outputs[0].finish_reason, len(last.outputs[0].token_ids) - sampling.max_tokens))

    lanes = [asyncio.create_task(ask(lane)) for lane in range(4)]
    steps = []
    for step in range(1, args.refits + 1):
        await asyncio.sleep(0.1)
        start_s = time.perf_counter()
        report = await refitter.refit_async(policies.fill_policy(policy, 1 + step % 2))
        memory = await llm.collective_rpc("observe_rank", args=("memory",))
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
    same = await llm.collective_rpc("observe_rank", args=("checksum",)) == expected
    llm.shutdown()
    return {
        "steps": steps,
        "num_finished": len(finished),
        "unlike_asked": [entry for entry in finished if entry != ("length", 0)],
        "same_bytes": same,
    }


OPTIONS = {
    "engine": {"choices": ["vllm", "sglang"], "default": "vllm"},
    "inside": FLAG,
    "online": {"choices": ["fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "mxfp8", "w8a8_fp8"]},
    "checkpoint": {"choices": list(CHECKPOINTS)},
    "tp": WHOLE,
    "refits": WHOLE | {"default": 50},
}
MODES = {
    "refit": run_refit,
    "checkpoint": run_checkpoint,
    "fresh": run_fresh,
    "sleep": run_sleep,
    "families": run_families,
    "external": run_external,
    "served": run_served,
}
