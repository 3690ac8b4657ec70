"""The embedded engine's linear on a GPU: the device's own scaled product means what the CPU computes."""

import pytest
import torch
from fp8refit_transformers import BlockFp8Linear
from fp8refit_transformers.linear import has_block_scaled_product
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_in"), [(1, 128), (3, 640), (128, 512), (257, 1024)])
def test_device_product_equals_the_dequantized_one(num_tokens, num_in, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(num_in, 256, dtype=torch.bfloat16)
    x = torch.randn(num_tokens, num_in).to(dtype)
    layer = BlockFp8Linear.from_linear(linear, block_size=(128, 128), scale_format="fp32")
    expected = layer(x)
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability() == (9, 0):
        assert has_block_scaled_product(device, torch.bfloat16)
    got = layer.to(device)(x.to(device)).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
