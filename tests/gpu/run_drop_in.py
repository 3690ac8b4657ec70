"""A vLLM engine fed as trainers feed it, with the drop-in and by vLLM's own reload of the same stream. Writes JSON.

    python tests/gpu/run_drop_in.py --out benchmarks/results/drop_in_vllm_qwen3-8b_h200.json     # both ways, about 5 minutes

`trl`: the engine is in the trainer's process, and gets one tensor a call (TRL, colocated). `verl`: it is in another process on
the same GPU, and gets buckets of 512 MiB through one CUDA IPC handle, each acknowledged before the next, and a larger tensor by
a handle of its own (verl's protocol). The two boot side by side and measure one after the other.

Two policies come in turn, as in training: what comes again unchanged would be compared with what the engine holds. Times are
of the whole transfer, everything synchronised before and after; the drop-in, then vLLM's own reload, then the drop-in again,
on one engine. vLLM's keeps tensors of a bucket that is overwritten, until it has a layer: its time counts, its bytes are not
looked at. `--shape tiny --way trl` tries the script where vLLM runs on a CPU.
"""

import argparse
import gc
import json
import os
import pickle
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import side_by_side
import torch
from harness import timed
from scripts import wait_for_turn

DROP_IN = {"FP8REFIT_DROP_IN": "1", "FP8REFIT_QUANTIZATION": "fp8_per_block", "VLLM_USE_DEEP_GEMM": "0"}
"""DeepGEMM compiles for minutes."""
WAYS = {"trl": DROP_IN, "verl": DROP_IN}
PROMPTS = [list(range(100, 140))]
OURS, OWN, NOTHING = "drop-in", "vLLM's own reload", "the transfer alone"
MPS = "CUDA_MPS_PIPE_DIRECTORY"
"""Set where both processes use the GPU through NVIDIA's multi-process service, without turns."""
FIRST_ROUNDS = 3
"""They compile and are not counted."""
ALIGNMENT_BYTES = 16


def main() -> None:
    parser = side_by_side.parser_of("way", WAYS, rounds=9)
    parser.add_argument("--bucket-mib", type=int, default=512, help="of verl's update_weights_bucket_megabytes")
    side_by_side.run(parser.parse_args(), "way", WAYS, measure, show, has_mps=MPS in os.environ)


def show(results: dict) -> None:
    for way, result in results.items():
        print(way, json.dumps({key: value for key, value in result.items() if key != "ms"}, indent=1))


def load(worker: Any, way: str, buckets: Iterator[list]) -> None:
    """What a trainer does in a worker: with the drop-in its own calls, without it vLLM's reload around the same calls; or
    nothing, to know what the transfer takes by itself.
    """
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, config = worker.model_runner.model, worker.vllm_config.model_config
    if way == OWN:
        reload.initialize_layerwise_reload(worker.model_runner.get_model())
    with torch.no_grad():
        for bucket in buckets:
            if way != NOTHING:
                model.load_weights(bucket)
    if way == OWN:
        reload.finalize_layerwise_reload(worker.model_runner.get_model(), config)
    elif way == OURS:
        process_weights_after_loading(worker.model_runner.get_model(), config, worker.device)


def switch(worker: Any, way: str) -> None:
    """Put the drop-in in, or take it out."""
    from fp8refit_vllm import drop_in
    from fp8refit_vllm.worker import rank_of

    if way == OURS:
        drop_in.install(worker, lambda: rank_of(worker))
    else:
        drop_in.remove(worker)


class Receiver:
    """For `worker_extension_cls`: the other end of `Sender`."""

    def switch_way(self, way: str) -> None:
        switch(self, way)

    def receive_weights(self, way: str, address: str) -> dict:
        import zmq

        def shared(handle: tuple) -> torch.Tensor:
            rebuild, described = handle
            described = list(described)
            described[6] = self.device.index
            return rebuild(*described)

        socket = zmq.Context.instance().socket(zmq.REP)
        socket.connect(address)
        buffer = shared(pickle.loads(socket.recv()))
        socket.send(b"")

        def buckets() -> Iterator[list]:
            while (message := socket.recv()) != b"":
                names, handle = pickle.loads(message)
                memory = buffer if handle is None else shared(handle).view(-1).view(torch.uint8)
                yield [
                    (name, memory[start : start + size].view(dtype).view(shape))
                    for name, dtype, shape, start, size in names
                ]
                torch.cuda.synchronize()  # as verl's receiver does before it lets the buffer be overwritten
                socket.send(b"")
            socket.send(b"")

        _, extra_bytes, _ = timed(lambda: load(self, way, buckets()))
        socket.close()
        return {"peak_extra_bytes": extra_bytes}


class Sender:
    """Gives tensors through one buffer."""

    def __init__(self, bucket_bytes: int) -> None:
        self.buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device="cuda")

    def send(self, address: str, items: list) -> None:
        import zmq
        from torch.multiprocessing.reductions import reduce_tensor

        socket = zmq.Context.instance().socket(zmq.REQ)
        socket.bind(address)
        ask(socket, pickle.dumps(reduce_tensor(self.buffer)))
        names: list[tuple] = []
        start = 0
        for name, tensor in items:
            described = (name, tensor.dtype, tuple(tensor.shape))
            if tensor.nbytes > self.buffer.nbytes:
                ask(socket, pickle.dumps(([(*described, 0, tensor.nbytes)], reduce_tensor(tensor))))
                continue
            if start + tensor.nbytes > self.buffer.nbytes:
                torch.cuda.synchronize()
                ask(socket, pickle.dumps((names, None)))
                names, start = [], 0
            into = self.buffer[start : start + tensor.nbytes]
            into.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            names.append((*described, start, tensor.nbytes))
            start += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        torch.cuda.synchronize()
        ask(socket, pickle.dumps((names, None)))
        ask(socket, b"")
        socket.close()


def ask(socket: Any, message: bytes) -> None:
    socket.send(message)
    socket.recv()


def measure(arguments: argparse.Namespace) -> None:
    """Write what was found after every round."""
    import policies
    from harness import about
    from live_engines import SMALL, Vllm

    from fp8refit import Refitter

    with tempfile.TemporaryDirectory() as folder:
        policies.write_config(arguments.shape, Path(folder))
        options = {"load_format": "dummy", "enforce_eager": True, "worker_extension_cls": "run_drop_in.Receiver"}
        engine = Vllm(Path(folder), is_inside=arguments.way == "trl", **SMALL | options)
    llm = engine.candidate
    wait_for_turn()
    pair = [policies.fill_policy(policies.allocate(arguments.shape), seed) for seed in (1, 2)]
    turns = cycle(range(2))
    refitter = Refitter(llm)
    transfer = by_ipc(llm, arguments.bucket_mib << 20) if arguments.way == "verl" else one_by_one(llm)
    expected, told = [], []
    for policy in pair:
        refitter.refit(policy)
        expected.append(refitter.fingerprints())
        told.append(engine.say(PROMPTS, 8))
    ms: dict[str, list[float]] = {OURS: [], OWN: [], NOTHING: []}
    checks: dict[str, object] = {"bytes": sum(tensor.nbytes for tensor in policy.values()), "tensors": len(policy)}
    checks["policies differ"] = expected[0] != expected[1] and told[0] != told[1]
    for way in (OURS, NOTHING, OWN, OURS):  # once more, after vLLM's has touched the weights
        llm.collective_rpc("switch_way", args=(way,))
        for round_ in range(arguments.rounds + FIRST_ROUNDS):
            gc.collect()
            turn = next(turns)
            items = list(pair[turn].items())
            seconds, _, found = timed(lambda way=way, items=items: transfer(way, items))
            if round_ >= FIRST_ROUNDS:
                ms[way].append(1e3 * seconds)
            elif len(ms[way]) == 0:
                checks[f"{way}: call {round_ + 1}, ms"] = round(1e3 * seconds, 2)
            checks[f"{way}: peak extra MiB"] = found["peak_extra_bytes"] >> 20
            if way == OURS and round_ < FIRST_ROUNDS:
                checks["same bytes as a refit"] = (
                    checks.get("same bytes as a refit", True) and refitter.fingerprints() == expected[turn]
                )
                checks["same tokens as a refit"] = (
                    checks.get("same tokens as a refit", True) and engine.say(PROMPTS, 8) == told[turn]
                )
        result = about() | {
            "median_ms": {way: round(statistics.median(times), 2) for way, times in ms.items() if times},
            "checks": checks,
            "ms": ms,
        }
        side_by_side.save(arguments.out, result)


def one_by_one(llm: Any) -> Callable[[str, list], dict]:
    """TRL's transfer."""

    worker = llm.llm_engine.model_executor.driver_worker.worker

    def transfer(way: str, items: list) -> dict:
        _, extra_bytes, _ = timed(lambda: load(worker, way, ([item] for item in items)))
        return {"peak_extra_bytes": extra_bytes}

    return transfer


def by_ipc(llm: Any, bucket_bytes: int) -> Callable[[str, list], dict]:
    """verl's transfer."""
    sender: list[Sender] = []

    def transfer(way: str, items: list) -> dict:
        if not sender:
            sender.append(Sender(bucket_bytes))
        address = f"ipc:///tmp/fp8refit-run-drop-in-{os.getpid()}.sock"
        thread = threading.Thread(target=sender[0].send, args=(address, items), daemon=True)
        thread.start()
        (found,) = llm.collective_rpc("receive_weights", args=(way, address))
        thread.join()
        return found

    return transfer


if __name__ == "__main__":
    main()
