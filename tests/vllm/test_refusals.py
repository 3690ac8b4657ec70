"""vLLM engines that fp8refit does not refit, told why and what to set, and left as they were. On the CPU."""

import re

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def refusals(run_engine, tmp_path_factory):
    return run_engine("refusals", work=tmp_path_factory.mktemp("refusals"))


NORMS = [f"model.layers.{layer}.self_attn.q_norm.weight" for layer in range(2)]
LOADERS = {
    "halves swapped": NORMS,
    "data replaced": NORMS,
    "rows moved unseen": ["model.layers.0.mlp.gate_up_proj.weight"],
}
"""What models that users register do while they load, and with what. Of a layer's matrices one of each kind is tried."""


@pytest.mark.parametrize("kind", ["repacking kernel", "repacked experts", *LOADERS])
def test_a_refused_engine_is_left_as_it_was(kind, refusals):
    assert refusals[kind]["refit"]["error"] == "UnsupportedEngineError"
    assert refusals[kind]["untouched"]
    assert not refusals[kind]["dirty"]
    assert refusals[kind]["refit"]["named"] == refusals[kind]["refusals"]


def test_every_module_of_a_repacking_kernel_is_named_with_the_setting_that_helps(refusals):
    reasons = refusals["repacking kernel"]["refusals"]
    modules = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert [reason.split(":")[0] for reason in reasons] == [
        f"model.layers.{layer}.{module}" for layer in range(2) for module in modules
    ]
    for reason in reasons:
        assert "RepackingBlockKernel repacks weights" in reason
        assert "VLLM_DISABLED_KERNELS" in reason


def test_layers_of_experts_that_a_kernel_repacks_are_named_with_the_setting_that_helps(refusals):
    experts = [reason for reason in refusals["repacked experts"]["refusals"] if ".mlp.experts" in reason]
    assert [reason.split(":")[0].removesuffix(".routed_experts") for reason in experts] == [
        f"model.layers.{layer}.mlp.experts" for layer in range(2)
    ]
    for reason in experts:
        assert re.search("its kernel (HPC|MARLIN) repacks experts", reason)
        assert 'Boot with moe_backend="triton"' in reason


@pytest.mark.parametrize("kind", LOADERS)
def test_what_a_loader_does_that_a_trace_cannot_follow_is_refused_by_name(kind, refusals):
    reasons = refusals[kind]["refusals"]
    assert [reason.split(":")[0] for reason in reasons] == LOADERS[kind]
    assert all("the model's loader does something with it that a trace cannot follow" in reason for reason in reasons)
    assert refusals[kind]["is_proved"] is False
