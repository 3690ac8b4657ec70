"""The trace of a draft's loader, beside a target in the same checkpoint. Real drafts: `tests/vllm` and `tests/sglang`."""

import pytest
import torch
from torch import nn

from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.drafts import DraftModel

META = TensorMeta(shape=(2, 2), dtype=torch.bfloat16)
STORED = dict.fromkeys(("layer.weight", "mtp.proj.weight", "mtp.embed.weight", "mtp.odd.weight"), META)


class Network(nn.Module):
    """Takes its projection, skips an embedding that it has of the target, and knows no others that draft."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16, device="meta")

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "mtp.proj.weight":
                self.proj.weight.data.copy_(tensor)
            elif not name.endswith(("embed.weight", "layer.weight")):
                raise KeyError(name)


@pytest.mark.parametrize("is_apart", [False, True])
def test_what_the_loader_skips_is_left_out_and_what_it_fails_for_is_not(is_apart):
    network = Network()
    options = {"is_plain": False, "is_apart": is_apart, "has_dummy_weights": False, "remedy": "Boot another"}
    draft = DraftModel(network, lambda: STORED, **options)

    def is_beside(name):
        return name.startswith("mtp.")

    twin = draft.trace(network, draft.naming(is_beside), is_beside)
    assert set(twin.naming.tensors) == {"mtp.proj.weight", "mtp.odd.weight"}
    assert twin.traced.taken == {"mtp.proj.weight"}
    assert [each.source for each in twin.traced.objections] == ["mtp.odd.weight"]
