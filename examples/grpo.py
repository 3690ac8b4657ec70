"""Reinforcement learning with FP8 rollouts: GRPO on a task that checks itself, the engine refitted after every step.

python examples/grpo.py --variants bf16,fp8,fp8+token,fp8-stale                    # transformers on a CPU, a few minutes
python examples/grpo.py --engine vllm --size small --seeds 0,1,2 --out grpo        # a GPU with vLLM

A small Qwen3 learns to sort numbers: first from example answers, most of them in falling order, then from rewards for
rising order only. A variant sets the precision of the rollout engine, and how the loss corrects for it:
PRECISION[-stale][+CORRECTION].

  bf16  fp8  fp8kv                    weights in BF16; in block FP8; also an FP8 KV cache, calibrated at every refit
  unified                             block FP8, and the trainer computes with the engine's codes and scales
  -stale                              the engine is never refitted, for comparison
  +token +sequence +icepop +adaptive  importance weights (`fp8refit.training.correction`); none without it

One engine serves all variants and seeds of a precision: every run begins with a refit. With `--at-once`, seeds run in
parallel processes with an engine each: that is faster, but makes the times meaningless. `OUT/grpo.json` holds every
step of every finished run; plots are next to it. The same command continues with what is missing, also after
`--minutes`. Other variants, seeds and learning rates may be added; other settings need another `--out`.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from grpo_engines import ENGINES, MAX_CALIBRATION, Engine, Rollouts
from grpo_results import FILE, add_run, describe, draw, read_results
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from fp8refit import __version__, quantize_blockwise
from fp8refit.training import correction
from fp8refit.training.precision import Unified, unify

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMMAND = "FP8REFIT_GRPO_COMMAND"
"""Environment variable with the original command line, for the processes of one precision."""
UNFINISHED = 75
"""Exit code when the time is up: run the same command again."""
VOCABULARY = 128
SEPARATOR, END, PADDING = 125, 126, 127
PRECISIONS = ("bf16", "fp8", "fp8kv", "unified")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, its task, and how it learns."""

    hidden: int
    heads: int
    """Number of query heads; there are two key-value heads."""
    layers: int
    num_values: int
    """Numbers to sort are smaller than this."""
    num_numbers: int
    """How many numbers a prompt has."""
    warm_up_lr: float
    warm_up_batch: int
    lr: float
    num_prompts: int
    """How many prompts a step has."""


SIZES = {
    "tiny": Size(
        hidden=128,
        heads=2,
        layers=2,
        num_values=32,
        num_numbers=6,
        warm_up_lr=1e-3,
        warm_up_batch=64,
        lr=1e-4,
        num_prompts=16,
    ),
    "small": Size(
        hidden=512,
        heads=4,
        layers=8,
        num_values=100,
        num_numbers=16,
        warm_up_lr=5e-4,
        warm_up_batch=256,
        lr=3e-5,
        num_prompts=32,
    ),
}
GROUP = 8
"""Number of answers per prompt, whose rewards are compared."""
CLIP = 0.2
NUM_HELD_OUT = 256
SHARE_RISING = 0.4
"""Share of warm-up answers in rising order: a policy that has learned them perfectly is right this often."""
WARM_UP_CHECK_EVERY = 5
MAX_WARM_UP_STEPS = 5000

CORRECTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda trainer, rollout, mask: mask.float(),
    "token": lambda *both: correction.importance_weights(*both),
    "sequence": lambda *both: correction.importance_weights(*both, level="sequence"),
    "icepop": lambda *both: correction.importance_weights(*both, lower=0.5, upper=5.0, outside="zero"),
    "adaptive": lambda *both: correction.adaptive_weights(correction.importance_weights(*both), both[2])[0],
}


@dataclass(frozen=True)
class Variant:
    """The engine's precision, and the correction in the loss."""

    precision: str
    is_stale: bool
    correction: str

    @classmethod
    def of(cls, text: str) -> "Variant":
        rollouts, _, correction_name = text.partition("+")
        precision, _, stale = rollouts.partition("-")
        variant = cls(precision, stale == "stale", correction_name or "none")
        if precision not in PRECISIONS or stale not in ("", "stale") or variant.correction not in CORRECTIONS:
            raise SystemExit(f"{text!r} is not a variant: PRECISION[-stale][+CORRECTION], see --help")
        return variant

    def __str__(self) -> str:
        return self.precision + "-stale" * self.is_stale + f"+{self.correction}" * (self.correction != "none")


# --- the task ---


def make_prompts(size: Size, count: int, generator: torch.Generator) -> Tensor:
    """Numbers and a separator, (count, N + 1)."""
    numbers = torch.randint(size.num_values, (count, size.num_numbers), generator=generator)
    return torch.cat([numbers, torch.full((count, 1), SEPARATOR)], 1).to(DEVICE)


def solve(prompts: Tensor) -> Tensor:
    """The correct answers: the numbers in order and an end token, (count, N + 1)."""
    return torch.cat([prompts[:, :-1].sort(-1).values, torch.full_like(prompts[:, :1], END)], 1)


def demonstrate(prompts: Tensor, generator: torch.Generator) -> Tensor:
    """Example answers, (count, N + 1): some are correct, the others in falling order."""
    answers = solve(prompts)
    is_rising = torch.rand(len(prompts), 1, generator=generator).to(DEVICE) < SHARE_RISING
    falling = torch.cat([answers[:, :-1].flip(-1), answers[:, -1:]], 1)
    return torch.where(is_rising, answers, falling)


def reward(rollouts: Rollouts) -> Tensor:
    """1 for the correct answer, 0 otherwise, (B,)."""
    return ((rollouts.tokens == solve(rollouts.prompts)) & rollouts.mask).all(-1).float()


# --- the policy ---


def make_policy(size: Size) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=2,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PADDING,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE)


def logprobs_of(policy: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
    """Log-probability of each token of each answer, (B, L) fp32."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        logits = policy(input_ids=torch.cat([prompts, answers], 1)[:, :-1]).logits
    logits = logits[:, prompts.shape[1] - 1 :].float()
    return logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)


@torch.no_grad()
def expected_reward(policy: nn.Module, prompts: Tensor) -> float:
    """The exact probability of the correct answer, averaged over prompts; each has only one."""
    return logprobs_of(policy, prompts, solve(prompts)).sum(-1).exp().mean().item()


def take_step(policy: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def warm_up(size: Size, seed: int, target: float, progress: Progress) -> nn.Module:
    """Train a policy on example answers until a share of `target` is correct."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy = make_policy(size)
    held_out = make_prompts(size, NUM_HELD_OUT, generator)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=size.warm_up_lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    task = progress.add_task(f"warm up, seed {seed}", total=None)
    while (reward := expected_reward(policy, held_out)) < target:
        if schedule.last_epoch >= MAX_WARM_UP_STEPS:
            raise SystemExit(f"only {reward:.3f} right after {MAX_WARM_UP_STEPS} steps of warm-up; lower --target")
        for _ in range(WARM_UP_CHECK_EVERY):
            prompts = make_prompts(size, size.warm_up_batch, generator)
            answers = demonstrate(prompts, generator)
            take_step(policy, optimizer, -logprobs_of(policy, prompts, answers).mean())
            schedule.step()
        progress.update(task, advance=WARM_UP_CHECK_EVERY, description=f"warm up, seed {seed}: {reward:.2f} right")
        if progress.disable and schedule.last_epoch % 100 == 0:
            print(f"step {schedule.last_epoch} of the warm-up, seed {seed}: {reward:.3f} right", flush=True)
    progress.remove_task(task)
    return policy


# --- how much of a policy changes ---


class Density:
    """Measures which share of an engine's weights changes from step to step."""

    def __init__(self, policy: nn.Module) -> None:
        self._before = self._held_by(policy)

    def step(self, policy: nn.Module) -> dict[str, float]:
        """Changed shares since the last call: BF16 values, and FP8 codes and scales of block-FP8 matrices."""
        before, self._before = self._before, self._held_by(policy)
        shares = {}
        for kind, now in self._before.items():
            changed = sum(int((a != b).sum()) for a, b in zip(before[kind], now, strict=True))
            shares[f"changed_{kind}"] = changed / sum(tensor.numel() for tensor in now)
        return shares

    @staticmethod
    @torch.no_grad()
    def _held_by(policy: nn.Module) -> dict[str, list[Tensor]]:
        layers = (module for name, module in policy.named_modules() if ".layers." in name)
        weights = [layer.weight.bfloat16() for layer in layers if isinstance(layer, nn.Linear)]
        held: dict[str, list[Tensor]] = {"bf16": [parameter.bfloat16() for parameter in policy.parameters()]}
        for scale_format in ("fp32", "ue8m0"):
            codes, scales = zip(*(quantize_blockwise(w, scale_format=scale_format) for w in weights), strict=True)
            held |= {f"codes_{scale_format}": [c.view(torch.uint8) for c in codes], f"scales_{scale_format}": [*scales]}
        return held


# --- one run ---


class Run:
    """One variant with one seed, starting from a warmed-up policy."""

    def __init__(
        self, variant: Variant, seed: int, lr: float, policy: nn.Module, engine: Engine, options: argparse.Namespace
    ) -> None:
        self.size, self.variant, self.seed, self.lr = SIZES[options.size], variant, seed, lr
        self.policy, self.engine, self.options = policy, engine, options
        self.held_out = make_prompts(self.size, NUM_HELD_OUT, torch.Generator().manual_seed(seed))
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.warm_up_reward = expected_reward(policy, self.held_out)
        self.served: nn.Module | Unified = policy
        if variant.precision == "unified":
            assert engine.refitter is not None, "its engine is FP8"
            self.served = unify(policy, like=engine.refitter.layout())
        self.records: list[dict[str, Any]] = []
        self.state_file = options.out / f"{variant}-{seed}-{lr}.pt"

    def steps(self) -> Iterator[dict[str, Any]]:
        """Run GRPO steps from the last saved one, and yield a record of each."""
        calibration = torch.cat([self.held_out, solve(self.held_out)], 1).tolist()
        self.update_engine(calibration[:MAX_CALIBRATION])
        if self.state_file.exists():
            self.load()
            if not self.variant.is_stale:
                self.update_engine(calibration[:MAX_CALIBRATION])
        density = Density(self.policy)
        for step in range(len(self.records) + 1, self.options.steps + 1):
            record = {"step": step, **self.step()}
            record |= {"expected_reward": expected_reward(self.policy, self.held_out), **density.step(self.policy)}
            self.records.append(record)
            if step % self.options.save_every == 0:
                self.save()
            yield record

    def step(self) -> dict[str, float]:
        """Sample, learn, refit."""
        clock, policy = Clock(), self.policy
        prompts = make_prompts(self.size, self.options.prompts, self.generator).repeat_interleave(GROUP, 0)
        rollouts = self.engine.generate(prompts, max_tokens=prompts.shape[1], end=END)
        clock.lap("rollout_s")

        rewards = reward(rollouts).view(-1, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        advantages = advantages.view(-1, 1)
        with torch.no_grad():
            old = logprobs_of(policy, prompts, rollouts.tokens)
        weights = CORRECTIONS[self.variant.correction](old, rollouts.logprobs, rollouts.mask)
        for _ in range(self.options.updates):
            ratio = (logprobs_of(policy, prompts, rollouts.tokens) - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            take_step(policy, self.optimizer, -(weights * gain)[rollouts.mask].mean())
        clock.lap("train_s")

        if not self.variant.is_stale:
            self.update_engine(rollouts.calibration)
        clock.lap("refit_s")
        both = old, rollouts.logprobs, rollouts.mask
        used = correction.mismatch(*both, weights=weights)
        mismatch = asdict(correction.mismatch(*both)) | {
            "masked_fraction": used.masked_fraction,
            "weights_ess": used.ess,
        }
        return {"reward": rewards.mean().item(), **mismatch, **clock.laps}

    def update_engine(self, calibration: list[list[int]]) -> None:
        self.engine.update(self.served, calibration if self.variant.precision == "fp8kv" else None)

    def save(self) -> None:
        """Save the run's state atomically."""
        state = {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["settings"] = settings_of(self.options)
        part = self.state_file.with_suffix(".part")
        torch.save(state | {"generator": self.generator.get_state(), "records": self.records}, part)
        part.replace(self.state_file)

    def load(self) -> None:
        state = torch.load(self.state_file, map_location=DEVICE)
        check_settings(self.state_file, state.get("settings", {}), self.options)
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.records = state["records"]


class Clock:
    """Measures the parts of a step in seconds, including the device's work."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._start_s = time.perf_counter()

    def lap(self, name: str) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        self.laps[name], self._start_s = now_s - self._start_s, now_s


# --- all runs ---


def run_precision(precision: str, options: argparse.Namespace) -> bool:
    """Do all missing runs of one precision on one engine. Returns whether none is left."""
    size, engine = SIZES[options.size], None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        for variant, seed, lr in missing_runs(options):
            if engine is None:
                engine = ENGINES[options.engine](model_folder(options), precision, options.set)
            policy = warmed_up(size, seed, options, progress)
            torch.manual_seed(seed)
            run = Run(variant, seed, lr, policy, engine, options)
            task = progress.add_task(str(variant), total=options.steps)
            log = open_log(options.out / "tensorboard" / run.state_file.stem)
            for record in run.steps():
                show(progress, task, run, record)
                log(record)
                if time.monotonic() > options.deadline_s and record["step"] < options.steps:
                    run.save()
                    return False
            finish(run)
            progress.remove_task(task)
    return True


def finish(run: Run) -> None:
    """Add a run to the results, and only then delete its state: whenever this process dies, one of them is left."""
    out = run.options.out
    with FileLock(out / ".lock"):
        add_run(out, about_run(run), run.records, about_all(run.engine))
    run.state_file.unlink(missing_ok=True)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for all runs in a folder."""
    return {
        "engine": options.engine,
        "size": options.size,
        "num_steps": options.steps,
        "prompts": options.prompts,
        "updates": options.updates,
        "target": options.target,
        "engine_options": options.set,
        "environment": options.environment,
    }


def check_settings(file: Path, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Refuse to go on with `file` if it was made with other settings. Those that an older file lacks are not compared."""
    wanted = settings_of(options)
    changed = [
        f"{name} was {found[name]}, now {value}" for name, value in wanted.items() if found.get(name, value) != value
    ]
    if changed:
        raise SystemExit(
            f"{file} was made with other settings, and its runs cannot be mixed with these: {'; '.join(changed)}; "
            "use those settings again, or another --out"
        )


def check_results(options: argparse.Namespace) -> None:
    """Refuse a folder whose finished runs had other settings."""
    for run in read_results(options.out)["runs"]:
        check_settings(options.out / FILE, {"num_steps": len(run["steps"]["step"]), **run}, options)


def missing_runs(options: argparse.Namespace) -> list[tuple[Variant, int, float]]:
    done = [(run["variant"], run["seed"], run["lr"]) for run in read_results(options.out)["runs"]]
    wanted = product(options.seeds, options.lr, options.variants)
    return [(variant, seed, lr) for seed, lr, variant in wanted if (str(variant), seed, lr) not in done]


def warmed_up(size: Size, seed: int, options: argparse.Namespace, progress: Progress) -> nn.Module:
    """The policy that every run of a seed starts from."""
    file = options.out / f"warm-up-{options.size}-{seed}-{options.target}.pt"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            torch.save(warm_up(size, seed, options.target, progress).state_dict(), part := file.with_suffix(".part"))
            part.replace(file)
    policy = make_policy(size)
    policy.load_state_dict(torch.load(file, map_location=DEVICE))
    return policy


def model_folder(options: argparse.Namespace) -> Path:
    """The folder that engines boot from. Its weights do not matter, since every run begins with a refit."""
    folder = options.out / f"model-{options.size}"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            make_policy(SIZES[options.size]).bfloat16().save_pretrained(part := folder.with_suffix(".part"))
            part.replace(folder)
    return folder


def about_run(run: Run) -> dict[str, Any]:
    options = run.options
    return {
        "variant": str(run.variant),
        "seed": run.seed,
        "lr": run.lr,
        "is_alone": not options.beside_others,
        **settings_of(options),
        "kernels": run.engine.kernels,
        "warm_up_reward": run.warm_up_reward,
    }


def about_all(engine: Engine) -> dict[str, Any]:
    return {
        "command": os.environ[COMMAND],
        "gpu": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or "CPU",
        "versions": {"fp8refit": __version__, "torch": torch.__version__, **engine.version},
    }


def open_log(folder: Path) -> Callable[[dict[str, Any]], None]:
    """Writes records for TensorBoard, if it is installed."""
    if find_spec("tensorboard") is None:
        return lambda record: None
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(record: dict[str, Any]) -> None:
        for name, value in record.items():
            writer.add_scalar(name, value, record["step"])
        writer.flush()  # it may be looked at now, and this process may be stopped

    return log


def show(progress: Progress, task: TaskID, run: Run, record: dict[str, Any]) -> None:
    said = f"{run.state_file.stem}: reward {record['reward']:.2f}, expected {record['expected_reward']:.3f}"
    progress.update(task, completed=record["step"], description=said)
    if progress.disable and record["step"] % 10 == 0:
        print(f"step {record['step']} of {said}, k3 {record['k3']:.1e}", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    everything = "bf16,bf16+token,fp8,fp8+token,fp8kv,fp8kv+token,fp8-stale"
    parser.add_argument("--variants", default=everything, help=f"comma-separated; default: {everything}")
    parser.add_argument("--seeds", default="0", help="with commas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, help="prompts per step, each answered 8 times")
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates per step")
    parser.add_argument("--lr", help="learning rates after the warm-up, comma-separated")
    parser.add_argument("--target", type=float, default=0.3, help="share of right answers at which the warm-up ends")
    parser.add_argument("--out", type=Path, default=Path("grpo"))
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--at-once", type=int, default=1, help="number of parallel processes, each with its own engine")
    parser.add_argument("--beside-others", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and exit after this many minutes")
    parser.add_argument("--set", action="append", default=[], help="engine option as name=JSON; may be repeated")
    options = parser.parse_args()
    os.environ.setdefault(COMMAND, shlex.join(["python", "examples/grpo.py", *sys.argv[1:]]))
    options.deadline_s = time.monotonic() + options.minutes * 60
    options.variants = [Variant.of(text) for text in options.variants.split(",")]
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    options.set = {name: json.loads(value) for name, _, value in (text.partition("=") for text in options.set)}
    options.environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith("VLLM_USE_")}
    size = SIZES[options.size]
    options.lr = [size.lr] if options.lr is None else [float(lr) for lr in options.lr.split(",")]
    options.prompts = size.num_prompts if options.prompts is None else options.prompts
    return options


def main() -> int:
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    check_results(options)
    precisions = [p for p in PRECISIONS if any(variant.precision == p for variant in options.variants)]
    code = 0
    if options.at_once > 1:
        code = run_at_once(options)
    elif len(precisions) > 1:
        code = run_apart(precisions, options)
    elif not run_precision(precisions[0], options):
        code = UNFINISHED
    if options.beside_others:
        return code
    if code == UNFINISHED:
        print(f"not all runs are finished; run the same command again to continue in {options.out}")
    if code:
        return code
    results = read_results(options.out)
    draw(results, options.out)
    print(describe(results["summary"]))
    return 0


def run_apart(precisions: list[str], options: argparse.Namespace) -> int:
    """Run each precision in a separate process, which frees the engine's memory. Returns the first nonzero exit
    code."""
    for precision in precisions:
        chosen = ",".join(str(variant) for variant in options.variants if variant.precision == precision)
        if code := run_again(options, "--variants", chosen):
            return code
    return 0


def run_at_once(options: argparse.Namespace) -> int:
    """Run each seed of a precision in a separate process, several at a time. Returns the highest exit code."""
    wanted: dict[tuple[str, int, float], list[str]] = {}
    for variant, seed, lr in missing_runs(options):
        wanted.setdefault((variant.precision, seed, lr), []).append(str(variant))

    def run(key: tuple[str, int, float]) -> int:
        chosen = "--variants", ",".join(wanted[key]), "--seeds", str(key[1]), "--lr", str(key[2])
        return run_again(options, *chosen, "--at-once", "1", "--beside-others")

    with ThreadPoolExecutor(options.at_once) as pool:
        return max(pool.map(run, sorted(wanted, key=lambda key: -len(wanted[key]))), default=0)


def run_again(options: argparse.Namespace, *arguments: str) -> int:
    """Run this command with other arguments in a separate process. Returns its exit code."""
    minutes = str((options.deadline_s - time.monotonic()) / 60)
    return subprocess.run([sys.executable, __file__, *sys.argv[1:], *arguments, "--minutes", minutes]).returncode


if __name__ == "__main__":  # engine processes import this file again
    sys.exit(main())
