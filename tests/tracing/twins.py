"""Twins of models that no engine built: loaders that copy every tensor under its own name, or cut it for one rank."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.rules import Kernel
from fp8refit.tracing.twin import Naming, Twin, trace_twin
from tests.tracing.models import HEAD

KERNEL = Kernel(name="Plain", format=BlockFormat(), remedy="Take another kernel")
Load = Callable[[Iterable[tuple[str, Tensor]]], None]
Changes = Mapping[str, Callable[[Tensor], Tensor]]


class FakeKernelRules:
    to_quantize, other_quantization = "Quantize it", "Quantize it in blocks"

    def why_refused(self, module):
        return getattr(module, "why_refused", None)

    def kernel_of(self, module) -> Kernel:
        return getattr(module, "kernel", KERNEL)

    def swaps_halves(self, module):
        return getattr(module, "is_up_first", False)

    def kept(self, module):
        return getattr(module, "kept", ())


def naming_of(model: nn.Module) -> Naming:
    """A checkpoint with a tensor of the same name for every parameter that is no scale; tied ones under their first."""
    named = ((name, TensorMeta.of(tensor)) for name, tensor in model.named_parameters())
    return Naming(tensors={name: meta for name, meta in named if not name.endswith("_scale_inv")})


def identity_twin(model: nn.Module) -> Twin:
    """What a loader does that copies every tensor to the parameter of its name."""
    return trace_twin(model, naming_of(model), copying(model))


def loading(load: Callable[[str, Tensor], object]) -> Load:
    """A loader that does this with every tensor."""

    def load_all(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            load(name, tensor)

    return load_all


def copying(model: nn.Module, changes: Changes | None = None) -> Load:
    """A loader that copies every tensor to the parameter of its name, some of them changed."""
    named, changes = dict(model.named_parameters()), changes or {}
    return loading(lambda name, tensor: named[name].data.copy_(changes.get(name, lambda same: same)(tensor)))


def twin_of_rank(model: nn.Module, checkpoint: dict[str, Tensor], rank: int, num_ranks: int) -> Twin:
    """What a loader does that cuts `checkpoint` for the model of `model_of_rank`, in the ways of engines' own."""
    named = dict(model.named_parameters())
    num_kv_heads = checkpoint["k_proj.bias"].shape[0] // HEAD
    metas = {n: TensorMeta.of(t) for n, t in checkpoint.items() if not n.endswith("_scale_inv")}

    def rows_of(tensor: Tensor, count: int, index: int) -> Tensor:
        size = tensor.shape[0] // count
        return tensor.narrow(0, index * size, size)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            module, leaf = name.split(".")
            if module in ("q_proj", "k_proj", "v_proj"):
                into = named[f"qkv_proj.{leaf}"].data
                num_kv_rows = max(1, num_kv_heads // num_ranks) * HEAD
                num_q_rows = into.shape[0] - 2 * num_kv_rows
                first = {"q_proj": 0, "k_proj": num_q_rows, "v_proj": num_q_rows + num_kv_rows}[module]
                num_copies = 1 if module == "q_proj" else max(1, num_ranks // num_kv_heads)
                part = rows_of(tensor, num_ranks // num_copies, rank // num_copies)
                into.narrow(0, first, part.shape[0]).copy_(part)
            elif module in ("gate_proj", "up_proj"):
                into = named[f"gate_up_proj.{leaf}"].data
                half = into.shape[0] // 2
                into.narrow(0, half * (module == "up_proj"), half).copy_(rows_of(tensor, num_ranks, rank))
            elif module in ("embed", "head"):
                into = named[name].data
                start = min(rank * into.shape[0], tensor.shape[0])
                count = min(into.shape[0], tensor.shape[0] - start)
                into[:count].copy_(tensor.narrow(0, start, count))
                into[count:].fill_(0)
            elif module in ("o_proj", "down_proj", "plain") and leaf == "weight":
                size = tensor.shape[1] // num_ranks
                named[name].data.copy_(tensor.narrow(1, rank * size, size))
            elif module == "fc_proj":
                named[name].data.copy_(rows_of(tensor, num_ranks, rank))
            else:
                named[name].data.copy_(tensor)

    return trace_twin(model, Naming(tensors=metas), load, num_ranks=num_ranks)
