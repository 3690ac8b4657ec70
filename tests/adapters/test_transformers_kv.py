"""The FP8 KV cache of the embedded engine, and the calibration of its scales, on real, tiny Hugging Face models."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch
from fp8refit_transformers import TransformersEngine, to_block_fp8
from fp8refit_transformers.kv_cache import Fp8Kv, Fp8SlidingWindowLayer, fp8_kvs
from fp8refit_transformers.prefill import DecoderPrefill
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    StaticCache,
    T5Config,
)

from fp8refit import (
    Refitter,
    UnsupportedEngineError,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = [pytest.param(Qwen3Config, id="qwen3"), pytest.param(LlamaConfig, id="llama")]
OUTLIERS = [pytest.param(False, id="ordinary"), pytest.param(True, id="outliers")]
K_FACTORS = (2.0**9, 2.0**-5, 2.0**9)
V_FACTORS = (2.0**12, 2.0**12, 2.0**-3)
TOKENS = torch.randint(2, 97, (4, 32), generator=torch.Generator().manual_seed(0))
PROMPT = TOKENS[:2, :10]
BATCH = [TOKENS[0, :20].tolist(), TOKENS[1, :7].tolist(), TOKENS[2, :20].tolist(), TOKENS[3, :1].tolist()]
NAMES = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(3) for kind in "kv"]
SCALES = {name: 0.01 * 1.5**index for index, name in enumerate(NAMES)}
MARGIN = 1.05


def make_policy(config_class=Qwen3Config, *, seed=0, outliers=False, **sizes):
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(config_class(**SIZES | sizes), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        policy.lm_head.weight *= 8
    return add_outliers(policy) if outliers else policy


@torch.no_grad()
def add_outliers(policy, k_factors=K_FACTORS, v_factors=V_FACTORS):
    """Scale keys and values of each layer, and undo it in queries and outputs: the same function, to the bit."""
    for layer, k_factor, v_factor in zip(policy.model.layers, k_factors, v_factors, strict=True):
        attention = layer.self_attn
        has_norm = hasattr(attention, "k_norm")
        (attention.k_norm if has_norm else attention.k_proj).weight *= k_factor
        (attention.q_norm if has_norm else attention.q_proj).weight /= k_factor
        attention.v_proj.weight *= v_factor
        attention.o_proj.weight /= v_factor
    return policy


def make_engine(policy, **options):
    return to_block_fp8(copy.deepcopy(policy), kv_cache_dtype="fp8", **options)


def make_plain_engine(policy):
    return to_block_fp8(copy.deepcopy(policy))


def scales_of(engine):
    return {
        f"{name.removesuffix('.attn')}.{kind}_scale": getattr(kv, f"{kind}_scale").item()
        for name, kv in fp8_kvs(engine)
        for kind in "kv"
    }


@torch.no_grad()
def log_probs(engine, **options):
    return engine(TOKENS, **options).logits.float().log_softmax(-1)


def kv_error(engine):
    """Mean difference of log-probabilities between FP8 and BF16 KV, all else equal."""
    return (log_probs(engine) - log_probs(engine, use_cache=False)).abs().mean().item()


@torch.no_grad()
def maxima_of(policy, batch):
    """Largest key and value of each layer, read from transformers' own cache on the same FP8 weights."""
    engine, maxima = make_plain_engine(policy), {}
    for row in batch:
        cache = DynamicCache()
        engine(torch.tensor([row]), past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            for kind, states in (("k", layer.keys), ("v", layer.values)):
                name = f"model.layers.{index}.self_attn.{kind}_scale"
                maxima[name] = max(maxima.get(name, 0.0), states.float().abs().max().item())
    return maxima


class ReferenceCache(DynamicCache):
    """transformers' own cache, with keys and values rounded on their way into it by a search for the nearest value."""

    CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    GRID = CODES[:127].double()  # 0 to 448

    def __init__(self, config, scales):
        super().__init__(config=config)
        self.scales = scales
        self.codes = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rounded = []
        for kind, states in (("k", key_states), ("v", value_states)):
            name = f"model.layers.{layer_idx}.self_attn.{kind}_scale"
            scale = torch.tensor(self.scales[name], dtype=torch.float32)
            steps = self.nearest(states.float() / scale)
            self.codes.setdefault(name, []).append(steps)
            rounded.append((steps * scale).to(states.dtype))
        return super().update(*rounded, layer_idx, *args, **kwargs)

    @classmethod
    def nearest(cls, x):
        size = x.double().abs().clamp(max=448).contiguous()
        above = torch.searchsorted(cls.GRID, size).clamp(max=126)
        below = (above - 1).clamp(min=0)
        to_above, to_below = cls.GRID[above] - size, size - cls.GRID[below]
        is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
        return (torch.where(is_above, cls.GRID[above], cls.GRID[below]) * x.sign()).float()


@pytest.fixture(scope="module", params=[*FAMILIES, pytest.param(MistralConfig, id="sliding")])
def pair(request):
    """An engine with an FP8 KV cache and scales of its own, and one of the same weights that has none."""
    sliding = {"sliding_window": 6} if request.param is MistralConfig else {}
    policy = make_policy(request.param, **sliding)
    engine = make_engine(policy)
    Refitter(engine).refit(policy.state_dict(), kv_scales=SCALES)
    return engine, make_plain_engine(policy)


@torch.no_grad()
def test_attention_sees_what_the_codes_mean_token_after_token(pair):
    engine, plain = pair
    scales = scales_of(engine)
    cache, reference = None, ReferenceCache(plain.config, scales)
    for part in (TOKENS[:, :5], TOKENS[:, 5:6], TOKENS[:, 6:20], TOKENS[:, 20:21]):
        output = engine(part, past_key_values=cache)
        cache = output.past_key_values
        assert torch.equal(output.logits, plain(part, past_key_values=reference).logits)
    for index, layer in enumerate(cache.layers):
        for kind, codes in (("k", layer.keys), ("v", layer.values)):
            assert codes.dtype is torch.float8_e4m3fn
            expected = torch.cat(reference.codes[f"model.layers.{index}.self_attn.{kind}_scale"], dim=2)
            length = codes.shape[2]
            assert length == (5 if isinstance(layer, Fp8SlidingWindowLayer) else 21)
            assert torch.equal(codes.float(), expected[:, :, -length:])


def test_values_that_do_not_fit_are_clamped_and_the_rest_is_rounded_to_even():
    engine = make_engine(make_policy(num_hidden_layers=1))
    engine.model.layers[0].self_attn.attn.k_scale.fill_(0.5)
    cache = engine(TOKENS[:1, :1]).past_key_values
    cache.reset()
    engine(TOKENS[:1, :1], past_key_values=cache)
    layer = cache.layers[0]
    layer.reset()
    x = torch.tensor([0.0, -0.0, 224.0, 1e6, -1e6, torch.nan, 0.53125, 0.59375, 2.0**-11, 2.0**-10, 3 * 2.0**-11])
    x = x.view(1, 1, 1, -1)
    seen, _ = layer.update(x, x)
    expected = torch.tensor([0.0, -0.0, 224.0, 224.0, -224.0, torch.nan, 0.5, 0.625, 0.0, 2.0**-10, 2.0**-9])
    torch.testing.assert_close(seen.flatten(), expected, rtol=0, atol=0, equal_nan=True)
    assert layer.keys.dtype is torch.float8_e4m3fn and seen.dtype is torch.float32


@torch.no_grad()
def test_the_cache_takes_a_byte_a_value():
    engine, plain = make_engine(make_policy()), make_plain_engine(make_policy())
    sizes = []
    for model in (engine, plain):
        cache = model(TOKENS).past_key_values
        sizes.append(sum(layer.keys.untyped_storage().nbytes() for layer in cache.layers))
        held = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        assert all(value.element_size() == (1 if model is engine else 2) for value in held if value.ndim == 4)
        assert sum(value.ndim == 4 for value in held) == 6
    assert sizes == [3 * TOKENS.numel() * 2 * 32, 3 * TOKENS.numel() * 2 * 32 * 2]


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=["greedy", "beams", "two"]
)
def test_generate_needs_nothing(pair, options):
    engine, plain = pair
    padded = PROMPT.clone()
    padded[0, :4] = 0
    reference = ReferenceCache(plain.config, scales_of(engine))
    settings = {"attention_mask": (padded != 0).long(), "max_new_tokens": 8, "do_sample": False} | options
    expected = plain.generate(padded, past_key_values=reference, **settings)
    assert torch.equal(engine.generate(padded, **settings), expected)


@torch.no_grad()
def test_a_cache_of_the_users_own_is_filled_where_it_is():
    engine = make_engine(make_policy())
    for mine in (DynamicCache(), DynamicCache(config=engine.config)):
        output = engine(PROMPT, past_key_values=mine)
        assert output.past_key_values is mine and mine.get_seq_length() == 10
        assert mine.layers[2].values.dtype is torch.float8_e4m3fn
        engine(PROMPT[:, :1], past_key_values=mine)
        mine.crop(-3)
        assert mine.get_seq_length() == 8
        mine.batch_select_indices(torch.tensor([1]))
        twin = copy.deepcopy(mine)
        assert torch.equal(
            engine(PROMPT[:1, :2], past_key_values=mine).logits, engine(PROMPT[:1, :2], past_key_values=twin).logits
        )


@torch.no_grad()
def test_without_a_cache_nothing_is_quantized():
    engine, plain = make_engine(make_policy()), make_plain_engine(make_policy())
    assert torch.equal(log_probs(engine, use_cache=False), log_probs(plain))
    assert not torch.equal(log_probs(engine), log_probs(plain))


@torch.no_grad()
def test_caches_that_hold_no_fp8_are_refused():
    engine, plain = make_engine(make_policy()), make_plain_engine(make_policy())
    with pytest.raises(TypeError, match="given a StaticCache; pass none"):
        engine(PROMPT, past_key_values=StaticCache(config=engine.config, max_cache_len=32))
    filled = plain(PROMPT).past_key_values
    with pytest.raises(ValueError, match="tokens of another dtype; start with an empty cache"):
        engine(PROMPT, past_key_values=filled)


@torch.no_grad()
def test_a_cache_from_before_a_refit_is_refused():
    policy = make_policy()
    engine = make_engine(policy)
    refitter = Refitter(engine)
    cache = engine(PROMPT).past_key_values
    refitter.refit(policy.state_dict())
    with pytest.raises(
        ValueError, match="of policy version 0, but the model serves version 1; start with an empty cache"
    ):
        engine(PROMPT[:, :1], past_key_values=cache)
    cache.reset()
    assert torch.equal(engine(PROMPT, past_key_values=cache).logits, engine(PROMPT).logits)
    refitter.refit(policy.state_dict())
    with pytest.raises(ValueError, match="of policy version 1, but the model serves version 2"):
        engine(PROMPT[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_cache_keeps_its_scales_when_those_of_the_model_change():
    policy = make_policy(outliers=True)
    engine = make_engine(policy)
    twin = copy.deepcopy(engine)
    mine, others = (model(PROMPT).past_key_values for model in (engine, twin))
    Refitter(engine).calibrate(BATCH)
    after = engine(PROMPT[:, :3], past_key_values=mine).logits
    assert torch.equal(after, twin(PROMPT[:, :3], past_key_values=others).logits)


@pytest.mark.parametrize("outliers", OUTLIERS)
@pytest.mark.parametrize("config_class", FAMILIES)
def test_scales_are_those_of_an_independent_pass(config_class, outliers):
    engine = make_engine(make_policy(config_class, seed=1))
    policy = make_policy(config_class, seed=2, outliers=outliers)
    before = log_probs(engine, use_cache=False)
    report = Refitter(engine).refit(policy.state_dict(), calibration=BATCH)
    expected = {name: MARGIN * maximum / 448 for name, maximum in maxima_of(policy, BATCH).items()}
    assert scales_of(engine) == report.kv.scales
    assert report.kv.scales == pytest.approx(expected, rel=0.02)
    assert not torch.equal(log_probs(engine, use_cache=False), before)
    assert torch.equal(log_probs(engine, use_cache=False), log_probs(make_plain_engine(policy)))
    assert (report.kv.origin, report.kv.kept) == ("calibration", ())
    assert (report.kv.num_sequences, report.kv.num_tokens, report.kv.num_passes) == (4, 48, 1)
    assert report.phases_s["kv"] == pytest.approx(report.kv.seconds) and report.kv.seconds > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_calibrated_scales_restore_a_model_with_outliers(seed):
    ordinary, policy = make_policy(seed=seed), make_policy(seed=seed, outliers=True)
    engine = make_engine(policy)
    assert torch.equal(log_probs(engine, use_cache=False), log_probs(make_plain_engine(ordinary)))
    maxima = [value for name, value in maxima_of(policy, TOKENS.tolist()).items() if name.endswith("k_scale")]
    assert min(maxima) < 0.2 and max(maxima) > 1500
    uncalibrated = kv_error(engine)
    Refitter(engine).refit(policy.state_dict(), calibration=TOKENS[:2])
    calibrated = kv_error(engine)
    assert uncalibrated > 0.5
    assert calibrated < uncalibrated / 5
    assert calibrated < 1.5 * kv_error(make_engine(ordinary))


def test_what_is_measured_wins_over_what_comes_with_the_weights():
    policy = make_policy()
    engine = make_engine(policy)
    state = dict(policy.state_dict()) | {name: torch.tensor(value) for name, value in SCALES.items()}
    report = Refitter(engine).refit(state, calibration=BATCH)
    expected = {name: MARGIN * maximum / 448 for name, maximum in maxima_of(policy, BATCH).items()}
    assert report.kv.origin == "calibration"
    assert scales_of(engine) == report.kv.scales == pytest.approx(expected, rel=0.02)


def test_prompts_need_a_tokenizer():
    refitter = Refitter(make_engine(make_policy()))
    with pytest.raises(UnsupportedEngineError, match="has no tokenizer: pass token ids"):
        refitter.refit(make_policy().state_dict(), calibration=["a prompt"])
    with pytest.raises(UnsupportedEngineError, match="has no tokenizer: pass token ids"):
        refitter.calibrate("a prompt")
    assert not refitter.is_dirty


@pytest.mark.parametrize("order", [{"calibration": BATCH}, {"kv_scales": SCALES}], ids=lambda order: next(iter(order)))
def test_a_model_without_fp8_kv_says_how_to_get_it(order):
    engine = make_plain_engine(make_policy(seed=1))
    refitter = Refitter(engine)
    before = log_probs(engine)
    with pytest.raises(UnsupportedEngineError, match=r'to_block_fp8\(model, kv_cache_dtype="fp8"\)'):
        refitter.refit(make_policy(seed=2).state_dict(), **order)
    with pytest.raises(UnsupportedEngineError, match=r'to_block_fp8\(model, kv_cache_dtype="fp8"\)'):
        refitter.calibrate(BATCH)
    assert torch.equal(log_probs(engine), before)
    state = dict(make_policy(seed=2).state_dict()) | {name: torch.tensor(0.0) for name in NAMES}
    assert set(refitter.refit(state).ignored) == set(NAMES)


def test_passes_of_two_threads_leave_compilation_as_it_was():
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, _: graph_runs.append(1) or graph.forward)
    both, first_is_done, graph_runs = Barrier(2), Event(), []
    prefills = [DecoderPrefill(make_policy()) for _ in range(2)]

    def run(number):
        def observe(layer, _, k, v):
            if layer == 0:
                both.wait(30)  # both have begun
                assert number == 0 or first_is_done.wait(30)

        prefills[number]([torch.tensor(BATCH[0])], observe)
        first_is_done.set()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    compiled(torch.ones(1))
    assert graph_runs == [1]


def hooks_of(engine):
    return {
        name: (dict(module._forward_pre_hooks), dict(module._forward_hooks)) for name, module in engine.named_modules()
    }


def test_a_pass_that_breaks_leaves_nothing_behind():
    engine = make_engine(make_policy()).train()
    engine.model.layers[2].eval()
    modes = {name: module.training for name, module in engine.named_modules()}
    live = [(id(tensor), tensor.data_ptr()) for tensor in (*engine.parameters(), *engine.buffers())]

    def break_down(*_):
        raise ArithmeticError("on purpose")

    handle = engine.model.layers[1].mlp.register_forward_hook(break_down)
    hooks = hooks_of(engine)
    refitter = Refitter(engine)
    with pytest.raises(ArithmeticError, match="on purpose"):
        refitter.calibrate(BATCH)
    assert hooks_of(engine) == hooks and not refitter.is_dirty
    handle.remove()
    hooks = hooks_of(engine)
    refitter.calibrate(BATCH)
    assert hooks_of(engine) == hooks
    assert modes == {name: module.training for name, module in engine.named_modules()}
    assert live == [(id(tensor), tensor.data_ptr()) for tensor in (*engine.parameters(), *engine.buffers())]


def test_a_model_in_training_is_measured_as_it_infers():
    policy = make_policy(attention_dropout=0.5)
    engine = make_engine(policy).train()
    engine.gradient_checkpointing_enable()
    report = Refitter(engine).refit(policy.state_dict(), calibration=BATCH)
    expected = {name: MARGIN * maximum / 448 for name, maximum in maxima_of(policy, BATCH).items()}
    assert report.kv.scales == pytest.approx(expected, rel=0.02)
    assert engine.training and engine.model.layers[0].gradient_checkpointing


def test_scales_are_no_weights():
    engine, plain = make_engine(make_policy()), make_plain_engine(make_policy())
    assert engine.state_dict().keys() == plain.state_dict().keys()
    refitter = Refitter(engine)
    layout = refitter.layout()
    assert layout.slots == Refitter(plain).layout().slots
    assert (layout.kv.dtype, layout.kv.backend, layout.kv.refusals) == ("fp8_e4m3", "sdpa", ())
    assert layout.kv.scales == {f"model.layers.{index}.self_attn": ("k", "v") for index in range(3)}
    refitter.refit(plain.state_dict(), calibration=BATCH)
    assert scales_of(engine) == refitter.refit(plain.state_dict(), calibration=BATCH).kv.scales


def test_copies_have_scales_of_their_own():
    engine = make_engine(make_policy())
    Refitter(engine).refit(make_policy(seed=2).state_dict(), calibration=BATCH)
    file = io.BytesIO()
    torch.save(engine, file)
    file.seek(0)
    for twin in (copy.deepcopy(engine), torch.load(file, weights_only=False)):
        assert scales_of(twin) == scales_of(engine)
        assert torch.equal(log_probs(twin), log_probs(engine))
        before = scales_of(engine)
        Refitter(twin).refit(make_policy(seed=2).state_dict(), kv_scales=SCALES)
        assert scales_of(twin) == pytest.approx(SCALES, rel=1e-7) and scales_of(engine) == before


def test_scales_stay_float32_when_the_model_changes_dtype():
    engine = make_engine(make_policy())
    policy = make_policy(seed=2)
    refitter = Refitter(engine)
    refitter.refit(policy.state_dict(), kv_scales=SCALES)
    kv = engine.model.layers[0].self_attn.attn
    place = kv.k_scale.data_ptr()
    for kind in (torch.float16, torch.float64, torch.bfloat16):
        kv.to(kind)
        assert kv.k_scale.dtype is torch.float32 and kv.k_scale.data_ptr() == place
    assert scales_of(engine) == pytest.approx(SCALES, rel=1e-7)
    kv.to("meta")
    assert kv.k_scale.is_meta and kv.k_scale.dtype is torch.float32
    kv.to_empty(device="cpu")
    refitter.refit(policy.state_dict(), calibration=BATCH)
    assert kv.k_scale.item() == scales_of(engine)[NAMES[0]] != 0


def test_to_block_fp8_may_be_called_again():
    engine = to_block_fp8(make_plain_engine(make_policy()), kv_cache_dtype="fp8")
    hooks = hooks_of(engine)
    Refitter(engine).calibrate(BATCH)
    scales = scales_of(engine)
    assert to_block_fp8(engine, kv_cache_dtype="fp8") is engine
    assert hooks_of(engine) == hooks and scales_of(engine) == scales
    with pytest.raises(ValueError, match='give "auto" or "fp8"'):
        to_block_fp8(engine, kv_cache_dtype="int8")


def test_mixtures_of_experts_have_plain_attention():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    policy = make_policy(Qwen3MoeConfig, **sizes)
    report = Refitter(make_engine(policy)).refit(policy.state_dict(), calibration=BATCH)
    expected = {name: MARGIN * maximum / 448 for name, maximum in maxima_of(policy, BATCH).items()}
    assert report.kv.scales == pytest.approx(expected, rel=0.02)


def test_sliding_and_full_layers_may_alternate():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    policy = make_policy(Gemma3TextConfig, sliding_window=4, layer_types=types)
    engine = make_engine(policy)
    report = Refitter(engine).refit(policy.state_dict(), calibration=TOKENS[:2])
    maxima = maxima_of(policy, TOKENS[:2].tolist())
    assert report.kv.scales == pytest.approx({name: MARGIN * value / 448 for name, value in maxima.items()}, rel=0.02)
    cache = engine(TOKENS).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [3, 32, 3]
    assert engine.generate(PROMPT, max_new_tokens=6, do_sample=False).shape == (2, 16)


def test_rope_that_depends_on_the_length_may_replace_its_tables():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    policy = make_policy(Phi3Config, original_max_position_embeddings=8, rope_parameters=rope)
    engine = make_engine(policy)
    refitter = Refitter(engine)
    for batch in (BATCH, [[2, 3]]):
        report = refitter.refit(policy.state_dict(), calibration=batch)
        assert len(report.kv.scales) == 6 and not refitter.is_dirty


@torch.no_grad()
def test_speculation_may_take_tokens_back_from_a_sliding_window():
    engine = make_engine(make_policy(MistralConfig, sliding_window=6))
    rolled_back, straight = DynamicCache(config=engine.config), DynamicCache(config=engine.config)
    rolled_back.activate_past_recording()
    engine(TOKENS[:, :20], past_key_values=rolled_back)
    rolled_back.crop(-4)
    engine(TOKENS[:, :16], past_key_values=straight)
    after, expected = (engine(TOKENS[:, 16:18], past_key_values=cache).logits for cache in (rolled_back, straight))
    torch.testing.assert_close(after, expected, rtol=0.05, atol=0.05)


UNSUPPORTED = {
    "encoder-decoder": (
        AutoModelForSeq2SeqLM,
        T5Config(vocab_size=32, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0),
        "not a decoder-only language model",
    ),
    "linear-attention": (
        AutoModelForCausalLM,
        Qwen3NextConfig(
            **SIZES,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "layers of another kind",
    ),
    "state-space": (
        AutoModelForCausalLM,
        MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4),
        "cannot have an FP8 KV cache",
    ),
    "latent-attention": (
        AutoModelForCausalLM,
        DeepseekV3Config(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
        ),
        "0 of its 1 layers have causal self-attention",
    ),
}


@pytest.mark.parametrize(("auto", "config", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_other_kinds_of_attention_are_refused_before_anything_is_replaced(auto, config, message):
    model = auto.from_config(config, dtype=torch.bfloat16)
    kinds = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedEngineError, match=message):
        to_block_fp8(model, kv_cache_dtype="fp8")
    assert kinds == {name: type(module) for name, module in model.named_modules()}
    to_block_fp8(model)


def test_a_base_model_can_be_calibrated_too():
    policy = make_policy().model
    engine = make_engine(policy)
    report = Refitter(engine).refit(policy.state_dict(), calibration=BATCH)
    expected = {name: MARGIN * maximum / 448 for name, maximum in maxima_of(make_policy(), BATCH).items()}
    assert isinstance(engine, type(AutoModel.from_config(engine.config)))
    assert {f"model.{name}": value for name, value in report.kv.scales.items()} == pytest.approx(expected, rel=0.02)


def test_the_engine_serves_no_prompts():
    engine = TransformersEngine(make_engine(make_policy()))
    with pytest.raises(UnsupportedEngineError, match="pass token ids"):
        engine.tokenize(["a"]).send(None)


def test_print_shows_the_scales():
    assert str(Fp8Kv(torch.device("cpu"))) == "Fp8Kv(k_scale=1.0, v_scale=1.0)"
