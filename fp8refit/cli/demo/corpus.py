"""Text from every Python installation: the language reference in `pydoc` and the standard library's docstrings."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

HELD_OUT_EVERY = 10
"""One in this many runs of paragraphs is held out."""
RUN_LENGTH = 16
"""Paragraphs per run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Bytes to train on and bytes held out, each a vector of token ids below 256 (int64)."""

    train: Tensor
    held_out: Tensor


def read_corpus() -> Corpus:
    """Read the text, drop repeated paragraphs, and hold out every tenth run of the rest."""
    paragraphs = list(dict.fromkeys(paragraph for text in _texts() for paragraph in _paragraphs(text)))
    runs = ["\n\n".join(paragraphs[start : start + RUN_LENGTH]) for start in range(0, len(paragraphs), RUN_LENGTH)]
    held_out = runs[::HELD_OUT_EVERY]
    train = [run for index, run in enumerate(runs) if index % HELD_OUT_EVERY]
    return Corpus(train=_as_tokens(train), held_out=_as_tokens(held_out))


def sample_windows(tokens: Tensor, *, num_windows: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw `num_windows` windows of `length` tokens, (num_windows, length)."""
    starts = torch.randint(len(tokens) - length, (num_windows, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if stripped := paragraph.strip("\n"):
            yield stripped


def _texts() -> Iterator[str]:
    yield from (topics[name] for name in sorted(topics))
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield from _docstrings(file)


def _docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a module and its top-level definitions."""
    module = ast.parse(file.read_bytes())
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in (module, *(child for child in module.body if isinstance(child, definitions))):
        if docstring := ast.get_docstring(node):
            yield docstring


def _as_tokens(texts: list[str]) -> Tensor:
    return torch.frombuffer(bytearray("\n\n".join(texts).encode()), dtype=torch.uint8).long()
