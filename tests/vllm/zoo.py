"""Any model that vLLM names and that transformers can make small: refitted from noise, against a fresh engine.

The fresh one loads the block-FP8 checkpoint that `fp8refit quantize --like` writes, whose tensors are those of a second
quantizer. Where no such checkpoint boots, and `quantize` says so, it loads the BF16 checkpoint, quantizes nothing, and what
its loader made of that is quantized here.
"""

import json
from pathlib import Path
from typing import Any

import torch
from engines import booted, generate, live_bytes, model_of, refused, scribble
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import base_loader

from fp8refit import CheckpointError, InvalidSourceError, Refitter
from fp8refit.checkpoint import quantize_checkpoint
from tests import zoo_models, zoo_vision
from tests.zoo_table import Stage, check_is_small

UNCACHED = {"enable_prefix_caching": False}
"""On some CPUs vLLM 0.32 keeps states of Mamba-2 inside a prompt for its prefix cache, which its CPU kernels cannot give."""
UNKNOWN = "vision_tower.vision_model.encoder.layers.7.layer_norm1.bias"
"""No checkpoint has a layer of this number."""


def run_zoo(architecture: str, work: str, notes: str) -> dict:
    """What two engines hold and say.

    Args:
        architecture: A class of transformers'.
        work: For checkpoints.
        notes: A file, for the stage that begins.
    """
    begin = Path(notes).write_text
    begin(Stage.MAKE)
    check_is_small(architecture)
    folder = Path(work) / f"zoo-{architecture}"
    if architecture in zoo_vision.ARCHITECTURES:  # else vLLM asks for a processor of images, which no tiny model has
        ModelConfig.supports_multimodal_inputs = False
    # Not later: booting changes the models of transformers that it serves itself.
    policies = zoo_vision.policies_of(architecture, folder / "bf16")
    noise = {"load_format": "dummy", "hf_overrides": {"quantization_config": zoo_models.FP8_CONFIG}, **UNCACHED}
    found: dict[str, Any] = {}
    begin(Stage.BOOT)
    with booted(folder / "bf16", "fp32", **noise) as llm:
        begin(Stage.LOOK)
        before = traces_of(llm)
        refitter = Refitter(llm, keep=policies.keep)
        layout = refitter.layout()
        after = traces_of(llm)
        found["left_behind"] = [name for name in before if before[name] != after[name]]
        if layout.refusals:
            return found | {"refused": layout.refusals[0]}
        begin(Stage.FIRST_REFIT)
        try:
            found["ignored"] = refitter.refit(policies.first).ignored
        except InvalidSourceError as error:
            if error.written:
                raise
            return found | {"refused": error.problems[0]}
        found["unknown"] = refused(refitter.refit, policies.first | {UNKNOWN: torch.ones(128)})
        begin(Stage.FIRST_FORWARD)
        found["before"] = said_by(llm)
        begin(Stage.REFIT)
        refitter.refit(policies.second)
        found["generated"] = said_by(llm)
        found["refitted"] = [live_bytes(llm)]
        scribble(llm)
        begin(Stage.FROM_FILES)
        refitter.refit(folder / "bf16")
        found["from_files"] = [live_bytes(llm)]
        if architecture in zoo_vision.EXPERT_BY_EXPERT:
            refitter.refit(policies.first)
            refitter.refit(zoo_vision.expert_by_expert(policies.second))
            found["from_experts"] = [live_bytes(llm)]
    found["is_silent"] = found["generated"] is None
    begin(Stage.QUANTIZE)
    try:
        quantize_checkpoint(folder / "bf16", folder / "like", like=layout)
    except CheckpointError as error:
        begin(Stage.FRESH_BOOT)
        fresh = [loaded_and_quantized(folder / "bf16", found["refitted"][0])]
        return found | {"fresh": fresh, "no_checkpoint": error.problems}
    zoo_models.save_block_fp8(folder / "bf16", folder / "fp8", zoo_models.quantized_in(layout), layout.written_as)
    found["is_quantized_alike"] = zoo_models.hashes_in(folder / "like") == zoo_models.hashes_in(folder / "fp8")
    begin(Stage.FRESH_BOOT)
    with booted(folder / "like", "fp32", **UNCACHED) as llm:
        # Gemma3n's first answer depends on cache memory that nobody has written, and the other engine has spoken before.
        said_by(llm)
        found["fresh_generated"] = said_by(llm)
        return found | {"fresh": [live_bytes(llm)]}


def said_by(llm) -> list | None:
    """Tokens and log-probabilities; None of a model that vLLM has no kernels for on a CPU."""
    try:
        return generate(llm)["outputs"]
    except (
        NotImplementedError,
        RuntimeError,
        AttributeError,
        AssertionError,
        ImportError,
        ValueError,
        TypeError,
        IndexError,
    ):
        unanswered = list(llm.llm_engine.output_processor.request_states)
        llm.llm_engine.abort_request(unanswered, internal=True)
        return None


def loaded_and_quantized(folder: Path, live: dict[str, str]) -> dict[str, str]:
    """A sha256 for each tensor of `live`, of what vLLM's loader makes of a BF16 checkpoint before kernels see it."""
    loaded: dict[str, Tensor] = {}
    process = base_loader.process_weights_after_loading

    def keep_and_process(model, *arguments) -> None:
        loaded.update((name, tensor.clone()) for name, tensor in model.state_dict().items())
        process(model, *arguments)

    base_loader.process_weights_after_loading = keep_and_process
    try:
        with booted(folder, "fp32") as llm:
            scales = {name: tensor for name, tensor in model_of(llm).state_dict().items() if is_kv_scale(name)}
    finally:
        base_loader.process_weights_after_loading = process
    pairs = {
        name: quantized(loaded[name], is_w13=name.endswith("w13_weight"))
        for name in loaded
        if f"{name}_scale_inv" in live
    }
    expected = loaded | scales | {name: codes for name, (codes, _) in pairs.items()}
    expected |= {f"{name}_scale_inv": scale for name, (_, scale) in pairs.items()}
    return {name: zoo_models.hash_of(expected[name]) if name in expected else "not there" for name in live}


def is_kv_scale(name: str) -> bool:
    """What a kernel leaves of an attention layer's scales."""
    return name.endswith(("_q_scale", "_k_scale", "_v_scale", "_prob_scale"))


def quantized(weight: Tensor, *, is_w13: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, or of each expert's; those of gate and up projections have blocks of their own."""
    if not is_w13:
        return zoo_models.quantize(weight)
    halves = [zoo_models.quantize(half.contiguous()) for half in weight.chunk(2, dim=1)]
    codes = torch.cat([half.view(torch.uint8) for half, _ in halves], dim=1)
    return codes.view(torch.float8_e4m3fn), torch.cat([scale for _, scale in halves], dim=1)


def traces_of(llm) -> dict[str, str]:
    """What a twin might leave in this process: layers that registered themselves, hooks, rotary embeddings that are shared.

    Each under its name, as text.
    """
    from vllm.model_executor.layers import rotary_embedding

    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    model = model_of(llm)
    modules, tensors = list(model.named_modules()), [*model.named_parameters(), *model.named_buffers()]
    traces = {
        "layers": {name: id(layer) for name, layer in compilation.static_forward_context.items()},
        "rotary": {str(key): id(module) for key, module in rotary_embedding._ROPE_DICT.items()},
        "experts": list(getattr(compilation, "static_all_moe_layers", [])),
        "hooks": [(name, len(each._forward_hooks), len(each._forward_pre_hooks)) for name, each in modules],
        "tensors": {name: [id(tensor), tensor._version] for name, tensor in tensors},
        "configs": [str(compilation.mode), str(vars(config.quant_config)), str(config.model_config.hf_config)],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
    }
    return {name: json.dumps(trace) for name, trace in traces.items()}
