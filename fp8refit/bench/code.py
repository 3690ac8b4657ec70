"""Which code a benchmark measures: a hash of each package that a refit runs through, so that a later change shows."""

import ast
import hashlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
INSIDE = ("kernels", "fill", "ranks")
"""Packages that a refit in the trainer's process runs through."""
PARTS = (*INSIDE, "remote", "transport")
"""Packages that a refit of ranks in other processes runs through."""
_DIGITS = 12


def hash_sources(sources: Iterable[str]) -> str | None:
    """Hash modules by what they compute: comments, docstrings, layout, imports and names of modules do not count.

    So a module that is moved within its package changes nothing, nor do those that import it.

    Args:
        sources: The source text of each module.

    Returns:
        The same digits with every version of Python; None if there are no modules.
    """
    texts = sorted("".join(_tokens(ast.parse(source))) for source in sources)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:_DIGITS] if texts else None


@cache
def hash_part(part: str) -> str | None:
    """Hash the installed package `part`; None if there is none."""
    folder = PACKAGE / part
    return hash_sources(file.read_text() for file in folder.rglob("*.py"))


def hash_parts(parts: Iterable[str]) -> dict[str, str | None]:
    """Hash installed packages, by name."""
    return {part: hash_part(part) for part in parts}


def changed_parts(code: Mapping[str, str | None]) -> list[str]:
    """Return the packages that are no longer what they were when `code` was hashed."""
    return [part for part, digits in code.items() if digits is None or digits != hash_part(part)]


def changed_since(result: Mapping[str, Any], parts: Iterable[str] = PARTS) -> str:
    """Name the packages that have changed since a result was measured; "" if none has, or it does not say what they were.

    Args:
        result: A result as JSON, with the fields of `BenchResult`.
        parts: The packages that matter to the figures in question.
    """
    changed = changed_parts({part: digits for part, digits in result.get("code", {}).items() if part in parts})
    names = [f"`{part}`" for part in changed]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def commit_of(result: Mapping[str, Any]) -> str:
    """Say at which commit a result was measured, as far as it is known."""
    if commit := result.get("commit"):
        return f"measured at `{commit}`"
    return f"recorded in `{result['recorded_in']}`" if result.get("recorded_in") else "measured outside a checkout"


def age_of(result: Mapping[str, Any], parts: Iterable[str] = PARTS) -> str:
    """Say that a result is of earlier code, and of which; "" if `changed_since` is."""
    changed = changed_since(result, parts)
    return f"{commit_of(result)}, before later changes of {changed}" if changed else ""


@cache
def current_commit() -> str | None:
    """Return the commit of the checkout that the package is part of, with `+` if files have changed since; None without one."""
    try:
        _git(
            "ls-files", "--error-unmatch", "__init__.py"
        )  # or the checkout is another project's, with an environment in it
        return _git("describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _tokens(node: object) -> Iterator[str]:
    """Write a tree out. `ast.dump` differs between versions of Python in fields that are empty."""
    if isinstance(node, list):
        for part in node:
            yield from _tokens(part)
    elif not isinstance(node, ast.AST):
        yield f"{type(node).__name__} {node!r} "
    elif not _is_docstring(node) and not isinstance(node, ast.expr_context | ast.Import | ast.ImportFrom):
        yield f"({type(node).__name__} "
        for name, value in ast.iter_fields(node):
            if value is not None and value != [] and name not in {"kind", "type_comment"}:
                yield f"{name}="
                yield from _tokens(value)
        yield ")"


def _is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a string that nothing reads."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
