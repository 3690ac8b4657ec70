"""A vLLM engine with two LoRA adapters: one is refitted to the other's matrices, which vLLM has loaded from files by itself.

refit    the first is refitted again and again, and loaded from files by vLLM
"""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import policies
import torch
from harness import free_bytes, log, timed, wait_for_gpu
from live_engines import PROMPTS, Vllm, as_prompts, greedy
from live_model import hash_bytes
from safetensors.torch import save_file
from torch import Tensor

from fp8refit import Refitter

RANK, ALPHA = 16, 24
NUM_NEW = 24
NUM_REFITS = 50
NUM_LOADS = 5


def matrices(args: Any, seed: int) -> dict[str, Tensor]:
    """Of every linear layer of the model, under PEFT's names."""
    generator = torch.Generator(policies.DEVICE).manual_seed(seed)
    found = {}
    for name, size in policies.tensor_shapes(args.shape).items():
        if name.endswith("_proj.weight"):
            rows, columns = size
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                key = f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"
                noise = torch.randn(shape, generator=generator, device=policies.DEVICE)
                found[key] = (noise * 0.02).bfloat16()
    return found


def saved(args: Any, name: str, tensors: dict[str, Tensor]) -> Path:
    folder = args.work / name
    folder.mkdir(exist_ok=True)
    modules = sorted({key.split(".")[-3] for key in tensors})
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "peft_type": "LORA", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


class Served:
    """The engine, and its adapters by name."""

    def __init__(self, args: Any, folders: dict[str, Path]) -> None:
        from vllm.lora.request import LoRARequest

        work = args.work / "config"
        policies.write_config(args.shape, work)
        options = {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": RANK, "max_cpu_loras": len(folders)}
        self.engine = Vllm(work, is_inside=True, is_noise=True, **options)
        self.requests = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(folders.items(), 1)}
        for request in self.requests.values():
            self.engine.candidate.llm_engine.add_lora(request)

    def say(self, name: str | None) -> list[list[tuple[int, str]]]:
        """Greedy tokens, and their log-probabilities as exact hexadecimal floats."""
        self.engine.drop_caches()
        request = None if name is None else self.requests[name]
        options = greedy(NUM_NEW, logprobs=1)
        outputs = self.engine.candidate.generate(as_prompts(PROMPTS), options, use_tqdm=False, lora_request=request)
        return [
            [
                (t, step[t].logprob.hex())
                for t, step in zip(each.outputs[0].token_ids, each.outputs[0].logprobs, strict=True)
            ]
            for each in outputs
        ]

    def held(self, name: str) -> dict[str, str]:
        """A sha256 for each matrix in the adapter's slot."""
        manager = self.engine.worker.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(self.requests[name].lora_int_id)
        return hash_bytes(
            {
                f"{prefix}.{kind}.{index}": stacked[slot].contiguous()
                for prefix, module in manager.modules.items()
                for kind in ("lora_a_stacked", "lora_b_stacked")
                if isinstance(getattr(module, kind), tuple)  # not of the head, whose adapters nobody has here
                for index, stacked in enumerate(getattr(module, kind))
            }
        )

    def load(self, name: str) -> None:
        """As vLLM does it: from files."""
        core = self.engine.candidate.llm_engine
        core.remove_lora(self.requests[name].lora_int_id)
        core.add_lora(self.requests[name])
        wait_for_gpu()


def run_refit(args: Any) -> dict[str, Any]:
    old, new = (matrices(args, seed) for seed in (1, 2))
    served = Served(args, {"refitted": saved(args, "old", old), "loaded": saved(args, "new", new)})
    policy = policies.fill_policy(policies.allocate(args.shape), 1)
    refitter = Refitter(served.engine.candidate)
    refitter.refit(policy)
    base, live = served.say(None), served.engine.ask("live_bytes")
    found: dict[str, Any] = {"num_matrices": len(new), "num_bytes": sum(each.nbytes for each in new.values())}
    found["old"] = {"said": served.say("refitted"), "held": served.held("refitted")}
    found["loaded"] = {"said": served.say("loaded"), "held": served.held("loaded")}
    replays = served.engine.ask("replays")[0]
    first = refitter.refit_adapter("refitted", new)
    found["refitted"] = {"said": served.say("refitted"), "held": served.held("refitted")}
    found |= {"first_ms": first.total_s * 1e3, "graph_replays": served.engine.ask("replays")[0] - replays}
    found["is_base_untouched"] = served.say(None) == base and served.engine.ask("live_bytes") == live
    free, times_ms = free_bytes(), []
    for index in range(NUM_REFITS):
        seconds, *_ = timed(partial(refitter.refit_adapter, "refitted", (old, new)[index % 2]))
        times_ms.append(seconds * 1e3)
    found |= {"times_ms": times_ms, "grown_bytes": free - free_bytes()}
    found["phases_ms"] = {name: s * 1e3 for name, s in refitter.refit_adapter("refitted", new).phases_s.items()}
    found["last"] = {"said": served.say("refitted"), "held": served.held("refitted")}
    loads_ms = []
    for _ in range(NUM_LOADS):
        start_s = time.perf_counter()
        served.load("loaded")
        loads_ms.append((time.perf_counter() - start_s) * 1e3)
    log(f"refits {sorted(times_ms)[NUM_REFITS // 2]:.1f} ms, loads {sorted(loads_ms)[NUM_LOADS // 2]:.1f} ms")
    served.engine.shutdown()
    return found | {"loads_ms": loads_ms}


MODES = {"refit": run_refit}
OPTIONS: dict[str, dict] = {}
