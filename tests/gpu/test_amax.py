"""Maxima on a GPU: the kernel equals torch on large activations, and reads them at the rate of memory."""

import math
import statistics
import time

import pytest
import torch

from fp8refit.bench.clock import device_seconds
from fp8refit.kernels import Maxima

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUM_TOKENS = 16384
SIZES = (4096, 1024, 1024)


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def fused_activation(dtype: torch.dtype, device: torch.device, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn((num_tokens, sum(SIZES)), device=device).to(dtype)


@pytest.mark.parametrize("head", [None, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 33, NUM_TOKENS - 1, NUM_TOKENS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_activations(dtype, num_tokens, head, device):
    parts = fused_activation(dtype, device, num_tokens).split(SIZES, dim=1)
    expected = [part.abs().max().item() for part in parts]
    maxima = Maxima(5, device)
    maxima.update(1, [part.unflatten(1, (-1, head)) if head is not None else part for part in parts])
    assert maxima.read() == [0.0, *expected, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_that_are_not_aligned(dtype, device):
    qkv = fused_activation(dtype, device, 1000)
    parts = [qkv[:, 3:1000], qkv[1:, 1000:1001], qkv[:, ::3], qkv.T]
    maxima = Maxima(4, device)
    maxima.update(0, parts)
    assert maxima.read() == [part.abs().max().item() for part in parts]


@pytest.mark.parametrize("value", [-65504.0, float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_is_found_wherever_it_is(dtype, value, device):
    qkv = fused_activation(dtype, device)
    maxima = Maxima(9, device)
    for index, place in enumerate([(0, 0), (NUM_TOKENS - 1, -1), (7777, 4096)]):
        before = qkv[place].item()
        qkv[place] = value
        maxima.update(3 * index, qkv.split(SIZES, dim=1))
        qkv[place] = before
    found = maxima.read()
    expected = [abs(torch.tensor(value).to(dtype).item())] * 3
    torch.testing.assert_close([found[0], found[5], found[7]], expected, rtol=0, atol=0, equal_nan=True)
    assert all(math.isfinite(found[index]) and found[index] < 10 for index in (1, 2, 3, 4, 6, 8))


def test_reads_at_the_rate_of_memory(device):
    """A loose bound: a kernel that loads value by value, or waits for the host, is far below it."""
    qkv = fused_activation(torch.bfloat16, device)
    target = torch.empty_like(qkv)
    q, k, v = (part.unflatten(1, (-1, 128)) for part in qkv.split(SIZES, dim=1))
    maxima = Maxima(3, device)
    num_bytes = qkv.numel() * qkv.element_size()
    update_gb_per_s = num_bytes / median_ms(lambda: maxima.update(0, [q, k, v])) / 1e6
    copy_gb_per_s = 2 * num_bytes / median_ms(lambda: target.copy_(qkv)) / 1e6
    small = [part[:1] for part in (q, k, v)]
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(200):
        maxima.update(0, small)
    launch_us = (time.perf_counter() - start_s) / 200 * 1e6
    print(f"maxima {update_gb_per_s:.0f} GB/s, copy {copy_gb_per_s:.0f} GB/s, {launch_us:.1f} us of the host an update")
    assert update_gb_per_s >= 0.5 * copy_gb_per_s


def median_ms(run, num_runs: int = 9, num_calls: int = 20) -> float:
    """Of one call among `num_calls` in a row, so that the host is ahead of the device."""
    run()
    times_s = [device_seconds(lambda: [run() for _ in range(num_calls)], torch.device("cuda")) for _ in range(num_runs)]
    return 1e3 * statistics.median(times_s) / num_calls
