"""Looks at one rank's live model, in its own worker, without fp8refit."""

import os

import torch

from tests.engines import looking

KV_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


def observe(worker, what: str, *arguments) -> object:
    """Answer with a value, an error too: a worker that raises puts vLLM's replies out of step."""
    import cpu_eplb
    import drop_ins
    import faults

    try:
        return {
            "rank": number_of(worker),
            "found": (OBSERVATIONS | faults.FAULTS | drop_ins.OBSERVATIONS | cpu_eplb.OBSERVATIONS)[what](
                worker, *arguments
            ),
        }
    except Exception as error:  # noqa: BLE001
        return {"rank": number_of(worker), "error": repr(error)}


def number_of(worker) -> int:
    """Among the ranks of all replicas."""
    parallel = worker.vllm_config.parallel_config
    return parallel.data_parallel_index * parallel.world_size + worker.rank


def live_bytes(worker) -> dict[str, str]:
    """A sha256 for each parameter and persistent buffer, by the engine's own name; those of a draft too.

    Without tables of angles: no checkpoint holds them, and vLLM's own reload makes them persistent until 0.23.
    """
    held = _model(worker).state_dict()
    if (draft := _draft(worker)) is not None:
        held |= {f"draft: {name}": tensor for name, tensor in draft.state_dict().items()}
    return looking.digests({name: held[name] for name in held if not name.endswith("cos_sin_cache")})


def adapter_bytes(worker) -> dict[str, str]:
    """A sha256 for each tensor that a wrapper keeps of adapters."""
    return looking.digests(
        {
            f"{prefix}.{name}.{index}": tensor
            for prefix, module in _model(worker).named_modules()
            for name in ("lora_a_stacked", "lora_b_stacked")
            for index, tensor in enumerate(vars(module).get(name, ()))
        }
    )


def scribble_adapters(worker) -> None:
    """Overwrite every tensor that a wrapper keeps of adapters, as a deep sleep does, which a CPU ignores."""
    for module in _model(worker).modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            for tensor in vars(module).get(name, ()):
                tensor.fill_(0.5)


def seats(worker) -> list[int | None]:
    """Which adapter has which slot."""
    return list(worker.model_runner.lora_manager._adapter_manager.lora_index_to_id)


def places(worker) -> dict[str, list]:
    return looking.places(looking.named(_model(worker)))


def scribble(worker) -> None:
    """Overwrite every weight and scale, in place."""
    draft = _draft(worker)
    for parameter in (*_model(worker).parameters(), *(draft.parameters() if draft is not None else ())):
        parameter.detach().untyped_storage().fill_(0x55)  # absorbed copies are not contiguous


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
    return looking.padding(_model(worker))


def pids(worker) -> list[int]:
    """This worker's process and its parent."""
    return [os.getpid(), os.getppid()]


def prepare(worker, client: str) -> None:
    from tests.vllm import clients

    getattr(clients, client).prepare()


def variables(worker) -> list[str]:
    """Names of ours in this process's environment."""
    return sorted(name for name in os.environ if name.startswith("FP8REFIT_") and "_TEST_" not in name)


def echo(worker, said: str) -> str:
    return said


def _model(worker) -> torch.nn.Module:
    return worker.model_runner.get_model()


def _draft(worker) -> torch.nn.Module | None:
    return getattr(getattr(worker.model_runner, "drafter", None), "model", None)


OBSERVATIONS = {
    "live_bytes": live_bytes,
    "adapter_bytes": adapter_bytes,
    "scribble_adapters": scribble_adapters,
    "seats": seats,
    "places": places,
    "scribble": scribble,
    "kv_scales": kv_scales,
    "padding": padding,
    "pids": pids,
    "variables": variables,
    "echo": echo,
    "prepare": prepare,
}
