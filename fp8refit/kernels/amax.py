"""The largest magnitudes that activations reach, gathered while a model runs: nothing waits until they are read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8refit.live.slots import SOURCE_DTYPES


class Maxima:
    """The largest absolute value that each of many places has seen, gathered on the device without synchronising.

    All calls belong on one stream, that of the constructor.

    Args:
        num_places: How many maxima are kept.
        device: Where they are kept, and where every tensor is.

    Examples:
        >>> maxima = Maxima(3, torch.device("cpu"))
        >>> maxima.update(1, [torch.tensor([[-2.0, 1.0]]), None])
        >>> maxima.read()
        [0.0, 2.0, 0.0]
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self._bits = torch.zeros(num_places, dtype=torch.int32, device=device)
        if device.type == "cuda":
            from fp8refit.kernels.triton_amax import raise_maxima_triton

            self._raise_maxima = raise_maxima_triton
        else:
            self._raise_maxima = raise_maxima_reference

    def update(self, first_place: int, tensors: Sequence[Tensor | None]) -> None:
        """Raise place `first_place + i` to `max |tensors[i]|`. NaN wins over everything, then Inf.

        None and empty tensors leave their place as it is. On CUDA up to three tensors are one launch, and rows that are
        multiples of 16 bytes are read the fastest; a tensor whose rows are not dense is copied first.

        Args:
            first_place: Place of the first tensor.
            tensors: (N, C) or (N, H, D), bfloat16, float16 or float32, such as the q, k and v of one fused activation.
        """
        last_place = first_place + len(tensors)
        assert first_place >= 0 and last_place <= len(self._bits), f"{first_place=} {last_place=} {len(self._bits)=}"
        self._raise_maxima(self._bits, first_place, tensors)

    @torch.inference_mode()
    def read(self) -> list[float]:
        """Wait for the updates, and return the maximum of every place: 0.0 if it saw nothing, NaN and Inf as they are."""
        maxima: list[float] = self._bits.view(torch.float32).tolist()
        return maxima


@torch.inference_mode()
def raise_maxima_reference(bits: Tensor, first_place: int, tensors: Sequence[Tensor | None]) -> None:
    """The specification. `bits` are those of non-negative float32: ordered like the values, NaN above Inf."""
    for place, tensor in enumerate(tensors, first_place):
        if tensor is not None and tensor.numel():
            assert tensor.dtype in SOURCE_DTYPES, f"{tensor.dtype=}"
            seen = tensor.detach().abs().amax().float().view(torch.int32) & 0x7FFFFFFF  # a NaN may keep its sign
            bits[place] = torch.maximum(bits[place], seen)
