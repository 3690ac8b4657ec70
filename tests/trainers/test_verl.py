"""`fp8refit.training.correction` against verl's own functions, where definitions agree; and that they differ where it says."""

import math

import pytest
import torch

from fp8refit.training import correction
from tests.plain_correction import batch, noisy

verl = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="`nox -s tests_verl` has verl")


def verl_ratio(tensors):
    """What verl's functions take: a log-ratio and a mask of numbers."""
    trainer, rollout, mask = tensors
    return (trainer - rollout).masked_fill(~mask, 0.0), mask.double()


@pytest.mark.parametrize(
    ("level", "scale"), [("token", 1e-3), ("token", 0.3), ("token", 3.0), ("sequence", 1e-3), ("sequence", 0.1)]
)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bounds", [(None, 2.0), (0.5, 5.0)])
def test_weights_are_verls(level, bounds, normalize, scale):
    tensors = noisy(scale=scale, dtype=torch.float64)
    lower, upper = bounds
    expected, _ = verl.compute_rollout_correction_weights(
        *verl_ratio(tensors),
        rollout_is=level,
        rollout_is_threshold=upper if lower is None else f"{lower}_{upper}",
        rollout_is_batch_normalize=normalize,
    )
    options = {} if lower is None else {"lower": lower, "outside": "zero"}
    found = correction.importance_weights(*tensors, level=level, upper=upper, normalize=normalize, **options)
    assert torch.allclose(found, expected, rtol=1e-7, atol=0)  # verl adds 1e-8 to counts


CASES = [(divergence, per) for divergence in ("k1", "k2", "k3") for per in ("token", "sum", "mean", "max")]
CASES.remove(("k1", "max"))  # which verl has not


@pytest.mark.parametrize(("divergence", "per"), CASES)
@pytest.mark.parametrize("upper", [1.02, 1.3])
def test_what_is_rejected_is_verls(divergence, per, upper):
    tensors = noisy(dtype=torch.float64)
    option = f"token_{divergence}" if per == "token" else f"seq_{per}_{divergence}"
    expected, _ = verl.compute_rollout_rejection_mask(*verl_ratio(tensors), option, upper)
    bound = math.log(upper) if divergence == "k1" else upper
    found = correction.keep_mask(*tensors, divergence=divergence, per=per, upper=bound)
    assert torch.equal(found, expected.bool())


def test_verl_bounds_the_logarithm_of_a_ratio():
    """The same number means something else: for us nats, for verl a ratio."""
    tensors = batch([[0.55]], dtype=torch.float64)
    assert correction.keep_mask(*tensors, divergence="k1", upper=0.6, lower=-0.6).item()
    assert not verl.compute_rollout_rejection_mask(*verl_ratio(tensors), "token_k1", "0.6_1.6")[0].item()


@pytest.mark.parametrize("scale", [1e-3, 0.3, 3.0])
def test_metrics_are_verls(scale):
    trainer, rollout, mask = noisy(scale=scale, dtype=torch.float64)
    expected = verl.compute_offpolicy_metrics(
        trainer.masked_fill(~mask, 0), rollout.masked_fill(~mask, 0), mask.double()
    )
    found = correction.mismatch(trainer, rollout, mask)
    names = {
        "k1": "kl",
        "k3": "k3_kl",
        "ppl_ratio": "ppl_ratio",
        "chi2_token": "chi2_token",
        "chi2_sequence": "chi2_seq",
    }
    for ours, theirs in names.items():
        assert getattr(found, ours) == pytest.approx(expected[theirs], rel=1e-6, abs=1e-9), ours


@pytest.mark.parametrize("bounds", [(None, 2.0), (0.5, 5.0)])
def test_effective_sample_sizes_are_verls(bounds):
    tensors = noisy(dtype=torch.float64)
    lower, upper = bounds
    threshold = upper if lower is None else f"{lower}_{upper}"
    _, metrics = verl.compute_rollout_correction_weights(*verl_ratio(tensors), rollout_is_threshold=threshold)
    options = {} if lower is None else {"lower": lower, "outside": "zero"}
    weights = correction.importance_weights(*tensors, upper=upper, **options)
    found = correction.effective_sample_size(weights, tensors[2]).item()
    assert found == pytest.approx(metrics["rollout_is_eff_sample_size"], rel=1e-6)


def test_beyond_the_bound_verl_sums_what_this_module_cuts():
    """One token of +30 nats and one of -30 cancel for both; +30 and -25 do not for verl."""
    cut, uncut = ((verl_ratio(batch([[30.0, far]], dtype=torch.float64)), far) for far in (-30.0, -25.0))
    for (ratio, mask), far in (cut, uncut):
        ours = correction.importance_weights(*batch([[30.0, far]], dtype=torch.float64), level="sequence", upper=1e9)
        theirs, _ = verl.compute_rollout_correction_weights(ratio, mask, "sequence", 1e9)
        assert ours[0, 0].item() == pytest.approx(1.0)
        assert theirs[0, 0].item() == pytest.approx(math.exp(30 + far))
