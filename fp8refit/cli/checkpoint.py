"""Converts a BF16 checkpoint to a block-FP8 checkpoint that stock vLLM and SGLang boot from.

The codes and scales are those `refit` writes from the same weights. Given an engine's layout, they are byte for byte what
that engine holds after loading. All or nothing: the result is written beside its destination and renamed at the end. Into
an existing empty folder, files are moved, `config.json` last.
"""

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fp8refit.errors import CheckpointError, NonFiniteError
from fp8refit.fill.kernels import quantize_blockwise
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.names import is_not_a_weight
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, SOURCE_DTYPES, ScaleFormat, TensorMeta, dtype_name
from fp8refit.sources.source import SafetensorsSource

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"

_LINEAR = re.compile(r"_proj(?:_with_mqa)?\.weight$|\.experts\..+\.weight$")
_STACK = re.compile(r"\.experts\.[a-z]\w*$")
_LM_HEAD = re.compile(r"(?:^|\.)lm_head\.weight$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed\w*|\w*embeddings?|wte|wpe)\.weight$")
_FP32_SUFFIXES = ("e_score_correction_bias",)
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class CheckpointReport(BaseModel):
    """What `quantize_checkpoint` wrote."""

    model_config = ConfigDict(frozen=True)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Output:
    """What becomes of one source tensor."""

    name: str
    source: TensorMeta
    dtype: torch.dtype
    """dtype it is stored in."""
    scale_format: ScaleFormat | None
    """None if it is copied."""
    block_size: tuple[int, int]

    @property
    def num_source_bytes(self) -> int:
        return prod(self.source.shape) * self.source.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        num_bytes = prod(self.source.shape) * self.dtype.itemsize
        if self.scale_format is not None:
            num_bytes += 4 * prod(-(-n // size) for n, size in zip(self.source.shape, self.block_size, strict=True))
        return num_bytes


def quantize_checkpoint(
    src: Path,
    dst: Path,
    *,
    like: EngineLayout | None = None,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    block_size: tuple[int, int] = (128, 128),
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
    device: torch.device | None = None,
) -> CheckpointReport:
    """Write a Hugging Face checkpoint as block FP8.

    Linear weights become E4M3 codes under their own name and float32 scales under `..._scale_inv`; the rest is copied.
    fp32 is rounded to BF16 first, as in `refit`. The LM head of a tied model is left out. Peak memory: one shard of the
    result, the copy that safetensors writes, and one source tensor with the quantizer's fp32 workspace.

    Args:
        src: Folder with `config.json` and safetensors in bfloat16, float16 or float32.
        dst: Folder to write. It must not exist, or be empty. An empty folder is kept, since it may be the current folder,
            a mount or the target of a link.
        like: Layout of the engine that will boot from the result (`fp8refit inspect --json`). What it holds as block FP8
            is quantized in its slot's format and block size, and nothing else; `scale_format` and `block_size` are
            ignored. Without it, every 2-D `*_proj.weight` and expert weight is quantized.
        scale_format: Format of every scale.
        block_size: Rows and columns of one block.
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
    dst = _free_place(dst)
    source = SafetensorsSource(src)
    metadata = _select(source, config, kept={slot.name for slot in like.slots} if like is not None else set())
    if like is None:
        outputs = [_output_by_name(name, meta, scale_format, block_size) for name, meta in metadata.items()]
    else:
        outputs = _outputs_like(like, metadata)
        block_size = _one_block_size(outputs)
    _check_quantizable(outputs)
    if all(output.scale_format is None for output in outputs):
        raise CheckpointError(f"{src}: holds no weight to quantize")
    shards = _plan_shards(outputs, max_shard_bytes)
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    others = _other_files(src)
    num_bytes = sum(output.num_bytes for output in outputs) + sum(file.stat().st_size for file in others)
    with _becoming(dst, num_bytes) as folder:
        _write_shards(source, shards, folder, device=device, on_progress=on_progress)
        _write_index(shards, folder / INDEX_NAME)
        for file in others:
            with _naming(file):
                shutil.copyfile(file, folder / file.name)
        _write_config(config, outputs, block_size, folder / CONFIG_NAME)
    return CheckpointReport(
        num_quantized=sum(output.scale_format is not None for output in outputs),
        num_copied=sum(output.scale_format is None for output in outputs),
        bytes_read=sum(output.num_source_bytes for output in outputs),
        bytes_written=sum(output.num_bytes for output in outputs),
        shards=tuple(shards),
        scale_formats=Counter(output.scale_format for output in outputs if output.scale_format is not None),
    )


def _free_place(dst: Path) -> Path:
    """Resolve `dst`.

    Raises:
        CheckpointError: Something exists there, or it cannot be accessed.
    """
    try:
        place = dst.resolve()
        is_free = not place.exists() or (place.is_dir() and not any(place.iterdir()))
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"{dst}: cannot be written ({error}); choose another folder") from error
    if not is_free:
        raise CheckpointError(f"{dst}: exists and is not an empty folder; remove it or choose another")
    return place


@contextmanager
def _becoming(dst: Path, num_bytes: int) -> Iterator[Path]:
    """Yield an empty folder on the disk of `dst`. When the block ends, its contents become `dst`. On an error nothing
    remains.

    Args:
        dst: An absolute path, free to use.
        num_bytes: How much will be written.

    Raises:
        CheckpointError: There is too little room, or something cannot be written.
    """
    is_new = not dst.exists()
    made = [parent for parent in dst.parents if not parent.exists()]
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=dst.parent if is_new else dst, prefix=".fp8refit-") as scratch:
            if shutil.disk_usage(scratch).free < num_bytes:
                raise OSError("too little room")
            folder = Path(scratch) / "checkpoint"
            folder.mkdir()
            yield folder
            if is_new:
                folder.rename(dst)
            else:
                _move_files(folder, dst)
    except BaseException as error:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if not isinstance(error, OSError):
            raise
        there = next(parent for parent in (dst, *dst.parents) if parent.exists())
        raise CheckpointError(
            f"{dst}: could not be written ({error}); it needs {num_bytes / 1e6:,.1f} MB, and "
            f"{shutil.disk_usage(there).free / 1e6:,.1f} MB are free; nothing was left behind"
        ) from error


def _move_files(folder: Path, dst: Path) -> None:
    """Move all files or none, `config.json` last: no engine boots from a folder without it.

    Raises:
        OSError: A file cannot be moved, or another process wrote into `dst`.
    """
    if others := [path.name for path in dst.iterdir() if path not in folder.parents]:
        raise OSError(f"another process wrote {', '.join(sorted(others))} there")
    files = sorted(folder.iterdir(), key=lambda file: file.name == CONFIG_NAME)
    try:
        for file in files:
            file.rename(dst / file.name)
    except BaseException:
        for file in files:
            (dst / file.name).unlink(missing_ok=True)
        raise


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Add the file name to errors, since those of a full disk lack it.

    Raises:
        OSError: It cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{file.name}: {error}") from error


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


def _select(source: SafetensorsSource, config: Mapping[str, Any], *, kept: Collection[str]) -> dict[str, TensorMeta]:
    """Return the tensors to write, in the order of the source.

    Raises:
        CheckpointError: Names all that cannot be written, such as all experts of a layer in one tensor, if no engine
            keeps that tensor unquantized.
    """
    problems = list(source.problems)
    problems += [
        f"{name}: is FP8 already; pass the BF16 checkpoint it came from"
        for name, meta in source.metadata.items()
        if meta.dtype == FP8_DTYPE or name.endswith(SCALE_SUFFIX)
    ]
    problems += [
        f"{name}: holds all experts of a layer in one tensor, as state dicts do, but engines boot block FP8 from one tensor "
        "per expert; write the model with save_pretrained()"
        for name, meta in source.metadata.items()
        if len(meta.shape) == 3 and _STACK.search(name) and name not in kept
    ]
    if problems:
        raise CheckpointError("this checkpoint cannot be quantized:", problems)
    is_tied = bool(config.get("tie_word_embeddings", False))
    return {name: meta for name, meta in source.metadata.items() if not (is_tied and _LM_HEAD.search(name))}


def _output_by_name(name: str, meta: TensorMeta, scale_format: ScaleFormat, block_size: tuple[int, int]) -> _Output:
    if len(meta.shape) == 2 and _LINEAR.search(name):
        return _Output(name=name, source=meta, dtype=FP8_DTYPE, scale_format=scale_format, block_size=block_size)
    is_rounded = meta.dtype is torch.float32 and not name.endswith(_FP32_SUFFIXES) and not is_not_a_weight(name)
    dtype = torch.bfloat16 if is_rounded else meta.dtype
    return _Output(name=name, source=meta, dtype=dtype, scale_format=None, block_size=block_size)


def _outputs_like(layout: EngineLayout, metadata: Mapping[str, TensorMeta]) -> list[_Output]:
    """Decide what each tensor becomes for the engine that `layout` describes.

    Raises:
        CheckpointError: Names every tensor that does not fit.
    """
    if layout.refusals:
        raise CheckpointError("this layout belongs to an engine that cannot be refitted:", layout.refusals)
    slots = {slot.name: slot for slot in layout.slots}
    problems = [
        f"{slot.name}: slots of this engine need it in different formats"
        for slot in layout.slots
        if (slot.scale_format, slot.block_size) != (slots[slot.name].scale_format, slots[slot.name].block_size)
    ]
    outputs = []
    stacks = {stack.name: stack for stack in layout.stacked}
    for name, meta in metadata.items():
        slot = slots.get(layout.aliases.get(name, name))
        stack = stacks.get(layout.aliases.get(name, name))
        if stack is not None or (slot is not None and slot.is_rearranged):
            how = (
                "all experts of a layer in one tensor"
                if stack is not None
                else "it in an order that does not match its blocks"
            )
            problems.append(
                f"{name}: this model's checkpoints hold {how}; boot the engine from the BF16 checkpoint instead"
            )
        elif slot is not None and meta.shape != slot.full_shape:
            problems.append(f"{name}: has shape {list(meta.shape)}, but {list(slot.full_shape)} in this engine")
        elif slot is not None:
            outputs.append(_output_for_slot(name, meta, slot))
        elif is_not_a_weight(name):
            outputs.append(_output_by_name(name, meta, ScaleFormat.FP32, (128, 128)))
        else:
            problems.append(f"{name}: this engine has no such weight")
    sent = {layout.aliases.get(name, name) for name in metadata}
    sent = sent.union(*(stack.parts for name, stack in stacks.items() if name in sent))
    problems += [f"{name}: is in this engine but not in the checkpoint" for name in slots if name not in sent]
    if problems:
        raise CheckpointError(f"this checkpoint does not fit the layout of {layout.engine}:", problems)
    return outputs


def _output_for_slot(name: str, meta: TensorMeta, slot: SlotLayout) -> _Output:
    if slot.scale_format is not None and slot.block_size is not None:
        return _Output(
            name=name, source=meta, dtype=FP8_DTYPE, scale_format=slot.scale_format, block_size=slot.block_size
        )
    # As in a refit, fp32 is converted straight to the engine's dtype, without rounding to BF16 first.
    dtype = getattr(torch, slot.dtype) if meta.dtype is torch.float32 else meta.dtype
    return _Output(name=name, source=meta, dtype=dtype, scale_format=None, block_size=(128, 128))


def _check_quantizable(outputs: Iterable[_Output]) -> None:
    """Check that everything to be quantized can be.

    Raises:
        CheckpointError: Names every tensor that cannot.
    """
    problems = [
        f"{output.name}: is {dtype_name(output.source.dtype)} with shape {list(output.source.shape)}; only matrices of "
        "bfloat16, float16 or float32 can be quantized"
        for output in outputs
        if output.scale_format is not None
        and (output.source.dtype not in SOURCE_DTYPES or len(output.source.shape) != 2)
    ]
    if problems:
        raise CheckpointError("this checkpoint cannot be quantized:", problems)


def _one_block_size(outputs: list[_Output]) -> tuple[int, int]:
    """Return the checkpoint's block size; its config can name only one."""
    sizes = {output.block_size for output in outputs if output.scale_format is not None}
    if len(sizes) > 1:
        raise CheckpointError(
            f"this engine has several block sizes, but a checkpoint can have only one: {sorted(sizes)}"
        )
    return sizes.pop() if sizes else (128, 128)


def _plan_shards(outputs: list[_Output], max_shard_bytes: int) -> dict[str, list[_Output]]:
    """Map file names to tensors, in order. Scales are next to their codes."""
    shards: list[list[_Output]] = []
    num_bytes = 0
    for output in outputs:
        if not shards or num_bytes + output.num_bytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(output)
        num_bytes += output.num_bytes
    count = len(shards)
    return {f"model-{index:05}-of-{count:05}.safetensors": shard for index, shard in enumerate(shards, start=1)}


def _write_shards(
    source: SafetensorsSource,
    shards: Mapping[str, list[_Output]],
    folder: Path,
    *,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Write one shard after another. After a bad tensor, only read on, to name all bad ones.

    Raises:
        NonFiniteError: Names every tensor with NaN or Inf.
    """
    num_bytes = sum(output.num_source_bytes for shard in shards.values() for output in shard)
    num_bytes_done = 0
    bad: list[str] = []
    for file_name, shard in shards.items():
        batch: dict[str, Tensor] = {}
        for output in shard:
            try:
                batch |= _convert(output, source.stored[output.name].read(), device)
            except NonFiniteError:
                bad.append(output.name)
            num_bytes_done += output.num_source_bytes
            if on_progress is not None:
                on_progress(num_bytes_done, num_bytes)
        if not bad:
            _save(batch, folder / file_name)
    if bad:
        raise NonFiniteError(bad, written=False)


def _convert(output: _Output, tensor: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return what one source tensor becomes, by name.

    Raises:
        NonFiniteError: It holds NaN or Inf.
    """
    if output.scale_format is not None:
        tensor = tensor.to(device)
        if tensor.dtype is torch.float32:
            tensor = tensor.to(torch.bfloat16)
        codes, scale = quantize_blockwise(tensor, block_size=output.block_size, scale_format=output.scale_format)
        return {output.name: codes.cpu(), output.name + SCALE_SUFFIX: scale.cpu()}
    values = tensor.to(output.dtype)
    is_narrow = values.is_floating_point() and values.itemsize == 1  # torch.isfinite does not support these
    if not bool(torch.isfinite(values.to(torch.float32) if is_narrow else values).all()):
        raise NonFiniteError([output.name], written=False)
    return {output.name: values}


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write one safetensors file.

    Raises:
        OSError: It cannot be written, for example because the disk is full.
    """
    from safetensors.torch import save_file

    with _naming(file):
        save_file(tensors, file, metadata={"format": "pt"})


def _write_index(shards: Mapping[str, list[_Output]], file: Path) -> None:
    weight_map = {}
    for file_name, shard in shards.items():
        for output in shard:
            weight_map[output.name] = file_name
            if output.scale_format is not None:
                weight_map[output.name + SCALE_SUFFIX] = file_name
    total = sum(output.num_bytes for shard in shards.values() for output in shard)
    _write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, file)


def _write_config(config: Mapping[str, Any], outputs: list[_Output], block_size: tuple[int, int], file: Path) -> None:
    """Write `config.json` with the quantization config that vLLM and SGLang read."""
    stored = {key: "bfloat16" for key in ("dtype", "torch_dtype") if config.get(key) == "float32"}
    kept = ["lm_head"] + [
        output.name.removesuffix(".weight")
        for output in outputs
        if output.scale_format is None
        and output.name.endswith(".weight")
        and len(output.source.shape) == 2
        and not _EMBEDDING.search(output.name)
    ]
    quantization_config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block_size),
        "modules_to_not_convert": list(dict.fromkeys(kept)),
    }
    _write_json({**config, **stored, "quantization_config": quantization_config}, file)


def _write_json(value: object, file: Path) -> None:
    with _naming(file):
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
