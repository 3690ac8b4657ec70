"""What the engines of `run_vllm.py` and `layout_modes.py` are asked, and the rate that their fills are held against."""

import statistics

import torch
from vllm import LLM, SamplingParams

PROMPTS = [[(31 * i + 7 * j) % 50000 + 100 for j in range(24 + 8 * i)] for i in range(4)]
SAMPLING = SamplingParams(
    max_tokens=24, temperature=0, logprobs=4, prompt_logprobs=0, detokenize=False, ignore_eos=True
)


def generate(llm: LLM) -> dict:
    """Greedy tokens and every log-probability, as exact hexadecimal floats."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SAMPLING, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [{str(token): entry.logprob.hex() for token, entry in step.items()} for step in output.outputs[0].logprobs]
            for output in outputs
        ],
        "prompt_logprobs": [
            [
                {str(token): entry.logprob.hex() for token, entry in step.items()}
                for step in output.prompt_logprobs
                if step
            ]
            for output in outputs
        ],
    }


def measure_copy_gb_per_s(device: int) -> float:
    """The copy roofline: device-to-device bytes read and written, 4 GiB, median of 9."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=f"cuda:{device}").random_(0, 255)
    target = torch.empty_like(source)
    times_ms = []
    with torch.cuda.device(device):
        for _ in range(9):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times_ms.append(begin.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times_ms) / 1e6
