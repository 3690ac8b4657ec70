"""Compares slots with what a refit would write, by writing it to bounded scratch memory part by part."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.fill.kernels import Task

Pair: TypeAlias = tuple[Tensor, Tensor]
"""The expected values in scratch memory, and the slot's own."""

_ALIGNMENT_BYTES = 256


class Comparison:
    """Scratch memory as large as the largest part, and the differences found.

    Args:
        device: The slots' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._found: list[tuple[Sequence[str], Tensor]] = []

    @property
    def num_device_bytes(self) -> int:
        """Device memory held, in bytes."""
        return self._scratch.numel()

    def redirect(self, tasks: Sequence[Task]) -> tuple[list[Task], list[list[Pair]]]:
        """Redirect tasks to scratch memory. Returns the new tasks, and for each the pairs to compare once it has
        run.
        """
        ends, end = [], 0
        for task in tasks:
            for target in _targets(task):
                ends.append(end)
                end += -(-target.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if end > self._scratch.numel():
            self._scratch = torch.empty(end, dtype=torch.uint8, device=self._device)
        places = iter(ends)
        redirected, pairs = [], []
        for task in tasks:
            written = [self._take(next(places), target) for target in _targets(task)]
            pairs.append(list(zip(written, _targets(task), strict=True)))
            scale = written[1] if len(written) > 1 else None
            redirected.append(replace(task, target=written[0], scale=scale))
        return redirected, pairs

    @torch.inference_mode()
    def compare(self, names: Sequence[str], pairs: Sequence[Sequence[Pair]]) -> None:
        """Compare what the tasks wrote, on the current stream, without waiting.

        Args:
            names: The source tensor of each task.
            pairs: The pairs from `redirect`.
        """
        flags = [_differ(*pair) for each in pairs for pair in each]
        if flags:
            self._found.append(
                ([name for name, each in zip(names, pairs, strict=True) for _ in each], torch.stack(flags))
            )

    def differing(self) -> set[str]:
        """Wait for everything, and return the names of source tensors that differ."""
        found, self._found = self._found, []
        return {names[index] for names, flags in found for index in flags.nonzero()[:, 0].tolist()}

    def _take(self, start: int, like: Tensor) -> Tensor:
        return self._scratch[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _targets(task: Task) -> Iterator[Tensor]:
    yield task.target
    if task.scale is not None:
        yield task.scale


def _differ(written: Tensor, held: Tensor) -> Tensor:
    """Whether any byte differs, as a tensor. Compares eight bytes at a time where the layout allows it."""
    if not held.ndim:
        written, held = written.view(1), held.view(1)
    for dtype in (torch.int64, torch.uint8):
        try:
            return (written.view(dtype) != held.view(dtype)).any()
        except RuntimeError:
            continue
    raise AssertionError("the last dimension of every target is contiguous")
