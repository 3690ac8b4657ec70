"""Engines that keep copies of weights: a Qwen3 attention that joins two norms at its first forward, FlashInfer's attention
sinks in float32, and vLLM's own packed head on a CPU.
"""

import contextlib
import sys
from pathlib import Path
from types import ModuleType

import cpu_kernel
import torch
from engines import booted, booted_dummy, generate, make_policy, model_of, refused
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.models import qwen3

from fp8refit import Refitter
from tests.tiny_models import save_model


def _in_closure(attention: nn.Module, joined: Tensor) -> None:
    attention.joined = lambda: joined


def _in_buffer(attention: nn.Module, joined: Tensor) -> None:
    attention.built.copy_(joined)


WAYS = {
    "attribute": lambda attention, joined: setattr(attention, "joined", joined),
    "impl": lambda attention, joined: setattr(attention.attn.impl, "joined", joined),
    "late buffer": lambda attention, joined: attention.register_buffer("joined", joined, persistent=False),
    "buffer": _in_buffer,
    "closure": _in_closure,
}
"""Where an attention keeps what it joined. `tests/live/test_held.py` has what else may hold a tensor."""


@contextlib.contextmanager
def joining(way: list[str]):
    """Have Qwen3's attention multiply by norms that it joined at its first forward, kept in the way that `way[0]` names."""
    build, forward = qwen3.Qwen3Attention.__init__, qwen3.Qwen3Attention.forward

    def build_with_buffer(self, *arguments, **keywords):
        build(self, *arguments, **keywords)
        self.register_buffer("built", torch.zeros(2 * self.head_dim), persistent=False)

    def join_and_forward(self, positions, hidden_states):
        if not getattr(self, "has_joined", False):
            self.has_joined = True
            WAYS[way[0]](self, torch.cat([self.q_norm.weight, self.k_norm.weight]))
        return forward(self, positions, hidden_states)

    qwen3.Qwen3Attention.__init__, qwen3.Qwen3Attention.forward = build_with_buffer, join_and_forward
    try:
        yield
    finally:
        qwen3.Qwen3Attention.__init__, qwen3.Qwen3Attention.forward = build, forward


def let_go(llm) -> None:
    """Of all copies."""
    for module in model_of(llm).modules():
        if isinstance(module, qwen3.Qwen3Attention):
            module.built.zero_()
            module.has_joined = False
            for holder in (vars(module), module._buffers, vars(module.attn.impl)):
                holder.pop("joined", None)


def run_joined(work: str) -> dict:
    """For each way, in one engine: what a refit says before a forward joined norms, after it, and once copies are gone."""
    folder = Path(work) / "qwen3-bf16"
    save_model("qwen3", 2, folder)
    first, second = make_policy("qwen3", 1), make_policy("qwen3", 2)
    way, found = [""], {}
    with joining(way), booted_dummy(folder, "fp32") as llm:
        refitter = Refitter(llm)
        for way[0] in WAYS:
            let_go(llm)
            before = refused(refitter.refit, first)
            said = generate(llm)["outputs"]
            late = refused(refitter.refit, second)
            is_first_served = generate(llm)["outputs"] == said
            layout = refitter.layout().refusals
            let_go(llm)
            healed = refused(refitter.refit, second)
            found[way[0]] = {
                "before": before,
                "late": late,
                "is_first_served": is_first_served,
                "layout": layout,
                "healed": healed,
                "is_second_served": generate(llm)["outputs"] != said,
            }
    with joining(way), booted(folder, "fp32", quantization="fp8_per_block") as llm:
        way[0] = "attribute"
        generate(llm)
        found["after boot"] = refused(Refitter(llm).refit, first)
    return found


def run_packed_head(work: str) -> dict:
    """An engine whose head is packed as stock vLLM packs it on a CPU: what a refit says."""
    folder = Path(work) / "qwen3-bf16"
    save_model("qwen3", 2, folder)
    with booted_dummy(folder, "fp32") as llm:
        head = model_of(llm).lm_head
        before = refused(Refitter(llm).refit, make_policy("qwen3", 1))
        cpu_kernel.STOCK_DISPATCH(head, remove_weight=False)
        packed = refused(Refitter(llm).refit, make_policy("qwen3", 2))
        return {"is_packed": head.cpu_linear.__closure__ is not None, "before": before, "packed": packed}


class _Anything(ModuleType):
    """Stands for FlashInfer, which no CPU has. None of it runs."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def flashinfer_impl(sinks: Tensor) -> object:
    """vLLM's own attention over FlashInfer, as far as it deals with sinks, after its processing at boot."""
    names = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
    sys.modules.update({name: _Anything(name) for name in names})
    from vllm.v1.attention.backends.flashinfer import FlashInferImpl

    for name in names:
        del sys.modules[name]
    impl = FlashInferImpl(len(sinks), 64, 1.0, len(sinks), None, None, "auto", sinks=sinks)
    impl.process_weights_after_loading(torch.bfloat16)
    return impl


def run_sinks(work: str) -> dict:
    """Whether float32 sinks follow a refit, in place; a norm's weight stands for them."""
    folder = Path(work) / "qwen3-bf16"
    save_model("qwen3", 2, folder)
    policy = make_policy("qwen3", 1)
    with booted_dummy(folder, "fp32") as llm:
        attention = model_of(llm).model.layers[0].self_attn
        attention.add_module("over_flashinfer", nn.Module())
        with set_current_vllm_config(llm.llm_engine.vllm_config):
            attention.over_flashinfer.impl = impl = flashinfer_impl(attention.q_norm.weight)
        sinks = impl.sinks
        error = refused(Refitter(llm).refit, policy)
        expected = policy["model.layers.0.self_attn.q_norm.weight"].float()
        return {
            "error": error,
            "dtype": str(sinks.dtype),
            "is_in_place": impl.sinks is sinks,
            "is_fresh": torch.equal(sinks, expected),
        }


def run_gates(work: str) -> dict:
    """Whether gates that vLLM's experts join at their first forward follow a refit."""
    folder = Path(work) / "qwen2_moe-bf16"
    save_model("qwen2_moe", 2, folder)
    with booted_dummy(folder, "fp32") as llm:
        refitter = Refitter(llm)
        refitter.refit(make_policy("qwen2_moe", 1))
        mlp = next(layer.mlp for layer in model_of(llm).model.layers if hasattr(layer.mlp, "experts"))
        runner = mlp.experts
        runner.gate, runner.shared_expert_gate = runner.gate or mlp.gate, mlp.shared_expert_gate
        runner._maybe_fuse_gate_weights()
        joined, before = runner._combined_gate_weight, runner._combined_gate_weight.clone()
        refitter.refit(make_policy("qwen2_moe", 2))
        expected = torch.cat([runner.gate.weight, runner.shared_expert_gate.weight])
        return {"is_fresh": torch.equal(joined, expected), "has_changed": not torch.equal(joined, before)}
