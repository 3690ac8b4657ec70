"""The options that users set."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from textwrap import shorten
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from pydantic import BaseModel, Field, PlainValidator, ValidationError, field_validator

from fp8refit.errors import InvalidOptionError

Validate = Literal["fused", "strict", "off"]
InFlight = Literal["wait", "abort", "keep", "continue"]
KvKind = Literal["q", "k", "v"]
Transport = Literal["auto", "collective"]

LORA = "lora."
"""Begins the names of LoRA adapters' matrices in an engine. A refit of base weights keeps them."""
LONGEST_WAIT_S = 1e9
"""The longest wait that may be asked of another process. Every clock and socket accepts it."""
Wait: TypeAlias = Annotated[float, Field(gt=0, le=LONGEST_WAIT_S, allow_inf_nan=False)]
"""Seconds that another process may be told to wait. One order can cover many steps, each with `RefitConfig.timeout_s`."""
_WITH_A_POLICY = ("manifest", "calibration", "kv_scales")
"""Arguments of each refit that may be taken for options."""
MAX_TIMEOUT_S = 86_400
"""The longest `RefitConfig.timeout_s`: one day."""
NewNames: TypeAlias = Mapping[str, str] | tuple[str, str] | Sequence[tuple[str, str]] | str
Rename: TypeAlias = NewNames | Callable[[str], str]
"""How a trainer's names become the engine's; see `RefitConfig.rename`."""


def read_rename(rename: Any) -> Any:
    """Return a mapping of whole names, a tuple of pairs of prefixes, a function, or None.

    Raises:
        ValueError: It is none of these, or the function takes more than a name.
    """
    if rename is None:
        return None
    if callable(rename):
        try:
            inspect.signature(rename).bind("")
        except TypeError:
            raise ValueError(
                "rename takes more than a name; a function of a name and a tensor goes to fp8refit.gathered(..., rename=...)"
            ) from None
        return rename
    pairs = [pair.split("=") for pair in rename.split(",")] if isinstance(rename, str) else rename
    if isinstance(pairs, Mapping):
        pairs = list(pairs.items())
    elif _is_pair(pairs):
        pairs = [pairs]
    if not isinstance(pairs, Sequence) or not all(map(_is_pair, pairs)):
        raise ValueError(
            f'rename is {rename!r}; pass a pair of prefixes ("actor.", ""), several pairs, their text "actor.=", a mapping of '
            "whole names, or a function of a name"
        )
    return dict(pairs) if isinstance(rename, Mapping) else tuple((old, new) for old, new in pairs)


def _is_pair(found: Any) -> bool:
    return isinstance(found, list | tuple) and len(found) == 2 and all(isinstance(name, str) for name in found)


ReadRename: TypeAlias = Annotated[Rename | None, PlainValidator(read_rename)]


class KvConfig(BaseModel, frozen=True, extra="forbid"):
    """How the scales of an FP8 KV cache are computed from a calibration batch."""

    margin: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """A scale is `margin * amax / 448`, where amax is the largest absolute value in the batch. The margin leaves room for
    larger values. Default: 1.05 if the engine clamps overflow, 2 if overflow becomes NaN. A power of two costs no
    precision except for the smallest values."""

    scales: tuple[KvKind, ...] = Field(default=("q", "k", "v"), min_length=1)
    """Which scales to compute: queries (if the engine quantizes them), keys, values. The others are kept."""

    max_tokens: int = Field(default=16384, ge=1)
    """How many tokens of a calibration batch to use: whole sequences in order, the last one cut short."""

    reduction: Literal["max", "rank"] = "max"
    """`max`: every rank uses the largest value that any rank saw, so scales do not depend on tensor parallelism. `rank`:
    each rank uses what its own heads saw, which is finer."""


class KvOrder(BaseModel, frozen=True, extra="forbid"):
    """Where the KV scales of one refit come from: token ids to measure on, or scales by name."""

    token_ids: tuple[tuple[int, ...], ...] = ()
    scales: dict[str, float] = {}


class CollectiveConfig(BaseModel, frozen=True, extra="forbid"):
    """How to broadcast a policy with `transport="collective"`."""

    host: str = Field(default="127.0.0.1", max_length=255)
    """Address of the trainer's host where the engine's ranks connect. The loopback address reaches only engines on that
    host. Anyone who can reach the port can disturb a refit, so use a trusted network."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port on that host; 0 picks a free one."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries the bytes. `auto`: NCCL if trainer and engine each have GPUs of their own, else gloo."""

    wire: Literal["fp8", "bf16"] = "fp8"
    """What is sent. `fp8`: codes and scales, quantized by the trainer into the format of the engine's slots. `bf16`: the
    trainer's weights, quantized by every rank. Engines end up with the same bytes either way. A tensor is always sent as
    BF16 if its slots differ in format or cut through its blocks."""

    stage: Literal["auto", "ahead", "during"] = "auto"
    """When the policy is sent. `ahead`: while requests still run, into memory of the engine's GPU that holds all that a rank is
    sent, and stays allocated until the trainer closes; requests are paused only for the write. `during`: while they are
    paused, through three buckets. `auto`: ahead if tensors are at rest, requests run meanwhile, and each engine has one rank,
    no sleep mode, and 4 GiB of its GPU stay free."""


class RefitConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How a `Refitter` works. The defaults suit a trainer with BF16 or fp32 master weights."""

    validate_values: Validate = Field(default="fused", alias="validate")
    """Pass it as `validate=`. When to look for NaN and Inf. `fused`: while writing; a bad tensor leaves the engine dirty,
    and it refuses requests until the next good refit. `strict`: in a separate pass before the first byte is written.
    `off`: never."""

    fp32_sources: Literal["round_to_bf16", "exact"] = "round_to_bf16"
    """`round_to_bf16` rounds fp32 masters to BF16 before quantizing, so that trainer and engine agree on the policy.
    `exact` quantizes the fp32 values."""

    on_scale_mismatch: Literal["refuse", "copy"] = "refuse"
    """What to do with an FP8 tensor if its scales are not powers of two and the slot's kernel needs powers of two. `copy`
    writes them bit for bit anyway: the engine then differs from one booted from that checkpoint."""

    keep: tuple[str, ...] = Field(default=(), validate_default=True)
    """Patterns (`*` and `?`) of checkpoint names that may be missing, such as frozen parameters: the engine keeps its
    values. Weights discarded by sleep mode or overwritten by a failed refit cannot be kept. One pattern may be a string.
    `lora.*`, the engine's adapters, is always added: `Refitter.refit_adapter` writes them."""

    ignore: tuple[str, ...] = ()
    """Patterns (`*` and `?`) of names that the trainer may send although the engine has no such weight. Whatever else the
    engine does not know is an error. One pattern may be a string."""

    rename: ReadRename = Field(default=None, exclude=True)
    """How the trainer's names become the engine's, after the prefixes of wrappers are removed: a pair of prefixes, old and
    new; several pairs, applied one after another, also as text (`"actor.=,model.language_model.=model."`); a mapping of whole
    names; or a function from a name to a name. Files are then read by the trainer."""

    prove_trace: bool = True
    """Whether the first refit of an engine compares what fp8refit knows of the engine's own loader with what the loader does:
    it loads random values into one layer of each kind, apart from the live model. What differs is refused by name. Takes about
    a second, and memory for one layer; `layout` and `fp8refit inspect` do it too. `False` leaves it out."""

    bucket_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of one staging buffer, for tensors that are not on the engine's device. A rank holds at most two. A trainer
    holds two more if its engine runs in other processes, and keeps them between refits. A broadcast uses three on each
    side."""

    transport: Transport = "auto"
    """How tensors reach ranks in other processes. `auto`: through the trainer's mapped memory where possible, else
    through a shared bucket; both need one host. `collective`: a broadcast to all ranks of one or more engines
    (`Broadcaster`), also over a network."""

    collective: CollectiveConfig = CollectiveConfig()
    """How to broadcast."""

    in_flight: InFlight = "wait"
    """What an asynchronous engine does with running requests. `wait` lets them finish. `abort` ends them with the tokens
    they have. `keep` freezes them, then continues under the new policy with their KV recomputed. `continue` does so with the
    KV that they have, of which no other request takes a block; KV scales stay as they are. New requests wait for the refit.
    A synchronous engine refuses a refit while requests are unfinished."""

    count_changes: bool = False
    """Whether the report says how many codes, scales and other values the refit changed. It then reads what it writes over."""

    kv: KvConfig = KvConfig()
    """How to compute KV-cache scales, for `calibration=` and `calibrate`."""

    timeout_s: float = Field(default=300.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)
    """Seconds to wait for any other rank or process at each step, and for running requests under `in_flight="wait"`. At
    most 86,400, one day. A rank that reads files must finish within one step."""

    @field_validator("keep", "ignore", mode="before")
    @classmethod
    def _one_or_several(cls, patterns: Any) -> Any:
        return (patterns,) if isinstance(patterns, str) else patterns

    @field_validator("keep")
    @classmethod
    def _and_adapters(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*patterns, f"{LORA}*")))


def _described(model: type[BaseModel]) -> str:
    """A docstring with every option, for `help`."""
    fields = ((field.alias or name, field.description or "") for name, field in model.model_fields.items())
    said = (f"    {name}: {' '.join(description.split())}" for name, description in fields)
    return "\n".join([f"{model.__doc__}\n\nOptions:", *said])


RefitConfig.__doc__ = _described(RefitConfig)


class Options(TypedDict, total=False):
    """The fields of `RefitConfig`, as keywords of `Refitter`, `refit`, `update` and `Broadcaster`."""

    validate: Validate
    fp32_sources: Literal["round_to_bf16", "exact"]
    on_scale_mismatch: Literal["refuse", "copy"]
    keep: str | Sequence[str]
    ignore: str | Sequence[str]
    rename: Rename | None
    prove_trace: bool
    bucket_bytes: int
    transport: Transport
    collective: CollectiveConfig | Mapping[str, Any]
    in_flight: InFlight
    count_changes: bool
    kv: KvConfig | Mapping[str, Any]
    timeout_s: float


def choose_config(config: RefitConfig | None, options: Mapping[str, Any]) -> RefitConfig:
    """Return the given config, or make one from its fields.

    Raises:
        TypeError: `config` is not a config.
        InvalidOptionError: Both were given, or a field is unknown or invalid.
    """
    if config is None:
        try:
            return RefitConfig(**options)
        except ValidationError as error:
            raise InvalidOptionError("\n".join(map(_why_invalid, error.errors()))) from None
    if not isinstance(config, RefitConfig):
        raise TypeError(f"config is of type {type(config).__name__}; pass a RefitConfig, or its fields as keywords")
    if options:
        raise InvalidOptionError(f"give config or its fields as keywords, not both (got {sorted(options)} too)")
    return config


def _why_invalid(problem: Mapping[str, Any]) -> str:
    """Say in one line what a model says of a field."""
    *path, name = map(str, problem["loc"])
    where = ".".join((*path, name))
    if problem["type"] != "extra_forbidden":
        return f"`{where}` is {shorten(repr(problem['input']), 80)}: {problem['msg'].removeprefix('Value error, ')}"
    model: Any = RefitConfig
    for part in path:
        model = model.model_fields[part].annotation
    if where in _WITH_A_POLICY:
        return f"no option `{name}`; pass it with the policy, as in refit(policy, {name}=...)"
    known = _names_of(model)
    closest = [".".join((*path, each)) for each in get_close_matches(name, known, n=1)]
    return f"no option `{where}`; " + (f"did you mean `{closest[0]}`?" if closest else f"there are {', '.join(known)}")


def refuse_others(call: Callable[..., object], others: Mapping[str, object], *, where: str = "") -> None:
    """Refuse what a method does not take.

    Args:
        call: The method.
        others: What it was given besides.
        where: What takes options; the method's class if empty.

    Raises:
        InvalidOptionError: There is something; says where options go.
    """
    if others:
        raise InvalidOptionError("\n".join(_why_not_here(call, name, where) for name in others))


def _why_not_here(call: Callable[..., object], name: str, where: str) -> str:
    owner = where or call.__qualname__.partition(".")[0]
    parameters = inspect.signature(call).parameters.values()
    taken = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    options = (*_names_of(RefitConfig), "config", "on_refit")
    if name in options:
        return f"`{name}` is an option, which this call does not take: pass {owner}(..., {name}=...)"
    known = {each: f"`{each}`" for each in taken} | {each: f"{owner}(..., {each}=...)" for each in options}
    closest = get_close_matches(name, known, n=1)
    return f"no argument `{name}`; " + (
        f"did you mean {known[closest[0]]}?" if closest else f"there are {', '.join(taken)}"
    )


def _names_of(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


class Job(BaseModel, frozen=True, extra="forbid"):
    """What every rank of an engine has to do."""

    config: RefitConfig = RefitConfig()
    kv: KvOrder | None = None
    """KV scales to set once the weights are in place."""
    compares: bool = False
    """Whether to compare the weights with what a refit would write, instead of writing."""
