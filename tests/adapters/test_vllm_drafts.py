"""What the checkpoint of a vLLM draft holds, as its files say. Real drafts: `tests/vllm/test_drafts.py`."""

import re
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.drafts import Draft, draft_of
from safetensors.torch import save_file
from torch import nn

from fp8refit.live.slots import Refusal

BF16 = torch.zeros(4, 4, dtype=torch.bfloat16)
FP8 = BF16.to(torch.float8_e4m3fn)


class Network(nn.Module):
    def load_weights(self, weights):
        """Take everything."""


def draft_from(folder, **tensors):
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return Draft(Network(), None, SimpleNamespace(model=str(folder)), prefix="", is_apart=True)


def test_the_names_of_a_draft_are_those_of_its_files(tmp_path):
    tables = {"d2t": torch.zeros(4, dtype=torch.int64), "t2d": torch.zeros(8, dtype=torch.bool)}
    draft = draft_from(tmp_path, a=BF16.clone(), **{"b.weight": FP8, "b.weight_scale_inv": torch.ones(1, 1)}, **tables)
    assert set(draft.naming.tensors) == {"a", "b.weight"}
    assert set(draft.stored) == {"a", "b.weight", "d2t", "t2d"}


@pytest.mark.parametrize(
    ("tensors", "why"),
    [({}, "whose names are unknown"), ({"w": torch.zeros(4, dtype=torch.uint8)}, "packed weights .* such as w")],
    ids=["no checkpoint", "packed"],
)
def test_a_draft_whose_names_are_unknown_is_refused(tensors, why, tmp_path):
    refusal = draft_from(tmp_path, **tensors).naming
    assert isinstance(refusal, Refusal)
    assert re.search(why, refusal.reason) and "without speculative_config" in refusal.remedy


def worker_of(model, method="mtp", own="draft"):
    speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=own))
    config = SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(model="target"))
    return SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(drafter=SimpleNamespace(model=model)))


def test_a_draft_is_a_model_that_loads_weights():
    network = Network()
    found = draft_of(worker_of(network))
    assert (found.network, found.prefix, found.is_apart) == (network, "", True)
    assert draft_of(worker_of(network, "draft_model")).prefix == "draft_model"
    assert not draft_of(worker_of(network, own="target")).is_apart
    assert draft_of(worker_of(nn.Linear(2, 2))) is None
    assert draft_of(worker_of(None, "ngram")) is None
