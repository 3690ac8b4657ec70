"""Corrections against the same in plain Python, at what log-probabilities can come to."""

import math
from dataclasses import asdict
from itertools import chain, product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fp8refit.training import correction
from tests import plain_correction as plain

ANY = {"nan_ok": True, "rel": 1e-9, "abs": 1e-11}
LOGPROBS = st.sampled_from([-math.inf, -1e4, -45.0, -25.0, -19.5, -3.0, -0.7, -0.69, -1e-6, 0.0]) | st.floats(-30, 0)
GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])


@st.composite
def batches(draw):
    """Log-probabilities of trainer and engine, and a mask beside which anything may stand."""
    num_rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    trainer, rollout, mask = [], [], []
    for _ in range(num_rows):
        counts = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        mask.append(counts)
        for rows in (trainer, rollout):
            rows.append([draw(LOGPROBS if c else GARBAGE) for c in counts])
    return trainer, rollout, mask


def tensors(batch):
    trainer, rollout, mask = batch
    return torch.tensor(trainer, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64), torch.tensor(mask)


def is_near(values, bounds):
    """Whether rounding decides on which side of a bound a value is."""
    return any(math.isclose(value, bound, rel_tol=1e-9, abs_tol=1e-9) for value in values for bound in bounds)


WEIGHTS = {
    "level": ["token", "sequence", "geometric"],
    "bounds": [(0.0, 1e12), (0.5, 5.0), (0.0, 2.0), (0.999, 1.001)],
    "outside": ["clip", "zero"],
    "normalize": [False, True],
}
REJECTIONS = {
    "divergence": ["k1", "k2", "k3"],
    "per": ["token", "sum", "mean", "max"],
    "bounds": [(-0.11, 0.11), (-3.3, 2.1), (0.0, 30.0)],
}


def choices(options):
    """Every combination of options, with `bounds` as lower and upper."""
    for values in product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        lower, upper = chosen.pop("bounds")
        yield chosen | {"lower": lower, "upper": upper}


@given(batches())
def test_weights_are_what_their_formulas_say(batch):
    for chosen in choices(WEIGHTS):
        uncut = {"lower": 0.0, "upper": math.inf, "outside": "clip", "normalize": False}
        ratios = chain(*plain.weights(*batch, **chosen | uncut))
        if chosen["outside"] == "zero" and is_near(ratios, (chosen["lower"], chosen["upper"])):
            continue
        found = correction.importance_weights(*tensors(batch), **chosen)
        assert found.tolist() == [pytest.approx(row, **ANY) for row in plain.weights(*batch, **chosen)], chosen


@given(batches())
def test_what_diverged_is_rejected(batch):
    rows = [row for row in plain.log_ratios(*batch) if row]
    for chosen in choices(REJECTIONS):
        values = [[plain.DIVERGENCES[chosen["divergence"]](log) for log in row] for row in rows]
        sums = [math.fsum(row) for row in values]
        means = [total / len(row) for total, row in zip(sums, values, strict=True)]
        if not is_near(chain(*values, sums, means), (chosen["lower"], chosen["upper"])):
            found = correction.keep_mask(*tensors(batch), **chosen)
            assert found.tolist() == plain.kept(*batch, **chosen), chosen


@given(batches(), st.sampled_from([1e-4, 0.3]))
def test_a_sequence_is_vetoed_by_one_token(batch, least_ratio):
    assume(not is_near([log for row in plain.log_ratios(*batch) for log in row], [math.log(least_ratio)]))
    found = correction.veto_mask(*tensors(batch), least_ratio=least_ratio)
    assert found.tolist() == plain.vetoed(*batch, least_ratio=least_ratio)


@given(batches(), st.sampled_from([0.01, 3.3]), st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=3, max_size=3))
def test_bad_sequences_off_the_policy_are_dropped(batch, delta, advantages):
    advantages = advantages[: len(batch[0])]
    assume(not is_near([-math.fsum(row) / len(row) for row in plain.log_ratios(*batch) if row], [delta]))
    given_as = torch.tensor(advantages)
    found = correction.opsm_mask(*tensors(batch), advantages=given_as, delta=delta)
    assert found.tolist() == plain.off_policy(*batch, advantages=advantages, delta=delta)
    by_token = given_as[:, None].expand(found.shape)
    assert torch.equal(correction.opsm_mask(*tensors(batch), advantages=by_token, delta=delta), found)


@given(batches())
def test_metrics_are_what_their_formulas_say(batch):
    found = asdict(correction.mismatch(*tensors(batch)))
    if any(map(any, batch[2])):
        assert found == pytest.approx(plain.metrics(*batch), rel=1e-9, abs=1e-11)
    else:
        assert all(map(math.isnan, found.values()))


@given(batches(), st.sampled_from(["token", "sequence"]), st.sampled_from([0.3, 0.9, 0.999, 1.0]))
def test_no_more_correction_than_leaves_enough_samples(batch, level, least_ess):
    mask = tensors(batch)[2]
    assume(mask.any())
    full = correction.importance_weights(*tensors(batch), level=level)
    weights, share = correction.adaptive_weights(full, mask, least_ess=least_ess)
    ess = correction.effective_sample_size(weights, mask).item()
    assert ess >= least_ess - 1e-7
    assert 0 <= share.item() <= 1
    if share < 1:  # as much as that allows
        assert ess == pytest.approx(least_ess, abs=1e-7)
    expected = torch.where(mask, 1 + share * (full - 1), 0.0)
    assert torch.allclose(weights, expected, rtol=1e-12, atol=0)
