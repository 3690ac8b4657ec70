"""What ranks of a trainer do in the tests of `fp8refit.sources.sharded.gather`. Each function runs on every rank at once."""

import gc
import os
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import lru_cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import fp8refit.driver.adapters
import fp8refit.sources.sharded.gather
from fp8refit import EngineLostError, RefitError, Refitter, gathered
from fp8refit.sources.sharded import batches
from fp8refit.sources.sharded.gather import Gathered, Piece
from fp8refit.sources.sharded.trainer_group import _voting, trainer_group
from fp8refit.training.megatron import MegatronNames, global_names
from fp8refit.transport.process_group import ProcessGroupExchange
from tests.fakes import FakeEntryPoint, FakeModel, assert_holds, live_bytes, make_policy
from tests.training.test_megatron import GROUPS, HEAD, checkpoint, megatron

SHAPES = {
    "embedding": (1000, 24),
    "even": (256, 64),
    "uneven": (301, 20),
    "short": (3, 8),
    "one": (1,),
    "norm": (37,),
    "experts": (6, 40, 16),
    "stack": (9, 130, 8),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@lru_cache
def mesh_of(*shape: int) -> DeviceMesh:
    names = {1: ("ranks",), 2: ("outer", "inner"), 3: ("outer", "middle", "inner")}
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, shape, mesh_dim_names=names[len(shape)])


def reference() -> dict[str, Tensor]:
    """The whole model, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    whole = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        whole[name] = torch.randn(shape, generator=generator).to(DTYPES[number % len(DTYPES)])
    whole["scalar"] = torch.tensor(3.5)
    return whole


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def shard(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor of `tensor`, whose placements are cut back to the dimensions it has."""
    fitting = [Shard(min(one.dim, tensor.ndim - 1)) if isinstance(one, Shard) else one for one in placements]
    if tensor.ndim == 0:
        fitting = [Replicate()] * mesh.ndim
    if tensor.dtype is not torch.float8_e4m3fn:
        return distribute_tensor(tensor, mesh, fitting)
    local = (
        distribute_tensor(tensor.view(torch.uint8), mesh, fitting).to_local().view(tensor.dtype)
    )  # gloo knows no FP8
    return DTensor.from_local(local, mesh, fitting, shape=tensor.shape, stride=tensor.stride(), run_check=False)


def put_together(pieces: Iterator[Piece], whole: dict[str, Tensor], max_bytes: int) -> list[str]:
    """What is wrong with `pieces`, if they are to be `whole`."""
    wrong, ends = [], {}
    last = None
    for piece in pieces:
        expected, rows = whole[piece.name], piece.tensor.shape[0] if piece.tensor.ndim else 1
        if piece.name != last and piece.name in ends:
            wrong.append(f"{piece.name} comes in between")
        if piece.first_row != ends.get(piece.name, 0):
            wrong.append(f"{piece.name} has row {piece.first_row} after {ends.get(piece.name, 0)}")
        if expected.ndim == 2 and piece.first_row % 128:
            wrong.append(f"{piece.name} is cut at {piece.first_row}")
        step = 128 if expected.ndim == 2 else 1
        row_bytes = prod(expected.shape[1:]) * expected.itemsize
        if piece.tensor.nbytes > max(max_bytes, step * row_bytes):
            wrong.append(f"{piece.name} has a piece of {piece.tensor.nbytes}")
        ends[piece.name], last = piece.first_row + rows, piece.name
        part = expected[piece.first_row : piece.first_row + rows] if expected.ndim else expected
        if piece.tensor.dtype is not expected.dtype or not torch.equal(bits(piece.tensor), bits(part)):
            wrong.append(f"{piece.name} differs from row {piece.first_row} on")
    wrong += [f"{name} is incomplete" for name in whole if ends.get(name) != (whole[name].shape or (1,))[0]]
    return wrong


def gather_all(rank: int, shape: tuple[int, ...], placements: tuple[Placement, ...], max_bytes: int) -> list[str]:
    """Gather a model on every rank, in pieces and whole; gives what is wrong with them."""
    mesh, whole = mesh_of(*shape), reference()
    state_dict = {name: shard(tensor, mesh, placements) for name, tensor in whole.items()} | {
        "plain": torch.arange(3000.0)
    }
    whole["plain"] = torch.arange(3000.0)
    source = Gathered(state_dict, bucket_bytes=max_bytes)
    wrong = put_together(source.pieces(max_bytes), whole, max_bytes)
    metadata, problems = source.scan()
    wrong += problems
    given = dict(source)
    wrong += [name for name in whole if metadata[name].shape != given[name].shape]
    wrong += [f"{name} whole" for name in whole if not torch.equal(bits(given[name]), bits(whole[name]))]
    source.close()
    return wrong


class Tiny(nn.Module):
    """A model whose rows are no multiples of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(301, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=index > 0) for index in range(3))
        self.norm = nn.LayerNorm(24)
        self.register_buffer("steps", torch.arange(5))


def gather_fsdp(rank: int, *mesh_shape: int) -> list[str]:
    """Gather the state dict of an FSDP2 model, its layers wrapped one by one; gives what differs from `full_tensor`."""
    torch.manual_seed(3)
    model, mesh = Tiny(), mesh_of(*mesh_shape)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state_dict = model.state_dict()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state_dict.items()}
    with gathered(state_dict) as source:
        return put_together(source.pieces(3000), whole, 3000)


def gather_oddly(rank: int) -> list[str]:
    """Gather what only PyTorch itself can put together: partial sums, and columns cut twice the other way round."""
    mesh = mesh_of(2, 2)
    whole = {"sum": torch.full((300, 8), 6.0), "strided": torch.arange(64.0).view(16, 4)}
    odd = torch.full((300, 8), float(rank))
    strided = distribute_tensor(whole["strided"], mesh["inner"], [Shard(0)])
    layer = nn.Linear(4, 16, bias=False)
    layer.weight = nn.Parameter(strided)
    fully_shard(layer, mesh=mesh["outer"])
    state_dict = {"sum": DTensor.from_local(odd, mesh, [Partial(), Partial()]), "strided": layer.weight}
    with gathered(state_dict) as source:
        return [str(layer.weight.placements)] * (not rank) + put_together(source.pieces(2000), whole, 2000)


def engine() -> FakeModel:
    """A fake engine, the only one whose adapter is installed."""
    fp8refit.driver.adapters.entry_points = lambda group: [FakeEntryPoint()]
    return FakeModel()


def policy_and_shards(model: FakeModel, seed: int) -> tuple[dict[str, Tensor], dict[str, DTensor]]:
    policy = make_policy(model, seed)
    mesh = mesh_of(torch.distributed.get_world_size())
    return policy, {name: shard(tensor, mesh, (Shard(0),)) for name, tensor in policy.items()}


def error_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def refit_everywhere(rank: int) -> list[int]:
    """Every rank has an engine, and refits it from its shards: twice well, once with NaN on one rank, and well again."""
    model = engine()
    refitter, versions = Refitter(model, bucket_bytes=1 << 20), []
    for seed, is_bad in enumerate((False, False, True, False)):
        policy, sharded = policy_and_shards(model, seed)
        if is_bad and rank == 2:
            sharded["model.layers.0.mlp.up_proj.weight"].to_local()[0, 0] = float("nan")
        try:
            refitter.refit(sharded)
        except RefitError as error:
            assert is_bad and "model.layers.0.mlp.up_proj.weight" in str(error), error
            versions.append(-refitter.version)
        else:
            assert_holds(model, policy)
            versions.append(refitter.version)
    return versions


def refit_where_one_is_busy(rank: int) -> tuple[str, bool]:
    """Every rank has an engine, one of which cannot be refitted now. Gives the error, and whether anything was written."""
    model = engine()
    refitter = Refitter(model)
    before = live_bytes(model)
    model.is_busy = rank == 3
    try:
        refitter.refit(policy_and_shards(model, 1)[1])
    except RefitError as error:
        return error_of(error), live_bytes(model) != before or refitter.is_dirty
    return "no error", False


def refit_one(rank: int, *, strict: bool) -> int | None:
    """Rank 0 has two engines, and the others take part."""
    models = [engine(), engine()] if rank == 0 else []
    policy, sharded = policy_and_shards(FakeModel(), 5)
    with gathered(sharded, bucket_bytes=50_000) as weights:
        for model in models:
            report = Refitter(model, validate="strict" if strict else "fused").refit(weights)
            assert_holds(model, policy)
    return report.version if models else None


def refit_in_vain(rank: int, fault: str) -> tuple[str, bool]:
    """Rank 0 refits, and something is wrong somewhere. Gives the error, and whether the engine was written."""
    model = engine() if rank == 0 else FakeModel()
    refitter = Refitter(model) if rank == 0 else None
    _, sharded = policy_and_shards(model, 5)
    name = "model.layers.0.self_attn.o_proj.weight"
    allocate, num_batches = batches.Bucket.allocate, 0
    if fault == "missing everywhere" or (fault == "missing on one" and rank == 1):
        del sharded[name]
    elif fault == "placed otherwise" and rank == 2:
        sharded[name] = DTensor.from_local(torch.ones(192, 64, dtype=torch.bfloat16), mesh_of(4), [Shard(1)])
    elif fault == "other order" and rank == 3:
        sharded = dict(reversed(sharded.items()))
    elif fault == "broken shard" and rank == 1:
        whole = sharded[name]
        short = whole.to_local()[:-1]
        sharded[name] = DTensor.from_local(short, mesh_of(4), [Shard(0)], shape=whole.shape, stride=whole.stride())
    elif fault == "late" and rank == 2:

        def fail(bucket: batches.Bucket) -> None:
            nonlocal num_batches
            num_batches += 1
            if num_batches == 3:
                raise MemoryError("no room for a third bucket")
            allocate(bucket)

        batches.Bucket.allocate = fail
    before = live_bytes(model)
    try:
        with gathered(sharded, bucket_bytes=100_000, timeout_s=20) as weights:
            if refitter is not None:
                refitter.refit(weights)
            elif fault == "interrupted" and rank == 1:
                raise KeyboardInterrupt
    except (RefitError, MemoryError, KeyboardInterrupt) as error:
        return error_of(error), live_bytes(model) != before
    finally:
        batches.Bucket.allocate = allocate
    return "no error", False


def read_partly(rank: int, how: str) -> str:
    """Rank 0 stops in the middle, of its own will or by an error."""
    _, sharded = policy_and_shards(FakeModel(), 5)
    try:
        with gathered(sharded, bucket_bytes=50_000, timeout_s=20) as weights:
            if rank == 0:
                for count, _ in enumerate(weights):
                    if count == 3 and how == "break":
                        break
                    if count == 3:
                        raise ValueError("a reader of its own")
    except (RefitError, ValueError) as error:
        return error_of(error)
    return "no error"


def come_alone(rank: int, timeout_s: float) -> str:
    """Rank 0 waits for ranks that never come."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    sharded = {"w": shard(torch.ones(8, 8), mesh, (Shard(0),))}
    group = torch.distributed.new_group()
    if rank:
        return "elsewhere"
    with gathered(sharded, group, timeout_s=timeout_s) as weights:
        dict(weights)
    return "no error"


def die_in_the_middle(rank: int) -> str:
    """The last rank dies while the others gather."""
    _, sharded = policy_and_shards(FakeModel(), 5)
    with gathered(sharded, bucket_bytes=50_000, timeout_s=3) as weights:
        for count, _ in enumerate(weights):
            if count == 3 and rank == 3:
                os._exit(1)
    return "no error"


class Observed(Gathered):
    """Says what is done, in its order, and what is finished to whoever looks into `store`."""

    def __init__(self, state_dict: dict[str, Any], store: torch.distributed.Store, **options: Any) -> None:
        super().__init__(state_dict, **options)
        self.events: list[str] = []
        self._store = store
        exchange = self._trainers.exchange
        self._trainers.exchange = lambda own, error=None: (
            self._see(f"vote {own.place}", own.step) or exchange(own, error)
        )

    def _see(self, event: str, step: str) -> None:
        if step == "batch":
            self.events.append(event)

    def observe(self, number: int, batch: batches.Batch) -> batches.Batch:
        begin, finish, tensors = batch.begin, batch.finish, batch.tensors

        def begin_it() -> None:
            self.events.append(f"begin {number}")
            begin()

        def finish_it(timeout_s: float) -> None:
            finish(timeout_s)
            if torch.distributed.get_backend() == "nccl":
                torch.cuda.synchronize()
            self.events.append(f"finish {number}")
            self._store.set(f"{torch.distributed.get_rank()} finished {number}", "")

        def read() -> batches.PartRows:
            self.events.append(f"read {number}")
            yield from tensors()

        batch.begin, batch.finish, batch.tensors = begin_it, finish_it, read
        return batch


def read_slowly(rank: int, placements: tuple[Placement, ...], path: str) -> list[str]:
    """Rank 0 reads, and goes on from each batch only once the others have finished the next. Gives what each rank did."""
    size = torch.distributed.get_world_size()
    mesh = mesh_of(size)
    store = torch.distributed.FileStore(path, size)
    whole = {f"layers.{index}.weight": torch.full((256, 64), float(index)) for index in range(6)}
    whole["embed_tokens.weight"] = torch.randn(1024, 64, generator=torch.Generator().manual_seed(3))
    state_dict = {name: shard(tensor, mesh, placements) for name, tensor in whole.items()}
    source = Observed(state_dict, store, bucket_bytes=1 << 18)
    make = fp8refit.sources.sharded.gather.batches
    made = list(make(source._parts, 1 << 17))
    fp8refit.sources.sharded.gather.batches = lambda *_: (
        source.observe(number, batch) for number, batch in enumerate(made)
    )
    wrong: list[str] = []
    try:
        with source:
            for piece in source.pieces(1 << 18) if rank == 0 else ():
                rows = whole[piece.name][piece.first_row : piece.end_row]
                wrong += [piece.name] * (not torch.equal(bits(rows), bits(piece.tensor)))
                following = int(source.events[-1].split()[1]) + 1
                if following < len(made):
                    store.wait([f"{other} finished {following}" for other in range(1, size)], timedelta(seconds=20))
    finally:
        fp8refit.sources.sharded.gather.batches = make
    return wrong + source.events


def assert_overlap(reader: list[str], *others: list[str]) -> None:
    """Check that each batch was voted on and begun before the last was read, and finished after it."""
    last = int(reader[-1].split()[1])
    expected = ["vote 0", "begin 0", "finish 0"]
    for number in range(1, last + 1):
        expected += [f"vote {number}", f"begin {number}", f"read {number - 1}", f"finish {number}"]
    assert last > 4 and reader == [*expected, f"read {last}"]
    assert list(others) == [[event for event in expected if not event.startswith("read")]] * len(others)


def peak_bytes(rank: int, placements: tuple[Placement, ...], max_bytes: int) -> tuple[int, int]:
    """Most bytes that a pass takes beside the model, and those of the model; nothing is kept of what is read.

    Nothing is communicated: gloo's threads let go of a buffer some time after its operation is over.
    """
    all_gather, broadcast = batches._all_gather, batches.broadcast
    batches._all_gather = batches.broadcast = lambda *_: nullcontext()
    wait, batches.wait_for = batches.wait_for, lambda work, timeout_s: None
    mesh = mesh_of(2, 2)
    state_dict: dict[str, Any] = {f"layers.{index}.weight": torch.randn(256, 64) for index in range(20)}
    state_dict["embed_tokens.weight"] = torch.randn(4096, 64)
    num_bytes = sum(tensor.nbytes for tensor in state_dict.values())
    for name, tensor in state_dict.items():
        state_dict[name] = shard(tensor, mesh, placements)
    source = Gathered(state_dict)
    for _ in source.pieces(max_bytes):
        pass
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for piece in source.pieces(max_bytes):
            del piece
    source.close()
    batches._all_gather, batches.broadcast, batches.wait_for = all_gather, broadcast, wait
    held = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak, num_bytes


def gather_megatron(rank: int, max_bytes: int) -> list[str]:
    """Gather a Megatron model that two ranks share, each half of them twice."""
    weights, mesh = checkpoint(), mesh_of(2, 2)["inner"]
    columns = ("linear_proj.weight", "linear_fc2.weight")
    sharded = {
        name: shard(tensor, mesh, (Shard(int(name.endswith(columns))),))
        if "linear_" in name and "experts" not in name and "norm" not in name
        else tensor
        for name, tensor in megatron(weights, 2).items()
    }
    rename = MegatronNames(num_query_groups=GROUPS, head_dim=HEAD, tensor_parallel=2)
    with gathered(sharded, rename=rename) as source:
        return put_together(source.pieces(max_bytes), weights, max_bytes)


def megatron_stages(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint, and what a rank holds of it: two stages of two tensor-parallel ranks, which have an expert each.

    Layers and experts are counted from zero on every rank, as Megatron does.
    """
    weights, mesh = checkpoint(), mesh_of(2, 2)["inner"]
    columns = ("linear_proj.weight", "linear_fc2.weight")
    is_last, number = rank >= 2, rank % 2
    held = {}
    for name, tensor in megatron(weights, 2).items():
        if ("layers.1." in name or "final_layernorm" in name or "output_layer" in name) is not is_last:
            continue
        expert = re.search(r"local_experts\.(\d)|weight(\d)$", name)
        if expert is not None:
            if int(expert[1] or expert[2]) == number:
                held[re.sub(r"local_experts\.\d|weight\d$", lambda found: found[0][:-1] + "0", name)] = tensor
        elif "linear_" in name and "norm" not in name:
            held[name] = shard(tensor, mesh, (Shard(int(name.endswith(columns))),))
        else:
            held[name] = tensor
    held = {name.replace("layers.1.", "layers.0."): tensor for name, tensor in held.items()}
    return weights, dict(global_names(held, first_layer=int(is_last), first_expert=number))


def gather_stages(rank: int, max_bytes: int) -> list[str]:
    """Gather them, on every rank and, with three that join, on the last."""
    weights, held = megatron_stages(rank)
    rename = MegatronNames(num_query_groups=GROUPS, head_dim=HEAD, tensor_parallel=2)
    with gathered(held, rename=rename, is_apart=True) as source:
        scanned, problems = source.scan()
        assert not problems
        assert {name: meta.shape for name, meta in scanned.items()} == {
            name: tuple(tensor.shape) for name, tensor in weights.items()
        }
        wrong = put_together(source.pieces(max_bytes), dict(weights), 1 << 20)
    with gathered(held, rename=rename, is_apart=True, bucket_bytes=max_bytes) as source:
        if rank == 3:
            wrong += [name for name, tensor in source if not torch.equal(tensor, weights[name])]
    return wrong


def gather_stages_in_vain(rank: int, fault: str) -> str:
    """What every rank is told of a fault on one."""
    _, held = megatron_stages(rank)
    norm = "decoder.final_layernorm.weight"
    if rank == 3 and fault == "shape":
        held[norm] = held[norm][:4]
    elif rank == 3 and fault == "unreadable":
        held[norm] = held[norm].to("meta")
    try:
        with gathered(held, is_apart=True, timeout_s=5.0) as source:
            for _ in source:
                if rank == 1 and fault == "raise":
                    raise RuntimeError("no room")
    except Exception as error:  # noqa: BLE001
        return error_of(error)
    return "nothing"


STREAM_TIMEOUT_S = 4.0
SLACK_S = 8.0
"""What a busy machine may add to a time limit."""


def refit_from_a_stream(rank: int, fault: str | None) -> tuple[str, int, bool]:
    """The last rank refits its engine from a stream that all ranks must read together.

    Gives what each rank is told, how many tensors it read, and whether its engine is dirty. A rank that is told late says so.
    """
    model, num_read = engine(), 0
    policy = make_policy(model, 1)
    other = {f"model.other.{index}": torch.zeros(2) for index in range(40)} if fault == "unexpected" else {}

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal num_read
        for name, tensor in {**other, **policy}.items():
            torch.distributed.all_reduce(torch.ones(1))
            num_read += 1
            if rank == 2 and num_read == 5 and fault == "raise":
                raise MemoryError("no room")
            if rank == 2 and num_read == 5 and fault == "end":
                return
            if rank == 2 and num_read == 5 and fault == "die":
                os._exit(1)
            yield name, tensor

    told, start_s = "nothing", time.monotonic()
    try:
        with gathered(stream, timeout_s=STREAM_TIMEOUT_S) as weights:
            if rank == 3:
                model.is_busy = fault == "busy"
                Refitter(model).refit(weights)
    except Exception as error:  # noqa: BLE001
        told = error_of(error)
    if fault in ("raise", "end", "die") and (late_s := time.monotonic() - start_s - STREAM_TIMEOUT_S) > SLACK_S:
        told = f"nothing for {late_s:.1f} s beyond its time limit, then {told}"
    return told, num_read, rank == 3 and Refitter(model).is_dirty


def leave_others_in_a_gather(rank: int, num_elements: int, *, when: int, timeout_s: float = STREAM_TIMEOUT_S) -> tuple:
    """One rank's function raises while the other ranks are in an all-gather of the default group.

    Gives what each rank is told, whether in time, and whether all of them can vote after that.
    """

    def stream() -> Iterator[tuple[str, Tensor]]:
        for number in range(40):
            if rank == 1 and number == when:
                raise MemoryError("no room")
            whole = [torch.empty(num_elements) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(whole, torch.full((num_elements,), float(rank)))
            yield f"w{number}", torch.cat(whole)

    told, start_s = "nothing", time.monotonic()
    try:
        with gathered(stream, timeout_s=timeout_s) as weights:
            if rank == 0:
                for _ in weights:
                    pass
    except Exception as error:  # noqa: BLE001
        told = error_of(error)
    is_in_time = time.monotonic() - start_s < timeout_s + SLACK_S
    answers = trainer_group(None).exchange(f"{rank}".encode(), timeout_s=20.0)
    return told, is_in_time, [int(message) for message in answers]


def gather_whole(rank: int, fault: str, *, is_apart: bool) -> str:
    """Tensors that are whole on every rank, and shards. What each rank is told."""
    _, sharded = policy_and_shards(FakeModel(), 5)
    whole = torch.arange(40_000.0).to(torch.bfloat16)
    if fault == "other value" and rank == 2:
        whole[-1] = 0
    elif fault == "other order" and rank == 1:
        whole[:2] = whole[:2].flip(0)
    replicated = DTensor.from_local(
        torch.arange(24.0) + (rank == 3 and fault == "replicated"), mesh_of(4), [Replicate()]
    )
    held = sharded | {"whole": whole[1:], "replicated": replicated}
    try:
        with gathered(held, torch.distributed.group.WORLD, is_apart=is_apart, timeout_s=20) as source:
            if rank == 0:
                found = dict(source)
                assert torch.equal(found["whole"], whole[1:])
    except RefitError as error:
        return error_of(error)
    return "nothing"


def gather_in_pairs(rank: int) -> list[str]:
    """Two pairs of ranks at once, each in a group of its own, and again after one pair had an error."""
    group = mesh_of(2, 2)["inner"].get_group()
    wrong = []
    for attempt in range(3):
        whole = {f"w{rank // 2}": torch.arange(3000.0) + attempt}
        try:
            with gathered(whole, group, timeout_s=20) as source:
                if rank % 2 == 0:
                    wrong += put_together(source.pieces(3000), whole, 3000)
                if attempt == 1 and rank == 1:
                    raise ValueError("of one pair")
        except (ValueError, RefitError) as error:
            wrong += [] if attempt == 1 and rank < 2 else [error_of(error)]
    return wrong


def come_alone_first(rank: int) -> list[str]:
    """Rank 0 asks the others to vote and they do not come; then rank 3 does; then all of them do."""
    told = []
    for alone in (0, 3):
        if rank == alone:
            try:
                trainer_group(None).exchange(b"", timeout_s=0.5)
            except RefitError as error:
                told.append(type(error).__name__)
        torch.distributed.barrier()
    for attempt in range(2):
        answers = trainer_group(None).exchange(f"{rank} {attempt}".encode(), timeout_s=20.0)
        told += [] if answers == [f"{other} {attempt}".encode() for other in range(4)] else [str(answers)]
    if rank == 0:
        try:
            trainer_group(None).exchange(b"", timeout_s=0.5)
        except RefitError as error:
            told.append(type(error).__name__)
    torch.distributed.barrier()
    # The others still have connections that rank 0 has given up, and perhaps what it sent last.
    for timeout_s in (0.5, 5.0):
        with suppress(RefitError):
            trainer_group(None).exchange(b"", timeout_s=5.0 if rank else timeout_s)
        torch.distributed.barrier()
    answers = trainer_group(None).exchange(b"", timeout_s=20.0)
    return told + ([] if len(answers) == 4 else [str(answers)])


def come_late_after_giving_up(rank: int) -> int:
    """Rank 3 asks the others to vote, and they do not come. Then they come, a moment before rank 3 does."""
    if rank == 3:
        with suppress(RefitError):
            trainer_group(None).exchange(b"", timeout_s=0.2)
    torch.distributed.barrier()
    if rank == 3:
        time.sleep(1.0)
    return len(trainer_group(None).exchange(b"", timeout_s=15.0))


def begin_anew(rank: int, store: str) -> tuple[int, list[str]]:
    """The default group is destroyed, and there is another one. Gives how many groups are kept for votes in between."""
    before = gather_whole(rank, "", is_apart=False)
    mesh_of.cache_clear()
    torch.distributed.destroy_process_group()
    gc.collect()
    num_kept = len(_voting)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, 4), rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    return num_kept, [before, gather_whole(rank, "", is_apart=False)]


def give_up_alone(rank: int) -> list[Any]:
    """Rank 1's time is over at a vote that the others just hear. Gives what is heard in the next one, and how soon."""
    votes = trainer_group(None)
    votes.exchange(b"", timeout_s=20.0)
    gather = ProcessGroupExchange._gather

    def gather_late(*args: Any) -> None:
        gather(*args)
        raise EngineLostError("too late")

    with pytest.MonkeyPatch.context() as patched, suppress(EngineLostError):
        if rank == 1:
            patched.setattr(ProcessGroupExchange, "_gather", gather_late)
        votes.exchange(b"", timeout_s=20.0)
    start_s = time.monotonic()
    answers = votes.exchange(f"{rank}".encode(), timeout_s=20.0)
    return [*map(int, answers), time.monotonic() - start_s < 5]
