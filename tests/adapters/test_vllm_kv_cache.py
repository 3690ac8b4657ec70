"""The vLLM adapter's reading of an FP8 KV cache, on modules that look like vLLM's; no vLLM is needed. Real ones: tests/vllm."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm import compat, kv_cache
from fp8refit_vllm.driver import tokenized
from fp8refit_vllm.kv_cache import keep_kv_scales_through_wake, read_kv_cache
from torch import Tensor, nn

from fp8refit import UnsupportedEngineError
from fp8refit.ranks.kv.attention import PackedSequences

VOCAB_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD = 11, 4, 2, 8


class Attention(nn.Module):
    """What vLLM's attention layer shows; `impl` is its backend's."""

    def __init__(self, backend="FLASH_ATTN", dtype="fp8", scale_shape=(), query_quant=None, impl=None, **attributes):
        super().__init__()
        self.kv_cache_dtype, self.query_quant = dtype, query_quant
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.impl = SimpleNamespace(**{"scale": HEAD**-0.5, "alibi_slopes": None} | (impl or {}))
        for kind in ("q", "k", "v", "prob"):
            self.register_buffer(f"_{kind}_scale", torch.ones(scale_shape))
            setattr(self, f"_{kind}_scale_float", 1.0)
        self._k_scale_cpu, self._v_scale_cpu = torch.ones(()), torch.ones(())
        self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v = NUM_HEADS, NUM_KV_HEADS, HEAD, HEAD
        self.attn_type, self.sliding_window, self.kv_sharing_target_layer_name = "decoder", None, None
        self.has_sink = self.use_mm_prefix = False
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("reads a KV cache that is none")


class MLAAttention(Attention):
    """Latents."""


def latents(backend, *, quantizes_queries=False, **options):
    impl = {"supports_quant_query_input": quantizes_queries} | options.pop("impl", {})
    return MLAAttention(backend=backend, kv_lora_rank=512, attn_type="", impl=impl, **options)


class ChunkedLocalAttention(Attention):
    """Attends otherwise."""


class Mamba(nn.Module):
    def get_kv_cache_spec(self): ...


class SelfAttention(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn


class Network(nn.Module):
    """Layers of attention over embedded tokens, each of which adds to what it is given."""

    def __init__(self, *attentions: nn.Module, **others: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, NUM_HEADS * HEAD)
        self.layers = nn.ModuleList(SelfAttention(attention) for attention in attentions)
        for name, module in others.items():
            self.add_module(name, module)
        self.positions: list[Tensor] = []

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.positions.append(positions)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer.attn(x, x[:, : NUM_KV_HEADS * HEAD], -x[:, : NUM_KV_HEADS * HEAD])
        return x


def worker_of(graphs: bool | None = False, *, cache_dtype="fp8", runner=None, num_stages=1, **model):
    """What a vLLM worker shows of its engine; `graphs`: whether attention is in CUDA graphs, None if there is no mode."""
    mode = None if graphs is None else SimpleNamespace(has_full_cudagraphs=lambda: graphs)
    defaults = {"max_model_len": 64, "is_multimodal_model": False, "uses_mrope": False}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE, **defaults | model),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
    )
    return SimpleNamespace(vllm_config=config, model_runner=runner if runner is not None else SimpleNamespace())


def read(*attentions: nn.Module, worker=None, **others: nn.Module):
    return read_kv_cache(worker if worker is not None else worker_of(), Network(*attentions, **others))


# What is read.


def test_layers_are_named_as_checkpoints_name_them():
    cache = read(Attention(), Attention(backend="TRITON_ATTN"))
    assert [layer.name for layer in cache.layers] == ["layers.0", "layers.1"]
    assert (cache.dtype, cache.backend, cache.saturates) == ("fp8_e4m3", "FLASH_ATTN, TRITON_ATTN", True)
    assert (cache.refusals, cache.prefill_refusals) == ((), ())


def test_the_scale_of_queries_is_one_where_the_layer_quantizes_them():
    plain, quantizing = read(Attention(), Attention(query_quant=lambda q, scale: q)).layers
    assert [scale.kind for scale in plain.scales] == ["k", "v"]
    assert [scale.kind for scale in quantizing.scales] == ["q", "k", "v"]


def test_layers_whose_cache_is_not_fp8_have_no_scales():
    cache = read(Attention(dtype="auto"), Attention(), Attention(dtype="bfloat16"))
    assert [(layer.name, len(layer.scales)) for layer in cache.layers] == [
        ("layers.0", 0),
        ("layers.1", 2),
        ("layers.2", 0),
    ]


@pytest.mark.parametrize("attentions", [[], [Attention(dtype="auto")]])
def test_an_engine_without_an_fp8_cache_is_refused_with_what_to_boot(attentions):
    cache = read(*attentions, worker=worker_of(cache_dtype="auto"))
    (refusal,) = map(str, cache.refusals)
    assert refusal == "KV cache: is not FP8 (kv_cache_dtype='auto'). Boot with kv_cache_dtype=\"fp8\""
    assert (cache.layers, cache.prefill) == ((), None)


def test_the_pass_s_limits_are_the_engine_s():
    prefill = read(Attention()).prefill
    assert (prefill.vocab_size, prefill.max_length, prefill.max_tokens) == (VOCAB_SIZE, 64, 32)


# What keeps scales from being written.


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLEX_ATTENTION", "TRITON_ATTN"])
@pytest.mark.parametrize("graphs", [True, False, None])
def test_backends_that_read_tensors_are_written_graphs_or_not(backend, graphs):
    assert read(Attention(backend=backend), worker=worker_of(graphs)).refusals == ()


@pytest.mark.parametrize("backend", ["TRITON_MLA", "FLASHMLA"])
@pytest.mark.parametrize("graphs", [True, False, None])
def test_backends_for_latents_that_read_tensors_are_written_graphs_or_not(backend, graphs):
    cache = read(latents(backend), worker=worker_of(graphs))
    assert cache.refusals == ()
    (refusal,) = map(str, cache.prefill_refusals)
    assert refusal.endswith("not plain causal attention. Give the scales instead (kv_scales=)")


def test_a_backend_for_latents_that_is_given_numbers_is_refused_in_full_graphs_alone():
    assert read(latents("FLASHINFER_MLA")).refusals == ()
    (refusal,) = map(str, read(latents("FLASHINFER_MLA"), worker=worker_of(True)).refusals)
    assert refusal.endswith('Boot with attention_backend="TRITON_MLA" or "FLASHMLA", or with enforce_eager=True')


def test_latents_have_one_scale_which_is_written_for_keys_and_values_and_queries_another_where_they_are_quantized():
    plain, quantizing = (
        latents("TRITON_MLA"),
        latents("FLASHINFER_MLA", quantizes_queries=True, impl={"bmm1_scale": 1.0}),
    )
    first, second = read(plain, quantizing).layers
    assert [[scale.kind for scale in layer.scales] for layer in (first, second)] == [["k"], ["q", "k"]]
    for scale, value in zip(second.scales, (3.0, 4.0), strict=True):
        scale.write_copies(value)
    floats = [getattr(quantizing, f"_{kind}_scale_float") for kind in ("q", "k", "v", "prob")]
    assert floats == [3.0, 4.0, 4.0, 1.0]
    assert (quantizing._k_scale_cpu.item(), quantizing._v_scale_cpu.item()) == (4.0, 4.0)
    assert (quantizing._v_scale.item(), quantizing.impl.bmm1_scale) == (4.0, None)


@pytest.mark.parametrize("backend", ["FLASHINFER", "CPU_ATTN"])
def test_backends_that_are_given_numbers_are_refused_in_full_graphs_alone(backend):
    attention = Attention(backend=backend)
    for graphs in (False, None):
        assert read(attention, worker=worker_of(graphs)).refusals == ()
    (refusal,) = map(str, read(attention, worker=worker_of(True)).refusals)
    assert refusal.startswith(f"layers.0.attn: its backend {backend} takes scales as numbers, which CUDA graphs freeze")
    assert refusal.endswith('Boot with attention_backend="FLASH_ATTN" or "TRITON_ATTN", or with enforce_eager=True')


@pytest.mark.parametrize(
    ("attention", "reason", "remedy"),
    [
        (Attention(backend="HPC_ATTN"), "backend HPC_ATTN is not known to read", 'attention_backend="FLASH_ATTN"'),
        (Attention(dtype="fp8_e5m2"), "stores its cache as fp8_e5m2", 'kv_cache_dtype="fp8"'),
        (Attention(dtype="fp8_per_token_head"), "stores its cache as fp8_per_token_head", 'kv_cache_dtype="fp8"'),
        (Attention(scale_shape=(2,)), "has one scale per head", "without kv_cache_scheme"),
        (
            latents("CUTLASS_MLA"),
            "backend CUTLASS_MLA is not known to read",
            'attention_backend="TRITON_MLA" or "FLASHMLA"',
        ),
        (latents("FLASHMLA_SPARSE", dtype="fp8_ds_mla"), "stores its cache as fp8_ds_mla", 'kv_cache_dtype="fp8"'),
    ],
)
def test_scales_that_cannot_be_changed_are_refused_with_what_to_set(attention, reason, remedy):
    (refusal,) = map(str, read(attention).refusals)
    assert refusal.startswith("layers.0.attn: ")
    assert reason in refusal and remedy in refusal


def test_a_reason_is_told_once_for_all_layers():
    refusals = read(Attention(), Attention(backend="HPC_ATTN"), Attention(backend="HPC_ATTN")).refusals
    assert [refusal.module for refusal in refusals] == ["layers.1.attn"]


# What keeps scales from being measured.


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (Attention(impl={"alibi_slopes": [0.5]}), "attends with ALiBi"),
        (Attention(has_sink=True), "attends with sinks"),
        (Attention(use_mm_prefix=True), "attends to a prefix in both directions"),
        (Attention(kv_sharing_target_layer_name="layers.0.attn"), "shares the cache of another layer"),
        (Attention(attn_type="encoder_only"), "is Attention (of type encoder_only), not plain causal attention"),
        (Attention(attn_type=SimpleNamespace(value="encoder")), "is Attention (of type encoder), not plain"),
        (ChunkedLocalAttention(), "is ChunkedLocalAttention (of type decoder), not plain causal attention"),
        (Attention(dtype="auto", has_sink=True), "attends with sinks"),
    ],
)
def test_what_plain_attention_would_compute_otherwise_is_given_and_not_measured(attention, reason):
    cache = read(Attention(), attention)
    (refusal,) = map(str, cache.prefill_refusals)
    assert refusal.startswith(f"layers.1.attn: {reason}")
    assert refusal.endswith("Give the scales instead (kv_scales=)")
    assert cache.refusals == ()


@pytest.mark.parametrize(
    ("model", "others", "reason"),
    [
        ({"is_multimodal_model": True}, {}, "Network: takes more than text"),
        ({"uses_mrope": True}, {}, "Network: takes more than text"),
        ({}, {"mamba": Mamba()}, "mamba: is Mamba, which keeps a state between tokens"),
    ],
)
def test_networks_that_tokens_and_positions_do_not_say_all_of_are_not_measured(model, others, reason):
    (refusal,) = map(str, read(Attention(), worker=worker_of(**model), **others).prefill_refusals)
    assert refusal.startswith(reason)


def test_windows_and_soft_caps_are_measured():
    attention = Attention(sliding_window=3, impl={"logits_soft_cap": 0.7})
    assert read(attention).prefill_refusals == ()


# Writing.


def test_every_copy_of_a_scale_is_written():
    attention = Attention(query_quant=lambda q, scale: q)
    (layer,) = read(attention).layers
    for scale, value in zip(layer.scales, (3.0, 4.0, 5.0), strict=True):
        assert scale.tensor is getattr(attention, f"_{scale.kind}_scale")
        scale.write_copies(value)
    assert (attention._q_scale_float, attention._k_scale_float, attention._v_scale_float) == (3.0, 4.0, 5.0)
    assert (attention._k_scale_cpu.item(), attention._v_scale_cpu.item()) == (4.0, 5.0)
    assert not hasattr(attention, "_q_scale_cpu")


def test_products_that_flashinfer_keeps_are_computed_anew():
    attention = Attention(backend="FLASHINFER", impl={"bmm1_scale": 0.5, "bmm2_scale": torch.ones(())})
    (layer,) = read(attention).layers
    layer.scales[0].write_copies(2.0)
    assert (attention.impl.bmm1_scale, attention.impl.bmm2_scale) == (None, None)
    layer.scales[0].write_copies(3.0)  # they are None until the next forward
    assert not hasattr(Attention().impl, "bmm1_scale")


class ForgetfulRunner:
    """Sets scales to 1.0 when the KV cache wakes up, as vLLM 0.26 does."""

    def __init__(self, *layers: Attention) -> None:
        self.layers = layers
        self.num_resets = 0

    def init_fp8_kv_scales(self) -> None:
        self.num_resets += 1
        for layer in self.layers:
            layer._k_scale.fill_(1.0)
            layer._v_scale.fill_(1.0)


def test_scales_outlive_a_wake_up_of_the_cache():
    attention = Attention()
    runner = ForgetfulRunner(attention)
    cache = read_kv_cache(worker_of(runner=runner), Network(attention))
    for values in ((4.0, 5.0), (6.0, 7.0)):
        for scale, value in zip(cache.layers[0].scales, values, strict=True):
            scale.tensor.fill_(value)
            scale.write_copies(value)
        cache.after_write()
        runner.num_resets = 0
        runner.init_fp8_kv_scales()
        assert (attention._k_scale.item(), attention._v_scale.item()) == values
        assert runner.num_resets == 1


def test_a_runner_that_forgets_nothing_is_left_alone():
    runner = SimpleNamespace()
    keep_kv_scales_through_wake(runner, [Attention()])
    assert vars(runner) == {}


# Measuring.


@pytest.fixture
def forwards(monkeypatch):
    """Numbers of tokens of the forwards that were set up; vLLM's own way is tests/vllm's."""
    forwards = []

    def eager_forward(config, num_tokens):
        forwards.append(num_tokens)
        return nullcontext()

    monkeypatch.setattr(kv_cache, "eager_forward", eager_forward)
    return forwards


def test_a_pass_shows_every_layer_under_its_own_place(forwards):
    attentions = [Attention(), Attention(dtype="auto"), Attention(sliding_window=2)]
    network = Network(*attentions)
    prefill = read_kv_cache(worker_of(), network).prefill
    seen: list[tuple] = []
    sequences = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    with torch.inference_mode():
        prefill(sequences, lambda *observed: seen.append(observed))
    assert [index for index, *_ in seen] == [0, 1, 2]
    assert forwards == [5]
    assert [positions.tolist() for positions in network.positions] == [[0, 1, 2, 0, 1]]
    packed, x = PackedSequences([3, 2], torch.device("cpu")), network.embed(torch.cat(sequences))
    for index, window in enumerate((None, None, 2)):
        q, k = x.view(-1, NUM_HEADS, HEAD), x[:, : NUM_KV_HEADS * HEAD].view(-1, NUM_KV_HEADS, HEAD)
        for got, wanted in zip(seen[index][1:], (q, k, -k), strict=True):
            torch.testing.assert_close(got, wanted)
        x = x + packed.attend(q, k, -k, scale=HEAD**-0.5, window=window).flatten(1)
    assert not any("forward" in vars(attention) for attention in attentions)


def test_a_pass_that_fails_leaves_no_hook(forwards):
    attentions = [Attention(), Attention()]
    prefill = read_kv_cache(worker_of(), Network(*attentions)).prefill

    def fail(index, *_):
        assert index == 0, "boom"

    with pytest.raises(AssertionError, match="boom"):
        prefill([torch.tensor([1, 2])], fail)
    assert not any("forward" in vars(attention) for attention in attentions)


# Prompts.


class Tokenizer:
    def encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(map(ord, prompt))


def engine_of(tokenizer: object, *, skip: bool = False):
    config = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=skip))
    return SimpleNamespace(vllm_config=config, get_tokenizer=lambda: tokenizer)


def test_prompts_are_the_engine_s_own_tokens():
    async def later() -> Tokenizer:
        return Tokenizer()

    for tokenizer in (Tokenizer(), later()):
        assert asyncio.run(compat.token_ids(engine_of(tokenizer), ["ab", "c"])) == [[97, 98], [99]]


def test_prompts_are_refused_by_an_engine_without_a_tokenizer():
    found = asyncio.run(compat.token_ids(engine_of(Tokenizer(), skip=True), ["ab"]))
    with pytest.raises(UnsupportedEngineError, match="skip_tokenizer_init; pass token ids instead of prompts"):
        tokenized(found)
