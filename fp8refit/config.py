"""What a user configures."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Validate = Literal["fused", "strict", "off"]


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

    bucket_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of one staging buffer for tensors that are not on the engine's device; at most two are held."""
