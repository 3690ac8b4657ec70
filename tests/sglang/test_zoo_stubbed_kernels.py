"""Models that SGLang names and that transformers can make small, refitted and booted afresh; kernels stubbed (`conftest.py`).

A few run here. With FP8REFIT_ZOO set all of them do (`all`, as in `nox -s zoo`), or those that nobody has walked to yet
(`rest`), or those that it names; docs/zoo.md is written anew after each.
"""

import ast
import importlib.util
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.vllm.processes import ProcessFailure
from tests.zoo_table import EQUAL, SILENT, Stage, asked_of, ended, outcome_of, outcomes_of, unexpected_failures, write

ASKED = os.environ.get("FP8REFIT_ZOO")
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

CI = [
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "Cohere2MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteMoeForCausalLM",
    "LlamaForCausalLM",
    "OlmoeForCausalLM",
]
SILENT_IN_CI = ["GraniteSWAForCausalLM"]
"""Those that SGLang has no kernels for on a CPU."""
NO_CHECKPOINT = ("GPT2LMHeadModel", "LlamaForCausalLM")
"""Those of which no block-FP8 checkpoint boots: blocks in orders of their own, or a loader that takes no block scales."""
BY_TRANSFORMERS = "GPTNeoXForCausalLM"
"""One that SGLang's Transformers backend runs, for all of those."""
AT_LEAST = 30


def named_by_sglang() -> list[str]:
    """Every architecture of SGLang's registry, read off the source of its models: some cannot be imported here."""
    (package,) = importlib.util.find_spec("sglang.srt.models").submodule_search_locations
    names: set[str] = set()
    for file in Path(package).rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and any(
                getattr(target, "id", "") == "EntryClass" for target in node.targets
            ):
                names |= {found.id for found in ast.walk(node.value) if isinstance(found, ast.Name)}
    return sorted(names)


@pytest.mark.parametrize("architecture", [*CI, *SILENT_IN_CI])
def test_a_refit_equals_a_fresh_boot(architecture, run_engine, tmp_path):
    speaks = architecture in CI
    found = run_engine("zoo", architecture=architecture, speaks=speaks, notes=tmp_path / "notes")
    assert outcome_of(found, speaks=speaks)["outcome"] == (EQUAL if speaks else SILENT)
    assert ("no_checkpoint" in found) == (architecture in NO_CHECKPOINT)
    assert found["left_behind"] == []


@pytest.mark.skipif(not ASKED, reason="takes half an hour; FP8REFIT_ZOO asks for it")
@pytest.mark.timeout(7200)
def test_every_model_that_sglang_names(run_engine, tmp_path):
    import tests.stubs.sitecustomize  # noqa: F401 - lets transformers import torchvision here too
    from tests import zoo_models, zoo_vision

    tiny = {*zoo_models.architectures(), *zoo_vision.ARCHITECTURES}
    named = ({*named_by_sglang()} & tiny) | {BY_TRANSFORMERS}
    for architecture in asked_of("SGLang", named, ASKED):
        line = walk_to(architecture, run_engine, tmp_path / architecture)
        print(architecture, line, flush=True)
        write("SGLang", version("sglang"), architecture, line)
    assert unexpected_failures("SGLang") == {}
    num_equal = sum(outcome in (EQUAL, SILENT) for outcome in outcomes_of("SGLang").values())
    assert ASKED != "all" or num_equal >= AT_LEAST


def walk_to(architecture, run_engine, notes):
    """Its line of the table: with a forward, and if the engine ends at the first one, without."""
    for speaks in (True, False):
        try:
            found = run_engine("zoo", architecture=architecture, speaks=speaks, notes=notes)
        except ProcessFailure as failure:
            print(failure, flush=True)
            found = ended(failure, notes)
        if found.get("stage") != Stage.FIRST_FORWARD:
            break
    return outcome_of(found, speaks=speaks)
