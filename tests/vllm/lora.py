"""Engines that serve LoRA adapters: what their base weights and their adapters are after a refit, and in a fresh engine."""

import hashlib
import json
from pathlib import Path

import torch
from engines import PROMPTS, SAMPLING, booted, booted_dummy, generate, live_bytes, make_policy, model_of, said
from safetensors.torch import save_file
from vllm import LLM
from vllm.lora.request import LoRARequest

from fp8refit import Refitter

FAMILY = "qwen2"
"""Tied, with biases."""
OPTIONS = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


def run_lora(work: str) -> dict:
    """A dummy engine that has an adapter, moved to policy 1 and then to policy 2."""
    adapter = save_adapter(Path(work) / "adapter")
    with booted_dummy(Path(work) / "bf16", "fp32", **OPTIONS) as llm:
        refitter = Refitter(llm)
        refitter.refit(make_policy(FAMILY, 1))
        found = {"before": generate_adapted(llm, adapter), "adapter_before": adapter_bytes(llm)}
        refitter.refit(make_policy(FAMILY, 2))
        layout = refitter.layout().model_dump(mode="json")
        return found | {"layout": layout} | state_of(llm, adapter)


def run_fresh_lora(work: str) -> dict:
    """One that loads the checkpoint of policy 2."""
    adapter = Path(work) / "adapter"
    with booted(Path(work) / "fp8", "fp32", **OPTIONS) as llm:
        return state_of(llm, adapter)


def state_of(llm: LLM, adapter: Path) -> dict:
    """Base weights, the adapter, and what is said without and with it."""
    adapted = generate_adapted(llm, adapter)
    return {"generated": generate(llm), "adapted": adapted, "live": live_bytes(llm), "adapter": adapter_bytes(llm)}


def generate_adapted(llm: LLM, adapter: Path) -> list[dict]:
    """What the engine says with the adapter."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    request = LoRARequest("adapter", 1, str(adapter))
    return [said(output) for output in llm.generate(prompts, SAMPLING, use_tqdm=False, lora_request=request)]


def adapter_bytes(llm: LLM) -> dict[str, str]:
    """A sha256 for each tensor that a wrapper keeps of adapters."""
    return {
        f"{prefix}.{name}.{index}": hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for prefix, module in model_of(llm).named_modules()
        for name in ("lora_a_stacked", "lora_b_stacked")
        for index, tensor in enumerate(vars(module).get(name, ()))
    }


def save_adapter(folder: Path) -> Path:
    """An adapter of two kinds of layers, as PEFT saves it."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in range(2):
        for module, rows, columns in (("self_attn.q_proj", 256, 256), ("mlp.down_proj", 256, 512)):
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, columns, generator=generator).to(torch.bfloat16)
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 4, generator=generator).to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
