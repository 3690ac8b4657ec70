"""Checks of FP8 KV-cache scales: measured for the policy served, or given, and used by the engine."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from unittest import SkipTest

import torch

from fp8refit.errors import EngineDirtyError, InvalidCalibrationError, InvalidSourceError, NonFiniteError, RefitError
from fp8refit.report import KvReport
from fp8refit.sources.source import StateDict
from fp8refit.testing.policies import poisoned, policy_of
from fp8refit.testing.promises import differing, expect, hold, hold_equal, listed
from fp8refit.testing.steps import Served, answers_of, hold_all_or_nothing, refit, restoring
from fp8refit.testing.subject import Subject

LOST = 2.0**30
"""A scale that makes an ordinary network store every key and value as zero."""
UNFIT = (0.0, -1.0, torch.nan, torch.inf)
"""Values that are not valid scales."""
NO_TOKEN = 2**31 - 1
NO_SCALE = "model.layers.9999.self_attn.k_scale"


@restoring
def check_scales_fit_the_policy_that_is_served(subject: Subject) -> None:
    """After calibration, an engine has the new policy's scales everywhere, whatever it had before, and the same
    weights.
    """
    (first, _), (second, _) = _calibrated(subject, 1), _calibrated(subject, 2)
    hold(
        first != second,
        "two policies gave the same scales: are they measured under the new weights, and are these the live ones?",
    )
    _give(subject, _some_scales(first), seed=2)
    again, served = _calibrated(subject, 1)
    hold_equal(first, again, "the second calibration of a policy gave other scales, in")
    _give(subject, _scales_of(subject), seed=1)
    served.hold_bytes(subject, "a refit with the scales that a calibration gave, instead of one,")
    hold(
        answers_of(subject) == served.answers,
        "a refit with the scales of a calibration led to other answers than the calibration",
    )


@restoring
def check_calibrating_alone_gives_the_scales_of_a_refit(subject: Subject) -> None:
    """`calibrate` gives the scales of a refit with its batch, under the same version. Caches of other scales are not
    reused.
    """
    scales, served = _calibrated(subject, 1)
    _give(subject, _some_scales(scales), seed=1)
    version, traces = subject.refitter().version, subject.traces()
    subject.drop_caches()
    subject.generate()  # fills caches that the calibration must drop
    try:
        report = subject.calibrate(subject.refitter(), _batch_of(subject))
    except RefitError as error:
        raise AssertionError(f"a calibration alone failed: {type(error).__name__}: {error}") from error
    _hold_written(subject, report, "a calibration alone")
    hold_equal(scales, report.scales, "a calibration alone gave other scales than a refit with its batch, in")
    hold(
        subject.generate() == served.answers,
        "after a calibration, a prompt asked before got another answer than an engine with empty caches gives",
    )
    served.hold_bytes(subject, "a calibration alone")
    hold(
        subject.refitter().version == version,
        f"a calibration alone changed version {version} to {subject.refitter().version}",
    )
    hold(subject.traces() == traces, f"a calibration alone left {listed(subject.traces() or ())} on the engine")


@restoring
def check_scales_stay_without_calibration(subject: Subject) -> None:
    """A refit without calibration or scales leaves every scale unchanged."""
    scales = _some_scales(_names_of(subject))
    _give(subject, scales)
    policy = policy_of(subject, 1)
    sources: dict[str, StateDict] = {"a mapping": policy, "an iterator": iter(policy.items())}
    for kind, source in sources.items():
        report = refit(subject, source)
        _hold_scales(subject, scales, f"a refit from {kind} without scales")
        hold(report.kv is None, f"a refit from {kind} without scales reports {report.kv}")


@restoring
def check_given_scales_are_written_exactly(subject: Subject) -> None:
    """Scales given separately or among the weights are written everywhere as float32 numbers. Nothing moves."""
    names, policy = _names_of(subject), policy_of(subject, 1)
    places = subject.places()
    given = [_some_scales(names, start) for start in (64.0, 96.0, 128.0)]
    tensors = [{name: torch.tensor(value) for name, value in scales.items()} for scales in given]
    among = [{**policy, **scales} for scales in tensors]
    attempts: dict[str, tuple[StateDict, dict[str, Any]]] = {
        "kv_scales=": (policy, {"kv_scales": given[0]}),
        "a mapping": (among[1], {}),
        "an iterator": (iter([*policy.items(), *((name, scale.view(1)) for name, scale in tensors[2].items())]), {}),
    }
    for scales, (way, (source, options)) in zip(given, attempts.items(), strict=True):
        report = refit(subject, source, **options).kv
        hold(report is not None, f"a refit with scales by {way} reports none")
        moved = differing(places, subject.places())
        hold(not moved, f"writing scales moved {listed(moved)}; CUDA graphs and views of them are stale now")
        _hold_scales(subject, scales, f"a refit with scales by {way}")


@restoring
def check_scales_are_read(subject: Subject) -> None:
    """Scales that lose all keys and values change the answers; restoring the scales restores the answers."""
    scales = _some_scales(_names_of(subject))
    before = _give(subject, scales)
    lost = _give(subject, dict.fromkeys(scales, LOST))
    hold(
        lost.answers != before.answers,
        "scales that lose every key and value did not change the answers: are they used?",
    )
    hold(_give(subject, scales).answers == before.answers, "the same scales gave other answers the second time")


@restoring
def check_bad_scales_and_batches_write_nothing(subject: Subject) -> None:
    """A bad batch or scale is refused before anything is written, and the engine keeps serving."""
    scales = _some_scales(_names_of(subject))
    before = _give(subject, scales)
    for situation, attempt in {**_with_bad_scales(subject, scales), **_with_bad_batches(subject)}.items():
        expect(InvalidCalibrationError, situation, attempt)
        _hold_untouched(subject, before, scales, situation)
    for situation, attempt in _with_bad_scales_among_weights(subject, scales).items():
        expect(InvalidSourceError, situation, attempt)
        _hold_untouched(subject, before, scales, situation)
    before.hold(subject, "a refused batch or refused scales")


@restoring
def check_a_dirty_engine_is_not_calibrated(subject: Subject) -> None:
    """A dirty engine is not calibrated. It keeps its scales, and refuses requests until a complete refit."""
    batch, names = _batch_of(subject), _names_of(subject)
    scales, refitter = _some_scales(names), subject.refitter()
    before = _give(subject, scales)
    policy, _ = poisoned(subject, policy_of(subject, 1))
    expect(NonFiniteError, "a refit with NaN and Inf", lambda: subject.refit(refitter, policy))
    if not refitter.is_dirty:
        raise SkipTest("the engine found NaN before writing, so it is not dirty")
    situation = "a calibration of a dirty engine"
    expect(EngineDirtyError, situation, lambda: subject.calibrate(subject.refitter(), batch))
    hold(subject.refitter().is_dirty, f"{situation} made it clean")
    _hold_scales(subject, scales, situation)
    hold_all_or_nothing(subject, before, situation)


def _calibrated(subject: Subject, seed: int) -> tuple[Mapping[str, float], Served]:
    """Refit to a policy and calibrate with it. Return the measured scales and what is served."""
    report = refit(subject, policy_of(subject, seed), calibration=_batch_of(subject)).kv
    scales = _hold_written(subject, report, "a refit with a calibration batch")
    return scales, Served.of(subject)


def _give(subject: Subject, scales: Mapping[str, float], seed: int = 0) -> Served:
    """Refit to a policy with given scales."""
    refit(subject, policy_of(subject, seed), kv_scales=scales)
    _hold_scales(subject, scales, "a refit with kv_scales=")
    return Served.of(subject)


def _batch_of(subject: Subject) -> list[list[int]]:
    batch = subject.calibration()
    if batch is None or subject.kv_scales() is None:
        raise SkipTest("calibration() gives no batch" if batch is None else "kv_scales() cannot tell")
    return batch


def _names_of(subject: Subject) -> list[str]:
    scales = subject.kv_scales()
    if scales is None:
        raise SkipTest("kv_scales() cannot tell")
    hold(bool(scales), "kv_scales() gives no scale")
    return list(scales)


def _scales_of(subject: Subject) -> dict[str, float]:
    """Return every scale, after checking that all its copies are equal."""
    places = {name: list(dict.fromkeys((subject.kv_scales() or {})[name])) for name in _names_of(subject)}
    torn = [f"{name} ({', '.join(map(str, values))})" for name, values in places.items() if len(values) != 1]
    hold(not torn, f"copies of a scale differ in {listed(torn)}")
    return {name: values[0] for name, values in places.items()}


def _some_scales(names: Iterable[str], start: float = 64.0) -> dict[str, float]:
    """Return scales that no policy has, different for each name, and rarely exact in float32."""
    return {name: start + (index + 1) / 7 for index, name in enumerate(names)}


def _hold_scales(subject: Subject, expected: Mapping[str, float], situation: str) -> None:
    """Check that the engine has these scales, as float32 numbers."""
    rounded = {name: torch.tensor(value, dtype=torch.float32).item() for name, value in expected.items()}
    held = _scales_of(subject)
    wrong = differing(rounded, held)
    told = [f"{name} (should be {rounded.get(name)}, is {held.get(name)})" for name in wrong]
    hold(not wrong, f"{situation} left wrong scales: {listed(told)}")


def _hold_written(subject: Subject, report: KvReport | None, situation: str) -> Mapping[str, float]:
    """Check that the engine has the scales that a report says were measured, and return them."""
    hold(report is not None and bool(report.scales), f"{situation} reports no scale")
    assert report is not None, "held"
    held = _scales_of(subject)
    unlike = held.keys() ^ {*report.scales, *report.kept}
    hold(not unlike, f"only one of kv_scales() and the report of {situation} knows {listed(sorted(unlike))}")
    _hold_scales(subject, {**held, **report.scales}, situation)
    return report.scales


def _hold_untouched(subject: Subject, before: Served, scales: Mapping[str, float], situation: str) -> None:
    before.hold_bytes(subject, situation)
    _hold_scales(subject, scales, situation)


def _with_bad_scales(subject: Subject, scales: Mapping[str, float]) -> dict[str, Callable[[], object]]:
    """Return refits with good scales and a bad one."""
    policy, first = policy_of(subject, 1), next(iter(scales))
    bad = [(first, value) for value in (*UNFIT, 1e39)] + [(NO_SCALE, 1.0)]
    return {
        f"a refit with {name} {value}": partial(
            subject.refit, subject.refitter(), policy, kv_scales={**scales, name: value}
        )
        for name, value in bad
    }


def _with_bad_scales_among_weights(subject: Subject, scales: Mapping[str, float]) -> dict[str, Callable[[], object]]:
    """Return refits with good scales and a bad one among the weights."""
    policy = policy_of(subject, 1) | {name: torch.tensor(value) for name, value in scales.items()}
    first = next(iter(scales))
    return {
        f"a refit with {first} {value} among the weights": partial(
            subject.refit, subject.refitter(), {**policy, first: torch.tensor(value)}
        )
        for value in UNFIT
    }


def _with_bad_batches(subject: Subject) -> dict[str, Callable[[], object]]:
    """Return refits and separate calibrations with bad batches; none if the subject has no good one."""
    good = subject.calibration()
    if good is None:
        return {}
    batches = {
        "a token id outside the vocabulary": [*good, [NO_TOKEN]],
        "a negative token id": [*good, [-1]],
        "an empty sequence": [*good, []],
        "no sequence": [],
    }
    policy, refitter = policy_of(subject, 1), subject.refitter()
    attempts: dict[str, Callable[[], object]] = {}
    for kind, batch in batches.items():
        attempts[f"a refit with {kind}"] = partial(subject.refit, refitter, policy, calibration=batch)
        attempts[f"a calibration alone with {kind}"] = partial(subject.calibrate, refitter, batch)
    return attempts
