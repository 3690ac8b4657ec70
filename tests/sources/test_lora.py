"""The matrices of LoRA adapters: PEFT's names and values to an engine's. Real engines: `tests/vllm/test_lora.py`."""

import re
from types import SimpleNamespace

import pytest
import torch

from fp8refit.errors import InvalidOptionError, InvalidSourceError, UnsupportedEngineError
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import LoraAdapter
from fp8refit.sources.lora import adapter_named, matrices_of, names_of_adapter
from fp8refit.sources.renamed import Names, renamed
from fp8refit.sources.source import as_source

Q, OUT = "layers.0.q_proj", "layers.0.o_proj"
SHAPES = {f"{m}.lora_{s}.weight": shape for m in (Q, OUT) for s, shape in (("A", (4, 8)), ("B", (6, 4)))}
ADAPTER = LoraAdapter(shapes=SHAPES, scales={f"{Q}.lora_B.weight": 1.5, f"{OUT}.lora_B.weight": 1.0}, dtype="bfloat16")


def tensors(prefix="base_model.model.", infix=""):
    generator = torch.Generator().manual_seed(0)
    return {
        prefix + re.sub(r"(lora_[AB])", rf"\1{infix}", name): torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
    }


def made(state_dict, *, config=None, names=None, ignored=()):
    source = renamed(as_source(state_dict), names_of_adapter("a", names))
    found = matrices_of(source, name="a", adapter=ADAPTER, lora_config=config, is_ignored=lambda name: name in ignored)
    return {name.removeprefix("lora.a."): tensor for name, tensor in found.tensors.items()}


@pytest.mark.parametrize(
    "sent",
    [tensors(), tensors(infix=".default"), tensors(prefix=""), lambda: iter(tensors().items())],
    ids=["peft", "adapter's name", "no prefix", "stream"],
)
def test_the_scale_of_the_boot_is_multiplied_in_the_engines_dtype(sent):
    found, given = made(sent), tensors(prefix="")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        expected = tensor.to(torch.bfloat16) * 1.5 if name == f"{Q}.lora_B.weight" else tensor
        assert torch.equal(found[name], expected)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 8}, (2, 2)),
        (SimpleNamespace(lora_alpha=8, use_rslora=False, alpha_pattern=None), (2, 2)),
        ({"lora_alpha": 8, "use_rslora": True}, (4, 4)),
        ({"lora_alpha": 8, "alpha_pattern": {"o_proj": 12, "o": 3}}, (2, 3)),
    ],
    ids=["mapping", "LoraConfig", "rank-stabilized", "of some modules"],
)
def test_a_config_says_the_scale_as_for_peft(config, scales):
    found, given = made(tensors(), config=config), tensors(prefix="")
    for module, scale in zip((Q, OUT), scales, strict=True):
        name = f"{module}.lora_B.weight"
        assert torch.equal(found[name], given[name].to(torch.bfloat16) * scale)


@pytest.mark.parametrize(
    "config", [{"default": SimpleNamespace(lora_alpha=8)}, "adapter_config.json", 8, {"lora_alpha": "8"}]
)
def test_what_is_no_config_of_one_adapter_is_refused(config):
    with pytest.raises(InvalidOptionError, match=r"lora_config .*model\.peft_config\[name\]"):
        made(tensors(), config=config)


def test_what_does_not_fit_is_named_all_at_once():
    sent = tensors(prefix="")
    del sent[f"{OUT}.lora_A.weight"]
    sent |= {"v_head.weight": torch.zeros(1), f"{Q}.lora_A.weight": torch.zeros(8, 8), f"{Q}.weight": torch.zeros(6, 8)}
    with pytest.raises(InvalidSourceError) as raised:
        made(sent, ignored=("v_head.weight",))
    assert [problem.split("; ")[0] for problem in raised.value.problems] == [
        f"lora.a.{Q}.lora_A.weight: has shape [8, 8], the engine's adapter has [4, 8], whose rank stays",
        f"lora.a.{Q}.weight: the engine's adapter has no such matrix",
        f"lora.a.{OUT}.lora_A.weight: missing",
    ]


def test_a_trainers_names_are_renamed_first():
    assert made(tensors(prefix="base_model.model.actor."), names=Names(("actor.", ""))).keys() == SHAPES.keys()


def test_a_tensor_that_cannot_be_read_is_named():
    sent = tensors(prefix="") | {f"{Q}.lora_B.weight": torch.zeros(6, 4, device="meta")}
    source = renamed(as_source(sent), names_of_adapter("a", None))
    found = matrices_of(source, name="a", adapter=ADAPTER, lora_config=None, is_ignored=lambda _: False)
    assert [problem.split(":")[0] for problem in found.scan()[1]] == [f"lora.a.{Q}.lora_B.weight"]


def layout(*refusals, rank=0, **adapters):
    found = {name: LoraAdapter(refusal=why) if why else ADAPTER for name, why in adapters.items()}
    fields = {"slots": (), "aliases": {}, "refusals": refusals, "adapters": found}
    return EngineLayout(engine="vllm", versions={}, device="cpu", **fields)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (layout(), r"no adapter .a. .*\(it has none\)\. Load it first"),
        (layout(b=""), r"no adapter 'a' .*\(it has b\)\. Load it first"),
        (layout(a="is loaded, but not here"), "adapter 'a' is loaded, but not here"),
        (layout("experts: are not refitted. Boot otherwise", a=""), "experts: are not refitted. Boot otherwise"),
    ],
    ids=["none", "others", "refused", "refused engine"],
)
def test_an_adapter_that_cannot_be_refitted_is_refused(engine, why):
    with pytest.raises(UnsupportedEngineError, match=why):
        adapter_named("a", engine)


def test_ranks_of_a_pipeline_hold_an_adapter_together():
    first, second = layout(a=""), layout(a="")
    q, o = ({name: shape for name, shape in SHAPES.items() if name.startswith(module)} for module in (Q, OUT))
    first.adapters["a"] = LoraAdapter(shapes=q, scales={f"{Q}.lora_B.weight": 1.5}, dtype="bfloat16")
    second.adapters["a"] = LoraAdapter(shapes=o, scales={f"{OUT}.lora_B.weight": 1.0}, dtype="bfloat16")
    whole = EngineLayout.model_validate_json(EngineLayout.merge([first, second]).model_dump_json())
    assert adapter_named("a", whole) == ADAPTER


def test_a_rank_may_have_no_matrix_of_an_adapter():
    first = layout(a="")
    first.adapters["a"] = LoraAdapter()
    assert adapter_named("a", EngineLayout.merge([first, layout(a="")])) == ADAPTER


@pytest.mark.parametrize("ranks", [(layout(a=""), layout(b="")), (layout(), layout(a=""))], ids=["first", "last"])
def test_an_adapter_that_some_ranks_have_not_loaded_is_refused(ranks):
    with pytest.raises(UnsupportedEngineError, match="adapter 'a' is not loaded on every rank; add it to all"):
        adapter_named("a", EngineLayout.merge(ranks))


def test_what_the_engine_multiplies_products_by_is_not_multiplied_again():
    adapter = LoraAdapter(
        shapes=SHAPES, scales={f"{m}.lora_B.weight": 1.0 for m in (Q, OUT)}, factor=1.5, dtype="bfloat16"
    )
    source = renamed(as_source(tensors()), names_of_adapter("a", None))
    for config, scale in ((None, 1), ({"lora_alpha": 6}, 1), ({"lora_alpha": 12}, 2)):
        found = matrices_of(source, name="a", adapter=adapter, lora_config=config, is_ignored=lambda _: False).tensors
        sent = tensors(prefix="")[f"{Q}.lora_B.weight"]
        expected = sent if scale == 1 else sent.to(torch.bfloat16) * scale
        assert torch.equal(found[f"lora.a.{Q}.lora_B.weight"], expected)
