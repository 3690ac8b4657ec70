"""Real engines of mixtures of experts: a policy in every form that trainers send, vLLM's own reload, two ranks."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from async_engine import refit_under_way, try_too_slow
from engines import PROMPTS, SCALES, booted, booted_dummy, generate, live_bytes, make_policy, model_of, said, scribble
from subject import NOISE, AsyncSubject, Subject, booted_as
from torch import Tensor, nn
from vllm import SamplingParams

from fp8refit import Broadcaster, Refitter, quantize_blockwise
from fp8refit.checkpoint import quantize_checkpoint
from tests.tiny_models import add_small_blocks, save_model

LONGER = SamplingParams(max_tokens=300, temperature=0, detokenize=False, ignore_eos=True)
"""For replicas, of which each step waits for those of others."""
MODES = ("wait", "abort", "keep", "continue")
STACKS = (".experts.gate_up_proj", ".experts.down_proj")


def run_experts(cases: list, work: str) -> dict:
    """Dummy engines, each moved to policy 1, to policy 2, and to policy 2 again in other forms, over rubbish each time."""
    found = {f"{family}-{kernel}": refit_experts(family, kernel, Path(work)) for family, kernel in cases}
    return found | {"online": refit_online(*cases[0], Path(work))}


def refit_online(family: str, kernel: str, work: Path) -> dict:
    """Engines that quantize experts as they load them, from BF16: one refitted to policy 1, and one booted from it."""
    policy = save_model(family, 1, work / f"{family}-bf16-1", change=add_small_blocks).state_dict()
    with booted(work / f"{family}-bf16", kernel, quantization="fp8_per_block") as llm:
        refitter = Refitter(llm)
        refitter.refit(policy)
        found = {"live": live_bytes(llm), "wrong": wrong_experts(llm, policy, kernel, "fp32_floored")}
        slots = [slot for slot in refitter.layout().slots if slot.scale_format is not None]
        found |= {"num_layers": len(expert_layers(llm)), "formats": sorted({slot.scale_format for slot in slots})}
    with booted(work / f"{family}-bf16-1", kernel, quantization="fp8_per_block") as llm:
        return found | {"own": live_bytes(llm)}


def refit_experts(family: str, kernel: str, work: Path) -> dict:
    policy, bf16, fp8 = make_policy(family, 2), work / f"{family}-bf16", work / f"{family}-{kernel}"
    with booted_dummy(bf16, kernel) as llm:
        refitter = Refitter(llm, bucket_bytes=1 << 20)
        refitter.refit(make_policy(family, 1))
        found: dict[str, Any] = {"before": generate(llm)}
        refitter.refit(policy)
        found |= {"live": live_bytes(llm), "wrong": wrong_experts(llm, policy, kernel), "generated": generate(llm)}
        layout = refitter.layout()
        quantize_checkpoint(bf16, fp8, like=layout)
        found |= {"layout": layout.model_dump(mode="json"), "sources": {}}
        for kind, source in sources_of(policy, bf16, fp8, "ue8m0" if kernel.startswith("ue8m0") else "fp32"):
            scribble(llm)
            refitter.refit(source)
            found["sources"][kind] = live_bytes(llm)
        found["bfloat16_corrections"] = is_correction_of_choices_taken(llm, refitter, policy)
        return found


def is_correction_of_choices_taken(llm, refitter: Refitter, policy: dict[str, Tensor]) -> bool:
    """Whether what corrects a router's choices, which is float32, takes the values of a state dict that is BF16 all over."""
    sent = {name: tensor.to(torch.bfloat16) for name, tensor in policy.items()}
    refitter.refit(sent)
    held = dict(model_of(llm).named_parameters())
    return all(
        torch.equal(held[name], values.float())
        for name, values in sent.items()
        if name.endswith("e_score_correction_bias")
    )


def sources_of(policy: dict[str, Tensor], bf16: Path, fp8: Path, scale_format: str) -> Iterator[tuple[str, Any]]:
    """`policy`, a state dict with stacks, in every form that experts come in."""
    stacks = {name: tensor for name, tensor in policy.items() if name.endswith(STACKS)}
    rest = {name: tensor for name, tensor in policy.items() if name not in stacks}
    assert stacks
    yield "expert by expert, files", bf16
    yield "expert by expert, FP8 files", fp8
    turned = {name: stack.mT.contiguous() if is_not_square(stack) else stack for name, stack in stacks.items()}
    yield "rows and columns swapped", rest | turned
    yield (
        "rows and columns swapped, strided",
        rest | {name: stack.mT.contiguous().mT for name, stack in stacks.items()},
    )
    yield "one-shot iterator", iter(policy.items())
    yield "float32", {name: tensor.float() for name, tensor in policy.items()}
    quantized = {name: [quantize_blockwise(one, scale_format=scale_format) for one in stacks[name]] for name in stacks}
    codes = {name: torch.stack([codes for codes, _ in found]) for name, found in quantized.items()}
    scales = {f"{name}_scale_inv": torch.stack([scale for _, scale in found]) for name, found in quantized.items()}
    yield "FP8 stacks", rest | codes | scales


def is_not_square(stack: Tensor) -> bool:
    """Whether its shape says which way round it is."""
    return stack.shape[1] != stack.shape[2]


def wrong_experts(llm, policy: dict[str, Tensor], kernel: str, fp32: str = "fp32") -> list[str]:
    """Live tensors of experts whose bytes are not what `policy` makes of them; looks at neither slots nor plan.

    `fp32` is the format of scales that are no powers of two.
    """
    wrong = []
    for prefix, experts in expert_layers(llm):
        name = prefix.removesuffix(".routed_experts").replace(".block_sparse_moe.", ".mlp.")
        for leaf, stack in (("w13", policy[f"{name}.gate_up_proj"]), ("w2", policy[f"{name}.down_proj"])):
            codes = getattr(experts, f"{leaf}_weight")
            (scales,) = (getattr(experts, f"{leaf}_{name}") for name in SCALES if hasattr(experts, f"{leaf}_{name}"))
            for place, matrix in enumerate(stack):
                halves = matrix.chunk(2) if leaf == "w13" else (matrix,)
                matrix = torch.cat(halves[::-1] if kernel == "up first" else halves)
                expected = quantize_blockwise(matrix, scale_format="ue8m0" if kernel.startswith("ue8m0") else fp32)
                least = 1e-10 if kernel == "up first" else 0  # of FlashInfer's boot
                same = torch.equal(codes[place].view(torch.uint8), expected[0].view(torch.uint8))
                if not (same and torch.equal(scales[place], expected[1].clamp(min=least))):
                    wrong.append(f"{prefix}.{leaf}[{place}]")
    return wrong


def expert_layers(llm) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model_of(llm).named_modules() if hasattr(module, "w13_weight")]


def broadcast_stacks(subject: Subject, family: str) -> dict:
    """Stacks by a broadcast: what every rank holds, and in which dtypes experts came, to how many ranks each."""
    live = subject.live()
    subject.look("scribble")
    with Broadcaster([subject.llm], timeout_s=20.0) as broadcaster:
        broadcaster.push(make_policy(family, 2))
        wire = broadcaster._refitter._engine.ranks._broadcast._plan.wire
    experts = [tensor for tensor in wire.tensors if ".experts." in tensor.name]
    return {
        "is_broadcast": subject.live() == live,
        "dtypes": sorted({tensor.dtype for tensor in experts}),
        "num_ranks_of_experts": [sum(count > 0 for _, count in tensor.cut.spans) for tensor in experts],
    }


def run_fresh_experts(cases: list, reloaded: list, work: str) -> dict:
    """Engines that load the block-FP8 checkpoints of policy 2, and some of which then reload them over policy 1."""
    found: dict[str, Any] = {}
    for family, kernel in cases:
        with booted(Path(work) / f"{family}-{kernel}", kernel) as llm:
            name = f"{family}-{kernel}"
            found[name] = {"generated": generate(llm), "live": live_bytes(llm)}
            if [family, kernel] in reloaded:
                found[name] |= reload(llm, make_policy(family, 1))
    return found


def reload(llm, policy: dict[str, Tensor]) -> dict:
    """A refit, vLLM's own reload from disk, and the refit again: after the reload, vLLM's product reads other scales."""
    refitter = Refitter(llm)
    refitter.refit(policy)
    found: dict[str, Any] = {"refitted": generate(llm), "orphans": [count_orphans(llm)]}
    llm.collective_rpc("reload_weights")
    assert llm.reset_prefix_cache()
    found |= {"reloaded": live_bytes(llm), "reloaded_generated": generate(llm)}
    refitter.refit(policy)
    found["refitted_again"] = generate(llm)
    found["orphans"].append(count_orphans(llm))
    return found


def count_orphans(llm) -> int:
    """Scales that vLLM's product over experts reads, and that are no parameters of the model."""
    return sum(
        read.data_ptr() != held.data_ptr()
        for _, experts in expert_layers(llm)
        for read, held in (
            (experts.quant_method.moe_quant_config.w1_scale, experts.w13_weight_scale_inv),
            (experts.quant_method.moe_quant_config.w2_scale, experts.w2_weight_scale_inv),
        )
    )


def refit_in_flight(subject: AsyncSubject, family: str, mode: str) -> dict:
    """Policy 2 over policy 1, while two requests run."""
    subject.refit(make_policy(family, 1))
    return subject.run(refit_under_way(subject, make_policy(family, 2), in_flight=mode, timeout_s=20))


def cancel_when_paused(subject: AsyncSubject, family: str, num_pauses: int) -> dict:
    """A refit is cancelled as soon as its pause number `num_pauses` has begun; another one follows. Nothing may stay paused."""

    async def steps() -> dict:
        client, begun, refitter = subject.llm.engine_core, [0], Refitter(subject.llm, timeout_s=20)
        pause = client.pause_scheduler_async

        async def count(**how: Any) -> None:
            begun[0] += 1
            await pause(**how)

        client.pause_scheduler_async = count
        try:
            refit = asyncio.create_task(refitter.refit_async(make_policy(family, 1)))
            while begun[0] <= num_pauses and not refit.done():
                await asyncio.sleep(0)
            refit.cancel()
            await asyncio.wait([refit])
        finally:
            del client.pause_scheduler_async
        await refitter.refit_async(make_policy(family, 2))
        paused = await subject.llm.is_paused()
        answer = await asyncio.wait_for(subject.answer(PROMPTS[2]), 20)
        return {"cancelled": refit.cancelled(), "paused": paused, "tokens": said(answer)["tokens"]}

    return subject.run(steps())


def run_expert_ranks(layout: str, family: str, model: str, options: dict[str, Any], is_refitted: bool) -> dict:
    """One engine of two ranks: of noise and refitted twice, or of a checkpoint."""
    with booted_as(layout, Path(model), "fp32", **options, **(NOISE if is_refitted else {})) as subject:
        found: dict[str, Any] = {}
        if is_refitted:
            for seed in (1, 2):
                subject.refit(make_policy(family, seed))
            found["live_from_stacks"] = subject.live()
            subject.look("scribble")
            subject.refit(Path(model))  # expert by expert
            if layout == "core in process":
                found |= broadcast_stacks(subject, family)
            if layout == "replicas" and options["enable_expert_parallel"]:
                found["in flight"] = {mode: refit_in_flight(subject, family, mode) for mode in MODES}
                found["too slow"] = try_too_slow(subject, family, Path(model), timeout_s=2.0, sampling=LONGER)
                found["cancelled"] = [cancel_when_paused(subject, family, at) for at in range(2)]
            found["num_slots"] = sum(".experts." in slot.name for slot in subject.layout().slots)
        return found | subject.state()
