"""Converts a BF16 checkpoint to an FP8 checkpoint that stock vLLM and SGLang boot from.

The codes and scales are those `refit` writes from the same weights. Given an engine's layout, they are byte for byte what
that engine holds after loading. All or nothing: the result is written beside its destination and renamed at the end. Into
an existing empty folder, files are moved, `config.json` last.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from fp8refit.checkpoint.outputs import (
    Output,
    check_quantizable,
    check_ties,
    output_by_name,
    outputs_like,
    plan_shards,
    quantization_of,
    select,
)
from fp8refit.checkpoint.whole_folder import CONFIG_NAME, becoming, free_place, naming
from fp8refit.errors import CheckpointError, NonFiniteError
from fp8refit.kernels import Maxima, quantized
from fp8refit.live.formats import BlockFormat, Container, ScaleFormat
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import stored_as
from fp8refit.sources.checkpoints import SafetensorsSource

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
INDEX_NAME = "model.safetensors.index.json"

_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class CheckpointReport(BaseModel, frozen=True):
    """What `quantize_checkpoint` wrote."""

    num_quantized: int
    """Tensors written as codes and scales."""
    num_copied: int
    """Tensors written as values."""
    bytes_read: int
    """Size of the source tensors that were written."""
    bytes_written: int
    """Size of the tensors in the shards."""
    shards: tuple[str, ...]
    """File names."""
    scale_formats: dict[ScaleFormat, int]
    """Number of quantized tensors per scale format."""


def quantize_checkpoint(
    src: Path,
    dst: Path,
    *,
    like: EngineLayout | None = None,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    block_size: tuple[int, int] = (128, 128),
    container: Container = Container.FP8,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
    device: torch.device | None = None,
) -> CheckpointReport:
    """Write a Hugging Face checkpoint as FP8.

    Linear weights become E4M3 codes under their own name and float32 scales under the container's, by default `..._scale_inv`;
    the rest is copied. fp32 is rounded to BF16 first, as in `refit`. The LM head of a tied model is left out. Peak memory: one
    shard of the result, the copy that safetensors writes, and one source tensor with the quantizer's fp32 workspace.

    Args:
        src: Folder with `config.json` and safetensors in bfloat16, float16 or float32.
        dst: Folder to write. It must not exist, or be empty. An empty folder is kept, since it may be the current folder,
            a mount or the target of a link.
        like: Layout of the engine that will boot from the result (`fp8refit inspect --json`). What it holds as FP8 is
            quantized in its slot's format and block size, with one scale where the engine has one, and nothing else;
            `scale_format`, `block_size` and `container` are ignored. Without it, every 2-D `*_proj.weight` and expert
            weight is quantized.
        scale_format: Format of every scale.
        block_size: Rows and columns of one block; `(1, WHOLE)` of `fp8refit.live.formats` is one scale per row, which
            compressed-tensors has.
        container: Whose names scales get, and what config.json says.
        max_shard_bytes: Size at which a new file begins. A larger tensor gets a file of its own.
        on_progress: Called after every tensor with source bytes done and total source bytes.
        device: Where to quantize. By default CUDA if available, else the CPU. The bytes are the same.

    Raises:
        CheckpointError: `src` is not such a checkpoint, is FP8 already or does not fit `like`; or `dst` is not empty,
            cannot be written or has too little room. Nothing is left behind.
        InvalidSourceError: A safetensors file is missing or corrupt.
        NonFiniteError: NaN or Inf after rounding to BF16; names every tensor.

    Examples:
        >>> quantize_checkpoint(Path("Qwen3-8B"), Path("Qwen3-8B-FP8"))  # doctest: +SKIP
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    config = _read_config(src)
    dst = free_place(dst)
    source = SafetensorsSource(src)
    metadata = select(source, config, takes_stacks=like is not None)
    check_ties(source, config, like)
    if like is None:
        if scale_format.has_exponents:
            raise CheckpointError(f"no checkpoint is written with scales in {scale_format}; use fp32 or ue8m0")
        block_format = BlockFormat(scale_format=scale_format, block_size=block_size)
        outputs = [output_by_name(name, meta, block_format) for name, meta in metadata.items()]
    else:
        outputs, container = outputs_like(like, metadata), like.container
    outputs = [replace(output, container=container) for output in outputs]
    quantization = quantization_of(outputs)
    check_quantizable(outputs)
    if all(output.format is None for output in outputs):
        raise CheckpointError(f"{src}: holds no weight to quantize")
    shards = plan_shards(outputs, max_shard_bytes)
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    others = _other_files(src)
    num_bytes = sum(output.num_bytes for output in outputs) + sum(file.stat().st_size for file in others)
    with becoming(dst, num_bytes) as folder:
        reader = _Reader(source, outputs, on_progress)
        maxima = _read_maxima(reader, outputs, device)
        _write_shards(reader, shards, folder, maxima, device=device)
        _write_index(shards, folder / INDEX_NAME)
        for file in others:
            with naming(file):
                shutil.copyfile(file, folder / file.name)
        _write_config(config, quantization, folder / CONFIG_NAME)
    return CheckpointReport(
        num_quantized=sum(output.format is not None for output in outputs),
        num_copied=sum(output.format is None for output in outputs),
        bytes_read=sum(output.num_source_bytes for output in outputs),
        bytes_written=sum(output.num_bytes for output in outputs),
        shards=tuple(shards),
        scale_formats=Counter(output.format.scale_format for output in outputs if output.format is not None),
    )


def _read_config(src: Path) -> dict[str, Any]:
    path = src / CONFIG_NAME
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or no Unicode
        raise CheckpointError(f"{path}: cannot be read ({error}); pass a Hugging Face checkpoint folder") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: is not a JSON object; pass a Hugging Face checkpoint folder")
    if "quantization_config" in config:
        raise CheckpointError(
            f"{src}: is quantized already (config.json has quantization_config); pass its BF16 original"
        )
    return config


class _Reader:
    """Reads tensors to be written, those that share a scale twice, and says how far it is."""

    def __init__(
        self, source: SafetensorsSource, outputs: Sequence[Output], on_progress: Callable[[int, int], None] | None
    ) -> None:
        self._source, self._on_progress = source, on_progress
        self._num_bytes = sum(output.num_source_bytes * (1 + bool(output.shared_with)) for output in outputs)
        self._num_bytes_done = 0

    def read(self, output: Output, device: torch.device) -> Tensor:
        """Read a tensor; one to be quantized to the device, in a dtype that is quantized."""
        tensor = self._source.stored[output.name].read()
        self._num_bytes_done += output.num_source_bytes
        if self._on_progress is not None:
            self._on_progress(self._num_bytes_done, self._num_bytes)
        if output.format is None:
            return tensor
        return tensor.to(device, torch.bfloat16 if tensor.dtype is torch.float32 else tensor.dtype)


def _read_maxima(reader: _Reader, outputs: Sequence[Output], device: torch.device) -> dict[str, float]:
    """The largest magnitudes of tensors that share a scale, by the first of them. NaN and Inf stay."""
    sharing = [output for output in outputs if output.shared_with]
    firsts = list(dict.fromkeys(output.shared_with for output in sharing))
    places, maxima = {name: place for place, name in enumerate(firsts)}, Maxima(len(firsts), device)
    for output in sharing:
        maxima.update(places[output.shared_with], [reader.read(output, device)])
    return dict(zip(firsts, maxima.read(), strict=True))


def _write_shards(
    reader: _Reader,
    shards: Mapping[str, list[Output]],
    folder: Path,
    maxima: Mapping[str, float],
    *,
    device: torch.device,
) -> None:
    """Write one shard after another. After a bad tensor, keep reading but write nothing, so that all bad ones are named.

    Raises:
        NonFiniteError: Names every tensor with NaN or Inf.
    """
    bad: list[str] = []
    for file_name, shard in shards.items():
        batch: dict[str, Tensor] = {}
        for output in shard:
            try:
                batch |= _convert(output, reader.read(output, device), maxima.get(output.shared_with))
            except NonFiniteError:
                bad.append(output.name)
        if not bad:
            _save(batch, folder / file_name)
    if bad:
        raise NonFiniteError(bad, written=False)


def _convert(output: Output, tensor: Tensor, maximum: float | None) -> dict[str, Tensor]:
    """Return what one source tensor becomes, by name.

    Args:
        output: What it becomes.
        tensor: The tensor.
        maximum: The largest magnitude of all that share its scale.

    Raises:
        NonFiniteError: It holds NaN or Inf.
    """
    if output.format is not None:
        written: dict[str, Tensor] = {}
        for name, start, shape in stored_as(output.written, tuple(tensor.shape)):
            part = tensor[start[0], start[1] : start[1] + shape[0]] if len(shape) < tensor.ndim else tensor
            codes, scale, *over_all = _quantized(part, output.format, maximum)
            stored = scale.cpu().reshape(output.container.shape_of(scale.shape, output.format))
            written |= {name: codes.cpu(), name + output.container.scale_suffix(output.format): stored}
            if over_all:
                written[name + output.container.global_suffix] = over_all[0].cpu().reshape(())
        return written
    values = tensor.to(output.dtype)
    is_narrow = values.is_floating_point() and values.itemsize == 1  # torch.isfinite does not support these
    if not bool(torch.isfinite(values.to(torch.float32) if is_narrow else values).all()):
        raise NonFiniteError([output.name], written=False)
    return {output.name: values}


def _quantized(tensor: Tensor, block_format: BlockFormat, maximum: float | None) -> tuple[Tensor, ...]:
    """What a matrix becomes, or each matrix of a stack."""
    if tensor.ndim == 2:
        # Of a maximum that is not finite another tensor is to blame: nothing is written.
        return quantized(tensor, block_format, maximum if maximum is not None and isfinite(maximum) else None)
    parts = zip(*(_quantized(matrix, block_format, maximum) for matrix in tensor), strict=True)
    return tuple(torch.stack([each.view(torch.uint8) for each in part]).view(part[0].dtype) for part in parts)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write one safetensors file.

    Raises:
        OSError: It cannot be written, for example because the disk is full.
    """
    from safetensors.torch import save_file

    with naming(file):
        save_file(tensors, file, metadata={"format": "pt"})


def _write_index(shards: Mapping[str, list[Output]], file: Path) -> None:
    weight_map = {name: file_name for file_name, shard in shards.items() for output in shard for name in output.names}
    total = sum(output.num_bytes for shard in shards.values() for output in shard)
    _write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, file)


def _write_config(config: Mapping[str, Any], quantization: Mapping[str, Any], file: Path) -> None:
    """Write `config.json` with the quantization config that vLLM and SGLang read."""
    stored = {key: "bfloat16" for key in ("dtype", "torch_dtype") if config.get(key) == "float32"}
    _write_json({**config, **stored, "quantization_config": quantization}, file)


def _write_json(value: object, file: Path) -> None:
    with naming(file):
        file.write_text(json.dumps(value, indent=2) + "\n")


def _other_files(src: Path) -> Sequence[Path]:
    """Return every file without weights: tokenizer, generation config and so on."""
    return [
        file
        for file in sorted(src.iterdir())
        if file.is_file()
        and file.suffix not in _WEIGHT_FILES
        and not file.name.endswith(".index.json")
        and file.name != CONFIG_NAME
    ]
