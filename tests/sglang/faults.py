"""Faults inside a rank, armed from outside, and one pretence."""

from observer import number_of

from tests.engines.faults import before_next, end_next_write, fail


def arm(scheduler, rank: int, _: str) -> bool:
    """Let the next write of `rank` fail once its last slot is written; whether this is that rank."""
    if number_of(scheduler) != rank:
        return False
    end_next_write(fail)
    return True


def keep_caches(scheduler, is_kept: bool) -> None:
    """Let SGLang's own flush find the scheduler at work, so that it keeps the cache and says so; or let it flush again."""
    if is_kept:
        scheduler.is_fully_idle = lambda **_: False
    else:
        del scheduler.is_fully_idle


def claim_fp8_cache(scheduler) -> None:
    """Have fp8refit believe that the KV cache is FP8 and read by FlashAttention 3. It is BF16, and read by torch."""
    from fp8refit_sglang.live_scheduler import Scheduler

    Scheduler.cache_dtype = "fp8_e4m3"
    Scheduler.attention_backends = ("fa3", "fa3")


def move_adapters(scheduler, when: str) -> None:
    """Let the first adapter lose its slot to another one, as requests may, when the next refit is `prepared` or `written`."""
    manager = scheduler.tp_worker.model_runner.lora_manager
    uids = {ref.lora_name: uid for uid, ref in manager.lora_refs.items()}

    def move() -> None:
        manager.fetch_new_loras({None, *(uid for name, uid in uids.items() if name != "one")})

    before_next(when, move)


def update(scheduler, *arguments) -> dict:
    """Update the engine from within this scheduler."""
    from tests import updating

    return updating.update(scheduler, number_of(scheduler), *arguments)


def update_model(scheduler, family: str, seed: int) -> dict:
    """The same, by one who has only the network."""
    from tests import updating

    model = scheduler.tp_worker.model_runner.model
    return updating.update(model, number_of(scheduler), family, seed, "buckets")


def is_dirty(scheduler) -> bool:
    """Whether this rank's weights are incomplete."""
    from fp8refit_sglang.live_scheduler import Scheduler
    from fp8refit_sglang.worker import rank_of

    return rank_of(Scheduler(scheduler)).target.is_dirty


def is_idle(scheduler) -> bool:
    """Whether this rank has noticed that its last request is over."""
    return scheduler.is_fully_idle()


FAULTS = {
    "is_idle": is_idle,
    "arm": arm,
    "keep_caches": keep_caches,
    "move_adapters": move_adapters,
    "claim_fp8_cache": claim_fp8_cache,
    "update": update,
    "update_model": update_model,
    "dirty": is_dirty,
}
