"""The transformers adapter under the conformance kit, on tiny models with FP8 KV caches: two scale formats, tied and untied."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from unittest import SkipTest

import pytest
import torch
from fp8refit_transformers import to_block_fp8
from fp8refit_transformers.admission import refusal_of
from torch import Tensor, nn

from fp8refit.testing import CHECKS, Subject, name_of
from tests.broken_adapters import tensor_bytes
from tests.tiny_models import make_model

PROMPT = torch.arange(2, 26).view(2, 12)
BATCH = [[*range(30, 60)], [*range(7)]]
CANNOT = {
    "a_busy_engine_is_left_alone": "a request is one call of the model",
    "sleeping_weights_are_not_written": "nothing sleeps",
    "caches_that_stay_keep_the_old_policy": "there are no caches between two calls",
}
"""Checks that the engine gives no occasion for."""


class TransformersSubject(Subject):
    """A tiny Hugging Face model that `to_block_fp8` converted."""

    def __init__(self, family: str, scale_format: str) -> None:
        self.family = family
        self.scale_format = scale_format
        self.engine = self.boot(make_model(family, 100))

    def boot(self, model: nn.Module) -> nn.Module:
        return to_block_fp8(model, scale_format=self.scale_format, kv_cache_dtype="fp8")

    def policy(self, seed: int) -> Mapping[str, Tensor]:
        return make_model(self.family, seed).state_dict()

    def live_bytes(self) -> Mapping[str, object]:
        return {name: digest_of(tensor) for name, tensor in self.engine.state_dict().items()}

    def expected_bytes(self, policy: Mapping[str, Tensor]) -> Mapping[str, object]:
        fresh = make_model(self.family, 100)
        fresh.load_state_dict(policy)
        return {name: digest_of(tensor) for name, tensor in self.boot(fresh).state_dict().items()}

    def places(self) -> Mapping[str, object]:
        engine = self.engine
        named = [*engine.named_parameters(remove_duplicate=False), *engine.named_buffers(remove_duplicate=False)]
        return {name: (id(t), t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in named}

    def generate(self) -> object:
        tokens = self.engine.generate(PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            return tokens.tolist(), digest_of(self.engine(input_ids=PROMPT).logits)

    def drop_caches(self) -> None:
        pass

    def num_unfinished(self) -> int:
        return 0

    def traces(self) -> list[str]:
        refusal = refusal_of(self.engine)
        return [refusal] if refusal is not None else []

    def memory_bytes(self) -> int:
        return tensor_bytes()

    def kv_scales(self) -> Mapping[str, Sequence[float]]:
        scales = {name: buffer for name, buffer in self.engine.named_buffers() if name.endswith(("k_scale", "v_scale"))}
        return {name.replace(".attn.", "."): [scale.item()] for name, scale in scales.items()}

    def calibration(self) -> list[list[int]]:
        return BATCH


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


@pytest.fixture(scope="module", params=[("qwen3", "fp32"), ("qwen2", "ue8m0")], ids="-".join)
def subject(request):
    return TransformersSubject(*request.param)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check, subject):
    is_tied = subject.engine.config.tie_word_embeddings
    cannot = {*CANNOT} if is_tied else {*CANNOT, "tied_names_may_be_sent_or_not"}
    with pytest.raises(SkipTest) if name_of(check) in cannot else nullcontext():
        check(subject)
