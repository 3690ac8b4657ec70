"""What reports say to people and to metrics."""

import pytest

from fp8refit import DifferentPolicyError, RefitConfig, RefitReport, VerifyReport
from fp8refit.report import RankReport


def rank(place: int, *differing: str) -> RankReport:
    return RankReport(
        rank=place, num_tensors=40, bytes_read=8, bytes_written=4, fill_s=0.5, verify_s=0.25, differing=differing
    )


def test_a_comparison_that_finds_something_is_false_prints_a_table_and_raises():
    names = [f"model.layers.{layer}.weight" for layer in range(30)]
    report = VerifyReport.of([rank(0, *names), rank(1, *names, "norm")], version=7)
    assert not report and not report.is_equal
    assert str(report).splitlines() == [
        "version               7",
        "tensors              40",
        "differing            31",
        "model.layers.{0..29}.weight: differs on rank 0, 1 (30 names)",
        "norm: differs on rank 1",
    ]
    with pytest.raises(DifferentPolicyError) as raised:
        report.raise_if_different()
    assert raised.value.names == tuple(sorted([*names, "norm"]))
    assert str(raised.value).splitlines() == [
        "the engine, at version 7, does not hold this policy; 31 tensor(s) differ:",
        "  - model.layers.{0..29}.weight: differs (30 names)",
        "  - norm: differs",
    ]
    assert report.metrics() == {
        "fp8refit/verify/version": 7,
        "fp8refit/verify/num_tensors": 40,
        "fp8refit/verify/num_differing": 31,
        "fp8refit/verify/num_differing_ranks": 2,
        "fp8refit/verify/is_dirty": 0,
    }


def test_a_comparison_with_a_dirty_engine_is_false_whatever_it_holds():
    report = VerifyReport.of([rank(0)], version=7, is_dirty=True)
    assert report.is_equal and not report
    assert str(report).splitlines()[-1].split() == ["dirty", "yes"]
    assert report.metrics()["fp8refit/verify/is_dirty"] == 1
    with pytest.raises(DifferentPolicyError, match=r"^the engine is dirty: it holds this policy, but refuses requests"):
        report.raise_if_different()


def test_a_comparison_that_finds_nothing_is_true():
    report = VerifyReport.of([rank(0), rank(1)], version=7)
    assert report
    report.raise_if_different()
    assert str(report).splitlines()[-1] == "differing             0"


@pytest.mark.parametrize("device_s", [None, 0.001])
def test_metrics_of_a_refit_are_flat_numbers(device_s):
    report = RefitReport(
        version=3,
        engine="vllm",
        num_tensors=40,
        bytes_read=8,
        bytes_written=4,
        phases_s={"plan": 0.5, "fill": 1.5},
        fill_device_s=device_s,
        kept=("norm",),
        changed={"codes": (1, 8), "scales": (0, 4)},
    )
    assert "codes             1 new" in str(report).splitlines()
    metrics = report.metrics("refit/")
    assert all(type(value) is float for value in metrics.values())
    assert (metrics["refit/version"], metrics["refit/plan_s"], metrics["refit/fill_s"]) == (3, 0.5, 1.5)
    assert (metrics["refit/total_s"], metrics["refit/num_kept"]) == (2, 1)
    assert metrics.get("refit/fill_device_s") == device_s
    assert (metrics["refit/changed_codes"], metrics["refit/changed_scales"]) == (0.125, 0)
    assert metrics["refit/gb_per_s"] == report.gb_per_s


def test_one_pattern_may_be_a_string():
    assert RefitConfig(keep="*norm*") == RefitConfig(keep=("*norm*",))
