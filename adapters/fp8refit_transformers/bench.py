"""The transformers engine in the refit benchmark."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fp8refit.bench.eager import eager_quantize
from fp8refit.bench.engine import Place, RefitBoot, Strategy
from fp8refit.errors import UnsupportedEngineError
from fp8refit_transformers.engine import TransformersEngine
from fp8refit_transformers.linear import BlockFp8Linear


class TransformersBench:
    """Implements `fp8refit.bench.engine.BenchEngine`.

    Args:
        model: A model that `to_block_fp8` converted.
    """

    def __init__(self, model: nn.Module) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.candidate = model.to(device)
        self.worker = self.candidate
        self.settings: dict[str, object] = {"class": type(model).__name__, "device": device}
        self.strategies: Sequence[Strategy] = (
            Strategy(
                name="eager",
                summary="quantize each weight in eager PyTorch, then copy codes and scales into the layers",
                update=self._quantize_and_copy,
            ),
        )

    def close(self) -> None:
        """Stop the engine and everything it started."""
        del self.candidate, self.worker

    @torch.inference_mode()
    def _quantize_and_copy(self, policy: Mapping[str, Tensor]) -> None:
        layers = dict(self.candidate.named_modules())
        own = dict(self.candidate.named_parameters())
        for name, weight in policy.items():
            layer = layers.get(name.removesuffix(".weight"))
            if not name.endswith(".weight") or not isinstance(layer, BlockFp8Linear):
                own[name].copy_(weight)
                continue
            codes, scale = eager_quantize(weight, layer.format)
            layer.weight.view(torch.uint8).copy_(codes.view(torch.uint8))
            layer.weight_scale_inv.copy_(scale)


def boot(wanted: RefitBoot) -> TransformersBench:
    """Make an engine with random weights.

    Raises:
        UnsupportedEngineError: It has one rank, is in this process, and quantizes no BF16 weights; or there is no such model.
    """
    if wanted.tp != 1:
        raise UnsupportedEngineError(f"transformers runs on one rank, not on {wanted.tp}; leave out --tp")
    if wanted.quantization is not None:
        raise UnsupportedEngineError(
            "transformers does not quantize BF16 weights to block FP8 itself; leave out --online"
        )
    if wanted.place not in {None, Place.INSIDE}:
        raise UnsupportedEngineError("transformers runs in this process; leave out --place")
    return TransformersBench(TransformersEngine.boot(str(wanted.model)))
