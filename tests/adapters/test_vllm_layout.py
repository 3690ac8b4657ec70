"""The vLLM adapter's reading of a model, on modules that look like vLLM's; no vLLM is needed. Real ones: tests/vllm."""

from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm import VllmEngine
from fp8refit_vllm.compat import InProcessLLM
from fp8refit_vllm.layout import read_inventory
from torch import nn

from fp8refit.errors import UnsupportedEngineError
from fp8refit.slots import ScaleFormat

FP8 = torch.float8_e4m3fn


class TritonFp8BlockScaledMMKernel:
    """Carries the name of a kernel that reads row-major weights."""


class MarlinFP8ScaledMMLinearKernel:
    """Carries the name of one that repacks."""


class BlockLinear(nn.Module):
    """What a block-FP8 linear layer of vLLM shows."""

    def __init__(self, sizes=(256,), cols=256, kernel=None, **attributes):
        super().__init__()
        rows = sum(sizes)
        self.weight = nn.Parameter(torch.zeros(rows, cols, dtype=FP8), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(-(-rows // 128), -(-cols // 128)), requires_grad=False)
        self.weight_block_size = [128, 128]
        self.output_partition_sizes = list(sizes)
        self.quant_method = SimpleNamespace(fp8_linear=kernel or TritonFp8BlockScaledMMKernel())
        for name, value in attributes.items():
            setattr(self, name, value)


def model_of(**modules) -> nn.Module:
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def only_refusal(model) -> str:
    (refusal,) = read_inventory(model).refusals
    return str(refusal)


def test_the_parts_of_a_fused_module_are_slots_of_their_own():
    model = model_of(qkv_proj=BlockLinear(sizes=(256, 128, 128)))
    slots = read_inventory(model).slots
    assert [slot.name for slot in slots] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert [tuple(slot.scale.shape) for slot in slots] == [(2, 2), (1, 2), (1, 2)]
    assert slots[2].weight.data_ptr() == model.qkv_proj.weight[384:].data_ptr()
    assert slots[2].scale.data_ptr() == model.qkv_proj.weight_scale_inv[3:].data_ptr()


def test_the_scale_format_is_the_live_kernel_s():
    powers = TritonFp8BlockScaledMMKernel()
    powers.use_deep_gemm_e8m0 = True
    behind = TritonFp8BlockScaledMMKernel()
    behind.fallback = powers
    model = model_of(a=BlockLinear(), b=BlockLinear(kernel=powers), c=BlockLinear(kernel=behind))
    formats = [slot.scale_format for slot in read_inventory(model).slots]
    assert formats == [ScaleFormat.FP32, ScaleFormat.UE8M0, ScaleFormat.UE8M0]


def test_a_tied_weight_is_an_alias_and_a_bias_beside_it_a_slot():
    embed, head = nn.Embedding(64, 128), nn.Linear(128, 64)
    head.weight = embed.weight
    inventory = read_inventory(model_of(embed=embed, head=head, proj=BlockLinear()))
    assert inventory.aliases == {"head.weight": "embed.weight"}
    assert [slot.name for slot in inventory.slots] == ["embed.weight", "head.bias", "proj.weight"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (BlockLinear(kernel=MarlinFP8ScaledMMLinearKernel()), "MarlinFP8ScaledMMLinearKernel repacks weights"),
        (BlockLinear(tp_size=2), "split over 2 ranks"),
        (BlockLinear(w13_weight=None), "mixture-of-experts"),
        (BlockLinear(W_UK_T=torch.zeros(1)), "absorbed copies"),
    ],
)
def test_what_cannot_be_refitted_is_refused_by_name(module, reason):
    refusal = only_refusal(model_of(thing=module))
    assert refusal.startswith("thing: ")
    assert reason in refusal


def test_absorbed_copies_are_seen_on_a_module_without_parameters():
    attention = nn.Module()
    attention.W_UK_T = torch.zeros(1)
    assert "absorbed copies" in only_refusal(model_of(attention=attention, proj=BlockLinear()))


def test_a_module_fused_otherwise_than_the_model_says_is_refused():
    assert "holds 2 matrices" in only_refusal(model_of(qkv_proj=BlockLinear(sizes=(128, 128))))


def test_a_module_fused_in_an_order_nobody_says_is_refused():
    assert "holds 3 matrices" in only_refusal(model_of(query_key_value=BlockLinear(sizes=(128, 128, 128))))


def test_parts_off_the_block_grid_are_refused():
    assert "do not start on blocks" in only_refusal(model_of(qkv_proj=BlockLinear(sizes=(192, 64, 128))))


def test_another_quantization_is_refused():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(128, 128, dtype=FP8), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(1))
    assert "not block FP8" in only_refusal(model_of(layer=layer))


def test_a_model_without_block_fp8_is_refused():
    assert "holds no block-FP8 weight" in only_refusal(model_of(proj=nn.Linear(128, 128)))


def llm_with(model, *, num_ranks=1, speculative=None, core=True):
    """What an in-process `vllm.LLM` shows."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=num_ranks),
        speculative_config=speculative,
        load_config=SimpleNamespace(load_format="auto"),
    )
    runner = SimpleNamespace(get_model=lambda: model)
    driver = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    executor = SimpleNamespace(driver_worker=driver)
    engine_core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor)) if core else SimpleNamespace()
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=engine_core, vllm_config=config))


@pytest.mark.parametrize(("method", "refused"), [("eagle3", True), ("ngram", False), (None, False)])
def test_drafts_with_weights_of_their_own_are_refused(method, refused, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace(__version__="0"))
    speculative = SimpleNamespace(method=method) if method else None
    engine = VllmEngine(llm_with(model_of(proj=BlockLinear()), speculative=speculative))
    assert ["draft model" in refusal for refusal in engine.ranks.layout().refusals] == [True] * refused


@pytest.mark.parametrize(("options", "hint"), [({"core": False}, "MULTIPROCESSING=0"), ({"num_ranks": 2}, "2 ranks")])
def test_engines_elsewhere_are_refused(options, hint):
    with pytest.raises(UnsupportedEngineError, match=hint):
        InProcessLLM(llm_with(model_of(proj=BlockLinear()), **options))
