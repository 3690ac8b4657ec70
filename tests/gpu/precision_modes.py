"""One trainer in the precision of an engine.

mismatch   k3 of a BF16 and of a unified trainer with one vLLM engine
step       forward and backward of layers of the 8B shape, compiled
"""

import copy
import statistics
from pathlib import Path

import policies
import torch
from harness import DEVICE, FLAG, WHOLE, log, save, wait_for_gpu
from live_engines import SMALL, Vllm
from scripts import wait_for_turn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from fp8refit import PrecisionError, Refitter
from fp8refit.bench.clock import device_seconds
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.training import correction, precision

TOKENS = 8192
ROUNDS, WARM_UP = 12, 4
WEIGHTS = ("ordinary", "outliers", "ordinary, residuals not scaled", "outliers, residuals not scaled")
"""Kinds of random weights. Projections that write to the residual stream are scaled by `1 / sqrt(2 layers)`, as GPT-2 and its
successors are initialised: without it every layer of a deep model of noise amplifies the last bit of the one before."""
NUM_PROMPTS, PROMPT, ANSWER = 16, 64, 64


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int, weights: str) -> None:
    """Random weights, with the outlier channels of real ones if `weights` begins with "outliers"."""
    named = dict(model.named_parameters())
    policies.fill_policy(named, seed)
    generator = torch.Generator(policies.DEVICE).manual_seed(seed)
    for name, tensor in named.items():
        if weights.startswith("ordinary") and tensor.ndim > 1:
            tensor.normal_(0.0, 0.02, generator=generator)
        if not weights.endswith("not scaled") and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_((2 * model.config.num_hidden_layers) ** -0.5)


def make_model(folder: Path, **changes) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device(policies.DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the answers, (B, ANSWER)."""
    found = []
    for row in rows.split(4):
        logits = model(input_ids=row[:, :-1], use_cache=False).logits[:, PROMPT - 1 :].float()
        found.append(logits.log_softmax(-1).gather(-1, row[:, PROMPT:, None])[..., 0])
    return torch.cat(found)


def run_mismatch(options) -> dict:
    """k3 of both trainers with what the engine sampled and said of it."""
    import vllm

    AttentionInterface.register("engine", attend_as_engine)
    folder = options.work / options.shape
    policies.write_config(options.shape, folder)
    model = make_model(folder)
    llm = Vllm(
        folder,
        is_inside=True,
        load_format="dummy",
        quantization=None if options.bf16 else options.online,
        enable_prefix_caching=False,
        enforce_eager=True,
        **SMALL | {"max_model_len": 512, "kv_cache_memory_bytes": 2 << 30},
    ).candidate
    refitter = None if options.bf16 else Refitter(llm)
    slots = refitter.layout().slots if refitter is not None else ()
    formats = {f"{slot.kernel} {slot.scale_format}" for slot in slots if slot.scale_format}
    found: dict = {"formats": sorted(formats), "vllm": vllm.__version__}
    for weights in WEIGHTS:
        found[weights] = mismatch_of(llm, refitter, copy.deepcopy(model), weights)
        save(options, found)
    return found


def mismatch_of(llm, refitter: Refitter | None, model: torch.nn.Module, weights: str) -> dict:
    """Of a BF16 trainer with what the engine sampled from its weights, then of the same in its precision, if possible.

    An engine without FP8, which no refitter takes, loads weights by itself.
    """
    import vllm

    fill(model, 1, weights)
    if refitter is not None:
        refitter.refit(model.state_dict())
    else:
        llm.apply_model(lambda network: bool(network.load_weights(model.state_dict().items())))
    generator = torch.Generator().manual_seed(0)
    most = min(model.config.vocab_size, 100_000)
    prompts = torch.randint(most // 100, most, (NUM_PROMPTS, PROMPT), generator=generator)
    sampling = vllm.SamplingParams(
        temperature=1.0, seed=0, max_tokens=ANSWER, logprobs=0, detokenize=False, ignore_eos=True
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
    answers = [output.outputs[0] for output in llm.generate(asked, sampling, use_tqdm=False)]
    tokens = torch.tensor([answer.token_ids for answer in answers])
    said = said_of(tokens, [answer.logprobs for answer in answers])
    rows, mask = torch.cat([prompts, tokens], 1).to(policies.DEVICE), torch.ones_like(said, dtype=torch.bool)
    found = {"plain": vars_of(correction.mismatch(logprobs_of(model, rows), said, mask))}
    if refitter is None:
        return found  # what kernels alone do, without FP8
    try:
        unified = precision.unify(model, like=refitter.layout())
    except PrecisionError as error:
        return found | {"not_unified": str(error)}
    report = refitter.refit(unified.served())
    found["unified"] = vars_of(correction.mismatch(logprobs_of(model, rows), said, mask))
    if policies.DEVICE == "cuda":
        model.set_attn_implementation("engine")
        found["unified, engine's attention"] = vars_of(correction.mismatch(logprobs_of(model, rows), said, mask))
    found["engine, reading"] = vars_of(correction.mismatch(read_by(llm, rows), said, mask))
    log(f"{weights}: {found}")
    return found | {"num_quantized": report.num_quantized}


def attend_as_engine(module, query, key, value, mask, scaling=None, **_):
    """FlashAttention 3 as vLLM calls it, for sequences of one length; see `transformers.AttentionInterface`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    rows, _, length, _ = query.shape
    ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
    heads = [each.transpose(1, 2).flatten(0, 1).contiguous() for each in (query, key, value)]
    out = flash_attn_varlen_func(
        *heads,
        max_seqlen_q=length,
        max_seqlen_k=length,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        softmax_scale=scaling,
        causal=True,
        fa_version=3,
    )
    return out.unflatten(0, (rows, length)), None


def read_by(llm, rows: torch.Tensor) -> torch.Tensor:
    """What the engine says of answers as prompts, (B, ANSWER): it differs from itself, too."""
    import vllm

    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows.tolist()], sampling, use_tqdm=False)
    return said_of(rows[:, PROMPT:], [output.prompt_logprobs[PROMPT:] for output in outputs])


def said_of(tokens: torch.Tensor, entries: list) -> torch.Tensor:
    """The log-probabilities of tokens (B, N) in vLLM's dictionaries of each."""
    pairs = [zip(row, steps, strict=True) for row, steps in zip(tokens.tolist(), entries, strict=True)]
    return torch.tensor([[entry[token].logprob for token, entry in row] for row in pairs]).to(policies.DEVICE)


def vars_of(metrics: object) -> dict:
    return {name: float(getattr(metrics, name)) for name in ("k3", "token_mult_prob_error", "ess")}


def run_step(options) -> dict:
    """Interleaved medians of a BF16 stack and of the same in the precision of an engine, each layer compiled."""
    folder = options.work / "qwen3-8b"
    policies.write_config("qwen3-8b", folder)
    plain = make_model(folder, num_hidden_layers=options.layers, vocab_size=1024, use_cache=False).train()
    fill(plain, 1, "outliers")
    models = {"bf16": plain} | {scale_format: copy.deepcopy(plain) for scale_format in ("fp32", "ue8m0")}
    unified = {name: precision.unify(m, like=layout_of(m, name)) for name, m in models.items() if name != "bf16"}
    for one in unified.values():
        one.refresh()
    ids = torch.randint(0, 1024, (options.batch, TOKENS // options.batch), device="cuda")
    for model in models.values():
        for layer in model.model.layers:
            layer.compile()
    wait_for_turn()
    times: dict[str, list[float]] = {name: [] for name in models}
    seen: dict[str, list[float]] = {"compare_s": [], "compare_and_quantize_s": []}
    for number in range(WARM_UP + ROUNDS):
        for name, model in models.items():
            seconds = timed(
                lambda model=model: model.model(input_ids=ids).last_hidden_state.float().square().mean().backward()
            )
            model.zero_grad(set_to_none=True)
            if number >= WARM_UP:
                times[name].append(seconds)
        seen["compare_s"].append(timed(unified["fp32"].refresh))
        for weight in unified["fp32"]._weights.weights:
            weight.parameter.data.neg_()
        seen["compare_and_quantize_s"].append(timed(unified["fp32"].refresh))
        log(f"round {number}")
    profiles = {name: profile(model, ids) for name, model in models.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "layers": options.layers,
        "tokens": TOKENS,
        "batch": options.batch,
        "seconds": times,
        "median_s": medians,
        "speedup": {name: medians["bf16"] / medians[name] for name in unified},
        **{name: statistics.median(values[WARM_UP:]) for name, values in seen.items()},
        "profiles": profiles,
    }


def layout_of(model: torch.nn.Module, scale_format: str) -> EngineLayout:
    """Of an engine that holds every linear of the layers in one format."""
    slots = []
    for name, tensor in model.state_dict().items():
        is_quantized = "_proj" in name
        slots.append(
            SlotLayout(
                name=name,
                module=name,
                full_shape=tuple(tensor.shape),
                shape=tuple(tensor.shape),
                offset=(0,) * tensor.ndim,
                dtype="float8_e4m3fn" if is_quantized else "bfloat16",
                scale_format=scale_format if is_quantized else None,
                block_size=(128, 128) if is_quantized else None,
                kernel="none",
            )
        )
    return EngineLayout(
        engine="none", versions={}, device="cuda", slots=tuple(slots), aliases={}, refusals=(), rounds_once=True
    )


def timed(run) -> float:
    wait_for_gpu()
    return device_seconds(run, DEVICE)


def profile(model: torch.nn.Module, ids: torch.Tensor) -> list[list]:
    """The kernels that take most of a step: name, calls and milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        model.model(input_ids=ids).last_hidden_state.float().square().mean().backward()
        torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    return [[event.key[:120], event.count, event.self_device_time_total / 1e3] for event in events[:25]]


OPTIONS = {
    "online": {"default": "fp8_per_block", "help": "how the engine quantizes BF16 weights"},
    "bf16": FLAG | {"help": "an engine without FP8: the least mismatch there can be"},
    "layers": WHOLE | {"default": 8},
    "batch": WHOLE | {"default": 4, "help": "sequences that the tokens are cut into"},
}
MODES = {"mismatch": run_mismatch, "step": run_step}
