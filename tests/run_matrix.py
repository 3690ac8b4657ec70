"""Run the tests that every version of an engine has to pass, in the environment of one version, and note what passed.

    python -m tests.run_matrix vllm --out benchmarks/results/matrix.json [--part refit ...]
    python -m tests.run_matrix vllm --out benchmarks/results/trainers.json --trainer trl

The file holds a row for each engine and version, of its last run; a run adds to its row part by part. `nox -s matrix` runs
this in an environment for each version, and `python -m benchmarks.render` makes the table in docs/engines.md.

With a trainer of `tests/trainers.toml` the row is that trainer's, and its tests are run: `nox -s trainers`, docs/drop-in.md.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]
PARTS = {
    "vllm": {
        "refit": ["tests/vllm/test_refit.py"],
        "drop-in": ["tests/vllm/test_drop_in.py"],
        "update in the worker": ["tests/vllm/test_updates.py"],
        "rank killed in a stream": ["tests/vllm/test_killed_streams.py"],
        "weight transfer": ["tests/vllm/test_weight_transfer.py"],
    },
    "sglang": {
        "refit": ["tests/sglang/test_refit_stubbed_kernels.py"],
        "drop-in": ["tests/sglang/test_drop_in_stubbed_kernels.py"],
        "update in the worker": ["tests/sglang/test_updates_stubbed_kernels.py"],
        "other formats": ["tests/sglang/test_containers_stubbed_kernels.py"],
    },
}
"""Tests of each part of the table, by engine."""
TRAINERS = ROOT / "tests" / "trainers.toml"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", help="Run this one; again for each. The others stay as they were.")
    parser.add_argument("--trainer", choices=read_trainers(), help="Note a row of this one instead.")
    arguments = parser.parse_args()
    if arguments.trainer:
        row = trainer_row(arguments.trainer)
        note_trainer(row, arguments.out)
        print(row, flush=True)
        return int(bool(row["failed"] or not (row["passed"] or row["proof"] == "read")))
    version = installed(arguments.engine)
    row: dict = {"engine": arguments.engine, "version": version, "torch": torch.__version__, "parts": {}}
    if arguments.part:
        row["parts"] = parts_of(row, arguments.out)
    for part in arguments.part or PARTS[arguments.engine]:
        row["parts"][part] = run(PARTS[arguments.engine][part])
        note(row, arguments.out)
        print(f"{arguments.engine} {version}: {part}: {row['parts'][part]}", flush=True)
    return int(any(counts["failed"] or not counts["passed"] + counts["skipped"] for counts in row["parts"].values()))


def read_trainers() -> dict[str, dict]:
    return tomllib.loads(TRAINERS.read_text())


def trainer_row(name: str) -> dict:
    """What the table has of a trainer, and what its tests came to, with the engine that is here."""
    table = read_trainers()[name]
    counts = run(table["tests"]) if table["proof"] != "read" else {"passed": 0, "failed": 0, "skipped": 0}
    trainer, _, version = table["trainer"].partition("==")
    engine, _, pinned = table["engine"].partition("==")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "name": name,
        "trainer": trainer,
        "version": version,
        "engine": engine,
        "engine_version": pinned if table["proof"] == "read" else installed(engine),
        "ways": table["ways"],
        "ranks": table["ranks"],
        "proof": table["proof"],
        "why": table.get("why", ""),
        **counts,
        "commit": commit.strip(),
    }


def note_trainer(row: dict, out: Path) -> None:
    """Put a row in the place of that of the same name, in the order of the table."""
    rows = {other["name"]: other for other in json.loads(out.read_text())["rows"]} if out.exists() else {}
    rows[row["name"]] = row
    write([rows[name] for name in read_trainers() if name in rows], out)


def installed(engine: str) -> str:
    """The engine's version; it is not imported, as its kernels may be stubbed for its tests alone."""
    for package in (engine, f"{engine}-cpu"):
        with suppress(PackageNotFoundError):
            return version_of(package)
    raise SystemExit(f"{engine} is not installed here")


def run(tests: list[str]) -> dict[str, int]:
    """How many tests passed, failed and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=ROOT, check=False)
        suites = ElementTree.parse(report).getroot().iter("testsuite") if report.exists() else ()
        counts = [
            {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites
        ]
    total = {key: sum(each[key] for each in counts) for key in ("tests", "failures", "errors", "skipped")}
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


def parts_of(row: dict, out: Path) -> dict:
    """What was found before with the same versions."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    same = ("engine", "version", "torch")
    return next((other["parts"] for other in rows if all(other[key] == row[key] for key in same)), {})


def note(row: dict, out: Path) -> None:
    """Put a row in the place of that of the same engine and version."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    others = [other for other in rows if (other["engine"], other["version"]) != (row["engine"], row["version"])]
    rows = sorted(
        [*others, row], key=lambda each: (each["engine"], [int(number) for number in each["version"].split(".")])
    )
    write(rows, out)


def write(rows: list[dict], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"gpu": "CPU", "cpu": platform.machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
