"""Adds to committed results what the git history knows of the code that they measured. Changes no figure.

python benchmarks/stamp_results.py

For a result without `commit` and `code`: finds the commit in which its figures first were (`recorded_in`), and hashes the
packages of that commit. What was measured is no newer than that. For a result with `code` alone, which was measured outside
a checkout: names HEAD as its `commit` if HEAD has the same code. Needs the whole history, as a shallow clone has not.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fp8refit.bench.code import INSIDE, PARTS, hash_sources

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED_PARTS: dict[str, tuple[str, ...]] = {
    "bench_kernel_*": ("kernels",),
    "bench_refit_*": PARTS,
    "drafts_*": INSIDE,
    "experts_qwen3*": INSIDE,
    "experts_*": PARTS,
    "kv_*": PARTS,
    "oracle_*": PARTS,
    "precision_*": ("kernels",),
    "sglang_*": PARTS,
    "soak_*": INSIDE,
    "synced_*": PARTS,
    "traced_sglang_*": PARTS,
    "traced_vllm_*": INSIDE,
    "transport_*": ("transport",),
    "vllm_layouts_*": PARTS,
    "vllm_*": INSIDE,
    "votes_*": ("transport",),
    "weight_transfer_*": PARTS,
}
"""The packages that each kind of result ran through; the first pattern that fits counts. Others name their builds, as
`run_interleaved.py` does, or measure no refit."""
OLD_PLACES = {"kernels": "fp8refit/fill/kernels/"}
"""Where earlier commits have a package."""


def main() -> None:
    """Stamp every result that lacks it."""
    for file in sorted(RESULTS.glob("*.json")):
        parts = next((parts for pattern, parts in MEASURED_PARTS.items() if fnmatch(file.stem, pattern)), None)
        text = file.read_text()
        found = json.loads(text)
        added = {} if parts is None else stamp_of(file, found, parts)
        if added:
            file.write_text(extended(text, added))
            sys.stdout.write(f"{file.name}: {added}\n")


def stamp_of(file: Path, found: dict[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """What to add to a result; nothing if it has all."""
    if found.get("commit") or found.get("recorded_in"):
        return {}
    if code := found.get("code"):
        return (
            {"commit": git("rev-parse", "--short=7", "HEAD").strip()} if code == hashes_of("HEAD", tuple(code)) else {}
        )
    commit = recorded_in(file, found)
    return {"recorded_in": commit[:7], "code": hashes_of(commit, parts)}


def recorded_in(file: Path, found: dict[str, Any]) -> str:
    """The oldest commit since which the file has had all of these figures. Names of keys may have changed."""
    figures = figures_of(found)
    commits = git("log", "--follow", "--name-only", "--format=%x00%H", "--", str(file.relative_to(ROOT)))
    oldest = ""
    for entry in commits.split("\0")[1:]:
        commit, name = entry.split()
        if figures_of(json.loads(git("show", f"{commit}:{name}"))) != figures:
            break
        oldest = commit
    assert oldest, f"{file.name} is not what HEAD has"
    return oldest


def figures_of(found: Any) -> list[str]:
    """Every number, in order."""
    return sorted(map(repr, _numbers(found)))


def _numbers(found: Any) -> Iterator[float]:
    if isinstance(found, dict | list):
        for value in found.values() if isinstance(found, dict) else found:
            yield from _numbers(value)
    elif isinstance(found, int | float):
        yield found


def hashes_of(commit: str, parts: tuple[str, ...]) -> dict[str, str | None]:
    """Hash the packages of a commit."""
    return {part: hash_sources(sources_of(commit, part)) for part in parts}


def sources_of(commit: str, part: str) -> list[str]:
    """The modules of a package in a commit, which may have had it elsewhere."""
    folders = [f"fp8refit/{part}/", *filter(None, [OLD_PLACES.get(part)])]
    names = git("ls-tree", "-r", "--name-only", commit, *folders).split()
    others = tuple(folder for other, folder in OLD_PLACES.items() if other != part)
    modules = [name for name in names if name.endswith(".py") and not name.startswith(others)]
    return [git("show", f"{commit}:{name}") for name in modules]


def extended(text: str, added: dict[str, Any]) -> str:
    """The text of a JSON object with fields added at its end; all that was there stays as it was."""
    body = text.rstrip()
    is_indented = body.startswith("{\n")
    indent = len(body.partition("\n")[2]) - len(body.partition("\n")[2].lstrip(" ")) if is_indented else None
    fields = json.dumps(added, indent=indent)
    head = body[:-1].rstrip()
    end = text[len(text.rstrip()) :]
    return f"{head},{fields[1:] if is_indented else ' ' + fields[1:]}{end}"


def git(*arguments: str) -> str:
    """What git says."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
