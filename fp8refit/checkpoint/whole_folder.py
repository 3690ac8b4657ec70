"""Folders that are written whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp8refit.errors import CheckpointError

CONFIG_NAME = "config.json"
"""Written last, because no engine boots from a folder without it."""


def free_place(dst: Path) -> Path:
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
def becoming(dst: Path, num_bytes: int) -> Iterator[Path]:
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
def naming(file: Path) -> Iterator[None]:
    """Add the file name to errors, since those of a full disk lack it.

    Raises:
        OSError: It cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{file.name}: {error}") from error
