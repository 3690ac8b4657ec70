"""Checks of sources: whatever form a policy comes in, the bytes served are the same."""

import tempfile
from collections.abc import Collection
from pathlib import Path
from unittest import SkipTest

import torch

from fp8refit.errors import RefitError
from fp8refit.kernels import dequantize_blockwise, quantize_blockwise
from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import SCALE_SUFFIX
from fp8refit.sources.source import Manifest, StateDict
from fp8refit.testing.policies import Policy, manifest_of, policy_of, slots_of
from fp8refit.testing.promises import differing, hold, listed
from fp8refit.testing.steps import refit, restoring, serve
from fp8refit.testing.subject import Subject


@restoring
def check_every_kind_of_source_gives_the_same_bytes(subject: Subject) -> None:
    """Mappings, pairs, functions, iterators, files, any order, any strides, fp32 masters and wrapped names give the same
    bytes.
    """
    expected, policy = serve(subject), policy_of(subject, 0)
    quantized = {slot.name for slot in slots_of(subject, policy) if slot.format is not None}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, (source, manifest) in _sources(policy, quantized, Path(folder)).items():
            refit(subject, policy_of(subject, 1))
            try:
                subject.refit(subject.refitter(), source, manifest=manifest)
            except RefitError as error:
                wrong.append(f"{kind}: {type(error).__name__}: {error}")
                continue
            if names := differing(expected.live, subject.live_bytes()):
                wrong.append(f"{kind}: other bytes in {listed(names)}")
    hold(not wrong, "the same policy, from other kinds of sources:" + "".join(f"\n  - {line}" for line in wrong))


@restoring
def check_prequantized_tensors_are_copied(subject: Subject) -> None:
    """Tensors that are already block FP8, in the slot's format, are copied bit for bit and not quantized again."""
    policy = policy_of(subject, 1)
    formats = _prequantizable(subject, policy)
    if not formats:
        raise SkipTest("no slot of this rank is aligned with its blocks")
    sent, coarse, meant = dict(policy), dict(policy), dict(policy)
    for name, block_format in formats.items():
        codes, scale = quantize_blockwise(policy[name].to(torch.bfloat16), format=block_format)
        sent |= {name + SCALE_SUFFIX: scale, name: codes}
        codes, scale = (codes.float() / 4).to(codes.dtype), scale * 4  # a quantizer would not choose these
        coarse |= {name + SCALE_SUFFIX: scale, name: codes}
        meant[name] = dequantize_blockwise(codes, scale, block_size=block_format.block_size, dtype=torch.bfloat16)
    sources: dict[str, StateDict] = {"a mapping": sent, "a function": lambda: iter(sent.items())}
    expected = serve(subject, 1)
    for kind, source in sources.items():
        serve(subject)
        refit(subject, source)
        expected.hold_bytes(subject, f"a refit from {kind} with {len(formats)} tensors in block FP8")
    refit(subject, coarse)
    quantized = subject.expected_bytes(meant)
    touched = differing(quantized, subject.expected_bytes(meant | {name: -meant[name] for name in formats}))
    again = sorted({*touched} - {*differing(quantized, subject.live_bytes())})
    hold(not again, f"tensors that were already block FP8 were quantized again in {listed(again)}")


@restoring
def check_tied_names_may_be_sent_or_not(subject: Subject) -> None:
    """Tensors that share a slot may be sent under any or all of their names."""
    policy = policy_of(subject, 1)
    aliases = subject.layout(subject.refitter()).aliases
    tied = {alias: name for alias, name in aliases.items() if alias in policy or name in policy}
    if not tied:
        raise SkipTest("the policy has no tied names")
    expected = serve(subject, 1)
    for alias, name in tied.items():
        tensor = policy[name] if name in policy else policy[alias]
        rest = {key: value for key, value in policy.items() if aliases.get(key, key) != name}
        for sent in ([name], [alias], [name, alias], [alias, name]):
            serve(subject)
            refit(subject, rest | dict.fromkeys(sent, tensor))
            expected.hold_bytes(subject, f"a refit that sent {' and '.join(sent)} of {name} and {alias}")


def _sources(policy: Policy, quantized: Collection[str], folder: Path) -> dict[str, tuple[StateDict, Manifest | None]]:
    """Return `policy` in every form that `refit` takes."""
    from safetensors.torch import save_file

    items, manifest = list(policy.items()), manifest_of(policy)
    (folder / "parts").mkdir()
    for part in (0, 1):
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in items[part::2]},
            folder / "parts" / f"{part}.safetensors",
        )
    save_file({name: tensor.clone().contiguous() for name, tensor in items}, folder / "whole.safetensors")
    strided = {name: torch.stack([tensor, tensor], dim=-1)[..., 0] for name, tensor in items}
    masters = {name: tensor.float() if tensor.dtype is torch.bfloat16 else tensor for name, tensor in items}
    for name in quantized:
        masters[name] *= 1 + 2**-11  # at most an eighth of a BF16 step: rounds back
    return {
        "a list of pairs": (items, None),
        "pairs in reverse": (items[::-1], None),
        "strided tensors": (strided, None),
        "a function": (lambda: iter(items), None),
        "a function with manifest": (lambda: iter(items), manifest),
        "an iterator": (iter(items), None),
        "an iterator in reverse": (iter(items[::-1]), None),
        "an iterator with manifest": (iter(items), manifest),
        "an iterator that makes each tensor on request": (((name, tensor.clone()) for name, tensor in items), None),
        "a safetensors file": (folder / "whole.safetensors", None),
        "a folder of safetensors": (str(folder / "parts"), None),
        "fp32 masters": (masters, None),
        "names as FSDP and torch.compile wrap them": ({f"module._orig_mod.{name}": t for name, t in items}, None),
    }


def _prequantizable(subject: Subject, policy: Policy) -> dict[str, BlockFormat]:
    """Return the formats of the tensors whose slices are all aligned with their blocks."""
    held = [(slot, slot.format) for slot in slots_of(subject, policy) if slot.format is not None]
    off_grid = {
        slot.name
        for slot, block_format in held
        if block_format.needs_maximum or not block_format.holds_whole_blocks(slot.offset, slot.shape, slot.full_shape)
    }
    return {slot.name: block_format for slot, block_format in held if slot.name not in off_grid}
