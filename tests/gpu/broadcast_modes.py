"""A trainer on one GPU and vLLM engines on others."""

import policies
import torch
from harness import WHOLE, free_bytes, log
from live_engines import PROMPTS, Vllm, gpus_alone

from fp8refit import Broadcaster, NonFiniteError, Refitter
from tests.wire_bytes import num_bytes_sent, num_bytes_to

TIMEOUT_S = 60.0
NUM_PUSHES = 50
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


class Ways:
    """The same policy by every way that it can go."""

    def __init__(self, llms: list) -> None:
        self.fp8 = Broadcaster(llms, timeout_s=TIMEOUT_S)
        self.bf16 = Broadcaster(llms, timeout_s=TIMEOUT_S, collective={"wire": "bf16"})
        self.pulls = [Refitter(llm, timeout_s=TIMEOUT_S) for llm in llms]

    def pull(self, policy: dict) -> list:
        """By mapped memory, one engine after another: each rank reads its own slices."""
        return [refitter.refit(policy) for refitter in self.pulls]

    def fingerprints(self) -> list[str]:
        return self.fp8.fingerprints()


def run_broadcast(args) -> dict:
    engines = []
    for replica in range(args.replicas):
        policies.write_config(args.shape, args.work / f"dummy-{args.tp}")
        with gpus_alone(replica * args.tp, args.tp):
            engines.append(Vllm(args.work / f"dummy-{args.tp}", is_noise=True, tensor_parallel_size=args.tp))
    trainer = torch.device("cuda", args.replicas * args.tp)
    assert trainer.index < torch.cuda.device_count(), f"{torch.cuda.device_count()=}"
    torch.cuda.set_device(trainer)
    found = push_all(engines, args.shape)
    for engine in engines:
        engine.shutdown()
    return found


def push_all(engines: list[Vllm], shape: str) -> dict:
    policy = policies.fill_policy(policies.allocate(shape), 1)
    ways = Ways([engine.candidate for engine in engines])
    found: dict = {"fingerprints": compare(ways, policy)}
    log("compared")
    ways.fp8.push(policy)  # a refit in another way leaves the group
    broadcasts = {
        name: way._refitter._engine.ranks._broadcast for name, way in (("fp8", ways.fp8), ("bf16", ways.bf16))
    }
    found["wire_bytes"] = {name: num_bytes_sent(broadcast._plan.sender) for name, broadcast in broadcasts.items()}
    found["wire_bytes_of_rank"] = {
        name: [num_bytes_to(broadcast._plan.sender, section) for section in broadcast._sections.of_rank or (None,)]
        for name, broadcast in broadcasts.items()
    }
    found["load"] = push_under_load(engines, ways, policy)
    log("pushed under load")
    found["nan"] = push_nan(ways, policy)
    ways.fp8.close()
    return found


def compare(ways: Ways, policy: dict) -> dict:
    """Digests of what every rank holds after policy 1 and 2, by every way."""
    found: dict = {}
    for seed in (1, 2):
        policies.fill_policy(policy, seed)
        for name, way in (("pull", ways.pull), ("fp8", ways.fp8.push), ("bf16", ways.bf16.push)):
            way(policy)
            found[f"{name} {seed}"] = ways.fingerprints()
    return found


def push_under_load(engines: list[Vllm], ways: Ways, policy: dict) -> dict:
    """Pushes and requests in turn: tokens, and memory that was free once everything was there."""
    free, tokens = [], []
    for step in range(NUM_PUSHES):
        policies.fill_policy(policy, 1 + step % 2)
        ways.fp8.push(policy)
        tokens.append([engine.say(PROMPTS, 4) for engine in engines])
        free.append([*(rank["free"] for engine in engines for rank in engine.ask("memory")), free_bytes()])
    return {"tokens": tokens, "free_bytes": free}


def push_nan(ways: Ways, policy: dict) -> dict:
    """What a NaN ends in, and whether the next push heals it."""
    policies.fill_policy(policy, 1)
    before = ways.fp8.push(policy) and ways.fingerprints()
    value = policy[DOWN_PROJ][3, 5].clone()
    policy[DOWN_PROJ][3, 5] = float("nan")
    try:
        ways.fp8.push(policy)
        names: list[str] = []
    except NonFiniteError as error:
        names = list(error.names)
    policy[DOWN_PROJ][3, 5] = value
    was_dirty = ways.fp8.is_dirty
    ways.fp8.push(policy)
    return {"names": names, "was_dirty": was_dirty, "healed": ways.fingerprints() == before}


OPTIONS = {"tp": WHOLE, "replicas": WHOLE}
MODES = {"push": run_broadcast}
