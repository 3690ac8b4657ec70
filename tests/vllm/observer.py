"""Looks at one rank's live model, in its own worker, without fp8refit."""

import hashlib
import os

import torch

KV_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


def observe(worker, what: str, *arguments) -> object:
    """Answer with a value, an error too: a worker that raises puts vLLM's replies out of step."""
    import drop_ins
    import faults

    try:
        return {
            "rank": worker.rank,
            "found": (OBSERVATIONS | faults.FAULTS | drop_ins.OBSERVATIONS)[what](worker, *arguments),
        }
    except Exception as error:  # noqa: BLE001
        return {"rank": worker.rank, "error": repr(error)}


def live_bytes(worker) -> dict[str, str]:
    """A sha256 for each parameter and persistent buffer, by the engine's own name."""
    return {
        name: hashlib.sha256(_raw(tensor).numpy()).hexdigest() for name, tensor in _model(worker).state_dict().items()
    }


def places(worker) -> dict[str, list]:
    """Identity, address and layout of each parameter and buffer."""
    model = _model(worker)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: [id(t), t.data_ptr(), list(t.shape), list(t.stride()), str(t.dtype)] for name, t in named}


def scribble(worker) -> None:
    """Overwrite every weight and scale, in place."""
    for parameter in _model(worker).parameters():
        parameter.detach().view(-1).view(torch.uint8).fill_(0x55)


def kv_scales(worker) -> dict[str, float]:
    """Every copy of every KV-cache scale: buffers, Python floats and CPU tensors."""
    return {
        f"{prefix}.{name}": float(value)
        for prefix, module in _model(worker).named_modules()
        if hasattr(module, "_k_scale_float")
        for name, value in (vars(module) | module._buffers).items()
        if name.startswith(KV_SCALES) and value is not None
    }


def padding(worker) -> dict[str, int]:
    """How many bytes there are in rows after this rank's part of the vocabulary, and how many of them are not zero."""
    layers = [module for module in _model(worker).modules() if hasattr(module, "shard_indices")]
    rows = [_raw(layer.weight[layer.shard_indices.num_org_elements :]) for layer in layers]
    return {
        "num_bytes": sum(row.numel() for row in rows),
        "num_set": sum(int(row.count_nonzero()) for row in rows),
    }


def pids(worker) -> list[int]:
    """This worker's process and its parent."""
    return [os.getpid(), os.getppid()]


def _model(worker) -> torch.nn.Module:
    return worker.model_runner.get_model()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


OBSERVATIONS = {
    "live_bytes": live_bytes,
    "places": places,
    "scribble": scribble,
    "kv_scales": kv_scales,
    "padding": padding,
    "pids": pids,
}
