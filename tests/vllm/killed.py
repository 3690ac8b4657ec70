"""Engines of which a rank is killed in the middle of a stream or an update. `test_killed_streams.py` says what comes of it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from engines import make_policy
from subject import NOISE, Subject, booted_as
from torch import Tensor

TIMEOUT_S = 10.0
"""Of every step, and so of what may be waited for."""


def run_killed(layout: str, family: str, model: str, way: str, place: int) -> dict:
    with booted_as(layout, Path(model), "fp32", **NOISE) as subject:
        subject.refit(make_policy(family, 1))
        victim = subject.look("pids")[-1][0]
        found = {"before": subject.generate(), "lost": WAYS[way](subject, family, victim, place)}
        policy = make_policy(family, 2)
        found["again"] = subject.refused(lambda: subject.refit(policy, timeout_s=TIMEOUT_S))
        found["generate"] = subject.refused(subject.generate)
        found["close"] = subject.refused(subject.close)
        return found


def stream(subject: Subject, family: str, victim: int, place: int) -> dict | None:
    """The trainer goes on with its stream, which is longer than all buckets together."""

    def read() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(make_policy(family, 2).items()):
            if number == place:
                os.kill(victim, signal.SIGKILL)
            yield item

    return subject.refused(lambda: subject.refit(read(), timeout_s=TIMEOUT_S, bucket_bytes=1 << 20))


def update(subject: Subject, family: str, victim: int, place: int) -> dict | None:
    return subject.refused(lambda: subject.look("update", family, 2, "buckets", f"kill {place}"))


WAYS = {"stream": stream, "update": update}
