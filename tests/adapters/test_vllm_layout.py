"""The vLLM adapter's reading of a model, on modules that look like vLLM's; no vLLM is needed. Real ones: tests/vllm.

What the core reads in every engine's layers: tests/layers.
"""

from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.layout import ROW_MAJOR_KERNELS, VllmRules
from fp8refit_vllm.worker import WorkerModel
from torch import nn

from fp8refit.live.formats import ScaleFormat
from fp8refit.live.slots import Inventory, Refusal
from fp8refit.tracing.inventory import inventory_of
from fp8refit.tracing.stored import own_tensors, why_not_stored
from tests.tracing.models import FP8, model_of
from tests.tracing.twins import identity_twin


class TritonFp8BlockScaledMMKernel:
    """Carries the name of a kernel that reads row-major weights."""


class MarlinFP8ScaledMMLinearKernel:
    """Carries the name of one that repacks."""


class MarkedKernel:
    reads_row_major_block_fp8 = True


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


def read_inventory(model: nn.Module) -> Inventory:
    """The inventory of a model whose loader copies every tensor to the parameter of its name."""
    return inventory_of(model, VllmRules(), identity_twin(model))


def only_refusal(model) -> str:
    (refusal,) = read_inventory(model).refusals
    return str(refusal)


def test_the_scale_format_is_the_live_kernel_s():
    powers = TritonFp8BlockScaledMMKernel()
    powers.use_deep_gemm_e8m0 = True
    behind = TritonFp8BlockScaledMMKernel()
    behind.fallback = powers
    model = model_of(a=BlockLinear(), b=BlockLinear(kernel=powers), c=BlockLinear(kernel=behind))
    formats = [slot.format.scale_format for slot in read_inventory(model).slots]
    assert formats == [ScaleFormat.FP32, ScaleFormat.UE8M0, ScaleFormat.UE8M0]


class Fp8PerBlockOnlineLinearMethod(SimpleNamespace):
    """The name of vLLM's own."""


def test_a_layer_that_vllm_quantized_itself_has_its_quantizers_scales_unless_they_are_powers_of_two():
    powers = TritonFp8BlockScaledMMKernel()
    powers.use_deep_gemm_e8m0 = True
    layers = [BlockLinear(), BlockLinear(), BlockLinear(kernel=powers)]
    for layer in layers:
        layer.quant_method = Fp8PerBlockOnlineLinearMethod(**vars(layer.quant_method))
    formats = [
        VllmRules().kernel_of(layer).format.scale_format for layer in (layers[0], layers[1].to("meta"), layers[2])
    ]
    assert formats == [ScaleFormat.FP32_FLOORED, ScaleFormat.FP32_RECIPROCAL, ScaleFormat.UE8M0]


def test_a_slot_says_its_kernel_and_its_block_size():
    layer = BlockLinear(sizes=(128,))
    layer.weight_block_size = [64, 128]
    layer.weight_scale_inv = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    (slot,) = read_inventory(model_of(proj=layer)).slots
    assert (slot.kernel, slot.format.block_size) == ("TritonFp8BlockScaledMMKernel", (64, 128))


@pytest.mark.parametrize("name", sorted(ROW_MAJOR_KERNELS))
def test_kernels_that_read_checkpoints_layout_are_known_by_name(name):
    assert read_inventory(model_of(proj=BlockLinear(kernel=type(name, (), {})()))).refusals == ()


def test_a_kernel_may_say_of_itself_that_it_reads_checkpoints_layout():
    assert read_inventory(model_of(proj=BlockLinear(kernel=MarkedKernel()))).refusals == ()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (BlockLinear(kernel=MarlinFP8ScaledMMLinearKernel()), "MarlinFP8ScaledMMLinearKernel repacks weights"),
        (BlockLinear(W_K=torch.zeros(1)), "quantized for AITER"),
        (
            BlockLinear(W_UK_T_dcp_qrep=torch.zeros(1)),
            "absorbed keys of other ranks. Boot with dcp_q_replicate=False",
        ),
        (BlockLinear(is_amx_bmm_enabled=True), "packs its latent projections for Intel AMX"),
    ],
)
def test_what_cannot_be_refitted_is_refused_by_name(module, reason):
    refusal = only_refusal(model_of(thing=module))
    assert refusal.startswith("thing: ")
    assert reason in refusal


def test_absorbed_copies_are_refreshed_and_are_no_weights():
    attention = nn.Module()
    attention.kv_b_proj = BlockLinear(sizes=(512,))
    attention.W_UK_T = nn.Parameter(torch.zeros(2, 128, 256, dtype=torch.bfloat16), requires_grad=False)
    attention.W_UV = nn.Parameter(torch.zeros(2, 256, 128, dtype=torch.bfloat16), requires_grad=False)
    attention.W_UK_T_dcp_qrep, attention.is_amx_bmm_enabled = None, False
    inventory = read_inventory(model_of(attn=attention))
    assert inventory.refusals == ()
    assert [slot.name for slot in inventory.slots] == ["attn.kv_b_proj.weight"]
    assert [refresh.name for refresh in inventory.refreshes] == ["attn: absorbed copies"]
    assert {"attn.W_UK_T", "attn.W_UV"} <= {live.name for live in inventory.live}


def test_absorbed_copies_that_are_views_of_their_projection_are_not_refreshed():
    attention = nn.Module()
    attention.kv_b_proj = nn.Linear(256, 512, bias=False)
    heads = attention.kv_b_proj.weight.data.unflatten(0, (2, 256))
    attention.W_UK_T = nn.Parameter(heads[:, :128], requires_grad=False)
    attention.W_UV = nn.Parameter(heads[:, 128:].transpose(1, 2), requires_grad=False)
    assert read_inventory(model_of(attn=attention, proj=BlockLinear())).refreshes == ()


def test_remedies_are_in_vllm_s_words():
    quantized = nn.Module()
    quantized.weight = nn.Parameter(torch.zeros(128, 128, dtype=FP8), requires_grad=False)
    assert 'quantization="fp8_per_block"' in only_refusal(model_of(layer=quantized))
    marlin = only_refusal(model_of(layer=BlockLinear(kernel=MarlinFP8ScaledMMLinearKernel())))
    assert marlin.endswith(
        "Add MarlinFP8ScaledMMLinearKernel to VLLM_DISABLED_KERNELS, or choose another with --linear-backend"
    )


def test_a_model_that_is_not_quantized_is_refitted_and_its_log_says_what_to_boot_instead(caplog):
    assert read_inventory(model_of(proj=nn.Linear(128, 128))).refusals == ()
    (record,) = caplog.records
    assert 'quantization="fp8_per_block"' in record.getMessage()


@pytest.mark.parametrize("backend", ["AITER", "CPU", "FLASHINFER_TRTLLM", "MOONEP"])
def test_unquantized_experts_that_a_kernel_repacks_are_refused(backend):
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 256, 128, dtype=torch.bfloat16), requires_grad=False)
    scales = SimpleNamespace(w1_scale=None, w2_scale=None)
    experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend), moe_quant_config=scales)
    refusal = only_refusal(model_of(experts=experts))
    assert f"its kernel {backend} repacks experts" in refusal and 'Boot with moe_backend="triton"' in refusal


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    """No vLLM builds a twin here: the loader of each model copies every tensor to the parameter of its name."""
    monkeypatch.setattr("fp8refit_vllm.worker.twin_of", lambda config: identity_twin(config.model))


def test_a_model_without_a_twin_is_refused_for_it():
    refusal = Refusal(module="Odd", reason="cannot be built without memory", remedy="Take another")
    inventory = inventory_of(model_of(proj=BlockLinear()), VllmRules(), refusal)
    assert inventory.refusals == (refusal,)
    assert {entry.name for entry in inventory.live} == {"proj.weight", "proj.weight_scale_inv"}


def worker_of(model, *, speculative=None, load_format="auto"):
    """What a vLLM worker shows of its model."""
    config = SimpleNamespace(
        speculative_config=speculative,
        load_config=SimpleNamespace(load_format=SimpleNamespace(value=load_format)),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model=model,
    )
    return SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(get_model=lambda: model))


@pytest.mark.parametrize(("method", "refused"), [("eagle3", True), ("ngram", False), (None, False)])
def test_drafts_with_weights_of_their_own_are_refused(method, refused):
    speculative = SimpleNamespace(method=method) if method else None
    inventory = WorkerModel(worker_of(model_of(proj=BlockLinear()), speculative=speculative)).read_inventory()
    assert [slot.name for slot in inventory.slots] == ["proj.weight"]
    assert [refusal.module for refusal in inventory.refusals] == ["draft model"] * refused
    assert all(method in refusal.reason for refusal in inventory.refusals)


def test_a_draft_model_is_refused_beside_what_the_model_is_refused_for():
    packed = nn.Linear(8, 8)
    packed.weight = nn.Parameter(torch.empty(0))
    worker = worker_of(model_of(packed=packed), speculative=SimpleNamespace(method="eagle3"))
    modules = [refusal.module for refusal in WorkerModel(worker).read_inventory().refusals]
    assert modules == ["packed", "draft model"]


class Attention(nn.Module):
    """Scales of a KV cache as a dummy boot leaves them: noise."""

    def __init__(self):
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(0.25))
        self._k_scale_float = 0.25


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_noise_in_the_kv_scales_of_a_dummy_boot_is_put_right_once(load_format):
    attention = Attention()
    live = WorkerModel(worker_of(model_of(attn=attention, proj=BlockLinear()), load_format=load_format))
    refreshes = live.read_inventory().refreshes
    for refresh in refreshes:
        refresh.run()
    scale = 1.0 if load_format == "dummy" else 0.25
    assert (attention._k_scale.item(), attention._k_scale_float) == (scale, scale)
    attention._k_scale.fill_(0.5)
    for refresh in refreshes:
        refresh.run()
    assert attention._k_scale.item() == 0.5
    assert live.read_inventory().refreshes == ()


@pytest.mark.parametrize("backend", ["MARLIN", "TRITON"])
def test_the_locks_of_marlins_experts_are_no_copies_of_weights(backend):
    """vLLM before 0.31 keeps them on the layer."""
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    experts.quant_method = SimpleNamespace(fp8_backend=SimpleNamespace(name=backend))
    experts.workspace = torch.zeros(528, dtype=torch.int32)
    assert list(VllmRules().kept(experts)) == (["workspace"] if backend == "MARLIN" else [])


class Nvfp4(nn.Module):
    """A linear layer in NVFP4, as vLLM holds it."""

    def __init__(self, method="ModelOptLinearMethod", **attributes):
        super().__init__()
        codes, scales = torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 8).to(torch.float8_e4m3fn)
        self.weight, self.weight_scale = (nn.Parameter(each, requires_grad=False) for each in (codes, scales))
        self.weight_global_scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        kernel = type("TestKernel", (), {"reads_row_major_block_fp8": True})()
        self.quant_method = type(method, (), {"kernel": kernel})()
        for name, value in attributes.items():
            setattr(self, name, value)


def nvfp4_in_tiles(**attributes):
    layer = Nvfp4(**attributes)
    layer.weight = nn.Parameter(torch.zeros(8, 128, dtype=torch.int32), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(8, 64).to(torch.float8_e4m3fn), requires_grad=False)
    layer.quant_method.kernel = type("MarlinNvFp4LinearKernel", (), {})()
    return layer


def experts_in_nvfp4():
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 64, 64, dtype=torch.uint8), requires_grad=False)
    experts.w13_weight_scale = nn.Parameter(torch.ones(2, 64, 8).to(torch.float8_e4m3fn), requires_grad=False)
    experts.quant_method = type("ModelOptNvFp4FusedMoE", (), {"moe_quant_config": None})()
    experts.moe_config = SimpleNamespace(tp_size=2)
    return experts


@pytest.mark.parametrize("layer", [Nvfp4(), nvfp4_in_tiles(params_dtype=torch.bfloat16)], ids=["rows", "tiles"])
def test_nvfp4_of_modelopt_has_a_format(layer):
    held = VllmRules().kernel_of(layer).format
    assert held is not None and held.scale_format.has_two_levels
    own = dict(own_tensors(layer))
    assert held.shape_of(own["weight"].shape) == (64, 128)
    assert why_not_stored(VllmRules(), "layer", layer, own) is None


@pytest.mark.parametrize(
    ("layer", "instead"),
    [
        (Nvfp4(method="CompressedTensorsLinearMethod"), "ModelOpt's W4A16_NVFP4"),
        (nvfp4_in_tiles(params_dtype=torch.float16), 'dtype="bfloat16"'),
        (Nvfp4(input_global_scale=torch.ones(())), "ModelOpt's W4A16_NVFP4"),
        (experts_in_nvfp4(), "enable_expert_parallel=True"),
    ],
    ids=["compressed-tensors", "float16", "activations in four bits", "experts"],
)
def test_other_nvfp4_is_refused_with_what_to_boot_instead(layer, instead):
    rules = VllmRules()
    why = rules.why_refused(layer) if not hasattr(layer, "w13_weight") else None
    why = why or why_not_stored(rules, "layer", layer, dict(own_tensors(layer)))
    assert why is not None
    assert instead in why[1] and 'quantization="fp8_per_block"' in why[1]
    assert "VLLM_DISABLED_KERNELS" not in why[1] and 'moe_backend="triton"' not in why[1]


def test_locks_of_marlins_kernels_are_zero_again_after_sleep():
    """vLLM before 0.31 keeps them on the layer, in memory that sleep discards."""
    layer = nvfp4_in_tiles(params_dtype=torch.bfloat16, workspace=torch.full((8,), 3, dtype=torch.int32))
    model = nn.Module()
    model.proj = layer
    refreshes = [each for each in VllmRules().refreshes(model) if "locks" in each.name]
    assert [each.is_constant for each in refreshes] == [True]
    refreshes[0].run()
    assert not layer.workspace.any()
    assert [each for each in VllmRules().refreshes(BlockLinear()) if "locks" in each.name] == []
