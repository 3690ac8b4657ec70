"""Checkpoints on disk: a safetensors file, or a folder of them with or without an index."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError
from torch import Tensor

from fp8refit.errors import InvalidSourceError
from fp8refit.live.formats import SCALE_SUFFIX
from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.files import SafetensorsFile, StoredTensor, Threads
from fp8refit.transport.stamps import FilesRead, FileStamp


class SafetensorsSource:
    """A safetensors file, or a folder of them with or without an index. The files stay open, and no others are read.

    Args:
        path: Path of the file or folder.
        judged: The state of the files that was checked elsewhere, if any.

    Attributes:
        path: Path of the file or folder.
        stamps: The state of each file.
        files: The same as one record, for ranks that compare what they opened.
        stored: Every tensor, by its checkpoint name.

    Raises:
        InvalidSourceError: A file is missing, unreadable, or not in the state that was checked.
    """

    is_repeatable = True

    def __init__(self, path: Path, *, judged: Sequence[FileStamp] | None = None) -> None:
        self.path = path
        files = _safetensors_files(path)
        if judged is not None and [file.name for file in files] != [stamp.name for stamp in judged]:
            raise InvalidSourceError([f"{path}: holds other files than when it was checked; refit again"])
        stamps: Iterable[FileStamp | None] = itertools.repeat(None, len(files)) if judged is None else judged
        threads = Threads()
        opened = [SafetensorsFile(file, threads, judged=stamp) for file, stamp in zip(files, stamps, strict=True)]
        self.stamps = tuple(file.stamp for file in opened)
        self.files = FilesRead.of(path, self.stamps)
        self.stored: dict[str, StoredTensor] = {}
        problems = []
        for file in opened:
            for raw_name, tensor in file.tensors.items():
                name = strip_wrappers(raw_name)
                if name in self.stored:
                    problems.append(f"{name}: stored twice, the second time in {file.path.name}")
                    continue
                if name.endswith(SCALE_SUFFIX) and tensor.meta.ndim == 4:
                    tensor.meta = tensor.meta[:, 0, :, 0]  # see `Container.MODELOPT`
                self.stored[name] = tensor
        self.metadata = {name: TensorMeta.of(tensor.meta) for name, tensor in self.stored.items()}
        self.problems = tuple(problems)

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]]:
        """Return metadata and problems, from the headers."""
        return self.metadata, self.problems

    def pick(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read the tensors with these names.

        Raises:
            InvalidSourceError: A file changed since it was opened.
        """
        return {name: self.stored[name].read() for name in names}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Read one tensor after another.

        Raises:
            InvalidSourceError: A file changed since it was opened.
        """
        return ((name, tensor.read()) for name, tensor in self.stored.items())


class _Index(BaseModel, strict=True):
    """The contents of `model.safetensors.index.json`."""

    weight_map: dict[str, str]


def _safetensors_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint, in order.

    Raises:
        InvalidSourceError: There are none, or the index names a missing file.
    """
    if _is_file(path):
        return [path]
    try:
        inside = sorted(path.iterdir())
    except (OSError, ValueError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise InvalidSourceError([f"{path}: {why}"]) from error
    index = path / "model.safetensors.index.json"
    if index in inside:
        return _indexed_files(index)
    files = [file for file in inside if file.suffix == ".safetensors"]
    if not files:
        raise InvalidSourceError([f"{path}: is neither a safetensors file nor a folder with any"])
    return files


def _indexed_files(index: Path) -> list[Path]:
    """Return the files that an index names.

    Raises:
        InvalidSourceError: It is not an index, or a file is missing or outside its folder.
    """
    try:
        weight_map = _Index.model_validate_json(index.read_bytes()).weight_map
    except (OSError, ValidationError) as error:
        raise InvalidSourceError([f"{index}: not a safetensors index ({str(error)[:300]})"]) from error
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise InvalidSourceError([f"{name[:200]}: is named by {index} but lies outside its folder" for name in outside])
    files = [index.parent / name for name in names]
    absent = [file.name for file in files if not _is_file(file)]
    if absent:
        raise InvalidSourceError([f"{name[:200]}: is named by {index} but does not exist" for name in absent])
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a possible file name
        return False
