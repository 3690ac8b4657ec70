"""An engine updated from within its schedulers. `test_updates_stubbed_kernels.py` says what must come of it."""

from pathlib import Path

from engines import booted_noise, look, make_policy
from subject import Subject

from tests.engines.updates import try_updates


def run_updates(family: str, num_ranks: int, work: Path) -> dict:
    with booted_noise(family, work, num_ranks) as engine:
        subject = Subject(engine)
        found = try_updates(subject, engine, family)
        subject.refit(make_policy(family, 1))
        good = subject.state()
        look(engine, "keep_caches", True)
        found["kept"] = look(engine, "update", family, 2, "buckets")
        look(engine, "keep_caches", False)
        return found | {"kept same": subject.state() == good}
