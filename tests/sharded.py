"""What ranks of a trainer do in the tests of `fp8refit.gather`. Each function runs on every rank at once."""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fp8refit.gather import Gathered, Piece

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
    return init_device_mesh("cpu", shape)


def reference() -> dict[str, Tensor]:
    """The whole model, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    whole = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        whole[name] = torch.randn(shape, generator=generator).to(DTYPES[number % len(DTYPES)])
    whole["scalar"] = torch.tensor(3.5)
    return whole


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def shard(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor of `tensor`, whose placements are cut back to the dimensions it has."""
    fitting = [Shard(min(one.dim, tensor.ndim - 1)) if isinstance(one, Shard) else one for one in placements]
    if tensor.ndim == 0:
        fitting = [Replicate()] * mesh.ndim
    local = bits_distributed(tensor, mesh, fitting)
    return local


def bits_distributed(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    if tensor.dtype is not torch.float8_e4m3fn:
        return distribute_tensor(tensor, mesh, placements)
    as_bytes = distribute_tensor(tensor.view(torch.uint8), mesh, placements)
    return DTensor.from_local(
        as_bytes.to_local().view(torch.float8_e4m3fn),
        mesh,
        placements,
        shape=tensor.shape,
        stride=tensor.stride(),
        run_check=False,
    )


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
