"""verl's own rollout worker and sender, unmodified, between a trainer and vLLM's workers: three steps. See `test_verl.py`.

    python verl_steps.py FOLDER NUM_RANKS

Of verl are the extension of vLLM's workers and the sender of buckets, through shared memory, as on hosts without CUDA IPC.
Writes what the engine held and said after each step, and the trainer's weights of that moment as a checkpoint.
"""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

import torch
from engines import said, settings
from torch import nn
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from vllm import LLM, SamplingParams

from tests.tiny_models import save_model

NUM_STEPS = 3
BUCKET_MB = 1
PROBE = SamplingParams(max_tokens=4, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
PROBED = [(13 * i) % 200 for i in range(24)]


def main(folder: Path, num_ranks: int) -> None:
    model = save_model("qwen2_wide", 1, folder / "model").train()
    llm = LLM(
        **settings(folder / "model"),
        tensor_parallel_size=num_ranks,
        worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
    )
    llm.collective_rpc("monkey_patch_model", args=(model.config.vocab_size,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[dict] = []
    error = ""
    try:
        for step in range(NUM_STEPS):
            train(model, optimizer, step)
            model.save_pretrained(folder / f"policy-{step}")
            update_weights(llm, model, num_ranks)
            (output,) = llm.generate({"prompt_token_ids": PROBED}, PROBE, use_tqdm=False)
            reports = llm.collective_rpc("fp8refit_last_report")
            seen.append(
                {
                    "live": [answer["found"] for answer in llm.collective_rpc("observe", args=("live_bytes",))],
                    "places": [answer["found"] for answer in llm.collective_rpc("observe", args=("places",))],
                    "said": said(output),
                    "versions": [json.loads(report)["version"] for report in reports],
                }
            )
    except Exception as raised:  # noqa: BLE001 - of the control
        error = f"{type(raised).__name__}: {raised}"
    (folder / "found.json").write_text(json.dumps({"steps": seen, "error": error}))
    llm.llm_engine.engine_core.shutdown()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(step))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def update_weights(llm: LLM, model: nn.Module, num_ranks: int) -> None:
    """As verl's `ServerAdapter.update_weights`: every rank has a sender, and gets the whole state dict."""

    def send(rank: int) -> None:
        handle = f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-{rank}.sock"
        sender = BucketedWeightSender(zmq_handle=handle, bucket_size_mb=BUCKET_MB, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(model.state_dict().items())))

    senders = [threading.Thread(target=send, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for sender in senders:
        sender.start()
    llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True}, timeout=100)
    for sender in senders:
        sender.join()


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), int(sys.argv[2]))
