"""Which drafts of SGLang are refitted, and what is said of the others. Real drafts:
`tests/sglang/test_drafts_stubbed_kernels.py`.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from fp8refit_sglang import drop_in
from fp8refit_sglang.drafts import Draft, draft_of
from fp8refit_sglang.live_scheduler import Scheduler
from safetensors.torch import save_file
from torch import nn

from fp8refit.driver.installed import Installed
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.slots import Refusal


def configs_of(model, *, load_format="auto"):
    model_config = SimpleNamespace(model_path=str(model), revision=None)
    return {
        "model_config": model_config,
        "load_config": SimpleNamespace(load_format=load_format, download_dir=None),
    }


def scheduler_of(algorithm, model="draft", *, token_map=None, load_format="auto", **worker):
    runner = SimpleNamespace(model=nn.Linear(2, 2), **configs_of(model, load_format=load_format))
    inner, target = SimpleNamespace(draft_runner=runner, **worker), nn.Module()
    target.weight = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
    return Scheduler(
        SimpleNamespace(
            spec_algorithm=SimpleNamespace(name=algorithm),
            draft_worker=SimpleNamespace(draft_worker=inner),
            server_args=SimpleNamespace(speculative_token_map=token_map),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target, **configs_of("target"))),
        )
    )


@pytest.mark.parametrize(
    ("algorithm", "model", "is_plain", "is_apart"),
    [
        ("EAGLE", "target", False, False),
        ("EAGLE", "draft", False, True),
        ("EAGLE3", "draft", False, True),
        ("STANDALONE", "target", True, True),
    ],
)
def test_a_draft_is_within_the_targets_checkpoint_or_apart(algorithm, model, is_plain, is_apart):
    draft = draft_of(scheduler_of(algorithm, model))
    assert isinstance(draft, Draft)
    assert (draft.is_plain, draft.is_apart, draft.refusals) == (is_plain, is_apart, ())


def test_the_targets_checkpoint_may_be_named_otherwise_for_the_draft(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target, draft in (("target", "target"), (tmp_path, "."), (tmp_path, f"{tmp_path}/")):
        scheduler = scheduler_of("EAGLE", draft)
        scheduler.itself.tp_worker.model_runner.model_config.model_path = str(target)
        scheduler.itself.draft_worker.draft_worker.draft_runner.model_config.revision = "main"
        assert not draft_of(scheduler).is_apart


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_there_may_be_no_model(algorithm):
    assert draft_of(scheduler_of(algorithm)) is None


@pytest.mark.parametrize(
    ("scheduler", "why", "remedy"),
    [
        (scheduler_of("DFLASH"), "by DFLASH", "speculative_algorithm NEXTN, EAGLE, EAGLE3 or STANDALONE"),
        (scheduler_of("FROZEN_KV_MTP"), "by FROZEN_KV_MTP", "NEXTN"),
        (scheduler_of("EAGLE", draft_runner_list=[]), "one model for each step", "without enable_multi_layer_eagle"),
        (scheduler_of("EAGLE", token_map="hot.pt"), "rows of the target's head", "without speculative_token_map"),
    ],
    ids=["DFLASH", "frozen KV", "several", "token map"],
)
def test_other_drafts_are_refused_by_name(scheduler, why, remedy):
    refusal = draft_of(scheduler)
    assert isinstance(refusal, Refusal)
    assert why in refusal.reason and remedy in refusal.remedy and "without speculative_algorithm" in refusal.remedy


def test_a_draft_of_eagle_3_knows_its_tokens_itself():
    assert isinstance(draft_of(scheduler_of("EAGLE3", token_map="hot.pt")), Draft)


def test_dummy_weights_of_a_draft_are_refused():
    (refusal,) = draft_of(scheduler_of("EAGLE", load_format="dummy")).refusals
    assert re.search("dummy weights", refusal.reason) and "without speculative_algorithm" in refusal.remedy


@pytest.mark.parametrize(
    ("tensors", "why"),
    [({}, "whose names are unknown"), ({"w": torch.zeros(4, dtype=torch.uint8)}, "packed weights .* such as w")],
    ids=["no checkpoint", "packed"],
)
def test_a_draft_whose_names_are_unknown_is_refused(tensors, why, tmp_path):
    if tensors:
        save_file(tensors, tmp_path / "model.safetensors")
    refusal = draft_of(scheduler_of("EAGLE", tmp_path)).naming(lambda _: False)
    assert isinstance(refusal, Refusal) and re.search(why, refusal.reason)


def test_sglang_s_own_updates_are_refused_beside_a_draft(monkeypatch):
    """They also load weights into the draft, by SGLang's own loader."""
    monkeypatch.setenv("FP8REFIT_DROP_IN", "1")
    monkeypatch.setattr(drop_in, "_installed", Installed(lambda _: None))
    scheduler = scheduler_of("EAGLE")
    drop_in.install(scheduler.itself)
    with pytest.raises(UnsupportedEngineError, match=r"into the draft, too.*refit with `Refitter`"):
        scheduler.model.load_weights([])
