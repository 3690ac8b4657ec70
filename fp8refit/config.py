"""What a user configures."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Validate = Literal["fused", "strict", "off"]
InFlight = Literal["wait", "abort", "keep"]
KvKind = Literal["q", "k", "v"]
Transport = Literal["auto", "collective"]

LONGEST_WAIT_S = 1e9
"""The longest wait that may be ordered of another process: every clock and every socket still takes it."""
Wait: TypeAlias = Annotated[float, Field(gt=0, le=LONGEST_WAIT_S, allow_inf_nan=False)]
"""Seconds that another process may be told to wait. One order may wait for many steps of `RefitConfig.timeout_s` each."""
MAX_TIMEOUT_S = 86_400
"""A day: the longest `RefitConfig.timeout_s`."""


class KvConfig(BaseModel):
    """How the scales of an FP8 KV cache are computed from a calibration batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    margin: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """A scale is `margin * amax / 448`, with amax the largest absolute value seen: room for values that the batch did not
    show. By default 1.05 where the engine clamps what does not fit, and 2 where that becomes NaN; a power of two
    costs FP8, a floating-point format, no precision but at its small end."""

    scales: tuple[KvKind, ...] = Field(default=("q", "k", "v"), min_length=1)
    """Which scales are computed: of queries (where the engine quantizes them), keys and values. The others are kept."""

    max_tokens: int = Field(default=16384, ge=1)
    """How much of a calibration batch is used: whole sequences in their order, the last one cut short."""

    reduction: Literal["max", "rank"] = "max"
    """`max`: every rank of the engine uses the largest value that any of them saw, as one rank would. `rank`: each uses what
    its own heads showed, which is finer."""


class KvOrder(BaseModel):
    """Where the KV scales of one refit come from: token ids to measure, or scales by their names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_ids: tuple[tuple[int, ...], ...] = ()
    scales: dict[str, float] = {}


class CollectiveConfig(BaseModel):
    """How a policy is broadcast, with `transport="collective"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", max_length=255)
    """Address of the trainer's host at which the engine's ranks meet it; the loopback address serves engines on that host
    alone. Whoever reaches the port can disturb a refit: name an address of a network that is trusted."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port there; 0 for any that is free."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries the bytes: NCCL if trainer and engine are on GPUs, of which each has its own; gloo otherwise."""

    wire: Literal["fp8", "bf16"] = "fp8"
    """What travels: FP8 codes and scales, quantized by the trainer in the format that the engine's slots have, or the trainer's
    weights, quantized by every rank. The bytes that engines hold are the same. Where slots of one tensor differ in format,
    or are slices off its blocks, it travels as BF16 in any case."""


class RefitConfig(BaseModel):
    """How a `Refitter` works. The defaults are right for a trainer with BF16 or fp32 master weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    validate_values: Validate = Field(default="fused", alias="validate")
    """Given as `validate=`. When NaN and Inf are looked for: `fused` in the pass that writes (a bad tensor leaves the engine
    dirty, refusing requests until the next good refit); `strict` in a pass of its own before the first byte is written;
    `off` never."""

    fp32_sources: Literal["round_to_bf16", "exact"] = "round_to_bf16"
    """fp32 masters are rounded to BF16 before they are quantized, so that trainer and engine agree on the policy;
    `exact` quantizes the fp32 values themselves."""

    on_scale_mismatch: Literal["refuse", "copy"] = "refuse"
    """What to do with a tensor that is already FP8 and whose scales are no powers of two, for a slot whose kernel wants
    powers of two. `copy` writes them bit for bit anyway: the engine then differs from one booted from that checkpoint."""

    keep: tuple[str, ...] = ()
    """Patterns (`*` and `?`) of checkpoint names that need not come: parameters that the trainer froze, of which the engine
    keeps what it has. What a sleep has thrown away, or a refit that failed has written, cannot be kept."""

    bucket_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of one staging buffer for tensors that are not on the engine's device; at most two are held on a rank, and one
    that other processes can read by a trainer whose engine runs in other processes. A broadcast has three on each side, which
    are kept from one refit to the next."""

    transport: Transport = "auto"
    """How tensors come to ranks in other processes: `auto` by mapping the trainer's memory where that can be, else through a
    shared bucket, both on one host; `collective` by a broadcast to all ranks, over a network too, and to several engines at
    once (`Broadcaster`)."""

    collective: CollectiveConfig = CollectiveConfig()
    """How a broadcast is done."""

    in_flight: InFlight = "wait"
    """What an asynchronous engine does with requests that run when a refit begins: `wait` lets them finish, `abort` ends them
    with what they have, `keep` freezes them and goes on under the new policy, their KV computed anew. Requests that arrive
    meanwhile wait for the refit. A synchronous engine refuses to be refitted while requests are unfinished."""

    kv: KvConfig = KvConfig()
    """How KV-cache scales are computed, for `calibration=` and `calibrate`."""

    timeout_s: float = Field(default=300.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)
    """Seconds to wait for any other rank or process at each step, and for running requests under `in_flight="wait"`; a day
    (86 400) at most. A rank that reads files does so within one step."""
