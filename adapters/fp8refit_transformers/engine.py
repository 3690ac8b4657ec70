"""A Hugging Face model in this process as an engine: one rank, no request queue, no caches of its own."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.adapters import booting
from fp8refit.driver.engine import Adapter
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import EngineBusyError, UnsupportedEngineError, install
from fp8refit.ranks.rank import Rank
from fp8refit.ranks.target import Target
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit_transformers.admission import admit, find_call, refusal_of, refuse
from fp8refit_transformers.caches import Policy, watch_caches
from fp8refit_transformers.convert import to_block_fp8
from fp8refit_transformers.layout import read_inventory
from fp8refit_transformers.linear import BlockFp8Linear


class TransformersEngine(Adapter):
    """Implements `fp8refit.driver.engine.Engine` for a converted Hugging Face model.

    Args:
        candidate: A model that `to_block_fp8` converted.

    Raises:
        UnsupportedEngineError: It has no block-FP8 layer, or is on more than one device.
    """

    name = "transformers"
    is_asynchronous = False

    def __init__(self, candidate: nn.Module) -> None:
        if not any(isinstance(module, BlockFp8Linear) for module in candidate.modules()):
            raise UnsupportedEngineError(
                f"{type(candidate).__name__} is not block FP8; convert it first: "
                "`from fp8refit_transformers import to_block_fp8; to_block_fp8(model)`"
            )
        self._model = candidate
        self._served = watch_caches(candidate)
        target = Target(
            lambda: read_inventory(candidate),
            device=_only_device(candidate),
            engine=self.name,
            versions={package: version(package) for package in ("torch", "transformers")},
        )
        target.is_dirty = refusal_of(candidate) is not None  # the model may be a copy of a dirty one
        self.ranks = LocalRanks(Rank(target))

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        """Whether `candidate` is a Hugging Face model."""
        bases = type(candidate).__mro__
        return isinstance(candidate, nn.Module) and any(base.__module__.startswith("transformers.") for base in bases)

    @classmethod
    def boot(cls, model: str) -> nn.Module:
        """Load a model folder in BF16 and make it block FP8; one with only `config.json` gets random weights.

        A folder that is already block FP8 is loaded bit for bit.

        Raises:
            UnsupportedEngineError: transformers is not installed, `model` is not a model folder, or transformers or
                `to_block_fp8` does not support the model.
            InvalidSourceError: A safetensors file is missing or corrupt.
        """
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise UnsupportedEngineError(f"transformers is not installed: {install('transformers')}") from error
        folder = Path(model)
        with booting(cls.name, model):
            if not (folder / "config.json").is_file():
                raise UnsupportedEngineError(f"{model} is not a model folder: it has no config.json")
            suffixes = {file.suffix for file in folder.iterdir()}
            has_weights = bool(suffixes & {".safetensors", ".bin"})
            if ".safetensors" in suffixes:
                SafetensorsSource(folder)  # names a file that is missing or corrupt
            config = AutoConfig.from_pretrained(folder)
            if has_weights and getattr(config, "quantization_config", None) is None:
                network: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
                return to_block_fp8(network)
            engine: nn.Module = to_block_fp8(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).eval()
        if has_weights:
            with Refitter(engine) as refitter:
                refitter.refit(folder)
        return engine

    @override
    async def check_ready(self) -> None:
        """Check that nobody is calling the model.

        Raises:
            EngineBusyError: A call is in progress, in another thread or further up this one's stack.
        """
        call = find_call(self._model)
        if call is not None:
            raise EngineBusyError(
                f"the model is in use ({call}) and would continue with another policy; let it finish, then refit"
            )

    @override
    async def pause(self, config: RefitConfig) -> int:
        """Refuse calls to the model.

        Raises:
            EngineBusyError: A call began just before.
        """
        await self.refuse("a refit is under way")
        await self.check_ready()
        return 0

    @override
    async def resume(self) -> None:
        admit(self._model)

    @override
    async def refuse(self, reason: str) -> None:
        refuse(self._model, reason)

    @override
    async def flush_caches(self) -> None:
        """Nothing to drop: every `generate` call starts with its own cache."""

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        raise UnsupportedEngineError("a model has no tokenizer: pass token ids")

    @override
    async def publish_version(self, version: int) -> None:
        """Mark older caches as stale. A model's outputs carry no version."""
        self._served.policy, self._served.was_refitted = Policy(version), True


def _only_device(model: nn.Module) -> torch.device:
    """The device of every parameter.

    Raises:
        UnsupportedEngineError: There are several, or none with memory.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise UnsupportedEngineError(
            f"{type(model).__name__} is on {', '.join(sorted(map(str, devices)))}; load it onto one device"
        )
    return devices.pop()
