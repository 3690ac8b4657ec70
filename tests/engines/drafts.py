"""Engines that draft tokens: checkpoints for them, and one moved to another policy in every way. What must come of it:
`draft_tests.py`.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.engines.subject import Subject

FAMILIES = {"mtp": "glm4_moe", "latent mtp": "deepseek_v3_experts"}
"""Of targets whose checkpoint holds the draft; those of others are `qwen3`."""
PLAIN_SEEDS = {1: 3, 2: 2}
"""Of plain drafts: that of policy 2 is its target, which says the tokens that it drafts."""
WRONG = ("model.layers.7.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.bias", "draft.fc.weight")
WITHIN = "model.layers.2."
"""Begins the names of a draft in the target's checkpoint."""


def save_drafting(method: str, work: str) -> dict:
    """Two policies, each with a draft: in the same checkpoint, or in one of its own."""
    from tests.tiny_models import save_model, save_with_draft

    folder = Path(work)
    for seed in (1, 2):
        if method in FAMILIES:
            save_with_draft(FAMILIES[method], seed, folder / f"policy-{seed}")
            continue
        target = save_model("qwen3", seed, folder / f"policy-{seed}")
        if method == "draft_model":
            save_model("qwen3", PLAIN_SEEDS[seed], folder / f"draft-{seed}")
        else:
            save_eagle(target, seed, folder / f"draft-{seed}", is_third=method == "eagle3")
    return {}


def save_eagle(model: Any, seed: int, folder: Path, *, is_third: bool) -> None:
    """A draft of one layer, which has the target's embedding, and reads its last layer. That of the third kind of EAGLE reads
    three layers and knows half of the tokens. Only the others' checkpoints hold embedding and head, too.
    """
    import torch
    from safetensors.torch import save_file

    target = model.config
    width, middle, vocabulary = target.hidden_size, target.intermediate_size, target.vocab_size // 2
    heads, key_heads = (n * target.head_dim for n in (target.num_attention_heads, target.num_key_value_heads))
    read = 2 * width if is_third else width
    layer = {
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (heads, read),
        **{f"self_attn.{part}_proj.weight": (key_heads, read) for part in "kv"},
        "self_attn.o_proj.weight": (width, heads),
        **{f"mlp.{part}_proj.weight": (middle, width) for part in ("gate", "up")},
        "mlp.down_proj.weight": (width, middle),
    }
    if is_third:
        shapes = {"fc.weight": (width, 3 * width), "norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
        layer |= {f"{norm}.weight": (width,) for norm in ("hidden_norm", "input_layernorm")}
    else:
        shapes = {
            "fc.weight": (width, 2 * width),
            "fc.bias": (width,),
            "embed_tokens.weight": (target.vocab_size, width),
        }
    shapes |= {f"{'midlayer' if is_third else 'layers.0'}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: (torch.randn(shape, generator=generator) * 0.05).bfloat16() for name, shape in shapes.items()}
    if is_third:
        tensors |= {"d2t": torch.arange(vocabulary) % 7, "t2d": torch.ones(target.vocab_size, dtype=torch.bool)}
    else:
        copies = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.lm_head}
        tensors |= {f"{name}.weight": copy.weight.detach().clone() for name, copy in copies.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    same = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: getattr(target, name) for name in same} | {
        "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    if is_third:
        config |= {"draft_vocab_size": vocabulary, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps(config))


def policy_of(method: str, work: Path, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the target needs, and what the draft needs besides."""
    policy = read(work / f"policy-{seed}")
    if method in FAMILIES:
        drafts = {name: tensor for name, tensor in policy.items() if name.startswith(WITHIN)}
        return {name: tensor for name, tensor in policy.items() if name not in drafts}, drafts
    return policy, {f"draft.{name}": tensor for name, tensor in read(work / f"draft-{seed}").items()}


def read(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def try_drafting(subject: Subject, method: str, folder: Path) -> dict:
    """An engine of policy 1 with its draft, moved to policy 2 in every way, over rubbish each time; then without the draft."""
    import torch

    (target, drafts), (old, _) = (policy_of(method, folder, seed) for seed in (2, 1))
    found: dict[str, Any] = {"before": subject.state(), "drafts": sorted(drafts)}
    policy = target | drafts
    ways = {"mapping": policy, "another order": drafts | target, "stream": iter(policy.items())}
    if method in FAMILIES:
        ways["folder"] = folder / "policy-2"
    for way, source in ways.items():
        subject.look("scribble")
        report = subject.refit(source)
        found[way] = subject.state() | {"ignored": sorted(report.ignored), "kept": sorted(report.kept)}
    found["verified"] = subject.verify(policy).is_equal
    name = next(name for name in drafts if name.endswith("o_proj.weight"))
    found["differs"] = list(subject.verify(policy | {name: -drafts[name]}).differing)
    found["name"] = name
    wrong = (*WRONG[:2], "model.layers.0.self_attn.o_proj.absent")
    found["wrong"] = {n: subject.refused(subject.refit, policy | {n: torch.zeros(256, 256).bfloat16()}) for n in wrong}
    found["missing"] = subject.refused(subject.refit, target)
    found["untouched"] = subject.state()
    report = subject.refit(old, keep=(f"{WITHIN}*",) if method in FAMILIES else ("draft.*",))
    found["kept"] = {"live": subject.live(), "kept": sorted(report.kept)}
    found["bad"] = refuse_bad(subject, policy, name)
    if (embedding := "draft.embed_tokens.weight") in drafts:
        other = {n: tensor for n, tensor in policy.items() if n != "model.embed_tokens.weight"}
        subject.look("scribble")
        subject.refit(other | {embedding: policy["model.embed_tokens.weight"]})
        found["other name"] = subject.state()
    return found


def refuse_bad(subject: Subject, policy: dict[str, Tensor], name: str) -> dict[str, Any]:
    """A draft with NaN, after which a good policy heals the engine."""
    import torch

    bad = policy | {name: torch.full_like(policy[name], float("nan"))}
    found = {"error": subject.refused(subject.refit, bad), "dirty": subject.is_dirty}
    subject.refit(policy)
    return found | subject.state()
