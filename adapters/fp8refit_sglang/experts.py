"""What a live SGLang model says of its layers of experts, and what is against writing one.

A rank holds a range of SGLang's places; a map, the same while the engine runs, says which of the checkpoint's experts lies in
which. The parts of an expert that a checkpoint names are read off the source of the model's own loading: nothing else in a
live model says whether a gate is a `gate_proj` or a `w1`.
"""

import inspect
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from fp8refit.layers.rules import Experts, Kernel, Why
from fp8refit.slots import Refresh, ScaleFormat

Places: TypeAlias = Sequence[Sequence[int]]
"""For each layer of a model, the checkpoint's expert in each place of all ranks together."""

ROW_MAJOR_RUNNERS = frozenset({"cutlass", "deep_gemm", "triton"})
"""SGLang's products that read block-FP8 experts as a checkpoint stores them, on the GPUs where scales stay float32."""

_METHOD = "Fp8MoEMethod"
_ROUTER_COPY = "_weight_fp32"
_SAID = (
    *("hidden_size", "intermediate_size_per_partition", "layer_id", "num_fused_shared_experts", "num_local_experts"),
    *("moe_ep_rank", "moe_ep_size", "moe_runner_config", "moe_tp_rank", "moe_tp_size", "use_presharded_weights"),
)
"""What every layer of experts says that SGLang's own class makes."""
_PARTS = re.compile(r'ckpt_(gate|up|down)_proj_name\s*=\s*"(\w*)"')
_NOT_YET = "fp8refit does not know this rule yet"
_REMEDIES = {
    "KTEPWrapperMethod": "Boot without kt_weight_path: some of its experts are computed on the CPU",
    "PagedExpertsMoEMethod": "Boot without enable_paged_experts",
}
_ANOTHER_RUNNER = 'Boot with moe_runner_backend="triton" or "deep_gemm", and without moe_a2a_backend="megamoe"'


class ModelExperts:
    """The experts of one live model.

    Args:
        model: The live model.
        places: None if the checkpoint's experts lie in order.
    """

    def __init__(self, model: nn.Module, places: Places | None) -> None:
        self._places = places
        self._architecture = type(model).__name__
        self._parts = _parts_in_checkpoint(model)
        self._num_shared = getattr(getattr(model, "config", None), "n_shared_experts", None)

    def why_refused(self, layer: Any) -> Why:
        """What is against `layer` beside its kernel and the shapes of its tensors."""
        if not all(hasattr(layer, name) for name in _SAID):
            return f"is a {type(layer).__name__}, which holds experts by a rule of its own", _NOT_YET
        return self._why_not_named(layer) or _why_not_cut(layer) or _why_not_float32(layer)

    def read(self, layer: Any, block_size: tuple[int, int]) -> Experts:
        """What is known of a layer that is not refused."""
        assert self._parts is not None, f"{self._architecture=}"
        gate, up, down = self._parts
        ids = self._ids(layer)
        return Experts(
            gate=gate,
            up=up,
            down=down,
            ids=ids,
            shared="shared_experts" if layer.num_fused_shared_experts else None,
            num_experts=len(ids) * layer.moe_ep_size if self._places is None else 1 + max(self._places[layer.layer_id]),
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size_per_partition * layer.moe_tp_size,
            ranks=(layer.moe_tp_rank, layer.moe_tp_size),
            block_size=block_size,
            kernel=_kernel_of(layer),
        )

    def _ids(self, layer: Any) -> tuple[int, ...]:
        """The checkpoint's expert in each place of this rank; shared experts lie after them."""
        num_places = layer.num_local_experts - layer.num_fused_shared_experts
        first = layer.moe_ep_rank * num_places
        places = range(first, first + num_places)
        return tuple(places if self._places is None else (self._places[layer.layer_id][place] for place in places))

    def _why_not_named(self, layer: Any) -> Why:
        """What is against knowing the checkpoint's names of what `layer` holds."""
        if layer.w13_weight.weight_loader.__name__ == "weight_loader_fused":
            return "loads all experts of a layer from one tensor, by a rule of its own", _NOT_YET
        if self._parts is None:
            return f"nobody knows what a checkpoint of {self._architecture} calls the matrices of an expert", _NOT_YET
        if layer.num_fused_shared_experts not in (0, self._num_shared) or layer.num_fused_shared_experts > 1:
            return (
                f"keeps {layer.num_fused_shared_experts} shared experts among the others, and nobody knows their names",
                "Boot with disable_shared_experts_fusion",
            )
        return None


def refreshes_of_routers(model: nn.Module) -> tuple[Refresh, ...]:
    """The float32 copies by which GLM's routers multiply, which the first forward makes (seen with 0.5.15 and 0.5.17)."""
    return tuple(
        Refresh(name=f"{name}: float32 copy", run=partial(_copy_router, module))
        for name, module in model.named_modules()
        if _ROUTER_COPY in module._buffers
    )


def _copy_router(router: nn.Module) -> None:
    copy = router._buffers[_ROUTER_COPY]
    if copy is not None:
        copy.copy_(router._parameters["weight"].detach())


def _parts_in_checkpoint(model: nn.Module) -> tuple[str, str, str] | None:
    """What the model's loading says that a checkpoint calls gate, up and down projections; None if it is not one answer."""
    found: dict[str, set[str]] = {"gate": set(), "up": set(), "down": set()}
    for cls in type(model).__mro__:
        if cls.__module__.partition(".")[0] not in ("torch", "builtins"):
            for part, name in _PARTS.findall(_source_of(cls)):
                found[part].add(name)
    if any(len(names) != 1 for names in found.values()):
        return None
    gate, up, down = (names.pop() for names in found.values())
    return gate, up, down


def _source_of(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # of a class that no file holds
        return ""


def _why_not_cut(layer: Any) -> Why:
    """What is against a rank's experts being equal parts of gated experts of the checkpoint."""
    if not layer.moe_runner_config.is_gated:
        return "its experts have no gate projection", _NOT_YET
    if layer.use_presharded_weights:
        return "its experts are cut before SGLang loads them", "Boot with tp_size=1"
    if getattr(layer, "_dwdp_bound", False):
        return "reads experts of other ranks from copies of them", "Boot without dwdp_size"
    return None


def _why_not_float32(layer: Any) -> Why:
    scales = (layer._parameters.get(f"{name}_weight_scale_inv") for name in ("w13", "w2"))
    if any(getattr(scale, "format_ue8m0", False) or getattr(scale, "power_of_two", False) for scale in scales):
        return "its kernel takes scales that are powers of two (UE8M0)", 'Boot with moe_runner_backend="triton"'
    return None


def _kernel_of(layer: Any) -> Kernel:
    """The runner that SGLang chose; 0.5.15 and 0.5.17 say it of the method alone, and not of all runners."""
    method = layer.quant_method
    runner = getattr(layer, "runner_backend", None) or getattr(getattr(method, "runner", None), "runner_backend", None)
    method_name = type(method).__name__
    name = runner.value if runner is not None and method_name == _METHOD else method_name
    if getattr(layer, "_mega_moe_weights_built", False):
        name = "megamoe"
    return Kernel(
        name=name,
        is_row_major=name in ROW_MAJOR_RUNNERS,
        scale_format=ScaleFormat.FP32,
        remedy=_REMEDIES.get(method_name, _ANOTHER_RUNNER),
    )
