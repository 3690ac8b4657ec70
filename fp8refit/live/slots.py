"""Records of what a live engine holds, slot by slot. No torch operation runs here."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property
from math import prod
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fp8refit.live import formats
from fp8refit.live.formats import SCALE_SUFFIX as SCALE_SUFFIX
from fp8refit.live.formats import BlockFormat, Container
from fp8refit.live.parameters import LiveTensor, Watch

FP8_DTYPE = torch.float8_e4m3fn
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name as engines and checkpoints spell it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


class Op(StrEnum):
    """What to do with one slice of a source tensor."""

    QUANTIZE = "quantize"
    """BF16, FP16 or FP32 in, E4M3 codes and block scales out."""
    COPY = "copy"
    """The values, in the engine's dtype."""
    COPY_CODES = "copy_codes"
    """E4M3 bytes, bit for bit."""
    COPY_SCALES = "copy_scales"
    """float32 block scales, bit for bit."""
    MAXIMUM = "maximum"
    """The largest magnitude, of which with others' follows the scale that they share."""
    OWN_MAXIMUM = "own_maximum"
    """In a plan: that of what the rank holds. A kernel's placement needs it; see `BlockFormat.needs_own_maximum`."""

    @property
    def finds_maximum(self) -> bool:
        """Whether it writes nothing but a largest magnitude."""
        return self is Op.MAXIMUM or self is Op.OWN_MAXIMUM


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """What is known about a source tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        """Describe `tensor`."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """The place of one checkpoint tensor in one engine rank's live storage.

    A rank holds the box of `shape` at `offset` in the checkpoint tensor. A tensor-parallel rank holds a range of
    rows or columns; a fused module has one slot per part.
    """

    name: str
    """Checkpoint name, such as `model.layers.0.self_attn.q_proj.weight`."""
    full_shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    weight: Tensor
    """The live view to write: codes if the slot is quantized, placed as its format says; else values in the engine's dtype."""
    offset: tuple[int, ...] = ()
    """Where this rank's slice starts in the checkpoint tensor; empty for the origin."""
    scale: Tensor | None = None
    """Live view of the block scales (ceil(N / block_n), ceil(K / block_k)); None if the slot is copied."""
    format: BlockFormat | None = None
    """How it is held quantized; None if it is copied."""
    global_scale: Tensor | None = None
    """Live scale of the whole weight, one float32, if scales have two levels."""
    module: str = ""
    """Engine module that owns the storage."""
    kernel: str = ""
    """Class name of the engine kernel that reads it."""
    is_optional: bool = False
    """Whether a source may omit it, such as a KV scale."""
    is_rearranged: bool = False
    """Whether the engine holds it quantized in another order, so that checkpoint blocks do not map to its blocks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box of the checkpoint tensor, however `weight` holds it."""
        return tuple(self.weight.shape) if self.format is None else self.format.shape_of(self.weight.shape)

    @property
    def is_quantized(self) -> bool:
        """Whether the engine holds this tensor as block FP8."""
        return self.format is not None

    @property
    def group(self) -> tuple[int, int] | None:
        """What only those slots have in common that share a scale; None if it has its own scales, or none."""
        if self.format is None or not self.format.needs_maximum:
            return None
        shared = self.scale if self.format.is_shared else self.global_scale
        return None if shared is None else (shared.untyped_storage()._cdata, int(shared.storage_offset()))

    @property
    def source_dtype(self) -> torch.dtype:
        """The dtype to which a value is rounded before it is held or quantized."""
        return torch.bfloat16 if self.is_quantized else self.weight.dtype

    @property
    def origin(self) -> tuple[int, ...]:
        """`offset` with one entry per dimension."""
        return self.offset or (0,) * len(self.full_shape)

    @property
    def scale_format(self) -> formats.ScaleFormat:
        """Deprecated: the scale format of `format`. 0.4 removes it."""
        warnings.warn("use Slot.format.scale_format; 0.4 removes Slot.scale_format", DeprecationWarning, stacklevel=2)
        return (self.format or BlockFormat()).scale_format

    @property
    def block_size(self) -> tuple[int, int]:
        """Deprecated: the block size of `format`. 0.4 removes it."""
        warnings.warn("use Slot.format.block_size; 0.4 removes Slot.block_size", DeprecationWarning, stacklevel=2)
        return (self.format or BlockFormat()).block_size


def alone(groups: Iterable[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    """Those groups of slots whose scale is not one of several in one tensor, as those of experts are."""
    found = set(groups)
    counts = Counter(storage for storage, _ in found)
    return frozenset(group for group in found if counts[group[0]] == 1)


def cut_groups(slots: Iterable[Slot]) -> frozenset[tuple[int, int]]:
    """Groups of slots that share a scale, of whose matrices the rank holds only parts. Not those of experts."""
    groups = [(slot.group, slot.shape != slot.full_shape) for slot in slots if slot.group is not None]
    return alone(group for group, _ in groups) & {group for group, is_cut in groups if is_cut}


def num_elements(slots: Iterable[Slot]) -> tuple[int, int, int]:
    """How many codes, scales and values that are not quantized slots hold."""
    codes = scales = values = 0
    groups = set[tuple[int, int]]()
    for slot in slots:
        if slot.format is None:
            values += slot.weight.numel()
            continue
        codes += slot.weight.numel()
        if slot.scale is not None and (slot.group not in groups or not slot.format.is_shared):
            scales += slot.scale.numel()
        if slot.global_scale is not None and slot.group not in groups:
            scales += 1
        if slot.group is not None:
            groups.add(slot.group)
    return codes, scales, values


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacked:
    """A checkpoint tensor that holds one matrix, or several fused ones, for every expert of a layer.

    A source may send it instead of the tensors in `parts`.
    """

    name: str
    """Checkpoint name, such as `model.layers.0.mlp.experts.gate_up_proj`."""
    shape: tuple[int, int, int]
    """Number of experts, and rows and columns of each matrix."""
    parts: Mapping[str, tuple[int, int]]
    """Slots of this rank, each with its expert and the first row of its matrix in the stack."""
    is_transposed: bool | None = False
    """Whether to read a shape that fits both ways as (experts, columns, rows). Models differ. None: it may be either."""

    @property
    def shape_in_checkpoint(self) -> tuple[int, int, int]:
        """The tensor's shape in a checkpoint."""
        experts, rows, cols = self.shape
        return (experts, cols, rows) if self.is_transposed else self.shape

    def is_transposed_in(self, shape: tuple[int, ...]) -> bool | None:
        """Whether a tensor of `shape` has rows and columns swapped; None if it does not fit."""
        experts, rows, cols = self.shape
        ways = [way for way, found in ((False, (experts, rows, cols)), (True, (experts, cols, rows))) if found == shape]
        return self.is_transposed if len(ways) == 2 else next(iter(ways), None)


def stored_as(written: Sequence[str], shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the tensors in which a tensor of `shape` is written: name, offset in that tensor, and shape.

    Args:
        written: See `Inventory.written_as`.
        shape: Shape of a matrix, or of a stack of experts' matrices.
    """
    if len(shape) != 3 or "{}" not in written[0]:
        yield written[0], (0,) * len(shape), shape
        return
    num_experts, rows, columns = shape
    count = rows // len(written)
    for expert in range(num_experts):
        for part, name in enumerate(written):
            yield name.format(expert), (expert, part * count, 0), (count, columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartlyRead:
    """A checkpoint tensor of which one rank reads only a part."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """What it reads: for each box, the start and length in every dimension."""
    reason: str = ""
    """Why its loader does not take the tensor, if it does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why one module cannot be refitted, and what to set instead."""

    module: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.module}: {self.reason}. {self.remedy}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Refresh:
    """A step that updates something the engine derived from weights at boot."""

    name: str
    run: Callable[[], None]
    written: tuple[Tensor, ...] = ()
    """Live weights it writes that no slot covers."""
    is_constant: bool = False
    """Whether only a dummy boot or sleep can make it necessary again."""
    restores: bool = False
    """Whether it writes the values that the model was built with."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvScale:
    """One per-tensor scale of one layer's FP8 attention: the multiplier that dequantizes."""

    kind: str
    """`q`, `k` or `v`."""
    tensor: Tensor
    """What the engine's kernels read: float32, one element."""
    write_copies: Callable[[float], None] = lambda _: None
    """Updates the engine's other copies of it: Python numbers, host tensors, products."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvLayer:
    """One attention layer with an FP8 KV cache."""

    name: str
    """Name of the checkpoint's module, such as `model.layers.0.self_attn`."""
    scales: tuple[KvScale, ...]
    """The scales that the engine uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraAdapter:
    """A LoRA adapter that an engine has loaded."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of each of its matrices, by PEFT's names: `model.layers.0.self_attn.q_proj.lora_A.weight`, (rank, inputs)."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """By what the engine multiplied each `lora_B` when it loaded the adapter."""
    factor: float = 1.0
    """By what it multiplies the product of any two of them whenever it computes one."""
    dtype: str = ""
    """In which dtype, as in `TensorMeta`, it holds all of them."""
    refusal: str = ""
    """Why it cannot be refitted, and what to do; empty if it can."""


Observe: TypeAlias = Callable[[int, Tensor | None, Tensor | None, Tensor | None], None]
"""Takes the index of an attention layer and its queries, keys and values as they enter attention, after RoPE and before
quantization: (N, C) or (N, H, D). None for what the layer does not compute."""


class Prefill(Protocol):
    """Runs the live network on token ids, without touching requests or the KV cache."""

    vocab_size: int
    max_length: int
    """The longest sequence the engine takes, in tokens."""
    max_tokens: int
    """Tokens that fit into the engine's memory in one pass."""

    def __call__(self, sequences: Sequence[Tensor], observe: Observe) -> None:
        """Run one pass over `sequences`, each (L,) int64 on the engine's device, and remove all hooks.

        Attention is not quantized, so that scales of earlier layers do not affect what later layers measure.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvCache:
    """The FP8 KV cache of one rank."""

    dtype: str
    backend: str
    """The engine's attention backend."""
    layers: tuple[KvLayer, ...] = ()
    prefill: Prefill | None = None
    saturates: bool = True
    """Whether the engine clamps values that do not fit; otherwise they become NaN."""
    refusals: tuple[Refusal, ...] = ()
    """Why its scales cannot be changed."""
    prefill_refusals: tuple[Refusal, ...] = ()
    """Why scales can be given but not measured."""
    check_now: Callable[[], None] = lambda: None
    """Raises if scales cannot be changed now, for example because graphs cannot be recaptured during sleep."""
    before_write: Callable[[], None] = lambda: None
    """Runs before the first scale changes, to remove the noise of a dummy boot."""
    after_write: Callable[[], None] = lambda: None
    """Runs after scales have changed, to recapture graphs."""


Write: TypeAlias = Callable[["Inventory", Mapping[str, Tensor]], None]
"""Writes a policy into the slots of an inventory, as a refit does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inventory:
    """Everything an adapter reads from one rank's live model."""

    slots: tuple[Slot, ...]
    live: tuple[LiveTensor, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    """Checkpoint names that share another's slot (tied embeddings). A source may send either or both."""
    unneeded: tuple[str, ...] = ()
    """Checkpoint names that a source may send but no slot takes, and patterns of such names with `*` for anything."""
    stacked: tuple[Stacked, ...] = ()
    """Tensors that hold the weights of all experts of a layer, which a source may send instead of single experts."""
    buffers: frozenset[str] = frozenset()
    """Checkpoint names of buffers, which a model's `named_parameters()` leaves out."""
    container: Container = Container.FP8
    """Of checkpoints from which the engine boots."""
    written_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names under which to write weights with block scales if the engine's loader takes no scales under their own names: one
    name, or one for each part of an expert's rows, with `{}` for the expert's number. Empty if the loader takes none at all.
    Every stack that the loader splits is listed."""
    padding: tuple[Tensor, ...] = ()
    """Live views that no checkpoint tensor covers. Booting from a checkpoint leaves them zero, so a refit does too."""
    refreshes: tuple[Refresh, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    partly_read: Mapping[str, PartlyRead] = field(default_factory=dict)
    """Checkpoint tensors that this rank reads only in part. Together, the ranks must read them whole."""
    adapters: Mapping[str, LoraAdapter] = field(default_factory=dict)
    """LoRA adapters by name. Slots of their matrices are named `config.LORA`, then the adapter's name, a dot, and PEFT's."""
    kv: KvCache | None = None
    find_copies: Callable[[bool, bool], Sequence[Refusal]] = lambda *_: ()
    """Refuses copies of weights that the engine keeps now and no refresh writes. Takes whether tensors whose initial values a
    refit restores hold them, and whether it may look at one of several layers that are alike."""
    rounds_once: bool = False
    """Whether norms and rotary embeddings compute in float32 and round once, as GPU kernels do."""
    prove: Callable[[Write, torch.device], tuple[Refusal, ...]] | None = None
    """Compares what the engine's own loader makes of random values with what a refit does, and returns what differs. None if
    the slots do not come from a loader."""

    has_moved: Callable[[], bool] = lambda: False
    """Whether the engine has moved weights between live tensors since this was read, so that slots have other names."""
    moving: tuple[Tensor, ...] = ()
    """The live tensors between which it does."""

    @cached_property
    def watch(self) -> Watch:
        """Watches `live`."""
        return Watch(self.live, self.has_moved, self.moving)

    @property
    def names(self) -> frozenset[str]:
        """Every checkpoint name that a source may send to this rank."""
        stacked = (stack.name for stack in self.stacked)
        return frozenset(slot.name for slot in self.slots).union(self.aliases, self.unneeded, stacked)

    def part(self, names: Iterable[str]) -> "Inventory":
        """Only what some tensors fill."""
        bases = {name.removesuffix(SCALE_SUFFIX) for name in names}
        bases = {self.aliases.get(base, base) for base in bases}
        stacked = tuple(stack for stack in self.stacked if stack.name in bases)
        held = bases.union(*(stack.parts for stack in stacked))
        slots = tuple(slot for slot in self.slots if slot.name in held)
        return replace(self, slots=slots, stacked=stacked, live=(), padding=(), refreshes=())


def _with_older_names(init: Callable[..., None]) -> Callable[..., None]:
    """Make `Slot` take the parts of a format one by one, as 0.2 did."""

    @functools.wraps(init)
    def wrapped(slot: Slot, *args: Any, **fields: Any) -> None:
        older = {name: fields.pop(name) for name in ("scale_format", "block_size") if name in fields}
        if fields.get("scale") is not None and fields.get("format") is None:
            fields["format"] = BlockFormat(**older)
            said = "pass format=BlockFormat(...) to Slot; 0.4 removes scale_format, block_size and their defaults"
            warnings.warn(said, DeprecationWarning, stacklevel=2)
        init(slot, *args, **fields)

    return wrapped


Slot.__init__ = _with_older_names(Slot.__init__)  # type: ignore[method-assign]


def __getattr__(name: str) -> Any:
    if name != "ScaleFormat":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    said = "import ScaleFormat from fp8refit.live.formats; 0.4 removes it from fp8refit.live.slots"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    return formats.ScaleFormat
