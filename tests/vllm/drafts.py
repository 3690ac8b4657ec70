"""Engines given checkpoints that hold a draft: some have one, others do not. `test_drafts.py` says what must come of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines import booted, booted_dummy, generate, live_bytes, make_policy, refused, scribble
from safetensors.torch import load_file, save_file
from subject import Subject, booted_as
from torch import Tensor

import fp8refit
from fp8refit import Refitter
from fp8refit.checkpoint import quantize_checkpoint
from tests.tiny_models import drafting, save_model, save_with_draft

WRONG = ("model.layers.7.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.bias", "draft.fc.weight")


def run_drafts(cases: list, work: str) -> dict:
    """Each family's engine, moved to policy 2 with a draft in every way, over rubbish each time."""
    return {family: refit_with_draft(family, kernel, Path(work)) for family, kernel in cases}


def refit_with_draft(family: str, kernel: str, work: Path) -> dict:
    policy, folder = make_policy(family, 2), work / f"{family}-bf16"
    drafts = drafting(family, policy)
    with booted_dummy(folder, kernel) as llm:
        refitter = Refitter(llm, bucket_bytes=1 << 20)
        refitter.refit(policy)
        found: dict[str, Any] = {"live": live_bytes(llm), "generated": generate(llm), "drafts": sorted(drafts)}
        found["ways"] = {}
        for way, run in ways(llm, refitter, policy, drafts, folder).items():
            scribble(llm)
            ignored = run()
            found["ways"][way] = {"ignored": sorted(ignored), "live": live_bytes(llm), "dirty": refitter.is_dirty}
        found["verified"] = refitter.verify(drafts | policy).is_equal
        found["wrong"] = {
            name: refused(refitter.refit, {**policy, name: torch.zeros(256, 256, dtype=torch.bfloat16)})
            for name in WRONG
        }
        found["dirty"] = refitter.is_dirty
        quantize_checkpoint(folder, work / f"{family}-{kernel}", like=refitter.layout())
        return found


def ways(
    llm: Any, refitter: Refitter, policy: dict[str, Tensor], drafts: dict[str, Tensor], folder: Path
) -> dict[str, Callable[[], Any]]:
    """Each gives the names that its report calls ignored."""
    names = list(policy)
    middle = {name: policy[name] for name in names[: len(names) // 2]} | drafts | policy

    def update() -> Any:
        with fp8refit.update(llm, timeout_s=60.0) as update:
            update.load(drafts)
            update.load(policy)
        return update.report.ignored

    return {
        "mapping": lambda: refitter.refit(drafts | policy).ignored,
        "folder": lambda: refitter.refit(folder).ignored,
        "stream, first": lambda: refitter.refit(iter((drafts | policy).items())).ignored,
        "stream, middle": lambda: refitter.refit(iter(middle.items())).ignored,
        "stream, last": lambda: refitter.refit(iter((policy | drafts).items())).ignored,
        "update": update,
    }


def run_fresh_drafts(cases: list, work: str) -> dict:
    """Engines that load the block-FP8 checkpoints with drafts. No fp8refit in them."""
    found = {}
    for family, kernel in cases:
        with booted(Path(work) / f"{family}-{kernel}", kernel) as llm:
            found[family] = {"generated": generate(llm), "live": live_bytes(llm)}
    return found


def save_drafting(method: str, work: str) -> dict:
    """Two policies, each with a draft: in the same checkpoint, or in one of its own."""
    folder = Path(work)
    for seed in (1, 2):
        if method == "mtp":
            save_with_draft("glm4_moe", seed, folder / f"policy-{seed}")
        else:
            target = save_model("qwen3", seed, folder / f"policy-{seed}")
            if method == "eagle3":
                save_eagle(target.config, seed, folder / f"draft-{seed}")
            else:
                save_model("qwen3", seed + 2, folder / f"draft-{seed}")
    return {}


def save_eagle(target: Any, seed: int, folder: Path) -> None:
    """A draft of one layer, which reads three of the target's and knows half of its tokens; it has the target's embedding."""
    width, middle, vocabulary = target.hidden_size, target.intermediate_size, target.vocab_size // 2
    heads, key_heads = (n * target.head_dim for n in (target.num_attention_heads, target.num_key_value_heads))
    layer = {
        **{f"{norm}.weight": (width,) for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "self_attn.q_proj.weight": (heads, 2 * width),
        **{f"self_attn.{part}_proj.weight": (key_heads, 2 * width) for part in "kv"},
        "self_attn.o_proj.weight": (width, heads),
        **{f"mlp.{part}_proj.weight": (middle, width) for part in ("gate", "up")},
        "mlp.down_proj.weight": (width, middle),
    }
    shapes = {"fc.weight": (width, 3 * width), "norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: (torch.randn(shape, generator=generator) * 0.05).bfloat16() for name, shape in shapes.items()}
    tables = {"d2t": torch.arange(vocabulary) % 7, "t2d": torch.ones(target.vocab_size, dtype=torch.bool)}
    folder.mkdir()
    save_file(tensors | tables, folder / "model.safetensors")
    same = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: getattr(target, name) for name in same} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": vocabulary,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    (folder / "config.json").write_text(json.dumps(config))


def policy_of(method: str, work: Path, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the target needs, and what the draft needs besides."""
    policy = read(work / f"policy-{seed}")
    if method == "mtp":
        drafts = {name: tensor for name, tensor in policy.items() if name.startswith("model.layers.2.")}
        return {name: tensor for name, tensor in policy.items() if name not in drafts}, drafts
    return policy, {f"draft.{name}": tensor for name, tensor in read(work / f"draft-{seed}").items()}


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def options_of(method: str, work: Path, seed: int) -> dict[str, Any]:
    own = {"model": str(work / f"draft-{seed}")} if method != "mtp" else {}
    speculative = {"method": method, "num_speculative_tokens": 2, **own}
    return {"quantization": "fp8_per_block", "speculative_config": speculative}


def run_drafting(method: str, layout: str, work: str) -> dict:
    """An engine of policy 1 with its draft, moved to policy 2 in every way, over rubbish each time; then without the draft."""
    folder = Path(work)
    (target, drafts), (old, _) = (policy_of(method, folder, seed) for seed in (2, 1))
    with booted_as(layout, folder / "policy-1", "fp32", **options_of(method, folder, 1)) as subject:
        found: dict[str, Any] = {"before": subject.state(), "drafts": sorted(drafts)}
        policy = target | drafts
        ways = {"mapping": policy, "another order": drafts | target, "stream": iter(policy.items())}
        if method == "mtp":
            ways["folder"] = folder / "policy-2"
        for way, source in ways.items():
            subject.look("scribble")
            report = subject.refit(source)
            found[way] = subject.state() | {"ignored": sorted(report.ignored), "kept": sorted(report.kept)}
        found["verified"] = Refitter(subject.llm).verify(policy).is_equal
        name = next(name for name in drafts if name.endswith("o_proj.weight"))
        found["differs"] = list(Refitter(subject.llm).verify(policy | {name: -drafts[name]}).differing)
        found["name"] = name
        wrong = (*WRONG[:2], "model.layers.0.self_attn.o_proj.absent")
        found["wrong"] = {
            n: subject.refused(subject.refit, policy | {n: torch.zeros(256, 256).bfloat16()}) for n in wrong
        }
        found["missing"] = subject.refused(subject.refit, target)
        found["untouched"] = subject.state()
        report = subject.refit(old, keep=("model.layers.2.*",) if method == "mtp" else ("draft.*",))
        found["kept"] = {"live": subject.live(), "kept": sorted(report.kept)}
        return found | {"bad": refuse_bad(subject, policy, name)}


def refuse_bad(subject: Subject, policy: dict[str, Tensor], name: str) -> dict[str, Any]:
    """A draft with NaN, after which a good policy heals the engine."""
    bad = policy | {name: torch.full_like(policy[name], float("nan"))}
    found = {"error": subject.refused(subject.refit, bad), "dirty": Refitter(subject.llm).is_dirty}
    subject.refit(policy)
    return found | subject.state()


def run_fresh_drafting(method: str, layout: str, work: str) -> dict:
    """An engine that boots with policy 2 and its draft. No fp8refit in it."""
    folder = Path(work)
    with booted_as(layout, folder / "policy-2", "fp32", **options_of(method, folder, 2)) as subject:
        return subject.state()
