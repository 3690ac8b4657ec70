"""Noise on the norms of a policy, as QeRL adds it, so that rollouts of a quantized engine explore more.

`noised(policy, ...)` is what the engine is refitted to. The trainer's weights do not change, and no noise stays in the engine:
the next refit starts from the trainer's norms again. (QeRL's code adds noise to what the engine holds, step upon step.)

QeRL: Huang et al., "QeRL: Beyond Efficiency - Quantization-enhanced Reinforcement Learning for LLMs", 2025.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fp8refit.errors import InvalidOptionError
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.row_runs import Piece, Recipe
from fp8refit.training.peft import Merged

NORMS = ("*_layernorm.weight", "*.norm.weight")
"""Names of norms: of Qwen and Llama models, those before attention, before the MLP, and at the end."""


def annealed(step: int, num_steps: int, *, start: float = 1e-2, end: float = 5e-4, num_stages: int = 10) -> float:
    """Standard deviation of QeRL's noise at a step: none in the first stage, then `start`, falling by one factor from stage to
    stage, down to `end` in the last one.

    Args:
        step: Of the training, from 0.
        num_steps: Of the whole training.
        start: In the second stage.
        end: In the last stage.
        num_stages: How many there are, each of the same number of steps.

    Raises:
        InvalidOptionError: A value is out of range.
    """
    if num_stages < 3 or num_steps < 1 or step < 0 or not (start > 0 and end > 0):
        raise InvalidOptionError(
            f"noise: step={step} of {num_steps}, start={start:g}, end={end:g}, num_stages={num_stages}; at least three stages "
            "and one step are needed, and noise that is more than zero"
        )
    stage = min(step * num_stages // num_steps, num_stages - 1)
    return float(start * (end / start) ** ((stage - 1) / (num_stages - 2))) if stage else 0.0


def noised(
    policy: Mapping[str, Tensor] | Merged | Iterable[tuple[str, Tensor]],
    sigma: float,
    *,
    seed: int = 0,
    names: Sequence[str] = NORMS,
) -> "Mapping[str, Tensor] | Noised | Iterator[tuple[str, Tensor]]":
    """Return a policy with normally distributed noise on its norms, for `refit`, `push` or `verify`.

    Noise depends on `seed` and a tensor's name alone: it is the same on every rank, host and engine, whatever the order,
    dtype or device of tensors. It is rounded to the tensor's dtype, and then added in that dtype.

    Args:
        policy: A state dict, `fp8refit.training.peft.merged(model)`, or pairs of names and tensors.
        sigma: Standard deviation; with 0, the policy is returned as it is.
        seed: Pass another one at every step.
        names: Patterns of names that get noise; of merged weights, vectors only.

    Raises:
        InvalidOptionError: `sigma` is negative or not finite, no name of a state dict matches, or that of a merged matrix does.

    Examples:
        >>> refitter.refit(noised(model.state_dict(), annealed(step, 1000), seed=step))  # doctest: +SKIP
    """
    if not 0 <= sigma < float("inf"):
        raise InvalidOptionError(f"noise: sigma={sigma!r}; pass a standard deviation of zero or more")
    noise = _Noise(sigma=sigma, seed=seed, names=tuple(names))
    known = policy.scan()[0] if isinstance(policy, Merged) else policy
    if isinstance(known, Mapping) and not any(map(noise.is_on, known)):
        raise InvalidOptionError(f"noise: no tensor is called like {', '.join(names)}; pass names=")
    if isinstance(policy, Merged):
        if odd := [name for name, meta in policy.scan()[0].items() if noise.is_on(name) and len(meta.shape) != 1]:
            raise InvalidOptionError(
                f"noise: {odd[0]} is no vector, and adapters may be merged into it; leave it out of names="
            )
        return Noised(policy, noise)
    if isinstance(policy, Mapping):
        return {name: noise.add(name, tensor) for name, tensor in policy.items()}
    return ((name, noise.add(name, tensor)) for name, tensor in policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Noise:
    """What `noised` adds."""

    sigma: float
    seed: int
    names: tuple[str, ...]

    def is_on(self, name: str) -> bool:
        """Whether a tensor gets it."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def add(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with noise in its dtype, or the same tensor if it gets none."""
        if not (self.sigma and self.is_on(name)):
            return tensor
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        values = np.random.Generator(np.random.PCG64(int.from_bytes(digest))).standard_normal(tuple(tensor.shape))
        noise = torch.from_numpy(self.sigma * values).to(tensor.dtype).to(tensor.device)
        if isinstance(tensor, DTensor):  # every rank has made all of it
            whole = DTensor.from_local(noise, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
            noise = whole.redistribute(placements=tensor.placements)
        return tensor.detach() + noise


class Noised:
    """Merged weights with noise, as an `fp8refit.sources.source.Source`. Vectors have no adapters, and are whole pieces."""

    is_repeatable = True

    def __init__(self, merged: Merged, noise: _Noise) -> None:
        self._merged, self._noise = merged, noise

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]]:
        """Names, shapes, dtypes and problems."""
        return self._merged.scan()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight."""
        return ((name, self._noise.add(name, tensor)) for name, tensor in self._merged)

    def pick(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the weights with these names."""
        return {name: self._noise.add(name, tensor) for name, tensor in self._merged.pick(names).items()}

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Yield the weights in pieces, each of which stays valid until the next one is requested."""
        return (self._with_noise(piece) for piece in self._merged.pieces(max_bytes))

    def recipes(self, max_bytes: int) -> Iterator[Piece | Recipe]:
        """Yield recipes for what has adapters, and pieces of the rest."""
        runs = self._merged.recipes(max_bytes)
        return (self._with_noise(each) if isinstance(each, Piece) else each for each in runs)

    def make(self, recipes: Sequence[Recipe], outs: Sequence[Tensor]) -> None:
        """Merge rows."""
        self._merged.make(recipes, outs)

    def _with_noise(self, piece: Piece) -> Piece:
        if not self._noise.is_on(piece.name):
            return piece
        assert piece.is_whole, f"a norm is smaller than a bucket: {piece.name}"
        return replace(piece, tensor=self._noise.add(piece.name, piece.tensor))
