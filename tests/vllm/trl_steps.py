"""TRL's own GRPO trainer, unmodified, with vLLM in its process: three steps. `test_trl.py` says what must come of it.

    python trl_steps.py FOLDER [sleep]

Writes what the engine held and said when each batch was rewarded, and the trainer's weights of that moment as a checkpoint.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from engines import live_bytes, said
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform

import fp8refit
from tests.tiny_models import save_model

NUM_STEPS = 3
PROBE = SamplingParams(max_tokens=4, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
PROBED = [(13 * i) % 200 for i in range(24)]


def main(folder: Path, *, sleeps: bool) -> None:
    if sleeps:  # which a CPU ignores, but for the order of the calls
        CpuPlatform.is_sleep_mode_available = lambda _: True
    save_model("qwen3", 1, folder / "model")
    tokenizer_of_bytes().save_pretrained(folder / "model")
    seen: list[dict] = []

    def reward(completions: list[str], **_: object) -> list[float]:
        """Looks at the engine, which has just answered."""
        llm = trainer.vllm_generation.llm
        if sleeps:
            llm.wake_up()
        (output,) = llm.generate({"prompt_token_ids": PROBED}, PROBE, use_tqdm=False)
        if sleeps:
            llm.sleep(level=2)
        policy = folder / f"policy-{len(seen)}"
        trainer.model.save_pretrained(policy)
        report = fp8refit.last_report()
        seen.append({"live": live_bytes(llm), "said": said(output), "version": report.version if report else None})
        return [len(set(text)) + len(text) / 7 for text in completions]

    config = GRPOConfig(
        output_dir=str(folder / "out"),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        vllm_enable_sleep_mode=sleeps,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "bfloat16"},
        max_steps=NUM_STEPS,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        temperature=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
    )
    prompts = Dataset.from_dict({"prompt": ["one two", "three", "four five six", "seven"] * 4})
    trainer = GRPOTrainer(model=str(folder / "model"), reward_funcs=reward, args=config, train_dataset=prompts)
    error = ""
    try:
        trainer.train()
    except Exception as raised:  # noqa: BLE001 - of the control
        error = f"{type(raised).__name__}: {raised}"
    (folder / "found.json").write_text(json.dumps({"steps": seen, "error": error}))
    trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), sleeps="sleep" in sys.argv)
