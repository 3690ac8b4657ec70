"""Starts a scenario, in a process that ends with it. The result is a JSON file, which a test judges.

    python tests/gpu/run.py SCENARIO [MODE] --shape S --work DIR --out FILE ...

    adapters          one vLLM engine with LoRA adapters, of which one is refitted
    broadcast         a trainer on one GPU and vLLM engines on others
    drafts            one vLLM engine whose tokens a second model drafts, refitted, and one booted afresh
    models            one engine of a model with experts or latent attention, or of a whole model
    kv                one engine, or one model of transformers, with an FP8 KV cache
    precision         one trainer in the precision of an engine
    refits            one engine that is refitted again and again, and one booted afresh
    servers           servers that answer without end, or are attacked with `--kills N` (`tests/oracle`)
    soak              a thousand refits of one vLLM engine
    weight_transfer   vLLM's weight-transfer API with fp8refit as its backend

`--engine sglang` for SGLang. Shapes `tiny` and `tiny-moe` try a scenario where an engine runs on a CPU.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""What vLLM needs here."""
ENVIRONMENT = VLLM | {
    "NCCL_NVLS_ENABLE": "0",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # other engines may have begun on one of the GPUs
    "SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK": "1",  # Triton's; that of FlashInfer is compiled from sources
}
OWN = {
    "servers": {
        "NCCL_CUMEM_ENABLE": "0",  # as SGLang has it in its processes
        "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", "fp8refit"),
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    },
    "weight_transfer": {"VLLM_USE_DEEP_GEMM": "0"},
}
"""Of some scenarios."""


def reach_tests() -> None:
    """Let this process import the project's tests."""
    sys.path.insert(1, str(HERE.parents[1]))  # before others that have a package called tests
    sys.path.append(str(HERE.parent))


def main() -> None:
    name, *arguments = sys.argv[1:]
    os.environ |= ENVIRONMENT | OWN.get(name, {})
    reach_tests()
    scenario = import_module(f"{name}_modes")
    import_module("harness").run(scenario.MODES, scenario.OPTIONS, arguments)


if __name__ == "__main__":  # processes of engines import this file again, and nothing of what follows
    main()
