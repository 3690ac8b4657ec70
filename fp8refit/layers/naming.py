"""What a checkpoint calls the tensors of a live model: fused modules have parts, and wrappers have names of their own."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from fp8refit.names import FUSED_MODULES, split_fused

Rename: TypeAlias = Callable[[str], tuple[str, ...]]
"""Takes the live name of a tensor, the name of a part in the place of a fused module's, and gives the checkpoint names that the
model loads into it, the usual one first. Empty if nobody knows."""


def same_name(name: str) -> tuple[str, ...]:
    """A `Rename` of models whose modules are called as in the checkpoint."""
    return (name,)


class CheckpointNames:
    """The names of one live model's tensors.

    The parts of fused modules are those that `model.packed_modules_mapping` names, and where it names none `FUSED_MODULES`.
    Some checkpoints hold them fused as well (Phi-3; GLM-4 its MLP): the model's Hugging Face config names the modules of its
    checkpoint.

    Args:
        model: The live model.
        rename: What else its engine calls otherwise.
    """

    def __init__(self, model: nn.Module, rename: Rename = same_name) -> None:
        packed = getattr(model, "packed_modules_mapping", {})
        self._fused = FUSED_MODULES | {leaf: tuple(parts) for leaf, parts in packed.items()}
        self._rename = rename
        config = getattr(model, "config", None)
        configs = [config, getattr(config, "text_config", None)]
        self._fused_in_checkpoint = FUSED_MODULES.keys() & _leaves_of(configs)
        self.is_tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        """Whether the LM head is the embedding."""

    def parts_of(self, module: str, num_matrices: int) -> tuple[str, ...]:
        """The modules that the live `module` of `num_matrices` holds, in storage order and by live names of their parents.

        Several matrices of one checkpoint module have its name each.
        """
        module = _without_lora(module)
        if module.rpartition(".")[2] in self._fused_in_checkpoint:
            return (module,) * num_matrices
        return split_fused(module, self._fused)

    def of(self, name: str) -> tuple[str, ...]:
        """See `Rename`."""
        return self._rename(_without_lora(name))

    def usual(self, name: str) -> str:
        """The first one; where nobody knows any, the live name."""
        return next(iter(self.of(name)), name)


def _without_lora(name: str) -> str:
    """A live name without the wrappers that LoRA puts around layers."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _leaves_of(configs: list[Any]) -> frozenset[str]:
    """Last names of the modules that Hugging Face configs say how to split."""
    plans = [getattr(config, "base_model_tp_plan", None) or {} for config in configs]
    return frozenset(name.rpartition(".")[2] for plan in plans for name in plan if ".experts." not in name)
