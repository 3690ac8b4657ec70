"""Corrections at named cases. `tests/fuzz/test_learn.py` holds them to their formulas at any values."""

import math
from dataclasses import asdict

import pytest
import torch

from fp8refit import InvalidCorrectionError, RefitError
from fp8refit.training import correction
from tests import plain_correction as plain
from tests.plain_correction import batch, noisy

BOUNDS = math.exp(-20), math.exp(20)


def as_lists(tensors):
    trainer, rollout, mask = tensors
    return trainer.double().tolist(), rollout.double().tolist(), mask.tolist()


@pytest.mark.parametrize("far", [1e4, -1e4, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratios_beyond_reason_give_finite_weights(far, level):
    tensors = batch([[far, far, far]])
    assert correction.importance_weights(*tensors, level=level, upper=1e12)[0, 0] == pytest.approx(BOUNDS[far > 0])
    assert correction.importance_weights(*tensors, level=level)[0, 0] == pytest.approx(2 if far > 0 else BOUNDS[0])
    assert correction.importance_weights(*tensors, level=level, outside="zero", lower=0.5)[0, 0] == 0
    assert all(map(math.isfinite, asdict(correction.mismatch(*tensors)).values()))


def test_a_token_that_neither_could_sample_is_no_mismatch():
    trainer = torch.full((1, 2), -math.inf)
    assert correction.importance_weights(trainer, trainer, torch.ones(1, 2)).tolist() == [[1, 1]]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_is_masked_is_never_read(garbage):
    trainer, rollout, mask = noisy()
    clean = trainer.masked_fill(~mask, 0), rollout.masked_fill(~mask, 0), mask
    dirty = trainer.masked_fill(~mask, garbage), rollout.masked_fill(~mask, -garbage), mask
    advantages = torch.tensor([-1.0, 1, -1, 1, -1, 1])
    for level in ("token", "sequence", "geometric"):
        options = {"level": level, "normalize": True}
        weights = correction.importance_weights(*dirty, **options)
        assert torch.equal(weights, correction.importance_weights(*clean, **options))
        assert (weights[~mask] == 0).all() and (weights[mask] > 0).all()
        mixed = correction.adaptive_weights(weights.masked_fill(~mask, garbage), mask)
        assert torch.equal(mixed[0], correction.adaptive_weights(weights, mask)[0])
    for per in ("token", "sum", "mean", "max"):
        kept = correction.keep_mask(*dirty, per=per, upper=0.05)
        assert torch.equal(kept, correction.keep_mask(*clean, per=per, upper=0.05)) and not kept[~mask].any()
    assert torch.equal(correction.veto_mask(*dirty, least_ratio=0.6), correction.veto_mask(*clean, least_ratio=0.6))
    for function in (correction.opsm_mask,):
        options = {"advantages": advantages, "delta": 0.01}
        assert torch.equal(function(*dirty, **options), function(*clean, **options))
    assert correction.mismatch(*dirty) == correction.mismatch(*clean)


def test_nan_in_a_token_that_counts_shows():
    tensors = batch([[math.nan, 0.0], [0.0, 0.0]])
    assert correction.importance_weights(*tensors).isnan().tolist() == [[True, False], [False, False]]
    assert correction.importance_weights(*tensors, outside="zero", level="sequence").isnan()[:, 0].tolist() == [
        True,
        False,
    ]
    assert correction.keep_mask(*tensors, upper=1.0).tolist() == [[False, True], [True, True]]
    assert correction.keep_mask(*tensors, upper=1.0, per="sum").tolist() == [[False, False], [True, True]]
    assert correction.veto_mask(*tensors).tolist() == [[False, False], [True, True]]
    negative = torch.tensor([-1.0, -1.0])
    assert correction.opsm_mask(*tensors, advantages=negative, delta=1.0).tolist() == [[False, False], [True, True]]
    assert correction.opsm_mask(*tensors, advantages=-negative, delta=1.0).tolist() == [[False, True], [True, True]]
    assert math.isnan(correction.mismatch(*tensors).k3) and math.isnan(correction.mismatch(*tensors).ess)
    assert correction.effective_sample_size(torch.tensor([[math.nan, 1.0]]), torch.ones(1, 2)).isnan()


def test_off_policy_sequences_are_told_by_their_mean_not_by_their_sum():
    tensors = batch([[-1.5, 0.0], [-3.0, 0.0]])
    kept = correction.opsm_mask(*tensors, advantages=torch.tensor([-1.0, -1.0]), delta=1.0)
    assert kept.tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize(
    "advantages", [[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [[-1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]]]
)
def test_nan_is_dropped_whatever_its_advantage(advantages):
    tensors = batch([[math.nan, 0.0], [0.0, math.nan], [-3.0, 0.0]], dtype=torch.float64)
    found = correction.opsm_mask(*tensors, advantages=torch.tensor(advantages), delta=1.0)
    assert found.tolist() == plain.off_policy(*as_lists(tensors), advantages=advantages, delta=1.0)
    assert not found[0, 0] and not found[1, 1]


@pytest.mark.parametrize("least_ratio", [1e-300, 1e-12, 1e-4, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_veto_sees_ratios_beyond_the_bound(least_ratio, dtype):
    far = [0.0, -1.0, -20.5, -25.0, -30.0, -1e4, 1e4, -math.inf, math.inf, math.nan]
    tensors = batch([[0.0, log] for log in far], dtype=dtype)
    found = correction.veto_mask(*tensors, least_ratio=least_ratio)
    assert found.tolist() == plain.vetoed(*as_lists(tensors), least_ratio=least_ratio)
    assert found[far.index(-1e4)].tolist() == [False, False] and found[0].all()


def test_a_token_that_neither_could_sample_is_not_vetoed():
    never = torch.full((1, 2), -math.inf)
    assert correction.veto_mask(never, never, torch.ones(1, 2)).all()


def test_sums_of_divergences_have_no_bound():
    tensors = batch([[15.0, 15.0], [-15.0, -15.0]], dtype=torch.float64)
    options = {"divergence": "k1", "per": "sum", "lower": -25.0, "upper": 25.0}
    assert not correction.keep_mask(*tensors, **options).any()
    assert correction.keep_mask(*tensors, **options).tolist() == plain.kept(*as_lists(tensors), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_are_those_of_float64(dtype):
    tensors = noisy(dtype=torch.float64)
    tensors = tensors[0].to(dtype), tensors[1].to(dtype), tensors[2]
    options = {"level": "sequence", "upper": 3.0, "lower": 0.25, "outside": "clip", "normalize": True}
    found = correction.importance_weights(*tensors, **options)
    assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    expected = torch.tensor(plain.weights(*as_lists(tensors), **options), dtype=torch.float64)
    assert torch.equal(found, expected.to(found.dtype)) or torch.allclose(found.double(), expected, rtol=1e-7, atol=0)


def test_small_divergences_keep_their_digits():
    """k3 of log-ratios of 1e-6 is 5e-13, which fp32 arithmetic would lose."""
    found = correction.mismatch(*batch([[1e-6, -1e-6]], dtype=torch.float64))
    assert found.k3 == pytest.approx(5e-13, rel=1e-3)


def test_no_gradient_flows_through_a_weight():
    trainer, rollout, mask = batch([[0.3, -0.2]])
    trainer.requires_grad_()
    weights = correction.importance_weights(trainer, rollout, mask)
    assert not weights.requires_grad and not correction.adaptive_weights(weights, mask)[0].requires_grad
    (weights * trainer).sum().backward()
    assert torch.equal(trainer.grad, weights)


def test_normalized_weights_have_mean_one():
    tensors = noisy()
    mask = tensors[2]
    assert correction.importance_weights(*tensors, normalize=True)[mask].mean().item() == pytest.approx(1)
    of_sequences = correction.importance_weights(*tensors, normalize=True, level="sequence")[:, 0]
    assert of_sequences.mean().item() == pytest.approx(1)
    nothing_left = correction.importance_weights(*tensors, normalize=True, outside="zero", lower=30.0, upper=40.0)
    assert (nothing_left == 0).all()


def test_metrics_know_what_the_loss_uses():
    tensors = batch([[0.0, 3.0], [0.0, 0.0]])
    weights = correction.importance_weights(*tensors, lower=0.5, upper=5.0, outside="zero")
    found = correction.mismatch(*tensors, weights=weights)
    assert found.masked_fraction == 0.25 and found.ess == 0.75
    assert found.k3 == correction.mismatch(*tensors).k3


@pytest.mark.parametrize(
    ("weights", "expected"), [([1, 1, 1, 1], 1), ([3, 0, 0, 0], 0.25), ([0, 0, 0, 0], 0), ([1e200, 1e200, 0, 0], 0.5)]
)
def test_effective_sample_sizes(weights, expected):
    weights = torch.tensor([weights], dtype=torch.float64)
    assert correction.effective_sample_size(weights, torch.ones(1, 4)).item() == expected


def test_a_policy_that_is_the_trainers_needs_no_correction():
    trainer, _, mask = noisy()
    found = correction.mismatch(trainer, trainer, mask)
    same = correction.Mismatch(
        k1=0, k3=0, token_mult_prob_error=1, ppl_ratio=1, chi2_token=0, chi2_sequence=0, ess=1, masked_fraction=0
    )
    assert found == same
    assert correction.adaptive_weights(mask.float(), mask, least_ess=1.0)[1] == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p, q, m: correction.importance_weights(p, q[:, :1], m), "all must be (B, L)"),
        (lambda p, q, m: correction.importance_weights(p[0], q[0], m[0]), "all must be (B, L)"),
        (lambda p, q, m: correction.importance_weights(p, q, m, upper=0.0), "do not bound a ratio"),
        (lambda p, q, m: correction.importance_weights(p, q, m, level="sentence"), "not one of token, sequence"),
        (lambda p, q, m: correction.importance_weights(p, q, m, outside="drop"), "not one of clip, zero"),
        (lambda p, q, m: correction.keep_mask(p, q, m, divergence="k4", upper=1.0), "not one of k1, k2, k3"),
        (lambda p, q, m: correction.keep_mask(p, q, m, per="row", upper=1.0), "not one of token, sum"),
        (lambda p, q, m: correction.keep_mask(p, q, m, upper=-1.0), "do not bound a divergence"),
        (lambda p, q, m: correction.keep_mask(p, q, m, upper=math.nan), "do not bound a divergence"),
        (lambda p, q, m: correction.veto_mask(p, q, m, least_ratio=0.0), "is not a ratio"),
        (lambda p, q, m: correction.veto_mask(p, q, m, least_ratio=math.inf), "is not a ratio"),
        (lambda p, q, m: correction.veto_mask(p, q, m, least_ratio=math.nan), "is not a ratio"),
        (
            lambda p, q, m: correction.opsm_mask(p, q, m, advantages=torch.ones(3), delta=0.1),
            "advantages have shape (3,)",
        ),
        (lambda p, q, m: correction.adaptive_weights(p, m, least_ess=0.0), "is not a share"),
        (lambda p, q, m: correction.adaptive_weights(m.long(), m), "weights are torch.int64"),
        (lambda p, q, m: correction.adaptive_weights(p, m[:, :1]), "both need the same shape"),
        (lambda p, q, m: correction.effective_sample_size(p, m[:1, :1]), "both need the same shape"),
    ],
)
def test_what_cannot_be_used_is_refused(call, words):
    with pytest.raises(InvalidCorrectionError) as caught:
        call(*batch([[0.0, 0.0], [0.0, 0.0]]))
    assert words in str(caught.value) and isinstance(caught.value, (RefitError, ValueError))


def test_lists_are_refused():
    tensors = batch([[1.0, 2.0]])
    good = correction.importance_weights(*tensors)
    calls = [
        lambda *given: correction.importance_weights(*given),
        lambda *given: correction.mismatch(*given),
        lambda *given: correction.keep_mask(*given, upper=2.0),
        lambda *given: correction.veto_mask(*given),
        lambda *given: correction.opsm_mask(*given, advantages=torch.ones(1), delta=0.1),
    ]
    for call in calls:
        for place in range(3):
            given = [tensor.tolist() if at == place else tensor for at, tensor in enumerate(tensors)]
            with pytest.raises(InvalidCorrectionError, match="type list; pass tensors"):
                call(*given)
    for call in (correction.effective_sample_size, correction.adaptive_weights):
        with pytest.raises(InvalidCorrectionError, match="type list; pass tensors"):
            call(good.tolist(), tensors[2])
    with pytest.raises(InvalidCorrectionError, match="type list; pass tensors"):
        correction.opsm_mask(*tensors, advantages=[1.0], delta=0.1)
    with pytest.raises(InvalidCorrectionError, match="type list; pass tensors"):
        correction.mismatch(*tensors, weights=good.tolist())
