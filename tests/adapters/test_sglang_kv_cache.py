"""KV-cache scales of an SGLang engine: what is measured, written and refused, with fakes instead of SGLang."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fp8refit_sglang import plugin
from fp8refit_sglang.kv_cache import HeldScales, _prefill, casts_saturate, give_scales, heads_of
from fp8refit_sglang.live_scheduler import Scheduler, decoder_of
from torch import nn

from fp8refit import EngineAsleepError, InvalidCalibrationError, Refitter, UnsupportedEngineError, quantize_blockwise
from tests.adapters import fake_sglang
from tests.adapters.fake_sglang import HEAD_DIM, HIDDEN, K_PROJ, Engine, Graphs, HookRegistry, RadixAttention, embed

BATCH = [[3, 1, 4, 1, 5], [9], list(range(16)) * 2]
MARGIN = 1.05 if casts_saturate(torch.device("cpu")) else 2.0


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    fake_sglang.install(monkeypatch)


def attentions(engine: Engine) -> list[list[RadixAttention]]:
    """Of each rank, by layer."""
    return [[layer.self_attn.attn for layer in scheduler.network.model.layers] for scheduler in engine.schedulers]


def held(engine: Engine) -> list[dict[str, float]]:
    """What each rank holds, of which tensors and numbers must be equal."""
    found = []
    for layers in attentions(engine):
        numbers = {}
        for index, attention in enumerate(layers):
            for kind in ("k", "v"):
                number = getattr(attention, f"{kind}_scale_float")
                assert getattr(attention, f"{kind}_scale").item() == number
                numbers[f"model.layers.{index}.self_attn.{kind}_scale"] = number
        found.append(numbers)
    return found


def expected_scales(policy, batch=BATCH) -> dict[str, float]:
    """By arithmetic of its own: values are twice the keys, and the keys of the second layer twice those of the first."""
    codes, scale = quantize_blockwise(policy[K_PROJ])
    weight = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :HIDDEN]
    amax = max((embed(torch.tensor(ids)) @ weight.T).abs().max().item() for ids in batch)
    factors = {"0.self_attn.k": 1, "0.self_attn.v": 2, "1.self_attn.k": 2, "1.self_attn.v": 2}
    return {f"model.layers.{name}_scale": MARGIN * factor * amax / 448 for name, factor in factors.items()}


def set_backends(engine: Engine, prefill: str, decode: str | None = None) -> None:
    for scheduler in engine.schedulers:
        scheduler.runner.prefill_attention_backend_str = prefill
        scheduler.runner.decode_attention_backend_str = decode or prefill


def events(engine: Engine) -> list[list[str]]:
    return [[event for event in scheduler.events if event != "flushed"] for scheduler in engine.schedulers]


def assert_refused(engine: Engine, match: str, **asked) -> None:
    """Check that scales are refused before a byte is written, and that a refit alone still works."""
    before, refitter = engine.live_bytes(), Refitter(engine)
    with pytest.raises(UnsupportedEngineError, match=match):
        refitter.refit(engine.make_policy(1), **asked or {"calibration": BATCH})
    assert engine.live_bytes() == before
    assert not refitter.is_dirty
    refitter.refit(engine.make_policy(1))
    engine.assert_holds(engine.make_policy(1))


# Calibration.


def test_every_rank_holds_the_scales_of_the_new_policy(engine):
    refitter = Refitter(engine)
    for seed in (1, 2):
        policy = engine.make_policy(seed)
        report = refitter.refit(policy, calibration=BATCH)
        engine.assert_holds(policy)
        expected = expected_scales(policy)
        assert report.kv.scales == pytest.approx(expected, rel=1e-5)
        assert held(engine) == [report.kv.scales] * len(engine.schedulers)
        assert (report.kv.origin, report.kv.num_tokens, report.kv.num_passes) == ("calibration", 38, 2)
        assert engine.generate("after") == "stop"


def test_each_rank_may_keep_to_its_own_heads(make_engine):
    engine = make_engine(2)
    Refitter(engine, kv={"reduction": "rank"}).refit(engine.make_policy(1), calibration=BATCH)
    first, second = held(engine)
    expected = expected_scales(engine.make_policy(1))
    assert first != second
    assert {name: max(first[name], second[name]) for name in expected} == pytest.approx(expected, rel=1e-5)


def test_the_served_policy_can_be_calibrated(engine):
    refitter = Refitter(engine)
    refitter.refit(engine.make_policy(1))
    assert refitter.calibrate(BATCH[:1]).scales == pytest.approx(
        expected_scales(engine.make_policy(1), BATCH[:1]), rel=1e-5
    )
    assert refitter.version == 1


def test_layers_get_their_own_forward_back(engine):
    Refitter(engine).refit(engine.make_policy(1), calibration=BATCH)
    for layers in attentions(engine):
        for attention in layers:
            assert "forward" not in vars(attention)
            with pytest.raises(AssertionError, match="KV cache"):
                attention(*[None] * 4)


def test_given_scales_are_written(engine):
    scales = {"model.layers.1.self_attn.v_scale": 0.125, "model.layers.0.self_attn.q_scale": 3.0}
    Refitter(engine).refit(engine.make_policy(1), kv_scales=scales)
    for one in held(engine):
        assert one.pop("model.layers.1.self_attn.v_scale") == 0.125
        assert set(one.values()) == {0.25}


def test_scales_in_a_checkpoint_are_written(engine):
    policy = engine.make_policy(1) | {"model.layers.0.self_attn.k_proj.output_scale": torch.tensor([0.5])}
    assert Refitter(engine).refit(policy).kv.origin == "state_dict"
    assert [one["model.layers.0.self_attn.k_scale"] for one in held(engine)] == [0.5] * len(engine.schedulers)


def test_scales_come_back_after_sleep_and_stay_through_refits(engine):
    refitter = Refitter(engine)
    scales = refitter.refit(engine.make_policy(1), calibration=BATCH).kv.scales
    for layers in attentions(engine):
        for attention in layers:
            attention.k_scale.fill_(torch.nan)
    refitter.refit(engine.make_policy(2))
    assert held(engine) == [scales] * len(engine.schedulers)


@pytest.mark.parametrize("is_refitted", [True, False])
def test_noise_of_a_dummy_boot_is_forgotten_where_nothing_is_written(is_refitted, engine):
    for scheduler in engine.schedulers:
        scheduler.server_args.load_format = "dummy"
    refitter, scales = Refitter(engine), {"model.layers.1.self_attn.k_scale": 0.125}
    if is_refitted:
        refitter.refit(engine.make_policy(1), kv_scales=scales)
    else:
        refitter.calibrate(BATCH[:1])
        scales = held(engine)[0]
        refitter.refit(engine.make_policy(1))
    for one in held(engine):
        assert {name: one.pop(name) for name in scales} == scales
        assert set(one.values()) <= {1.0}


def test_a_token_outside_the_vocabulary_is_refused(solo):
    with pytest.raises(InvalidCalibrationError, match="16 is outside the vocabulary of 16"):
        Refitter(solo).refit(solo.make_policy(1), calibration=[[16]])
    with pytest.raises(InvalidCalibrationError, match="65 tokens, but the engine takes at most 64"):
        Refitter(solo).refit(solo.make_policy(1), calibration=[[1] * 65])


@pytest.mark.parametrize(("chunk", "expected"), [(32, 32), (None, 4096)])
def test_a_pass_is_no_larger_than_a_prefill(chunk, expected, solo):
    solo.schedulers[0].chunked_prefill_size = chunk
    assert _prefill(Scheduler(solo.schedulers[0]), []).max_tokens == expected


# Backends.


def test_graphs_of_a_backend_that_reads_tensors_stay(engine):
    Refitter(engine).refit(engine.make_policy(1), calibration=BATCH)
    assert events(engine) == [[]] * len(engine.schedulers)


@pytest.mark.parametrize("backends", [("triton",), ("flashinfer",), ("fa3", "flashinfer"), ("triton", "fa3")], ids=str)
def test_graphs_of_a_backend_that_reads_numbers_are_captured_once_a_write(backends, engine):
    set_backends(engine, *backends)
    refitter = Refitter(engine)
    refitter.refit(engine.make_policy(1), calibration=BATCH)
    assert events(engine) == [["captured"]] * len(engine.schedulers)
    refitter.refit(engine.make_policy(2))
    assert events(engine) == [["captured"]] * len(engine.schedulers), "scales stayed"
    refitter.refit(engine.make_policy(2), calibration=BATCH)
    assert events(engine) == [["captured"] * 2] * len(engine.schedulers)


def test_graphs_are_captured_with_the_new_numbers(solo):
    set_backends(solo, "triton")
    seen = []
    solo.schedulers[0].runner.weight_updater.recapture_cuda_graph = lambda: seen.append(held(solo)[0])
    report = Refitter(solo).refit(solo.make_policy(1), calibration=BATCH)
    assert seen == [report.kv.scales]


def test_graphs_of_0_5_15_are_captured_by_its_runner(solo):
    set_backends(solo, "triton")
    del solo.schedulers[0].runner.weight_updater
    solo.schedulers[0].runner.init_decode_cuda_graph = lambda: solo.schedulers[0].events.append("initialized")
    Refitter(solo).refit(solo.make_policy(1), calibration=BATCH)
    assert events(solo) == [["initialized"]]


def test_without_graphs_none_are_captured(solo):
    set_backends(solo, "triton")
    Graphs.backends["decode"] = "disabled"
    Refitter(solo).refit(solo.make_policy(1), calibration=BATCH)
    assert events(solo) == [[]]


def test_graphs_are_not_captured_over_a_cache_that_sleeps(solo):
    set_backends(solo, "triton")
    refitter = Refitter(solo)
    refitter.refit(solo.make_policy(1))
    solo.schedulers[0].weight_updater.offload_tags = {"kv_cache"}
    before = held(solo)
    with pytest.raises(EngineAsleepError, match="resume_memory_occupation"):
        refitter.refit(solo.make_policy(2), calibration=BATCH)
    with pytest.raises(EngineAsleepError, match="resume_memory_occupation"):
        refitter.calibrate(BATCH)
    assert (events(solo), held(solo), refitter.is_dirty, refitter.version) == ([[]], before, False, 1)
    solo.schedulers[0].weight_updater.offload_tags = set()
    refitter.refit(solo.make_policy(2), calibration=BATCH)
    assert events(solo) == [["captured"]]


# Refusals.


@pytest.mark.parametrize(
    "asked", [{"calibration": BATCH}, {"kv_scales": {"model.layers.0.self_attn.k_scale": 1.0}}], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "name", "said"),
    [
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float8_e5m2, "fp8_e5m2", "float8_e5m2"),
        (torch.float8_e4m3fnuz, "fp8_e4m3", "float8_e4m3fnuz"),
        (torch.float8_e4m3fn, "mxfp8", "mxfp8"),
        (torch.uint8, "fp4_mx_block16", "uint8"),
    ],
    ids=str,
)
def test_a_cache_of_another_dtype_is_refused(dtype, name, said, asked, engine):
    for scheduler in engine.schedulers:
        scheduler.runner.kv_cache_dtype, scheduler.runner.kv_cache_dtype_str = dtype, name
    match = f'(?s)cannot be changed.*KV cache: is {said}, not fp8_e4m3. Boot with kv_cache_dtype="fp8_e4m3"'
    assert_refused(engine, match, **asked)


def test_the_dtype_of_0_5_15_is_in_its_arguments(solo):
    runner = solo.schedulers[0].runner
    del runner.kv_cache_dtype_str
    runner.server_args = SimpleNamespace(kv_cache_dtype="fp8_e4m3")
    Refitter(solo).refit(solo.make_policy(1), calibration=BATCH)
    assert held(solo)[0] == pytest.approx(expected_scales(solo.make_policy(1)), rel=1e-5)


@pytest.mark.parametrize("backends", [("fa4",), ("torch_native",), ("fa3", "trtllm_mha")], ids=str)
def test_an_unknown_backend_is_refused(backends, engine):
    set_backends(engine, *backends)
    assert_refused(engine, f'(?s)attention backend {backends[-1]}: .*Boot with attention_backend="fa3"')


def test_graphs_of_whole_prefills_are_refused_where_numbers_are_read(solo):
    set_backends(solo, "triton")
    Graphs.backends["prefill"] = "full"
    assert_refused(solo, "(?s)attention backend triton: .*disable_prefill_cuda_graph=True")


def test_graphs_of_whole_prefills_are_taken_where_tensors_are_read(solo):
    Graphs.backends["prefill"] = "full"
    Refitter(solo).refit(solo.make_policy(1), calibration=BATCH)


def test_latents_are_refused(engine):
    for scheduler in engine.schedulers:
        scheduler.runner.use_mla_backend = True
    assert_refused(engine, "KV cache: holds latents, which SGLang writes as if their scale were 1")


def test_layers_without_scales_are_refused(engine):
    for layers in attentions(engine):
        layers[1].k_scale = layers[1].v_scale = None
    match = r"model\.layers\.1\.self_attn\.attn: has no KV scales \(one of 1 such layers\).*with fp8refit installed"
    assert_refused(engine, f"(?s){match}")


def test_heads_that_fa3_reads_without_scales_are_refused(solo):
    attentions(solo)[0][1].qk_head_dim = 512
    match = r"model\.layers\.1\.self_attn\.attn: has heads larger than 256.*attention_backend=\"triton\""
    assert_refused(solo, f"(?s){match}")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"is_cross_attention": True}, "is cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "is encoder_only attention"),
        ({"attn_type": "decoder_bidirectional"}, "is decoder_bidirectional attention"),
        ({"pos_encoding_mode": "ALIBI"}, "encodes positions itself"),
        ({"xai_temperature_len": 8}, "scales its scores by position"),
        ({"use_irope": True}, "attends within chunks"),
        ({"logit_cap": 30.0, "logit_capping_method": "relu"}, "caps its scores by relu"),
        ({"sinks": torch.ones(2)}, "attends with sinks"),
    ],
    ids=str,
)
def test_layers_of_another_kind_are_not_measured_but_may_be_given_scales(attributes, reason, solo):
    vars(attentions(solo)[0][1]).update(attributes)
    assert_refused(solo, rf"(?s)cannot be measured.*model\.layers\.1\.self_attn\.attn: {reason}.*kv_scales=")
    Refitter(solo).refit(solo.make_policy(2), kv_scales={"model.layers.0.self_attn.k_scale": 0.5})
    assert held(solo)[0]["model.layers.0.self_attn.k_scale"] == 0.5


def test_a_model_that_is_called_otherwise_is_not_measured(solo):
    solo.schedulers[0].network.model.__class__ = type("Other", (fake_sglang.Decoder,), {"forward": lambda self, x: x})
    assert_refused(solo, "(?s)cannot be measured.*Network: is not built like SGLang's language models.*kv_scales=")


def test_what_piecewise_graphs_put_before_a_decoder_is_seen_through(solo):
    network = solo.schedulers[0].network
    network.model.forward = lambda *args, **kwargs: type(network.model).forward(network.model, *args, **kwargs)
    assert decoder_of(network) is network.model
    Refitter(solo).refit(solo.make_policy(1), calibration=BATCH)


# What layers say of themselves.


def test_a_window_of_sglang_s_counts_the_tokens_before():
    attention = RadixAttention(1)
    attention.sliding_window_size, attention.logit_cap = 127, 50.0
    heads = heads_of(attention)
    assert (heads.window, heads.soft_cap, heads.num_heads, heads.num_kv_heads) == (128, 50.0, 2, 1)
    assert (heads.head_dim, heads.v_head_dim, heads.scale) == (HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5)
    attention.sliding_window_size, attention.logit_cap = -1, 0.0
    heads = heads_of(attention)
    assert (heads.window, heads.soft_cap) == (None, None)


# Layers without scales of their own.


class Unquantized(nn.Module):
    """An attention layer whose model told it nothing of quantization."""

    def __init__(self, quant_method=None) -> None:
        super().__init__()
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None
        self.quant_method = quant_method


def build(monkeypatch, cache_dtype: str, **options) -> nn.Module:
    """A layer as SGLang would build it under the plugin."""
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: SimpleNamespace(kv_cache_dtype=cache_dtype)
    monkeypatch.setitem(sys.modules, context.__name__, context)
    layer = Unquantized.__new__(Unquantized)
    HookRegistry.call(plugin.IN_ATTENTION, Unquantized.__init__, layer, *options.values())
    return layer


def test_an_attention_layer_that_sglang_gives_no_scales_gets_them(monkeypatch):
    layer = build(monkeypatch, "fp8_e4m3")
    assert isinstance(layer.quant_method, fake_sglang.BaseKVCacheMethod)
    assert {name for name, _ in layer.named_parameters()} == {"k_scale", "v_scale"}


def test_other_caches_and_other_layers_are_left_alone(monkeypatch):
    assert list(build(monkeypatch, "auto").named_parameters()) == []
    assert list(build(monkeypatch, "fp8_e4m3", quant_method="another's").named_parameters()) == []


def test_layers_whose_scales_nobody_made_are_left_alone():
    scales = HeldScales(is_noise=True)
    scales.read(Unquantized())
    scales.restore()


def test_scales_of_a_draft_come_back_with_those_of_its_target(monkeypatch):
    models = [build(monkeypatch, "fp8_e4m3") for _ in range(2)]
    scales = HeldScales(is_noise=False)
    scales.read(*models)
    for number, model in enumerate(models):
        model.k_scale_float = model.v_scale_float = 2.0 + number
    scales.restore()
    assert [(model.k_scale.item(), model.v_scale.item()) for model in models] == [(2.0, 2.0), (3.0, 3.0)]


def test_the_hook_builds_a_layer_with_what_it_was_given(monkeypatch):
    seen = []
    give_scales(
        lambda layer, *args, **kwargs: seen.append((args, kwargs)), SimpleNamespace(quant_method=1), 2, prefix="p"
    )
    assert seen == [((2,), {"prefix": "p"})]


# Prompts.


def test_prompts_are_those_of_the_engine_s_tokenizer(engine):
    report = Refitter(engine).refit(engine.make_policy(1), calibration=["2 3", "4"])
    assert report.kv.num_tokens == 5
    assert report.kv.scales == pytest.approx(expected_scales(engine.make_policy(1), [[1, 2, 3], [1, 4]]), rel=1e-5)


def test_an_engine_without_a_tokenizer_asks_for_token_ids(engine):
    engine.tokenizer_manager.tokenizer = None
    with pytest.raises(UnsupportedEngineError, match=re.escape("booted with skip_tokenizer_init; pass token ids")):
        Refitter(engine).refit(engine.make_policy(1), calibration="2 3")
    assert engine.generate("after") == "stop"
