"""What `fp8refit.training.correction` promises, token by token in plain Python: rows of floats, masks of rows of bools.

`batch` and `noisy` make tensors to try it with.
"""

import math

import torch

BOUND = 20.0
DIVERGENCES = {
    "k1": lambda log: -log,
    "k2": lambda log: log * log / 2,
    "k3": lambda log: math.expm1(log) - log,
}
MEANS = {"sum": math.fsum, "mean": lambda values: math.fsum(values) / len(values), "max": max}


def cut(log):
    return min(max(log, -BOUND), BOUND)


def uncut_log_ratios(trainer, rollout, mask):
    """Of the tokens that count, row by row."""
    rows = zip(trainer, rollout, mask, strict=True)
    return [[0.0 if p == q else p - q for p, q, counts in zip(*row, strict=True) if counts] for row in rows]


def log_ratios(trainer, rollout, mask):
    """The same, within the bound."""
    return [[cut(log) for log in row] for row in uncut_log_ratios(trainer, rollout, mask)]


def spread(rows, mask, masked):
    """Put values of the tokens that count where they were."""
    found = (iter(row) for row in rows)
    return [[next(row) if c else masked for c in counts] for row, counts in zip(found, mask, strict=True)]


def weights(trainer, rollout, mask, *, level, upper, lower, outside, normalize):
    rows = []
    for row in log_ratios(trainer, rollout, mask):
        if level == "sequence":
            row = [cut(math.fsum(row))] * len(row)
        elif level == "geometric" and row:
            row = [math.fsum(row) / len(row)] * len(row)
        ratios = [math.exp(log) for log in row]
        if outside == "clip":
            rows.append([min(max(ratio, lower), upper) for ratio in ratios])
        else:
            rows.append([ratio if lower <= ratio <= upper else 0.0 for ratio in ratios])
    if normalize:
        counted = [value for row in rows for value in (row if level == "token" else row[:1])]
        mean = math.fsum(counted) / len(counted) if counted else 0.0
        if mean > 1e-8:
            rows = [[value / mean for value in row] for row in rows]
    return spread(rows, mask, 0.0)


def kept(trainer, rollout, mask, *, divergence, per, upper, lower):
    rows = []
    for row in log_ratios(trainer, rollout, mask):
        values = [DIVERGENCES[divergence](log) for log in row]
        if per == "token":
            rows.append([lower <= value <= upper for value in values])
        elif per == "max":
            rows.append([all(lower <= value <= upper for value in values)] * len(row))
        else:
            rows.append([bool(row) and lower <= MEANS[per](values) <= upper] * len(row))
    return spread(rows, mask, False)


def vetoed(trainer, rollout, mask, *, least_ratio):
    logs = uncut_log_ratios(trainer, rollout, mask)
    rows = [[all(log >= math.log(least_ratio) for log in row)] * len(row) for row in logs]
    return spread(rows, mask, False)


def off_policy(trainer, rollout, mask, *, advantages, delta):
    """`advantages` are one a sequence, or rows of one a token."""
    rows = []
    for row, counts, given in zip(log_ratios(trainer, rollout, mask), mask, advantages, strict=True):
        by_token = given if isinstance(given, list) else [given] * len(counts)
        of_row = [advantage for advantage, c in zip(by_token, counts, strict=True) if c]
        is_close = bool(row) and -math.fsum(row) / len(row) <= delta
        rows.append([(is_close or a >= 0) and not math.isnan(log) for log, a in zip(row, of_row, strict=True)])
    return spread(rows, mask, False)


def effective(values):
    return math.fsum(values) ** 2 / (len(values) * math.fsum(value * value for value in values))


def metrics(trainer, rollout, mask):
    rows = [row for row in log_ratios(trainer, rollout, mask) if row]
    logs = [log for row in rows for log in row]

    def mean(values):
        values = list(values)
        return math.fsum(values) / len(values)

    return {
        "k1": mean(-log for log in logs),
        "k3": mean(math.expm1(log) - log for log in logs),
        "token_mult_prob_error": mean(math.exp(abs(log)) for log in logs),
        "ppl_ratio": mean(math.exp(-mean(row)) for row in rows),
        "chi2_token": mean(math.exp(2 * log) for log in logs) - 1,
        "chi2_sequence": mean(math.exp(2 * cut(math.fsum(row))) for row in rows) - 1,
        "ess": effective([math.exp(log) for log in logs]),
        "masked_fraction": 0.0,
    }


def batch(log_ratio, mask=None, dtype=torch.float32):
    """Log-probabilities of trainer and engine that are so far apart, and a mask."""
    ratio = torch.tensor(log_ratio, dtype=dtype)
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return ratio - 1, torch.full_like(ratio, -1), mask


def noisy(*, rows=6, length=40, scale=0.3, seed=0, dtype=torch.float32):
    """A batch of ragged sequences, NaN beyond their ends."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < lengths
    rollout = -torch.rand(rows, length, generator=generator, dtype=dtype) * 3
    trainer = rollout + scale * torch.randn(rows, length, generator=generator, dtype=dtype)
    return trainer.masked_fill(~mask, math.nan), rollout.masked_fill(~mask, math.nan), mask
