"""Leaf records: what a live engine holds, slot by slot. No torch operation happens here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fp8refit.live import LiveTensor, Watch

FP8_DTYPE = torch.float8_e4m3fn
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_SUFFIX = "_scale_inv"
"""A block-FP8 checkpoint stores the scales of `X` as `X_scale_inv`, the multiplier that dequantizes."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name as engines and checkpoints spell it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


class ScaleFormat(StrEnum):
    """Which values a scale may take. Both are stored as float32."""

    FP32 = "fp32"
    """Any float32: `amax / 448`."""
    UE8M0 = "ue8m0"
    """Powers of two: the smallest with `amax / scale <= 464`."""


class Op(StrEnum):
    """What is done with one slice of a source tensor."""

    QUANTIZE = "quantize"
    """BF16, FP16 or FP32 in, E4M3 codes and block scales out."""
    COPY = "copy"
    """The values, in the engine's dtype."""
    COPY_CODES = "copy_codes"
    """E4M3 bytes, bit for bit."""
    COPY_SCALES = "copy_scales"
    """float32 block scales, bit for bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """What is known of a source tensor without its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        """Describe `tensor`."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """One checkpoint tensor's place in one engine rank's live storage.

    The slice of the checkpoint tensor that this rank holds is the box of `weight`'s shape at `offset`: a tensor-parallel
    rank holds a range of rows or columns, a fused module holds each of its parts as a slot of its own.
    """

    name: str
    """Checkpoint name of the tensor, for example `model.layers.0.self_attn.q_proj.weight`."""
    full_shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    weight: Tensor
    """Live view that is written. float8_e4m3fn if the slot is quantized, else the engine's own dtype."""
    offset: tuple[int, ...] = ()
    """Where this rank's slice starts in the checkpoint tensor; empty for the origin."""
    scale: Tensor | None = None
    """Live view of the block scales (ceil(N / block_n), ceil(K / block_k)), float32; None if the slot is copied."""
    scale_format: ScaleFormat = ScaleFormat.FP32
    block_size: tuple[int, int] = (128, 128)
    module: str = ""
    """Engine module that owns the storage."""
    kernel: str = ""
    """Class name of the engine kernel that reads it."""
    is_optional: bool = False
    """Whether a source may leave it out: KV scales."""
    is_rearranged: bool = False
    """Whether the engine holds it quantized, in an order of its own that blocks of the checkpoint tensor are not part of."""

    @property
    def is_quantized(self) -> bool:
        """Whether the engine holds this tensor as block FP8."""
        return self.scale is not None

    @property
    def origin(self) -> tuple[int, ...]:
        """`offset` with one entry a dimension."""
        return self.offset or (0,) * len(self.full_shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacked:
    """A checkpoint tensor that holds one matrix, or several fused ones, of every expert of a layer.

    A source may send it in the place of the tensors that `parts` names.
    """

    name: str
    """Checkpoint name, for example `model.layers.0.mlp.experts.gate_up_proj`."""
    shape: tuple[int, int, int]
    """Experts, rows and columns of the matrix of each."""
    parts: Mapping[str, tuple[int, int]]
    """Slots of this rank: the expert, and the first row of its matrix in that of the stack."""
    is_transposed: bool = False
    """Whether (experts, columns, rows) is meant where shapes leave both open: models differ in it."""

    def is_transposed_in(self, shape: tuple[int, ...]) -> bool | None:
        """Whether a tensor of `shape` has rows and columns the other way round; None if it does not fit."""
        experts, rows, cols = self.shape
        found = {False: (experts, rows, cols), True: (experts, cols, rows)}
        return next((way for way in (self.is_transposed, not self.is_transposed) if found[way] == shape), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartlyRead:
    """A checkpoint tensor that one rank does not read whole."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """What it reads: for each box the start and the length in every dimension."""
    reason: str = ""
    """What its loader says of it, if it does not take it."""


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
    """Something the engine derived from weights at boot, and how to bring it up to date after they changed."""

    name: str
    run: Callable[[], None]
    written: tuple[Tensor, ...] = ()
    """Live weights that no slot is a view of."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvScale:
    """One scale of the FP8 attention of one layer, per tensor: the multiplier that dequantizes."""

    kind: str
    """`q`, `k` or `v`."""
    tensor: Tensor
    """What the engine's kernels read; float32, one element."""
    write_copies: Callable[[float], None] = lambda _: None
    """Brings up to date what the engine keeps of it elsewhere: Python numbers, host tensors, products."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvLayer:
    """One attention layer that reads and writes an FP8 KV cache."""

    name: str
    """Of the checkpoint's module, for example `model.layers.0.self_attn`."""
    scales: tuple[KvScale, ...]
    """Those that the engine uses."""


Observe: TypeAlias = Callable[[int, Tensor | None, Tensor | None, Tensor | None], None]
"""Takes the index of an attention layer, and its queries, keys and values as they go into its attention, after RoPE: (N, C) or
(N, H, D), not quantized. None for what the layer does not compute."""


class Prefill(Protocol):
    """Runs the live network over token ids, away from requests and from the KV cache."""

    vocab_size: int
    max_length: int
    """Tokens of the longest sequence that the engine takes."""
    max_tokens: int
    """Tokens of one pass that the engine has memory for."""

    def __call__(self, sequences: Sequence[Tensor], observe: Observe) -> None:
        """Run one pass over `sequences`, each (L,) int64 on the engine's device, and leave no hook behind.

        Attention is not quantized, so that no layer is measured through the scales of those before it.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvCache:
    """The FP8 KV cache of one rank."""

    dtype: str
    backend: str
    """The engine's attention over it."""
    layers: tuple[KvLayer, ...] = ()
    prefill: Prefill | None = None
    saturates: bool = True
    """Whether the engine clamps values that do not fit; otherwise they become NaN."""
    refusals: tuple[Refusal, ...] = ()
    """Why its scales cannot be changed."""
    prefill_refusals: tuple[Refusal, ...] = ()
    """Why they can be given, but not measured."""
    check_now: Callable[[], None] = lambda: None
    """Raises what keeps scales from being changed now: graphs that cannot be captured anew while the engine sleeps."""
    before_write: Callable[[], None] = lambda: None
    """What has to be done before the first scale changes: noise of a dummy boot taken away."""
    after_write: Callable[[], None] = lambda: None
    """What has to be done once scales have changed: graphs captured anew."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inventory:
    """What an adapter reads off one rank's live model."""

    slots: tuple[Slot, ...]
    live: tuple[LiveTensor, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    """Checkpoint names that share another's slot (tied embeddings): a source may send either or both."""
    unneeded: tuple[str, ...] = ()
    """Checkpoint names that a source may send and no slot takes."""
    stacked: tuple[Stacked, ...] = ()
    """Tensors in which a source may send the weights of all experts of a layer at once."""
    padding: tuple[Tensor, ...] = ()
    """Live views that no checkpoint tensor covers; a boot from a checkpoint leaves them zero, and so does a refit."""
    refreshes: tuple[Refresh, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    partly_read: Mapping[str, PartlyRead] = field(default_factory=dict)
    """Checkpoint tensors that this rank does not read whole; the ranks of an engine together have to."""
    kv: KvCache | None = None

    @cached_property
    def watch(self) -> Watch:
        """Of `live`."""
        return Watch(self.live)

    @property
    def names(self) -> frozenset[str]:
        """Every checkpoint name that a source may send to this rank."""
        stacked = (stack.name for stack in self.stacked)
        return frozenset(slot.name for slot in self.slots).union(self.aliases, self.unneeded, stacked)
