"""Runs a scenario of `run_engine.py` in a process of its own, and shows its log if it fails."""

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.vllm.processes import ProcessFailure, Run, wait_until_gone

HERE = Path(__file__).parent


def run_scenario(
    name: str, arguments: Mapping[str, object], environment: Mapping[str, str], folder: Path, *, timeout_s: float
) -> Any:
    """What the scenario found. Its engines must not outlive it.

    Raises:
        ProcessFailure: It failed, hung, or was ended by SGLang, which kills the whole process if an engine fails.
    """
    label = f"{name.replace(' ', '-')}-{uuid.uuid4().hex[:8]}"
    scenario, result = folder / f"{label}.json", folder / f"{label}-result.json"
    scenario.write_text(json.dumps({"name": name, "arguments": arguments}, default=str))
    run = Run([HERE / "run_engine.py", scenario, result], environment, folder / label)
    code = run.wait(time.monotonic() + timeout_s)
    left = wait_until_gone([run.session])
    if code or left:
        raise ProcessFailure(f"{run}\nleft running: {left}")
    return json.loads(result.read_text())
