"""What NCCL's link does before and around NCCL, which needs GPUs: tests/gpu/test_broadcast.py has it for real."""

import pytest
import torch
from torch.distributed import HashStore

from fp8refit.errors import TransportError
from fp8refit.transport.collective import links
from fp8refit.transport.collective.links import NcclLink, Seat

DEVICE = torch.device("cpu")


class SilentCommunicator:
    """Is made, and connects with nobody."""

    made: tuple = ()

    def __init__(self, name, **options):
        SilentCommunicator.made = (name, options["rank"], options["size"])


@pytest.fixture
def trainer(monkeypatch):
    """The trainer's link; gives the store at which the rank comes."""
    store = HashStore()
    monkeypatch.setattr(links, "NcclCommunicator", SilentCommunicator)
    monkeypatch.setattr(links, "unique_id", lambda: b"a name")
    monkeypatch.setattr(links, "terms", lambda: {"NCCL": "22800", "NCCL_CUMEM_ENABLE": "1"})
    NcclLink(seat(store, 0), None)
    return store


def seat(store, rank):
    return Seat(store=store, trainer=("127.0.0.1", 1), rank=rank, size=2, device=DEVICE, timeout_s=5.0)


def test_a_rank_connects_by_the_trainers_name(trainer):
    NcclLink(seat(trainer, 1), None)
    assert SilentCommunicator.made == (b"a name", 1, 2)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (
            {"NCCL": "22800", "NCCL_CUMEM_ENABLE": "0"},
            r"the trainer has NCCL_CUMEM_ENABLE=1, but this rank has NCCL_CUMEM_ENABLE=0.* set NCCL_CUMEM_ENABLE to the same",
        ),
        (
            {"NCCL": "22700", "NCCL_CUMEM_ENABLE": "1"},
            r"has NCCL=22800, but this rank has NCCL=22700.*the same PyTorch",
        ),
    ],
)
def test_a_rank_whose_nccl_would_hang_says_why_before_it_connects(trainer, terms, said, monkeypatch):
    monkeypatch.setattr(links, "terms", lambda: terms)
    monkeypatch.setattr(links, "NcclCommunicator", None)
    with pytest.raises(TransportError, match=said):
        NcclLink(seat(trainer, 1), None)
