"""What the checkpoint of a vLLM draft holds, as its files say. Real drafts: `tests/vllm/test_drafts.py`."""

import re
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.drafts import Draft, _restore_tables, draft_of, read_boot_values
from safetensors.torch import save_file
from torch import nn

from fp8refit.fill.plan import is_any_of
from fp8refit.live.slots import Refusal

BF16 = torch.zeros(4, 4, dtype=torch.bfloat16)
FP8 = BF16.to(torch.float8_e4m3fn)


class Network(nn.Module):
    def load_weights(self, weights):
        """Take everything."""


def config_of(model, *, method="mtp", target="target", **fields):
    speculative = SimpleNamespace(
        method=method, draft_model_config=SimpleNamespace(model=str(model), revision=None), draft_load_config=None
    )
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(model=str(target), revision=None, enable_sleep_mode=False),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def draft_from(folder, *, target="target", **tensors):
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return Draft(Network(), None, config_of(folder, target=target))


def test_the_names_of_a_draft_are_those_of_its_files(tmp_path):
    tables = {"d2t": torch.zeros(4, dtype=torch.int64), "t2d": torch.zeros(8, dtype=torch.bool)}
    scales = {"b.weight_scale_inv": torch.ones(1, 1), "model.layers.0.self_attn.k_scale": torch.ones(())}
    draft = draft_from(tmp_path, a=BF16.clone(), **{"b.weight": FP8}, **scales, **tables)
    assert set(draft.naming(is_any_of(())).tensors) == {"a", "b.weight"}
    assert tables.keys() < draft.stored.keys()


@pytest.mark.parametrize(
    ("tensors", "why"),
    [({}, "whose names are unknown"), ({"w": torch.zeros(4, dtype=torch.uint8)}, "packed weights .* such as w")],
    ids=["no checkpoint", "packed"],
)
def test_a_draft_whose_names_are_unknown_is_refused(tensors, why, tmp_path):
    refusal = draft_from(tmp_path, **tensors).naming(is_any_of(()))
    assert isinstance(refusal, Refusal)
    assert re.search(why, refusal.reason) and "without speculative_config" in refusal.remedy


def test_weights_of_the_target_may_be_packed_beside_a_draft_in_its_checkpoint(tmp_path):
    packed = torch.zeros(4, dtype=torch.uint8)
    draft = draft_from(tmp_path, target=tmp_path, w=packed, **{"mtp.w": BF16.clone()})
    assert set(draft.naming(is_any_of(["mtp.*"])).tensors) == {"mtp.w"}
    refusal = draft_from(tmp_path, target=tmp_path, w=BF16.clone(), **{"mtp.w": packed}).naming(is_any_of(["mtp.*"]))
    assert "mtp.w" in refusal.reason


@pytest.mark.parametrize(
    ("part", "fields", "why"),
    [
        ("load_config", {"load_format": "dummy"}, "dummy weights"),
        ("draft_load_config", {"load_format": "dummy"}, "dummy weights"),
        ("cache_config", {"cache_dtype": "fp8"}, "FP8 KV cache"),
    ],
)
def test_what_a_draft_would_lose_is_refused(part, fields, why):
    config = config_of("draft")
    config.model_config.enable_sleep_mode = True
    owner = config.speculative_config if part == "draft_load_config" else config
    setattr(owner, part, SimpleNamespace(download_dir=None, **fields))
    assert [why in each.reason for each in Draft(Network(), None, config).refusals] == [True]


def test_the_configuration_of_a_draft_is_that_with_which_vllm_built_it():
    config = config_of("draft")

    def of(**proposer):
        return Draft(Network(), SimpleNamespace(**proposer), config).config

    assert of(_create_draft_vllm_config=lambda: "made for it") == "made for it"
    assert of(_draft_vllm_config="of the second runner") == "of the second runner"
    assert of() is config


def worker_of(model, method="mtp", own="draft"):
    runner = SimpleNamespace(drafter=SimpleNamespace(model=model))
    return SimpleNamespace(vllm_config=config_of(own, method=method), model_runner=runner)


def test_a_draft_is_a_model_that_loads_weights():
    network = Network()
    found = draft_of(worker_of(network))
    assert (found.network, found.prefix, found.is_apart) == (network, "", True)
    assert draft_of(worker_of(network, "draft_model", "target")).is_apart
    assert not draft_of(worker_of(network, own="target")).is_apart
    assert draft_of(worker_of(nn.Linear(2, 2))) is None
    assert draft_of(worker_of(None, "ngram")) is None


def test_what_no_policy_brings_is_read_at_boot_and_restored():
    network = Network()
    network.table = nn.Parameter(torch.arange(4), requires_grad=False)
    network.layer = nn.Module()
    network.layer.input_scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
    worker = worker_of(network)
    values = read_boot_values(worker)
    assert values.keys() == {"table", "layer.input_scale"}
    with torch.no_grad():
        network.table.zero_()
    (refresh,), refusals = _restore_tables(network, values)
    refresh.run()
    assert network.table.tolist() == [0, 1, 2, 3] and refusals == ()
    _, (refusal,) = _restore_tables(network, {})
    assert "table" in refusal.reason
    worker.vllm_config.load_config.load_format = "dummy"
    assert read_boot_values(worker) == {}
