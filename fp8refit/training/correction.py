"""Correction of the mismatch between a trainer and the engine that sampled for it: weights, rejection, metrics.

An FP8 engine samples from a policy q that is not quite the trainer's p, so a gradient over its samples is off-policy.
With `r = p / q` per token, these functions turn the log-probabilities of sampled tokens into loss weights, masks of
tokens to keep, and metrics. They only compute on tensors: no engine, no state, no collective calls.

Every function takes these, all of the same shape:

- `trainer_logprobs`: (B, L), any floating dtype: log p of each sampled token, before the optimizer's step.
- `rollout_logprobs`: (B, L), any floating dtype: log q, as the engine reported it.
- `mask`: (B, L), bool or numbers: which tokens count. Values of other tokens are never read, not even NaN.

Log-ratios are computed in float64 and clamped to +-20 per token; only `veto_mask` compares them unclamped. Their sum over
a sequence is clamped again before it becomes a ratio, but not in `keep_mask`, whose bounds are in nats. So ratios stay
finite and positive whatever the engine reported, including -inf; two -inf give a ratio of 1. A NaN in a token that counts
is a fault upstream: it stays NaN in weights and metrics, where the loss shows it, and every mask drops the token. No
gradient flows through a result: a weight is a change of measure, not part of the objective.

Formulas are from the papers named at each function, and from these:

- "verl": `docs/algo/rollout_corr_math.md` (2025-11-04), by section, and `rollout_corr_helper.py` (0.9.1, Apache-2.0).
- "slime": `examples/train_infer_mismatch_helper/mis.py`, and slime's command-line flags.

The tests compare with verl's helper. The differences:
verl bounds k1 by `[log lower, log upper]` of a ratio; this module by nats. In weights and chi-square of sequences verl
clamps only the sum of the log-ratios, and in the metrics k1, k3 and perplexity nothing, which matters once a token is
beyond 20 nats. Its means over sequences count empty sequences, as ratios of 1 or weights of 0. Its ESS is computed from
weights cut at the upper bound a second time, and it normalizes weights over all ranks. It has no lower clipping, geometric
mean, veto, OPSM or adaptive share; the geometric mean and the veto of that page were those of an earlier version.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fp8refit.errors import InvalidCorrectionError

LOG_BOUND = 20.0
"""Log-ratios are clamped to this bound: exp(20) is 4.9e8. verl and TRL use the same one."""

_LEAST_MEAN = 1e-8
"""Weights whose mean is below this are not normalized."""

Level = Literal["token", "sequence", "geometric"]
Outside = Literal["clip", "zero"]
Divergence = Literal["k1", "k2", "k3"]
Per = Literal["token", "sum", "mean", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """How far the engine is from the trainer, over the tokens that count. NaN if none counts."""

    k1: float
    """`mean(-log r)`: KL(q || p), estimated without bias (Schulman, kl-approx; verl, 4.1)."""
    k3: float
    """`mean(r - 1 - log r)`: the same, but never negative and with less variance (Schulman, kl-approx)."""
    token_mult_prob_error: float
    """`mean(exp |log r|)`: NeMo RL's token multiplicative probability error. 1 means equal; 1.05 is a lot."""
    ppl_ratio: float
    """Mean over sequences of `exp(mean(-log r))`: the trainer's perplexity of the samples divided by the engine's (verl,
    4.2)."""
    chi2_token: float
    """`mean(r^2) - 1`: the chi-square divergence of p from q, per token (verl, 4.3)."""
    chi2_sequence: float
    """`mean((prod r)^2) - 1`: the same, per sequence (verl, 4.3)."""
    ess: float
    """Effective sample size of the weights, as a share of the tokens. See `effective_sample_size`."""
    masked_fraction: float
    """Share of the tokens whose weight is zero."""


def importance_weights(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    upper: float = 2.0,
    lower: float = 0.0,
    outside: Outside = "clip",
    normalize: bool = False,
) -> Tensor:
    """Compute a loss weight for each token.

    The ratio R of a token is `r` (`level="token"`; verl, 3.3.1), `prod r` over its sequence (`"sequence"`; verl, 3.3.2), or
    `exp(mean log r)`, the geometric mean (`"geometric"`; slime's level of that name; verl, 3.3.3, only rejects by it).

    The weight is `clamp(R, lower, upper)` (`outside="clip"`). With `lower=0` this is truncated importance sampling, TIS
    (Ionides 2008, Yao et al. 2025), which FP8-RL (arXiv 2601.18150) uses per token with `upper=2`. Lower clipping is
    slime's mode "clip" and its `--tis-clip-low`. With `outside="zero"` the weight is `R` within `[lower, upper]` and 0
    outside: IcePop (Ling team 2025), and MIS of whole sequences (Li et al. 2025).

    Args:
        trainer_logprobs: See the module.
        rollout_logprobs: See the module.
        mask: See the module.
        level: What the ratio covers.
        upper: Largest weight.
        lower: Smallest weight.
        outside: What happens to a ratio outside the bounds.
        normalize: Divide the weights by their mean, `w / mean(w)`: over tokens, or over sequences for the other levels
            (verl, 3.3.1 and 3.3.2, `rollout_is_batch_normalize`). If the mean is 1e-8 or less, weights stay as they
            are, as in verl. The mean covers only these tensors: pass whole batches, not micro-batches.

    Returns:
        (B, L), fp64 if any log-probability was, else fp32. 0 where the mask is 0.

    Raises:
        InvalidCorrectionError: Shapes differ, or the bounds are empty.

    Examples:
        >>> weights = importance_weights(trainer_logprobs, rollout_logprobs, mask)     # doctest: +SKIP
        >>> loss = -(weights * advantages * new_logprobs)[mask].mean()                 # doctest: +SKIP
    """
    _check_choice(level, Level)
    _check_choice(outside, Outside)
    _check(0 <= lower < upper, f"{lower=} and {upper=} do not bound a ratio; use 0 <= lower < upper")
    counts, logs = _log_ratio(trainer_logprobs, rollout_logprobs, mask)
    if level != "token":
        logs = _over_sequence(logs, counts, mean=level == "geometric").clamp(-LOG_BOUND, LOG_BOUND).expand_as(logs)
    ratio = logs.exp()
    is_within = (ratio >= lower) & (ratio <= upper) | ratio.isnan()
    weights = ratio.clamp(lower, upper) if outside == "clip" else torch.where(is_within, ratio, 0.0)
    weights = torch.where(counts, weights, 0.0)
    if normalize:
        weights = weights / _mean_weight(weights, counts, level)
    return weights.to(_result_dtype(trainer_logprobs, rollout_logprobs))


def keep_mask(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence = "k3",
    per: Per = "token",
    upper: float,
    lower: float | None = None,
) -> Tensor:
    """Drop tokens where trainer and engine diverge too much.

    A token's divergence is `k1 = -log r`, `k2 = (log r)^2 / 2` or `k3 = r - 1 - log r` (Schulman, kl-approx). A token is
    kept if its own (`per="token"`), or the sum, mean or maximum over its sequence, is within `[lower, upper]`.
    `per="max"` applies the bounds to every token of the sequence, so it bounds k1 on both sides. These are verl's
    `rollout_rs` options `token_k*`, `seq_sum_k*`, `seq_mean_k*`, `seq_max_k2` and `seq_max_k3`. As there, sums are not
    clamped.

    Args:
        trainer_logprobs: See the module.
        rollout_logprobs: See the module.
        mask: See the module.
        divergence: Which estimate to use.
        per: What it covers. All but `"token"` keep or drop whole sequences.
        upper: Largest divergence, in nats.
        lower: Smallest divergence, `-upper` by default. Only k1 can be negative.

    Returns:
        (B, L) bool: the tokens of `mask` that are kept.

    Raises:
        InvalidCorrectionError: Shapes differ, or the bounds are empty.
    """
    _check_choice(divergence, Divergence)
    _check_choice(per, Per)
    lower = -upper if lower is None else lower
    _check(lower < upper, f"{lower=} and {upper=} do not bound a divergence; use lower < upper")
    counts, logs = _log_ratio(trainer_logprobs, rollout_logprobs, mask)
    values = _divergence(logs, divergence)
    if per in ("sum", "mean"):
        values = _over_sequence(values, counts, mean=per == "mean")
    within = (values >= lower) & (values <= upper)
    if per == "max":
        within = (within | ~counts).all(-1, keepdim=True)
    return within & counts


def veto_mask(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, least_ratio: float = 1e-4) -> Tensor:
    """Drop every sequence that holds a token with `r < least_ratio`, which the trainer would hardly sample.

    The veto of verl (3.5) and slime. Like them, it compares unclamped ratios, so `least_ratio` may be as small as you
    like. Arguments and errors as in `keep_mask`.

    Returns:
        (B, L) bool: the tokens of `mask` that are kept.
    """
    _check(0 < least_ratio < math.inf, f"{least_ratio=} is not a ratio; use a small positive number")
    counts, ours, theirs = _logprobs(trainer_logprobs, rollout_logprobs, mask)
    return counts & ((ours >= theirs + math.log(least_ratio)) | ~counts).all(-1, keepdim=True)


def opsm_mask(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, advantages: Tensor, delta: float
) -> Tensor:
    """Off-policy sequence masking: drop tokens where `A < 0` and the sequence's mean k1 exceeds `delta`.

    DeepSeek-V3.2 (2025), section 3.1; slime's `--use-opsm --opsm-delta`. A token with NaN is dropped whatever its
    advantage. Its sequence's mean is NaN too, so the sequence's tokens with `A < 0` are dropped with it. Other arguments
    and errors as in `keep_mask`.

    Args:
        trainer_logprobs: See the module.
        rollout_logprobs: See the module.
        mask: See the module.
        advantages: (B,), one per sequence, or (B, L).
        delta: Largest mean divergence, in nats.

    Returns:
        (B, L) bool: the tokens of `mask` that are kept.
    """
    counts, logs = _log_ratio(trainer_logprobs, rollout_logprobs, mask)
    (shape,) = _shapes(advantages)
    _check(shape in (counts.shape, counts.shape[:1]), f"advantages have shape {shape}")
    negative = (advantages if advantages.ndim == counts.ndim else advantages[:, None]) < 0
    is_close = _over_sequence(-logs, counts, mean=True) <= delta
    return counts & ~logs.isnan() & (is_close | ~negative)


def adaptive_weights(weights: Tensor, mask: Tensor, *, least_ess: float = 0.9) -> tuple[Tensor, Tensor]:
    """Apply as much correction as keeps `least_ess` of the samples effective.

    Full correction is unbiased but noisy; none is biased but calm. This computes `1 + share * (weights - 1)` with the
    largest share in [0, 1] that keeps `effective_sample_size` at `least_ess` or above. With the weights' mean m, standard
    deviation s and `c = sqrt(1 / least_ess - 1)`, that is `min(1, c / (s - c * (m - 1)))`, or 1 if the denominator is not
    positive. The rule is ours. AIS (arXiv 2605.13907) inspired it but mixes with a different coefficient.

    Args:
        weights: (B, L), any floating dtype, from `importance_weights(..., outside="clip")`. Apply masks afterwards: a
            zero weight would become `1 - share`.
        mask: (B, L), bool or numbers: which tokens count.
        least_ess: Share of the tokens, in (0, 1]. 1 means no correction.

    Returns:
        The weights, (B, L) in the dtype of `weights`, 0 where the mask is 0; and the share, a scalar tensor of that
        dtype.

    Raises:
        InvalidCorrectionError: Shapes differ, weights are not floating-point, or `least_ess` is not a share.
    """
    _check(0 < least_ess <= 1, f"{least_ess=} is not a share of the samples; use a number in (0, 1]")
    counts, full = _counted(weights, mask)
    _check(weights.is_floating_point(), f"weights are {weights.dtype}, which would cut results to integers; use floats")
    mean = _mean(full, counts)
    deviation = _mean((full - mean).square(), counts).sqrt()
    room = math.sqrt(1 / least_ess - 1)
    needed = deviation - room * (mean - 1)
    share = torch.where(needed > 0, (room / needed).clamp(max=1.0), 1.0)
    return torch.where(counts, 1 + share * (full - 1), 0.0).to(weights.dtype), share.to(weights.dtype)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """Kish's effective sample size (1965) as a share of the tokens that count: `mean(w)^2 / mean(w^2)`.

    Args:
        weights: (B, L), non-negative.
        mask: (B, L), bool or numbers: which tokens count.

    Returns:
        A float64 scalar in (0, 1]: 1 for equal weights, `1 / n` if one of n tokens has all the weight. 0 if all weights
        are zero, NaN if no token counts.

    Raises:
        InvalidCorrectionError: Shapes differ.
    """
    counts, found = _counted(weights, mask)
    largest = found.max() if found.numel() else found.new_zeros(())
    found = found / torch.where(largest > 0, largest, 1.0)
    ess = _mean(found, counts).square() / _mean(found.square(), counts)
    return torch.where((largest == 0) & counts.any(), 0.0, ess)


def mismatch(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, weights: Tensor | None = None
) -> Mismatch:
    """Measure how far the engine is from the trainer; see the fields of `Mismatch`. Synchronizes with the device once.

    Args:
        trainer_logprobs: See the module.
        rollout_logprobs: See the module.
        mask: See the module.
        weights: (B, L), the loss weights, for `ess` and `masked_fraction`; by default the token ratios.

    Raises:
        InvalidCorrectionError: Shapes differ.
    """
    counts, logs = _log_ratio(trainer_logprobs, rollout_logprobs, mask)
    ratio = logs.exp()
    used = ratio if weights is None else _counted(weights, mask)[1]
    rows = counts.any(-1)
    of_rows = _over_sequence(logs, counts, mean=False)[:, 0].clamp(-LOG_BOUND, LOG_BOUND)
    means = _over_sequence(logs, counts, mean=True)[:, 0]
    found = (
        _mean(_divergence(logs, "k1"), counts),
        _mean(_divergence(logs, "k3"), counts),
        _mean(logs.abs().exp(), counts),
        _mean((-means).exp(), rows),
        _mean(ratio.square(), counts) - 1,
        _mean((2 * of_rows).exp(), rows) - 1,
        effective_sample_size(used, mask),
        _mean((used == 0).double(), counts),
    )
    names = Mismatch.__dataclass_fields__
    return Mismatch(**dict(zip(names, torch.stack(found).tolist(), strict=True)))


def _log_ratio(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens count, (B, L) bool, and log r, (B, L) float64: clamped, and 0 where the mask is 0."""
    counts, ours, theirs = _logprobs(trainer_logprobs, rollout_logprobs, mask)
    apart = counts & (ours != theirs)
    return counts, torch.where(apart, ours - theirs, 0.0).clamp(-LOG_BOUND, LOG_BOUND)


def _logprobs(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens count, (B, L) bool, and both log-probabilities, (B, L) float64, without gradient."""
    shapes = _shapes(trainer_logprobs, rollout_logprobs, mask)
    _check(
        len(set(shapes)) == 1 and len(shapes[0]) == 2, f"log-probabilities and mask are {shapes}; all must be (B, L)"
    )
    return mask.bool(), trainer_logprobs.detach().double(), rollout_logprobs.detach().double()


def _counted(weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens count, and the weights in float64, 0 for the others."""
    shapes = _shapes(weights, mask)
    _check(shapes[0] == shapes[1], f"weights and mask are {shapes}; both need the same shape")
    counts = mask.bool()
    return counts, torch.where(counts, weights.detach().double(), 0.0)


def _divergence(logs: Tensor, kind: Divergence) -> Tensor:
    if kind == "k1":
        return -logs
    return logs.square() / 2 if kind == "k2" else torch.expm1(logs) - logs


def _over_sequence(values: Tensor, counts: Tensor, *, mean: bool) -> Tensor:
    """Sum or mean over the tokens that count, (B, 1); 0 for an empty sequence."""
    total = torch.where(counts, values, 0.0).sum(-1, keepdim=True)
    return total / counts.sum(-1, keepdim=True).clamp(min=1) if mean else total


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """Mean over what counts, a scalar; NaN if nothing counts."""
    return torch.where(counts, values, 0.0).sum() / counts.sum()


def _mean_weight(weights: Tensor, counts: Tensor, level: Level) -> Tensor:
    """The number that weights are divided by; 1 if almost no weight is left."""
    if level != "token":
        weights, counts = _over_sequence(weights, counts, mean=True), counts.any(-1, keepdim=True)
    mean = _mean(weights, counts)
    return torch.where(mean > _LEAST_MEAN, mean, 1.0)


def _result_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32


def _shapes(*tensors: Tensor) -> list[tuple[int, ...]]:
    """Their shapes. Raises `InvalidCorrectionError` if one is no tensor."""
    for each in tensors:
        _check(isinstance(each, Tensor), f"got something of type {type(each).__name__}; pass tensors")
    return [tuple(each.shape) for each in tensors]


def _check_choice(value: str, choices: object) -> None:
    _check(value in get_args(choices), f"{value!r} is not one of {', '.join(get_args(choices))}")


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise InvalidCorrectionError(problem)
