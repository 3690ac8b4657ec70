"""What the embedded engine refuses: requests while it is dirty, compiled ones too; refits amid requests; caches of before."""

import contextlib
import copy
import io
import threading

import pytest
import torch
from fp8refit_transformers import to_block_fp8
from fp8refit_transformers.admission import find_call, refusal_of
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    Qwen3Config,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from fp8refit import EngineBusyError, EngineDirtyError, NonFiniteError, RefitError, Refitter, StaleCacheError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
PROMPT = torch.arange(2, 14).view(2, 6)
HIDDEN = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def make_policy(seed=1, config=Qwen3Config, **sizes):
    torch.manual_seed(seed)
    config = config(**{**SIZES, "tie_word_embeddings": False} | sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def make_engine(seed=1, **options):
    return to_block_fp8(make_policy(seed), **options)


def soil(refitter, policy):
    """Refit part way."""
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    state["model.norm.weight"][0] = torch.nan
    with pytest.raises(NonFiniteError):
        refitter.refit(state)
    assert refitter.is_dirty


ENTRIES = {
    "model": lambda engine, ids: engine(input_ids=ids).logits,
    "forward": lambda engine, ids: engine.forward(input_ids=ids).logits,
    "decoder": lambda engine, ids: engine.model(input_ids=ids).last_hidden_state,
    "embedding": lambda engine, ids: engine.model.embed_tokens(ids),
    "norm": lambda engine, ids: engine.model.norm(HIDDEN),
    "norm of a layer": lambda engine, ids: engine.model.layers[0].input_layernorm(HIDDEN),
    "fp8 linear": lambda engine, ids: engine.model.layers[0].mlp.up_proj(HIDDEN),
    "head": lambda engine, ids: engine.lm_head(HIDDEN),
}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "entry"),
    [
        *((backend, entry) for backend in (None, "eager") for entry in ENTRIES),
        *(("aot_eager", entry) for entry in ("model", "embedding", "fp8 linear")),
    ],
)
@torch.no_grad()
def test_a_dirty_engine_refuses_wherever_it_is_entered_and_serves_once_it_is_healed(backend, entry):
    engine, call = make_engine(), ENTRIES[entry]
    refitter = Refitter(engine)

    def compiled():
        called = lambda ids: call(engine, ids)  # noqa: E731
        return called if backend is None else torch.compile(called, backend=backend)

    before, never_called = compiled(), compiled()
    served = before(PROMPT)
    for seed in (2, 3):
        soil(refitter, make_policy(9))
        for entered in (before, compiled(), before):
            with pytest.raises(EngineDirtyError, match=r"NaN or Inf in 1 tensor\(s\): model\.norm\.weight"):
                entered(PROMPT)
        policy = make_policy(seed)
        refitter.refit(policy.state_dict())
        expected = call(to_block_fp8(policy), PROMPT)
        assert torch.equal(before(PROMPT), expected) and torch.equal(never_called(PROMPT), expected)
        assert entry.startswith("norm") or not torch.equal(served, expected)


@pytest.mark.parametrize("entry", ["model", "embedding", "norm", "fp8 linear"])
@torch.no_grad()
def test_code_that_is_compiled_without_breaks_is_refused_too(entry):
    engine = make_engine()
    refitter = Refitter(engine)
    compiled = torch.compile(lambda ids: ENTRIES[entry](engine, ids), backend="eager", fullgraph=True)
    compiled(PROMPT)
    soil(refitter, make_policy(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the model refuses requests until a refit succeeds"):
        compiled(PROMPT)
    policy = make_policy(3)
    refitter.refit(policy.state_dict())
    assert torch.equal(compiled(PROMPT), ENTRIES[entry](to_block_fp8(policy), PROMPT))


@pytest.mark.parametrize("way", ["a wrapper", "in place", "a part of it", "before it was converted"])
@torch.no_grad()
def test_modules_compiled_by_themselves_refuse(way):
    policy = make_policy()
    compiled = None
    if way == "before it was converted":
        compiled = torch.compile(policy.model.embed_tokens, backend="eager")
        compiled(PROMPT)
    engine = to_block_fp8(policy)
    if way == "a wrapper":
        compiled = torch.compile(engine, backend="eager")
    elif way == "in place":
        engine.compile(backend="eager")
        compiled = engine
    elif way == "a part of it":
        engine.model.layers[0] = torch.compile(engine.model.layers[0], backend="eager")
        compiled = engine
    compiled(PROMPT)
    refitter = Refitter(engine)
    soil(refitter, make_policy(2))
    with pytest.raises(EngineDirtyError):
        compiled(PROMPT)
    refitter.refit(make_policy(3).state_dict())
    compiled(PROMPT)


def test_what_is_refused_is_itself_again_afterwards():
    engine = make_engine(kv_cache_dtype="fp8")
    refitter = Refitter(engine)
    classes = {name: type(module) for name, module in engine.named_modules()}
    layout = refitter.layout()
    soil(refitter, make_policy(2))
    assert refitter.layout() == layout
    refitter.close()
    assert refitter.layout() == layout
    assert all(isinstance(module, classes[name]) for name, module in engine.named_modules())
    refitter.refit(make_policy(3).state_dict(), calibration=PROMPT)
    assert {name: type(module) for name, module in engine.named_modules()} == classes
    assert not [key for module in engine.modules() for key in vars(module) if "refusal" in key]


def test_copies_of_a_dirty_engine_are_dirty_in_this_process_and_the_next():
    engine = make_engine()
    soil(Refitter(engine), make_policy(2))
    file = io.BytesIO()
    torch.save(engine, file)
    file.seek(0)
    for twin in (copy.deepcopy(engine), torch.load(file, weights_only=False)):
        for request in (lambda twin=twin: twin(PROMPT), lambda twin=twin: twin.model(PROMPT)):
            with pytest.raises(EngineDirtyError, match=r"model\.norm\.weight"):
                request()
        assert Refitter(twin).is_dirty
        Refitter(twin).refit(make_policy(3).state_dict())
        assert torch.equal(twin(PROMPT).logits, make_engine(3)(PROMPT).logits)
    assert refusal_of(engine) is not None


def test_while_a_refit_measures_scales_other_threads_are_refused(monkeypatch):
    engine, refused = make_engine(kv_cache_dtype="fp8"), []
    refitter = Refitter(engine)

    def ask(*_):
        def request():
            for entry in (ENTRIES["model"], ENTRIES["decoder"], ENTRIES["embedding"]):
                with pytest.raises(EngineDirtyError, match="under way"):
                    entry(engine, PROMPT)
                refused.append(entry)

        thread = threading.Thread(target=request)
        thread.start()
        thread.join()

    handle = engine.model.layers[0].mlp.register_forward_hook(ask)
    refitter.refit(make_policy(2).state_dict(), calibration=PROMPT)
    handle.remove()
    assert len(refused) == 3
    assert torch.equal(engine(PROMPT, use_cache=False).logits, make_engine(2)(PROMPT).logits)


# Refits amid requests.


class Calls:
    """Acts once, at one of the calls from within `generate`."""

    def __init__(self, act, at):
        self.act, self.left = act, at

    def step(self):
        self.left -= 1
        if self.left == 0:
            self.act()


class Streamer(BaseStreamer):
    def __init__(self, calls):
        self.calls = calls

    def put(self, value):
        self.calls.step()

    def end(self):
        pass


class Processor(LogitsProcessor):
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores):
        self.calls.step()
        return scores


class Criterion(StoppingCriteria):
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.step()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate_with(engine, way, act, **options):
    """Generate, and `act` after some tokens."""
    calls = Calls(act, at=3)
    wired = {
        "streamer": {"streamer": Streamer(calls)},
        "logits processor": {"logits_processor": LogitsProcessorList([Processor(calls)])},
        "stopping criterion": {"stopping_criteria": StoppingCriteriaList([Criterion(calls)])},
    }[way]
    tokens = engine.generate(PROMPT[:1], max_new_tokens=8, do_sample=False, **wired, **options)
    assert calls.left <= 0
    return tokens


WAYS = ["streamer", "logits processor", "stopping criterion"]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_refit_from_within_generate_is_refused_and_its_tokens_are_of_one_policy(way, use_cache, kv_cache_dtype):
    engine = make_engine(kv_cache_dtype=kv_cache_dtype)
    refitter, errors = Refitter(engine), []
    expected = engine.generate(PROMPT[:1], max_new_tokens=8, do_sample=False, use_cache=use_cache)

    def refit():
        with pytest.raises(EngineBusyError, match="generate in thread MainThread") as raised:
            refitter.refit(make_policy(2).state_dict())
        errors.append(raised.value)

    tokens = generate_with(engine, way, refit, use_cache=use_cache)
    assert torch.equal(tokens, expected) and len(errors) == 1
    assert (refitter.version, refitter.is_dirty, refusal_of(engine)) == (0, False, None)
    refitter.refit(make_policy(2).state_dict())
    assert refitter.version == 1


@pytest.mark.parametrize("call", ["generate", "forward", "a layer", "compiled"])
def test_a_refit_while_another_thread_is_at_work_is_refused(call):
    engine = make_engine()
    reached, proceed, results = threading.Event(), threading.Event(), []

    def wait(*_):
        reached.set()
        assert proceed.wait(60)

    if call == "generate":
        request = lambda: generate_with(engine, "streamer", wait)  # noqa: E731
    else:
        hook = torch.compiler.disable(wait)
        # A break inside a layer has the compiler trace every module around it again, for half a minute.
        hooked = engine.lm_head if call == "compiled" else engine.model.layers[0].mlp
        handle = hooked.register_forward_hook(hook)
        called = {
            "forward": engine,
            "a layer": lambda ids: engine.model.layers[0].mlp(HIDDEN),
            "compiled": torch.compile(engine, backend="eager"),
        }[call]
        request = lambda: called(PROMPT)  # noqa: E731
    refitter = Refitter(engine)
    thread = threading.Thread(target=lambda: results.append(request()), name="rollouts")
    thread.start()
    try:
        assert reached.wait(60)
        with pytest.raises(EngineBusyError, match="in thread rollouts"):
            refitter.refit(make_policy(2).state_dict())
    finally:
        proceed.set()
        thread.join(60)
    assert len(results) == 1, "the request was not disturbed"
    assert (refitter.version, refitter.is_dirty, find_call(engine)) == (0, False, None)
    if call != "generate":
        handle.remove()
    refitter.refit(make_policy(2).state_dict())
    assert torch.equal(engine(PROMPT).logits, make_engine(2)(PROMPT).logits)


def test_a_request_that_comes_when_the_engine_was_ready_keeps_the_refit_out(monkeypatch):
    engine = make_engine()
    refitter, outcomes = Refitter(engine), []

    def generate_in_the_middle():
        def refit(_):
            with contextlib.suppress(RefitError):
                refitter.refit(make_policy(2).state_dict())
            outcomes.append(refitter.version)

        adapter = engine._fp8refit_engine.engine
        check = adapter.check_ready
        calls = iter([False, True])

        async def check_late():
            if next(calls, True):
                await check()

        monkeypatch.setattr(adapter, "check_ready", check_late)
        return generate_with(engine, "streamer", lambda: refit(None))

    expected = engine.generate(PROMPT[:1], max_new_tokens=8, do_sample=False)
    assert torch.equal(generate_in_the_middle(), expected)
    assert outcomes == [0] and refusal_of(engine) is None


def test_a_model_may_refit_itself_and_other_models_may_work():
    class Rollouts(type(make_policy())):
        def follow(self, policy):
            return Refitter(self).refit(policy.state_dict())

    engine = to_block_fp8(Rollouts(make_policy().config).bfloat16())
    assert engine.follow(make_policy(2)).version == 1
    other, versions = make_policy(5), []
    other.model.register_forward_hook(lambda *_: versions.append(engine.follow(make_policy(3)).version))
    other(PROMPT)
    assert versions == [2]


# Caches.


@torch.no_grad()
def filled(engine, kind=DynamicCache):
    cache = kind(config=engine.config) if kind is DynamicCache else kind(config=engine.config, max_cache_len=32)
    engine(PROMPT, past_key_values=cache)
    return cache


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_a_cache_of_before_a_refit_is_refused_until_it_is_empty(kind, backend):
    engine = make_engine()
    refitter = Refitter(engine)
    call = engine if backend is None else torch.compile(engine, backend=backend)
    early, late = filled(engine, kind), None
    call(PROMPT[:, :1], past_key_values=early)
    for seed in (2, 3):
        refitter.refit(make_policy(seed).state_dict())
        for cache in (early, copy.deepcopy(early), late):
            if cache is not None:
                with pytest.raises(StaleCacheError, match=r"of policy version .*; start with an empty cache"):
                    call(PROMPT[:, :1], past_key_values=cache)
        late = filled(engine, kind)
        call(PROMPT[:, :1], past_key_values=late)
    late.reset()
    refitter.refit(make_policy(2).state_dict())
    got = engine(PROMPT, past_key_values=late).logits
    assert torch.equal(got, engine(PROMPT, past_key_values=filled_with_nothing(engine, kind)).logits)


def filled_with_nothing(engine, kind):
    return kind(config=engine.config) if kind is DynamicCache else kind(config=engine.config, max_cache_len=32)


@torch.no_grad()
def test_a_refit_that_wrote_nothing_leaves_caches_alone():
    engine = make_engine()
    cache, other = filled(engine), filled(engine)
    with pytest.raises(ValueError, match="missing"):
        Refitter(engine).refit({})
    expected = make_engine()(torch.cat([PROMPT, PROMPT[:, :1]], 1)).logits[:, -1:]
    assert torch.allclose(engine(PROMPT[:, :1], past_key_values=cache).logits, expected, atol=0.05)
    soil(Refitter(engine), make_policy(2))
    Refitter(engine).refit(make_policy(1).state_dict())
    with pytest.raises(StaleCacheError, match="version 0, but the model serves version 1"):
        engine(PROMPT[:, :1], past_key_values=other)


@torch.no_grad()
def test_caches_are_shared_with_a_copy_until_either_is_refitted():
    engine = make_engine()
    twin = copy.deepcopy(engine)
    twin(PROMPT[:, :1], past_key_values=filled(engine))
    mine = filled(engine)
    Refitter(twin).refit(make_policy(2).state_dict())
    with pytest.raises(StaleCacheError):
        twin(PROMPT[:, :1], past_key_values=mine)
    engine(PROMPT[:, :1], past_key_values=mine)


@torch.no_grad()
def test_a_cache_of_nobody_knows_what_is_refused_after_a_refit():
    engine, stranger = make_engine(), make_policy(4)
    engine(PROMPT[:, :1], past_key_values=stranger(PROMPT).past_key_values)
    Refitter(engine).refit(make_policy(2).state_dict())
    with pytest.raises(StaleCacheError, match="of an unknown policy"):
        engine(PROMPT[:, :1], past_key_values=stranger(PROMPT).past_key_values)


@torch.no_grad()
def test_recurrent_states_of_before_a_refit_are_refused_as_well():
    sizes = {"state_size": 4, "num_attention_heads": 1, "head_dim": 64}
    policy = make_policy(config=MambaConfig, **sizes)
    policy.config.quantization_config = {"modules_to_not_convert": ["dt_proj"]}  # its weight is read past the module
    engine = to_block_fp8(copy.deepcopy(policy))
    cache = engine(PROMPT, use_cache=True).cache_params
    engine(PROMPT[:, :1], cache_params=cache, use_cache=True)
    Refitter(engine).refit(policy.state_dict())
    with pytest.raises(StaleCacheError):
        engine(PROMPT[:, :1], cache_params=cache, use_cache=True)


@pytest.mark.parametrize("kind", [None, "static"])
@torch.no_grad()
def test_generate_needs_nothing_after_a_refit(kind):
    engine = make_engine()
    for seed in (2, 3, 4):
        Refitter(engine).refit(make_policy(seed).state_dict())
        tokens = [
            model.generate(PROMPT, max_new_tokens=6, do_sample=False, cache_implementation=kind, disable_compile=True)
            for model in (engine, make_engine(seed))
        ]
        assert torch.equal(*tokens)


@torch.no_grad()
def test_compiled_code_is_not_compiled_anew_for_another_policy():
    engine = make_engine()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    call = torch.compile(engine, backend=count, dynamic=True)
    policies = [make_policy(seed).state_dict() for seed in (2, 3)]
    for number in range(12):
        cache = filled(engine)
        call(PROMPT[:, :1], past_key_values=cache)
        call(PROMPT[:, :1], past_key_values=cache)
        if number == 2:
            settled = len(graphs)
        Refitter(engine).refit(policies[number % 2])
    assert len(graphs) == settled
