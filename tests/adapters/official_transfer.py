"""See `test_vllm_wheel_classes.py`: prints a line for each thing that worked."""

import importlib.util
import logging
import sys
from functools import cached_property
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from fp8refit import InvalidSourceError, RefitConfig
from tests.adapters.fake_weight_transfer import Engine
from tests.fake_ranks import Cluster

WHEEL = Path(sys.argv[1])
PACKAGE = "vllm.distributed.weight_transfer"


def stub(name: str, **contents: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(contents)
    module.__path__ = []
    sys.modules[name] = module


def load(name: str) -> ModuleType:
    file = WHEEL.joinpath(*f"{PACKAGE}.{name}".split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for package in ("vllm", "vllm.config", "vllm.distributed", PACKAGE):
    stub(package)
stub("vllm.config.parallel", ParallelConfig=object)
stub("vllm.config.weight_transfer", WeightTransferConfig=object)
stub("vllm.logger", init_logger=logging.getLogger)
base, factory = load("base"), load("factory")
sys.modules[PACKAGE].factory = factory

from fp8refit_vllm.trainer import RefitTrainerInitInfo  # noqa: E402
from fp8refit_vllm.transfer import RefitTransferEngine  # noqa: E402


class PolicySource(base.WeightSource):
    def __init__(self, policy: dict, owners: tuple[int, ...] | None = None) -> None:
        self.policy, self.owners = policy, owners

    @cached_property
    def metadata(self) -> list:
        return [
            base.ParamMeta(name, tensor.dtype, tuple(tensor.shape), owners=self.owners)
            for name, tensor in self.policy.items()
        ]

    def iter_full(self):
        yield from self.policy.items()


class LocalSource(PolicySource):
    iter_full = base.WeightSource.iter_full

    def iter_local(self):
        yield from self.policy.items()


def send(cluster: Cluster, source: object, *, times: int = 1) -> None:
    info = RefitTrainerInitInfo(rank=0, config=RefitConfig(timeout_s=20.0))
    trainer = factory.WeightTransferTrainerFactory.trainer_init(info, client=Engine(cluster), source=source)
    for _ in range(times):
        trainer.send_weights()
    assert (trainer.is_sender, trainer.rank, trainer.version, trainer.is_dirty) == (True, 0, times, False)
    trainer.shutdown()


def module_of(policy: dict) -> nn.Module:
    root = nn.Module()
    for name, tensor in policy.items():
        *path, key = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    return root


def refused(source: object, why: str) -> None:
    try:
        send(Cluster(), source)
    except InvalidSourceError as error:
        assert why in str(error), error
    else:
        raise AssertionError("was sent")


def main() -> None:
    torch.set_num_threads(1)
    for name, make in (("stream", PolicySource), ("module", lambda policy: base.ModuleSource(module_of(policy)))):
        cluster = Cluster()
        policy = cluster.make_policy(seed=1)
        send(cluster, make(policy), times=2)
        cluster.assert_holds(policy, version=2)
        print(name)
    policy = Cluster().make_policy(seed=1)
    refused(PolicySource(policy, owners=(1,)), "rank 0 does not own 7 of its tensors")
    print("partly")
    refused(LocalSource(policy), "does not implement iter_full")
    print("local")
    assert not RefitTransferEngine.__abstractmethods__
    assert issubclass(factory.WeightTransferEngineFactory._registry["fp8refit"](), base.WeightTransferEngine)
    print("engine")


main()
