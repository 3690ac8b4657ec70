"""Looks at one rank's live model, in its own scheduler, without fp8refit.

SGLang's RPC gives no values back and tells of the first rank's errors only, so each rank writes its answer to a file.
"""

import gc
import hashlib
import json
import os
import re
from pathlib import Path

import setproctitle
import torch
from safetensors.torch import save_file

from tests.engines import looking

ABSORBED = ("w_kc", "w_vc")
"""Attributes of latent attention that are neither parameters nor buffers."""
KV_SCALES = ("attn.k_scale", "attn.v_scale")


def observe(scheduler, folder: str, what: str, arguments: list) -> None:
    """Answer with a value, an error too: what another rank than the first raises, SGLang only logs."""
    import drop_ins
    import faults

    try:
        answer = {"found": (OBSERVATIONS | faults.FAULTS | drop_ins.OBSERVATIONS)[what](scheduler, *arguments)}
    except Exception as error:  # noqa: BLE001
        answer = {"error": repr(error)}
    file = Path(folder) / f"{number_of(scheduler)}.json"
    file.with_suffix(".part").write_text(json.dumps(answer))
    file.with_suffix(".part").rename(file)


def number_of(scheduler) -> int:
    """Of a rank, among those of all replicas."""
    replica = re.search(r"_DP(\d+)", setproctitle.getproctitle())
    number = torch.distributed.get_rank()
    if replica is None or scheduler.server_args.enable_dp_attention:  # whose groups are all one
        return number
    return int(replica[1]) * torch.distributed.get_world_size() + number


def live_bytes(scheduler) -> dict[str, str]:
    """A sha256 for each parameter, buffer and absorbed copy, by the engine's own name."""
    return looking.digests(_live(scheduler))


def places(scheduler) -> dict[str, list]:
    return looking.places(_live(scheduler))


def save(scheduler, folder: str) -> None:
    """Write every parameter and buffer to a file of this rank."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in _live(scheduler).items()}
    save_file(tensors, Path(folder) / f"{number_of(scheduler)}.safetensors")


def scribble(scheduler) -> None:
    """Overwrite every weight and every scale of one, in place. The scales of a KV cache are no policy's."""
    for name, tensor in _live(scheduler).items():
        if name.endswith(ABSORBED) or (isinstance(tensor, torch.nn.Parameter) and not name.endswith(KV_SCALES)):
            tensor.detach().untyped_storage().fill_(0x55)  # absorbed copies are not contiguous


def padding(scheduler) -> dict[str, int]:
    return looking.padding(_model(scheduler))


def linears(scheduler) -> dict[str, str]:
    """Which of SGLang's products each block-FP8 layer was given by SGLang's own choice."""
    methods = {name: getattr(module, "quant_method", None) for name, module in _model(scheduler).named_modules()}
    products = {name: getattr(method, "w8a8_block_fp8_linear", None) for name, method in methods.items()}
    return {name: product.__name__ for name, product in products.items() if product is not None}


def kv_scales(scheduler) -> dict[str, list[float]]:
    """Each KV scale, as a tensor and as SGLang's copy of it, by its checkpoint name."""
    return {
        f"{name.removesuffix('.attn')}.{kind}_scale": [
            getattr(module, f"{kind}_scale").item(),
            getattr(module, f"{kind}_scale_float"),
        ]
        for name, module in _model(scheduler).named_modules()
        if hasattr(module, "k_scale_float")
        for kind in ("k", "v")
    }


def cache_bytes(scheduler) -> str:
    """A sha256 of the KV cache."""
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    digest = hashlib.sha256()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        digest.update(looking.raw(buffer).numpy())
    return digest.hexdigest()


def adapter_bytes(scheduler) -> dict[str, str]:
    """A sha256 for each tensor that kernels read of an adapter, as far as its rank goes. The rest is of older ones."""
    manager, found = scheduler.tp_worker.model_runner.lora_manager, {}
    pool = manager.memory_pool
    for uid, ref in manager.lora_refs.items():
        if (slot := pool.uid_to_buffer_id.get(uid)) is not None:
            rank = manager.loras[uid].config.r
            for module, stacks in pool.A_buffer.items():
                for layer, (a, b) in enumerate(zip(stacks, pool.B_buffer[module], strict=True)):
                    num_parts = a.shape[1] // pool.max_lora_rank
                    found[f"{ref.lora_name} {module} {layer} A"] = a[slot, : rank * num_parts]
                    found[f"{ref.lora_name} {module} {layer} B"] = b[slot, :, :rank]
    return looking.digests(found)


def adapter_copies(scheduler) -> dict[str, str]:
    """A sha256 for each tensor that this rank has of the first adapter in host memory, rounded as kernels read it."""
    manager = scheduler.tp_worker.model_runner.lora_manager
    (uid,) = (uid for uid, ref in manager.lora_refs.items() if ref.lora_name == "one")
    layers = enumerate(manager.loras[uid].layers)
    return looking.digests(
        {f"{n} {name}": each.bfloat16() for n, layer in layers for name, each in layer.weights.items()}
    )


def flush_cache(scheduler) -> bool:
    """Drop the radix cache, unless something still runs; leave the allocator's alone, which takes SGLang half a second."""
    return scheduler.flush_cache(empty_cache=False)


def hidden(scheduler) -> list[str]:
    """Methods of the scheduler that an attribute of the instance hides."""
    return [name for name in vars(scheduler) if callable(getattr(type(scheduler), name, None))]


def process_state(scheduler) -> dict:
    """What a twin might leave in this process: hooks, shared rotary embeddings, other parameters and buffers, settings."""
    from sglang.srt.layers.rotary_embedding import factory

    model, config = _model(scheduler), scheduler.tp_worker.model_runner.model_config
    modules, tensors = dict(model.named_modules()), [*model.named_parameters(), *model.named_buffers()]
    return {
        "hooks": {name: [len(each._forward_hooks), len(each._forward_pre_hooks)] for name, each in modules.items()},
        "rotary": {str(key): id(module) for key, module in factory._ROPE_DICT.items()},
        "tensors": {name: [id(tensor), tensor._version] for name, tensor in tensors},
        "configs": [
            str(config.hf_config),
            str(vars(getattr(model, "quant_config", None) or object)),
            str(config.dtype),
        ],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "environment": dict(os.environ),
    }


def tensor_bytes(scheduler=None) -> int:
    """Bytes of all storage that a tensor in this process refers to."""
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def echo(scheduler, said: str) -> str:
    return said


def _model(scheduler) -> torch.nn.Module:
    return scheduler.tp_worker.model_runner.model


def _live(scheduler) -> dict[str, torch.Tensor]:
    runner = getattr(getattr(scheduler.draft_worker, "draft_worker", None), "draft_runner", None)
    drafts = {} if runner is None else {f"draft: {name}": tensor for name, tensor in _held(runner.model).items()}
    return _held(_model(scheduler)) | drafts


def _held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    absorbed = {
        f"{name}.{copy}": getattr(module, copy)
        for name, module in model.named_modules()
        for copy in ABSORBED
        if getattr(module, copy, None) is not None
    }
    return looking.named(model) | absorbed


OBSERVATIONS = {
    "live_bytes": live_bytes,
    "places": places,
    "save": save,
    "scribble": scribble,
    "padding": padding,
    "linears": linears,
    "kv_scales": kv_scales,
    "cache_bytes": cache_bytes,
    "adapter_bytes": adapter_bytes,
    "adapter_copies": adapter_copies,
    "flush_cache": flush_cache,
    "hidden": hidden,
    "process_state": process_state,
    "tensor_bytes": tensor_bytes,
    "echo": echo,
}
