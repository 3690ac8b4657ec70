"""An engine updated from within its schedulers. `test_updates_stubbed_kernels.py` says what must come of it."""

from pathlib import Path

from engines import PROMPTS, SAMPLING, booted_noise, generate, look, make_policy, num_unfinished, state
from refits import refused

from fp8refit import Refitter
from tests.updating import FAULTS, KINDS


def run_updates(family: str, num_ranks: int, work: Path) -> dict:
    with booted_noise(family, work, num_ranks) as engine:
        states = {}
        for seed in (1, 2):
            Refitter(engine).refit(make_policy(family, seed))
            states[seed] = state(engine)
        found: dict = {"differ": states[1] != states[2], "kinds": {}, "faults": {}}
        for index, kind in enumerate(KINDS):
            seed = 1 + index % 2
            updated = update(engine, "update", family, seed, kind)
            cached = [output["num_cached"] for output in generate(engine)]
            found["kinds"][kind] = {"updated": updated, "num_cached": cached, "same": state(engine) == states[seed]}
        found["model"] = {"updated": update(engine, "update_model", family, 1), "same": state(engine) == states[1]}
        for fault in (f"{fault} {place}" for fault in FAULTS for place in range(4)):
            found["faults"][fault] = {
                "updated": update(engine, "update", family, 2, "buckets", fault),
                "dirty": look(engine, "dirty"),
                "generate": refused(lambda: engine.generate(input_ids=PROMPTS[0], sampling_params=SAMPLING)),
                "num_unfinished": num_unfinished(engine),
                "healed": update(engine, "update", family, 1, "buckets"),
                "same": state(engine) == states[1],
            }
        update(engine, "update", family, 2, "buckets", "nan 1")
        Refitter(engine).refit(make_policy(family, 1))
        found["healed by a refit"] = state(engine) == states[1]
        same = Refitter(engine).verify(make_policy(family, 1))
        other = Refitter(engine).verify(iter(make_policy(family, 2).items()))
        found["verified"] = {"same": same.is_equal, "num_other": len(other.differing), "num": same.num_tensors}
        found["untouched"] = state(engine) == states[1]
        look(engine, "keep_caches", True)
        found["kept"] = look(engine, "update", family, 2, "buckets")
        look(engine, "keep_caches", False)
        found["kept same"] = state(engine) == states[1]
        return found


def update(engine, *what) -> list:
    """Update over a radix cache that holds another policy's, if requests are served, once each rank is idle."""
    if refused(lambda: generate(engine)) is None:
        while not all(look(engine, "is_idle")):
            pass
    return look(engine, *what)
