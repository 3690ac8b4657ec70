"""Times vLLM's linear layers in BF16 and in block FP8, kernel by kernel: why FP8 rollouts are slow where they are.

    python -m tests.gpu.run_linear --model qwen3-8b --out benchmarks/results/linear_vllm_qwen3-8b_h200.json

One row for each number of tokens: microseconds of the linear layers of one decoder layer together, as CUDA graphs replay them.
Weights rotate through copies that no cache holds. FP8 is the product alone, by each kernel that vLLM has; what it costs to
quantize activations comes on top, once for each of the layers.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fp8refit import quantize_blockwise
from fp8refit.bench import SHAPES
from fp8refit.bench.clock import device_seconds
from fp8refit.bench.result import Findings, gpu_name, versions_of, write_result

BLOCK = 128
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
LEAST_BYTES = 1 << 29
"""Of all copies of a weight: ten times the L2 cache of an H200."""
REPLAYS = 7


def shapes_of(model: str) -> dict[str, tuple[int, int]]:
    """(N, K) of the linear layers of a decoder layer, as vLLM fuses them; without experts."""
    config = SHAPES[model]
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    of_queries = config["num_attention_heads"] * head_dim
    shapes = {
        "qkv": (of_queries + 2 * config["num_key_value_heads"] * head_dim, hidden),
        "o": (hidden, of_queries),
    }
    if "num_experts" not in config:
        shapes |= {"gate_up": (2 * config["intermediate_size"], hidden), "down": (hidden, config["intermediate_size"])}
    return shapes


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of one of `calls`, replayed in a CUDA graph of all."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times_s = [device_seconds(graph.replay, torch.device("cuda")) for _ in range(REPLAYS)]
    return 1e6 * statistics.median(times_s) / len(calls)


def time_layer(n: int, k: int, num_tokens: int) -> dict[str, float]:
    """Microseconds of one layer, by kernel, and of quantizing its input, by format."""
    x_MK = torch.randn(num_tokens, k, dtype=torch.bfloat16, device="cuda")
    out_MN = torch.empty(num_tokens, n, dtype=torch.bfloat16, device="cuda")
    num_copies = max(4, LEAST_BYTES // (n * k))
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(num_copies // 2)]
    found = {"bf16": graph_us([partial(torch.nn.functional.linear, x_MK, weight) for weight in weights])}
    for scale_format in ("fp32", "ue8m0"):
        codes = [quantize_blockwise(weight, scale_format=scale_format) for weight in weights]
        codes += [(q.clone(), scale.clone()) for q, scale in codes]
        found |= time_fp8(x_MK, codes, out_MN, scale_format)
    return found


def time_fp8(x_MK, codes, out_MN, scale_format) -> dict[str, float]:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import fp8_gemm_nt

    is_ue8m0 = scale_format == "ue8m0"
    quantize = partial(per_token_group_quant_fp8, x_MK, BLOCK, column_major_scales=True, use_ue8m0=is_ue8m0)
    found = {f"quantize_{scale_format}": graph_us([partial(quantize, tma_aligned_scales=True)] * 20)}
    given = quantize(tma_aligned_scales=True)
    products = [partial(fp8_gemm_nt, given, code, out_MN, is_deep_gemm_e8m0_used=is_ue8m0) for code in codes]
    found[f"deepgemm_{scale_format}"] = graph_us(products)
    if not is_ue8m0:
        q, scale = quantize(tma_aligned_scales=False)
        multiply = partial(ops.cutlass_scaled_mm, q, scale_a=scale, out_dtype=torch.bfloat16)
        found["cutlass_fp32"] = graph_us([partial(multiply, b=w.T, scale_b=s.T) for w, s in codes])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shapes = shapes_of(options.model)
    rows: list[dict] = []
    result = Findings(
        command=shlex.join(["python", "-m", "tests.gpu.run_linear", *sys.argv[1:]]),
        gpu=gpu_name(),
        versions=versions_of("vllm"),
        model=options.model,
        shapes=shapes,
        rows=rows,
    )
    for num_tokens in TOKENS:
        layers = {name: time_layer(n, k, num_tokens) for name, (n, k) in shapes.items()}
        total_us = {kernel: sum(times[kernel] for times in layers.values()) for kernel in layers["qkv"]}
        rows.append({"tokens": num_tokens, "total_us": total_us, "layers_us": layers})
        write_result(result, options.out)
        print(num_tokens, {kernel: round(us, 1) for kernel, us in total_us.items()}, flush=True)


if __name__ == "__main__":
    main()
