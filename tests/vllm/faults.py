"""Faults inside a worker, armed from outside: what one rank does once, when the slots of its next write are written."""

import os
import signal

import observer

from fp8refit.ranks.live_model import LiveModel
from tests.engines.faults import before_next, end_next_write, fail


def arm(worker, rank: int, fault: str, pid: int | None = None) -> bool:
    """Let the next write of `rank` end in `fault`, after its last slot; whether this is that rank.

    `die` kills the worker, or the process `pid`.
    """
    if observer.number_of(worker) != rank:
        return False
    victim = os.getpid() if pid is None else pid
    # As the kernel's out-of-memory killer does it.
    end_next_write((lambda: os.kill(victim, signal.SIGKILL)) if fault == "die" else fail)
    return True


def move_adapters(worker, when: str) -> bool:
    """Let the first adapter lose its slot to another one, as requests may, when the next refit is `prepared` or `written`."""
    manager = worker.model_runner.lora_manager._adapter_manager

    def move() -> None:
        other = next(each for each in manager.list_adapters() if each not in manager.lora_index_to_id)
        manager.deactivate_adapter(1)
        manager.activate_adapter(other)

    before_next(when, move)
    return True


def arm_measuring(worker, rank: int) -> bool:
    """Let the next calibration of `rank` fail when its pass is over; whether this is that rank."""
    if observer.number_of(worker) != rank:
        return False
    honest = LiveModel.measure_kv

    def measure_kv(live, order, config) -> None:
        LiveModel.measure_kv = honest
        honest(live, order, config)
        raise RuntimeError("injected")

    LiveModel.measure_kv = measure_kv
    return True


def update(worker, *arguments) -> dict:
    """Update the engine from within this worker."""
    from tests import updating

    return updating.update(worker, worker.rank, *arguments)


def update_model(worker, family: str, seed: int) -> dict:
    """The same, by one who has only the network."""
    from tests import updating

    return updating.update(worker.model_runner.get_model(), worker.rank, family, seed, "buckets")


def is_dirty(worker) -> bool:
    """Whether this rank's weights are incomplete."""
    from fp8refit_vllm.worker import rank_of

    return rank_of(worker).target.is_dirty


def flip(worker, rank: int) -> bool:
    """Change one bit of a weight of `rank`; whether this is that rank."""
    import torch

    if observer.number_of(worker) != rank:
        return False
    weight = worker.model_runner.get_model().model.layers[1].mlp.down_proj.weight
    weight.detach().view(torch.uint8).view(-1)[-1] ^= 1
    return True


FAULTS = {
    "flip": flip,
    "arm": arm,
    "arm_measuring": arm_measuring,
    "move_adapters": move_adapters,
    "update": update,
    "update_model": update_model,
    "dirty": is_dirty,
}


def raise_in_worker(worker) -> str:
    """A method that raises through the engine's RPC, as ours never do, and does so on one rank."""
    if worker.rank == 0:
        raise RuntimeError("injected into the channel")
    return "what the first rank's driver never reads"
