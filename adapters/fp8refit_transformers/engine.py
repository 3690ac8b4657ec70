"""A Hugging Face model in this process as an engine: one rank, admission at `forward`, no caches of its own."""

import uuid
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8refit.config import RefitConfig
from fp8refit.engine import LocalRanks
from fp8refit.errors import EngineDirtyError, UnsupportedEngineError
from fp8refit.rank import Rank
from fp8refit.refitter import Refitter
from fp8refit.sources import SafetensorsSource
from fp8refit.target import Target
from fp8refit_transformers.convert import to_block_fp8
from fp8refit_transformers.kv_cache import fp8_kvs
from fp8refit_transformers.layout import read_inventory
from fp8refit_transformers.linear import BlockFp8Linear


class TransformersEngine:
    """See `fp8refit.engine.Engine`.

    Args:
        candidate: A model that `to_block_fp8` converted.

    Raises:
        UnsupportedEngineError: It holds no block-FP8 layer, or lies on more than one device.
    """

    name = "transformers"
    is_asynchronous = False

    def __init__(self, candidate: nn.Module) -> None:
        if not any(isinstance(module, BlockFp8Linear) for module in candidate.modules()):
            raise UnsupportedEngineError(
                f"{type(candidate).__name__} is not block FP8; make it so first: "
                "`from fp8refit_transformers import to_block_fp8; to_block_fp8(model)`"
            )
        self._model = candidate
        target = Target(
            lambda: read_inventory(candidate),
            device=_only_device(candidate),
            engine=self.name,
            versions={package: version(package) for package in ("torch", "transformers")},
        )
        target.is_dirty = bool(_refusals(candidate))  # a copy of a dirty model is as dirty
        self.ranks = LocalRanks(Rank(target))

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        """Whether `candidate` is a Hugging Face model."""
        bases = type(candidate).__mro__
        return isinstance(candidate, nn.Module) and any(base.__module__.startswith("transformers.") for base in bases)

    @classmethod
    def boot(cls, model: str) -> nn.Module:
        """Load a model folder in BF16 and make it block FP8; one with only `config.json` gets random weights.

        A folder that is block FP8 already is read as it is, bit for bit.

        Raises:
            UnsupportedEngineError: transformers is not installed, or `model` is no model folder.
            InvalidSourceError: A safetensors file is missing or corrupt.
        """
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise UnsupportedEngineError(
                "transformers is not installed: pip install 'fp8refit[transformers]'"
            ) from error
        folder = Path(model)
        if not (folder / "config.json").is_file():
            raise UnsupportedEngineError(f"{model} is no model folder: it has no config.json")
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

    async def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`: requests are calls, and the caller of `refit` makes none meanwhile."""

    async def pause(self, config: RefitConfig) -> int:
        """See `fp8refit.engine.Engine`."""
        await self.refuse("a refit is under way")
        return 0

    async def resume(self) -> None:
        """See `fp8refit.engine.Engine`."""
        for key in _refusals(self._model):
            del self._model._forward_pre_hooks[key]

    async def refuse(self, reason: str) -> None:
        """See `fp8refit.engine.Engine`."""
        await self.resume()
        self._model.register_forward_pre_hook(_Refuse(reason), prepend=True)

    async def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`: every `generate` call begins with a cache of its own."""

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit.engine.Engine`."""
        raise UnsupportedEngineError("a model has no tokenizer: pass token ids")

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.engine.Engine`: outputs of a model carry no version, but FP8 caches do, and older ones are refused."""
        policy = uuid.uuid4().hex
        for _, kv in fp8_kvs(self._model):
            kv.version, kv.policy = version, policy


class _Refuse:
    """A forward pre-hook that admits nothing."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, *_: Any) -> None:
        raise EngineDirtyError(f"this model refuses requests: {self._reason}")


def _refusals(model: nn.Module) -> list[int]:
    """Keys of the hooks that refuse requests."""
    return [key for key, hook in model._forward_pre_hooks.items() if isinstance(hook, _Refuse)]


def _only_device(model: nn.Module) -> torch.device:
    """The device of every parameter.

    Raises:
        UnsupportedEngineError: There are several, or none with memory.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise UnsupportedEngineError(
            f"{type(model).__name__} lies on {', '.join(sorted(map(str, devices)))}; load it onto one device"
        )
    return devices.pop()
