"""A trainer on one GPU and vLLM engines on others."""

from concurrent.futures import ThreadPoolExecutor

import policies
import torch
from broadcast_observer import TIMEOUT_S, broadcast_rate
from harness import WHOLE, free_bytes, log, time_call
from live_engines import PROMPTS, Vllm, gpus_alone

from fp8refit import Broadcaster, NonFiniteError, Refitter
from fp8refit.transport.collective.communicator import Communicator
from tests.wire_bytes import num_bytes_sent, num_bytes_to

NUM_ROUNDS = 7
NUM_PUSHES = 50
RATE_BYTES = 1 << 30
OTHER_BUCKET_BYTES = (128 << 20, 512 << 20, 1 << 30)
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
        observer = {"worker_extension_cls": "broadcast_observer.BroadcastObserver"}
        with gpus_alone(replica * args.tp, args.tp):
            engines.append(
                Vllm(args.work / f"dummy-{args.tp}", is_noise=True, tensor_parallel_size=args.tp, **observer)
            )
    trainer = torch.device("cuda", args.replicas * args.tp)
    assert trainer.index < torch.cuda.device_count(), f"{torch.cuda.device_count()=}"
    torch.cuda.set_device(trainer)
    found = measure(engines, args, trainer)
    for engine in engines:
        engine.shutdown()
    return found | {"nccl": list(torch.cuda.nccl.version())}


def measure(engines: list[Vllm], args, trainer: torch.device) -> dict:
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    llms = [engine.candidate for engine in engines]
    ways = Ways(llms)
    found: dict = {"fingerprints": compare(ways, policy), "broadcast_bytes_a_second": [], "rounds": []}
    log("compared")
    for _ in range(3):
        found["broadcast_bytes_a_second"].append(measure_rate(llms, args.tp, trainer))
    log("measured the wire")
    for _ in range(NUM_ROUNDS):
        found["rounds"].append(
            {
                "fp8": timed(ways.fp8.push, policy),
                "bf16": timed(ways.bf16.push, policy),
                "pull": timed(ways.pull, policy),
            }
        )
    # A refit in another way leaves the group; from here on it is kept.
    ways.fp8.push(policy)
    found["steady"] = [timed(ways.fp8.push, policy) for _ in range(NUM_ROUNDS)]
    broadcasts = {
        name: way._refitter._engine.ranks._broadcast for name, way in (("fp8", ways.fp8), ("bf16", ways.bf16))
    }
    found["wire_bytes"] = {name: num_bytes_sent(broadcast._plan.sender) for name, broadcast in broadcasts.items()}
    found["wire_bytes_of_rank"] = {
        name: [num_bytes_to(broadcast._plan.sender, section) for section in broadcast._sections.of_rank or (None,)]
        for name, broadcast in broadcasts.items()
    }
    log("timed")
    found["by_bucket_bytes"] = {num_bytes: steady(llms, policy, num_bytes) for num_bytes in OTHER_BUCKET_BYTES}
    log("timed in other buckets")
    found["steady_bf16"] = [timed(ways.bf16.push, policy) for _ in range(3 + NUM_ROUNDS)][3:]
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


def measure_rate(llms: list, tp: int, trainer: torch.device) -> float:
    """Bytes a second to the slowest rank, of NCCL's broadcasts alone."""
    opened = Communicator.open(host="127.0.0.1", port=0, size=1 + tp * len(llms), backend="nccl", timeout_s=TIMEOUT_S)
    meeting = opened.meeting.model_dump_json()

    def receive(place: int) -> list[float]:
        return llms[place].collective_rpc("observe_broadcast_rate", args=(meeting, 1 + place * tp, RATE_BYTES))

    with ThreadPoolExecutor(len(llms)) as pool:
        received = [pool.submit(receive, place) for place in range(len(llms))]
        opened.join(trainer, timeout_s=TIMEOUT_S)
        sent = broadcast_rate(opened, trainer, RATE_BYTES)
        rates = [rate for future in received for rate in future.result()]
    opened.abort()
    return min(sent, *rates)


def timed(push, policy: dict) -> dict:
    wall_s, _, report = time_call(lambda: push(policy))
    reports = report if isinstance(report, list) else [report]
    return {"wall_s": wall_s, "phases_s": [report.phases_s for report in reports]}


def steady(llms: list, policy: dict, bucket_bytes: int) -> list[dict]:
    """Pushes in buckets of another size, once the first ones have compiled what they need."""
    with Broadcaster(llms, timeout_s=TIMEOUT_S, bucket_bytes=bucket_bytes) as broadcaster:
        return [timed(broadcaster.push, policy) for _ in range(3 + NUM_ROUNDS)][3:]


def push_under_load(engines: list[Vllm], ways: Ways, policy: dict) -> dict:
    """Pushes and requests in turn: seconds, tokens, and memory that was free once everything was there."""
    free, tokens, seconds = [], [], []
    for step in range(NUM_PUSHES):
        policies.fill_policy(policy, 1 + step % 2)
        seconds.append(timed(ways.fp8.push, policy)["wall_s"])
        tokens.append([engine.say(PROMPTS, 4) for engine in engines])
        free.append([*(rank["free"] for engine in engines for rank in engine.ask("memory")), free_bytes()])
    return {"seconds": seconds, "tokens": tokens, "free_bytes": free}


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
