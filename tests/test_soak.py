"""Hundreds of refits of one engine, of every kind, failures among them: nothing grows, nothing moves, no byte is wrong."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from fp8refit_transformers import to_block_fp8
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from fp8refit import EngineDirtyError, InvalidSourceError, NonFiniteError, Refitter

NUM_REFITS = int(os.environ.get("FP8REFIT_SOAK", "300"))
NUM_WARM_UP = NUM_REFITS // 5
MIB = 1 << 20
PROMPT = torch.arange(2, 14).view(2, 6)
CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)


def make_network(seed):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()


def held():
    """What this process holds: bytes of memory, open files, threads."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "num_files": len(os.listdir("/proc/self/fd")),
        "num_threads": len(os.listdir("/proc/self/task")),
        "num_python_threads": threading.active_count(),
    }


def places(engine):
    named = [*engine.named_parameters(remove_duplicate=False), *engine.named_buffers(remove_duplicate=False)]
    return {name: (id(tensor), tensor.data_ptr(), tensor.stride(), tensor.dtype) for name, tensor in named}


def live_bytes(engine):
    return {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in engine.state_dict().items()}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux what the process holds")
def test_many_refits_leave_nothing_but_the_last_policy(tmp_path):
    engine = to_block_fp8(make_network(9), kv_cache_dtype="fp8")
    refitter = Refitter(engine)
    policies = [make_network(seed).state_dict() for seed in (1, 2)]
    references = [live_bytes(to_block_fp8(make_network(seed))) for seed in (1, 2)]
    for index, policy in enumerate(policies):
        save_file(policy, tmp_path / f"{index}.safetensors")
    soiled = {**policies[0], "model.norm.weight": torch.full((128,), torch.nan, dtype=torch.bfloat16)}
    incomplete = dict(list(policies[1].items())[1:])
    kinds = {
        "mapping": lambda index: {"state_dict": policies[index]},
        "new memory": lambda index: {"state_dict": {name: value.clone() for name, value in policies[index].items()}},
        "function": lambda index: {"state_dict": lambda: iter(policies[index].items())},
        "iterator": lambda index: {"state_dict": iter(policies[index].items())},
        "file": lambda index: {"state_dict": tmp_path / f"{index}.safetensors"},
        "scales": lambda index: {"state_dict": policies[index], "calibration": PROMPT},
    }
    order = ["mapping", "new memory", "mapping", "function", "scales", "mapping", "iterator", "file"]
    tokens, before, version = {}, None, 0
    refitter.refit(policies[0], calibration=PROMPT)
    addresses = places(engine)
    for number in range(1, NUM_REFITS):
        index = number % 2
        if number % 25 == 7:
            with pytest.raises(InvalidSourceError):
                refitter.refit(incomplete)
        if number % 25 == 13:
            with pytest.raises(NonFiniteError):
                refitter.refit(soiled)
            with pytest.raises(EngineDirtyError):
                engine(PROMPT)
        version = refitter.refit(**kinds[order[number // 2 % len(order)]](index)).version
        if number % 20 in (0, 1):
            said = engine.generate(PROMPT, max_new_tokens=4, do_sample=False, use_cache=False).tolist()
            assert tokens.setdefault(index, said) == said
            assert live_bytes(engine) == references[index]
        if number == NUM_WARM_UP:
            before = held()
    after = held()
    assert version == NUM_REFITS and tokens[0] != tokens[1]
    assert live_bytes(engine) == references[(NUM_REFITS - 1) % 2]
    assert places(engine) == addresses
    assert after["memory_bytes"] - before["memory_bytes"] <= 16 * MIB, (before, after)
    for key in ("num_files", "num_threads", "num_python_threads"):
        assert after[key] <= before[key], (key, before, after)
