"""The embedded engine on a GPU: the device's own scaled product means what the CPU computes, and so does its FP8 KV cache."""

import pytest
import torch
from fp8refit_transformers import BlockFp8Linear, to_block_fp8
from fp8refit_transformers.linear import has_block_scaled_product
from torch import nn

from fp8refit import Refitter
from fp8refit.live.formats import BlockFormat
from tests.outliers import BATCH, calm_policy, with_outliers
from tests.tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_in"), [(1, 128), (3, 640), (128, 512), (257, 1024)])
def test_device_product_equals_the_dequantized_one(num_tokens, num_in, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(num_in, 256, dtype=torch.bfloat16)
    x = torch.randn(num_tokens, num_in).to(dtype)
    layer = BlockFp8Linear.from_linear(linear, BlockFormat())
    expected = layer(x)
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability() == (9, 0):
        assert has_block_scaled_product(device, torch.bfloat16)
    got = layer.to(device)(x.to(device)).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def calibrated(device):
    """Scales, log-probabilities and greedy tokens of an engine on `device`."""
    engine = to_block_fp8(make_model("qwen3_deep", 1), kv_cache_dtype="fp8").to(device)
    policy = {name: tensor.to(device) for name, tensor in with_outliers(calm_policy("qwen3_deep", 2)).items()}
    scales = Refitter(engine).refit(policy, calibration=BATCH).kv.scales
    prompt = torch.tensor([BATCH[0]], device=device)
    with torch.inference_mode():
        log_probs = engine(prompt).logits.float().log_softmax(-1).cpu()
        cached = engine(prompt).past_key_values
        tokens = engine.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=2)
    assert {layer.keys.device.type for layer in cached.layers} == {torch.device(device).type}
    return scales, log_probs, tokens.shape


def test_the_fp8_kv_cache_holds_on_a_gpu_what_it_holds_on_a_cpu():
    (scales, log_probs, shape), (expected_scales, expected, expected_shape) = calibrated("cuda"), calibrated("cpu")
    assert scales == pytest.approx(expected_scales, rel=0.02)
    assert (log_probs - expected).abs().mean() < 0.3
    assert shape == expected_shape
