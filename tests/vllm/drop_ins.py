"""Engines of every layout whose weights are loaded by vLLM's own calls. `test_drop_in.py` says what must come of it.

`OBSERVATIONS` are done in the workers: what trainers do there, unchanged.
"""

import asyncio
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from async_engine import LONG, TIMEOUT_S, begin_as
from engines import PROMPTS, booted, make_policy, model_of, places, refused, state
from subject import LAYOUTS, NOISE, Subject, booted_as
from torch import nn
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import layerwise

from tests.updating import FAULTS, by_stages, in_fours, lent

LAYOUTS |= {
    "in process": {},
    "expert parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
IDS = [[(7 * i + 3 * j) % 256 for j in range(16)] for i in range(4)]
Load = Callable[[Any, nn.Module, list], None]


def one_by_one(worker: Any, model: nn.Module, buckets: list) -> None:
    """TRL's way, colocated."""
    for bucket in buckets:
        for name, tensor in bucket:
            model.load_weights([(name, tensor)])


def by_buckets(worker: Any, model: nn.Module, buckets: list) -> None:
    """verl's way: what it does after the last bucket finds nothing to do."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    for bucket in buckets:
        model.load_weights(bucket)
    process_weights_after_loading(model, worker.vllm_config.model_config, worker.device)


def by_generators(worker: Any, model: nn.Module, buckets: list) -> None:
    """Tensors that are overwritten once the next one is asked for."""
    for bucket in buckets:
        model.load_weights(bucket if isinstance(bucket, Iterator) else lent(bucket))


def stage_by_stage(worker: Any, model: nn.Module, buckets: list) -> None:
    """Sources of several pipeline stages, by OpenRLHF's call."""
    for bucket in by_stages(buckets):
        model.load_weights(weights=bucket)


def layer_by_layer(worker: Any, model: nn.Module, buckets: list) -> None:
    """prime-rl's way."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    for bucket in buckets:
        model.load_weights(iter(bucket))
    finalize_layerwise_reload(model, worker.vllm_config.model_config)


def reload(worker: Any, model: nn.Module, buckets: list) -> None:
    """vLLM's `reload_weights`."""
    worker.reload_weights(weights_iterator=(pair for bucket in buckets for pair in bucket))


def transfer(worker: Any, model: nn.Module, buckets: list) -> None:
    """vLLM's own weight transfer, and so TRL's with a server: all but the transport, which wants GPUs."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    engine = NCCLWeightTransferEngine.__new__(NCCLWeightTransferEngine)
    engine.model, engine.model_config = model, worker.vllm_config.model_config
    # Before 0.25 the worker begins and ends updates, if it has an engine.
    updates, before = engine if hasattr(engine, "start_weight_update") else worker, worker.weight_transfer_engine
    worker.weight_transfer_engine, worker.device = engine, next(model.parameters()).device  # a CPU's has None
    try:
        updates.start_weight_update()
        for bucket in buckets:
            engine.model.load_weights(bucket)
        updates.finish_weight_update()
    finally:
        worker.weight_transfer_engine = before


WAYS: dict[str, Load] = {
    "tensor by tensor": one_by_one,
    "buckets": by_buckets,
    "generators": by_generators,
    "stages": stage_by_stage,
    "layerwise": layer_by_layer,
    "reload_weights": reload,
    "weight transfer": transfer,
}


def load(worker: Any, family: str, seed: int, way: str, fault: str = "") -> dict:
    """What comes of a policy that a trainer loads in this worker."""
    name, _, place = fault.rpartition(" ")

    def buckets():
        for index, bucket in enumerate(in_fours(make_policy(family, seed))):
            # What fails between two calls fails on every rank; what fails within one, on the first.
            rank = worker.rank if name == "raise inside" and way != "tensor by tensor" else 0
            yield FAULTS[name](bucket, rank) if fault and index == int(place) else bucket

    try:
        WAYS[way](worker, worker.model_runner.model, buckets())
    except Exception as error:  # noqa: BLE001 - an engine's RPC does not bear it
        return {"error": type(error).__name__, "message": str(error)}
    report = json.loads(worker.fp8refit_last_report() or "{}")
    return {"version": report.get("version"), "old": report.get("num_old_scales"), "kv": report.get("kv")}


def load_some(worker: Any, family: str, seed: int, num_tensors: int) -> dict:
    """The first tensors of a policy, and no more."""
    for pair in list(make_policy(family, seed).items())[:num_tensors]:
        worker.model_runner.model.load_weights([pair])
    return {}


def traces(worker: Any) -> list[str]:
    """What there is of the drop-in in this process."""
    network = worker.model_runner.get_model()
    found = [f"network.{name}" for name in vars(network) if name == "load_weights" or "fp8refit_drop_in" in name]
    found += [f"worker.{name}" for name in vars(worker) if name == "fp8refit_last_report"]
    found += [f"runner.{name}" for name in vars(worker.model_runner) if name == "reload_weights"]
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        functions = [(name, value) for name, value in vars(module).items() if isinstance(value, FunctionType)]
        wrapped = [
            name for name, value in functions if value.__code__.co_filename.endswith("fp8refit/driver/installed.py")
        ]
        found += [f"{module.__name__}.{name}" for name in wrapped]
    if hasattr(EngineArgs.create_engine_config, "__wrapped__"):
        found.append("EngineArgs.create_engine_config")
    return sorted(found)


def remove(worker: Any) -> None:
    from fp8refit_vllm import drop_in

    drop_in.remove(worker)


KEPT: dict[str, torch.Tensor] = {}


def keep(worker: Any) -> None:
    """Remember what a policy left in every parameter."""
    KEPT.update({name: each.detach().clone() for name, each in model_of_worker(worker).named_parameters()})


def model_of_worker(worker: Any) -> nn.Module:
    return worker.model_runner.get_model()


def copied(worker: Any) -> None:
    """prime-rl's `quantize_in_weight_transfer`."""
    with torch.no_grad():
        for name, parameter in model_of_worker(worker).named_parameters():
            parameter.copy_(KEPT[name])


def copied_in_part(worker: Any) -> None:
    """The same, which fails after it has written something."""
    name, parameter = next(iter(model_of_worker(worker).named_parameters()))
    parameter.data.copy_(KEPT[name])
    raise ValueError("Kernel weight transfer skipped 1 weights")


def written_to(worker: Any) -> None:
    """As a network card writes: torch does not hear of it."""
    for name, parameter in model_of_worker(worker).named_parameters():
        kept, memory = KEPT[name].untyped_storage(), parameter.untyped_storage()
        ctypes.memmove(memory.data_ptr(), kept.data_ptr(), kept.nbytes())


def pulled(worker: Any) -> None:
    """prime-rl's NIXL: it traces vLLM's loader with tensors that have no memory, then copies into what it has seen."""
    model = model_of_worker(worker)
    layerwise.initialize_layerwise_reload(model)
    shape = (worker.model_runner.model_config.get_hidden_size(),)
    model.load_weights([("model.norm.weight", torch.empty(shape, dtype=torch.bfloat16, device="meta"))])
    copied(worker)
    layerwise.finalize_layerwise_reload(model, worker.model_runner.model_config)


def named(worker: Any) -> None:
    """vLLM's own call that names live parameters."""
    with torch.no_grad():
        worker.reload_weights(weights_iterator=iter(KEPT.items()), is_checkpoint_format=False)


PAST = {"copied": copied, "copied in part": copied_in_part, "written to": written_to, "pulled": pulled, "named": named}
"""Ways past every loader, but for the last one."""

OBSERVATIONS = {
    "load": load,
    "load some": load_some,
    "traces": traces,
    "remove drop-in": remove,
    "keep": keep,
    **PAST,
}


def run_drop_in(layout: str, family: str, model: str) -> dict:
    with booted_as(layout, Path(model), "fp32", **NOISE) as subject:
        return try_drop_in(subject, family) | {"layout": layout}


def run_drop_in_going_on(family: str, model: str) -> dict:
    """A trainer that knows nothing of fp8refit freezes a request, and loads another policy."""
    prompt = PROMPTS[2]
    with booted_as("asynchronous", Path(model), "fp32", **NOISE) as subject:
        subject.look("load", family, 1, "tensor by tensor")
        started = asyncio.Event()
        running = subject.loop.create_task(subject.answer(prompt, LONG, started=started))
        subject.run(asyncio.wait_for(started.wait(), TIMEOUT_S))
        subject.run(subject.llm.pause_generation(mode="keep", clear_cache=False))
        loaded = subject.look("load", family, 2, "tensor by tensor")
        subject.run(subject.llm.resume_generation())
        tokens = list(subject.run(asyncio.wait_for(running, TIMEOUT_S)).outputs[0].token_ids)
        return {"loaded": loaded, "length": len(tokens), **subject.run(begin_as(subject, prompt, tokens))}


def try_drop_in(subject: Subject, family: str) -> dict:
    calibration = IDS if subject.engine.vllm_config.cache_config.cache_dtype == "fp8" else None
    states = {}
    for seed in (1, 2):
        subject.refit(make_policy(family, seed), calibration=calibration)
        states[seed] = subject.state()
    subject.look("keep")
    placed = subject.look("places")
    found: dict = {"traces": subject.look("traces"), "differ": states[1] != states[2], "ways": {}}
    for index, way in enumerate(WAYS):
        seed = 1 + index % 2
        for level in (1, 2) if way == "tensor by tensor" else ():
            subject.call("sleep", level)
            subject.call("wake_up", ["weights"])
        loaded = subject.look("load", family, seed, way)
        subject.call("wake_up", ["kv_cache"])
        found["ways"][way] = {"loaded": loaded, "same": subject.state() == states[seed]}
    found["placed"] = subject.look("places") == placed
    found["faults"] = {}
    for way in ("tensor by tensor", "layerwise"):
        for fault in (f"{fault} {place}" for fault in FAULTS for place in range(4)):
            loaded = subject.look("load", family, 2, way, fault)
            one = {"loaded": loaded, "dirty": subject.look("dirty"), "generate": subject.refused(subject.generate)}
            one["healed"] = subject.look("load", family, 1, way)
            found["faults"][f"{way}: {fault}"] = one | {"same": subject.state() == states[1]}
    found["past"] = {}
    for way in PAST:
        one = {"raised": subject.refused(subject.look, way), "dirty": subject.look("dirty")}
        one["generate"] = subject.refused(subject.generate)
        one["served"] = [seed for seed in states if not any(one["dirty"]) and subject.live() == states[seed]["live"]]
        one["healed"] = subject.look("load", family, 1, "layerwise" if way == "pulled" else "buckets")
        found["past"][way] = one | {"same": subject.state() == states[1]}
    subject.look("load some", family, 2, 3)
    found["cut"] = {"dirty": subject.look("dirty"), "loaded": subject.look("load", family, 1, "buckets")}
    found["cut"]["same"] = subject.state() == states[1]
    failed = subject.look("load", family, 2, "reload_weights", "raise 1")
    found["reload"] = {"failed": failed, "loaded": subject.look("load", family, 1, "tensor by tensor")}
    found["reload"]["same"] = subject.state() == states[1]
    subject.look("load some", family, 2, 3)
    subject.refit(make_policy(family, 1), calibration=calibration)
    found["healed by a refit"] = subject.state() == states[1]
    subject.look("remove drop-in")
    found["removed"] = subject.look("traces")
    return found


def run_drop_in_boot(family: str, work: Path) -> dict:
    """A trainer gives no quantization; tensors come one by one, over a boot from another policy."""
    with booted(Path(work) / "policy-1", "fp32") as llm:
        before, worker = places(llm), llm.llm_engine.model_executor.driver_worker.worker
        found = {"traces": traces(worker), "loaded": load(worker, family, 2, "tensor by tensor"), **state(llm)}
        found["placed"] = places(llm) == before
        found["patched"] = patched(llm)
        found["same"] = state(llm)["live"] == found["live"]
        worker.reload_weights()
        found["reloaded"] = json.loads(worker.fp8refit_last_report())
        found["end"] = refused(layerwise.finalize_layerwise_reload, model_of(llm), worker.model_runner.model_config)
        remove(worker)
        from fp8refit_vllm import drop_in

        drop_in.not_quantize_at_boot()
        found["removed"] = traces(worker)
        buckets = [list(make_policy(family, 1).items())]
        found["control"] = refused(one_by_one, worker, model_of(llm), buckets, error_type=Exception)
    return found


def patched(llm: LLM) -> dict | None:
    """What comes of a patch of two values, in versions that have such."""
    try:
        from vllm.model_executor.model_loader import checkpoint_weight_patch as patches
    except ImportError:
        return None
    patch = patches.CheckpointWeightPatch(
        name="model.norm.weight",
        shape=(256,),
        dtype=torch.bfloat16,
        values=torch.ones(2, dtype=torch.bfloat16),
        indices=torch.tensor([3, 5], dtype=torch.int32),
    )
    return refused(patches.load_checkpoint_weight_patches, model_of(llm), [patch])


def run_drop_in_fresh(work: Path, policy: str = "policy-2", quantization: str = "fp8_per_block") -> dict:
    """An engine that boots from the same policy, without fp8refit."""
    with booted(Path(work) / policy, "fp32", quantization=quantization) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        return {"traces": traces(worker), **state(llm)}


def run_drop_in_fresh_ranks(layout: str, model: str) -> dict:
    """The same, on every rank."""
    with booted_as(layout, Path(model), "fp32", quantization="fp8_per_block") as subject:
        return {"live": subject.live()}


def run_drop_in_refused(work: Path) -> dict:
    """Engines that are dropped into although they cannot be, and one that holds what it was not asked for."""

    def boot(kernel: str, **options: Any) -> list[str]:
        with booted(Path(work) / "policy-1", kernel, **options) as llm:
            return traces(llm.llm_engine.model_executor.driver_worker.worker)

    return {
        "repacking": refused(lambda: boot("repacking", **NOISE), error_type=Exception),
        "bfloat16": boot("fp32"),
        "option": boot("fp32", additional_config={"fp8refit": {"drop_in": False}}, **NOISE),
    }
