"""vLLM's weight-transfer API with fp8refit as its backend."""

from collections.abc import Callable

import policies
import torch
from fp8refit_vllm.trainer import RefitTrainer, RefitTrainerInitInfo
from harness import log
from live_engines import Vllm, gpus_alone
from torch import Tensor, nn
from vllm import LLM
from vllm.distributed.weight_transfer.base import ModuleSource, WeightSource
from weight_transfers import LlmClient, PolicySource, open_trainer

from fp8refit import NonFiniteError, RefitConfig, Refitter

TIMEOUT_S = 60.0
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


def module_of(policy: dict[str, Tensor]) -> nn.Module:
    """A module whose parameters are the tensors of a policy, under their names."""
    root = nn.Module()
    for name, tensor in policy.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return root


def run_weight_transfer(args) -> dict:
    policies.write_config(args.shape, args.work / "dummy")
    with gpus_alone(0, 1):
        engine = Vllm(args.work / "dummy", is_noise=True, weight_transfer_config={"backend": "fp8refit"})
    found = send_all(engine.candidate, args.shape)
    engine.shutdown()
    return found


def send_all(llm: LLM, shape: str) -> dict:
    policy = policies.fill_policy(policies.allocate(shape), 1)
    refitter = Refitter(llm, timeout_s=TIMEOUT_S)
    found: dict = {
        "fingerprints": {"refit": fingerprints(policy, lambda: refitter.refit(policy), refitter.fingerprints)}
    }
    log("refitted")
    sources = {"module": ModuleSource(module_of(policy)), "stream": PolicySource(policy)}
    for name, source in sources.items():
        trainer = trainer_of(llm, source)
        found["fingerprints"][name] = fingerprints(policy, trainer.send_weights, trainer.fingerprints)
        if name == "module":
            found["nan"] = send_nan(trainer, policy)
        trainer.shutdown()
        log(f"sent a {name}")
    del sources, source, trainer
    torch.cuda.set_device(1)
    elsewhere = policies.fill_policy({name: tensor.to("cuda:1") for name, tensor in policy.items()}, 1)
    trainer = trainer_of(llm, ModuleSource(module_of(elsewhere)), transport="collective")
    found["fingerprints"]["broadcast"] = fingerprints(elsewhere, trainer.send_weights, trainer.fingerprints)
    other = Refitter(llm, timeout_s=TIMEOUT_S)
    other.fingerprints()  # has asked the ranks, and heard of their version
    found["served_versions"] = [trainer.version, other.version]
    trainer.shutdown()
    log("broadcast")
    return found


def trainer_of(llm: LLM, source: WeightSource, **options) -> RefitTrainer:
    """As a trainer makes one by vLLM's API."""
    init_info = RefitTrainerInitInfo(rank=0, config=RefitConfig(timeout_s=TIMEOUT_S, **options))
    return open_trainer(init_info, client=LlmClient(llm), source=source)


def fingerprints(
    policy: dict[str, Tensor], send: Callable[[], object], read: Callable[[], list[str]]
) -> list[list[str]]:
    """Of every rank, for two policies."""
    found = []
    for seed in (2, 1):
        policies.fill_policy(policy, seed)
        send()
        found.append(read())
    return found


def send_nan(trainer: RefitTrainer, policy: dict[str, Tensor]) -> dict:
    """What a NaN ends in, and whether the next update heals it."""
    before, value = trainer.fingerprints(), policy[DOWN_PROJ][3, 5].clone()
    policy[DOWN_PROJ][3, 5] = float("nan")
    try:
        trainer.send_weights()
        names: list[str] = []
    except NonFiniteError as error:
        names = list(error.names)
    policy[DOWN_PROJ][3, 5] = value
    was_dirty = trainer.is_dirty
    trainer.send_weights()
    return {"names": names, "was_dirty": was_dirty, "healed": trainer.fingerprints() == before}


OPTIONS: dict = {}
MODES = {"send": run_weight_transfer}
