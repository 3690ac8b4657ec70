"""A fake FP8 KV cache: a calibration pass shows what a test says, and every copy of a scale is looked at."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fp8refit.live.slots import KvCache, KvLayer, KvScale, Observe, Refusal

ATTENTION = "model.layers.0.self_attn"
K_SCALE, V_SCALE = f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale"


class FakeKvCache:
    """The cache of one rank, and its `fp8refit.live.slots.Prefill`."""

    vocab_size, max_length, max_tokens = 100, 16, 24

    def __init__(self, *layers: str, largest: float = 448.0) -> None:
        self.layers = layers or (ATTENTION,)
        self.largest = {f"{layer}.{kind}_scale": largest for layer in self.layers for kind in ("k", "v")}
        """What the next pass shows, by the names of the scales."""
        self.tensors = {name: torch.ones(()) for name in self.largest}
        self.copies = dict.fromkeys(self.largest, 1.0)
        self.refusals: tuple[Refusal, ...] = ()
        self.batches: list[list[list[int]]] = []
        """What passes ran over."""
        self.num_writes = 0
        self.on_pass: Callable[[], object] = lambda: None

    @property
    def held(self) -> dict[str, float]:
        """Every scale, of which all copies agree."""
        held = {name: tensor.item() for name, tensor in self.tensors.items()}
        assert held == self.copies
        return held

    def read(self) -> KvCache:
        return KvCache(
            dtype="fp8_e4m3",
            backend="FAKE",
            layers=tuple(
                KvLayer(
                    name=layer,
                    scales=tuple(
                        KvScale(
                            kind=kind, tensor=self.tensors[name], write_copies=partial(self.copies.__setitem__, name)
                        )
                        for kind, name in (("k", f"{layer}.k_scale"), ("v", f"{layer}.v_scale"))
                    ),
                )
                for layer in self.layers
            ),
            prefill=self,
            refusals=self.refusals,
            after_write=lambda: self._count_write(),
        )

    def __call__(self, sequences: Sequence[Tensor], observe: Observe) -> None:
        self.batches.append([sequence.tolist() for sequence in sequences])
        self.on_pass()
        for index, layer in enumerate(self.layers):
            k, v = (torch.tensor([[0.0, -self.largest[f"{layer}.{kind}_scale"]]]) for kind in ("k", "v"))
            observe(index, None, k, v)

    def _count_write(self) -> None:
        self.num_writes += 1
