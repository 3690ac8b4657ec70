"""Real SGLang engines in processes that this one starts, doing what the tests beside it ask. The result is a JSON file.

`start_scenarios.py` runs `main`. A scenario is a JSON file too: {"name": "refits", "arguments": {...}}.
"""

import faulthandler
import json
import multiprocessing
from pathlib import Path

import torch
from attacked import run_oracle
from clients import run_client, run_client_fresh
from conformance import run_conformance
from containers import run_container
from drafts import run_drafting
from drop_ins import run_drop_in, run_drop_in_off
from engines import look
from experts import run_experts
from fp8refit_sglang import rollout
from fresh import run_fresh
from latent import run_latent
from lora import run_adapters
from precision_runs import run_precision
from refits import run_refits
from replicas import run_replicas, run_served_replicas
from served import run_drop_in_going_on, run_served
from updates import run_updates
from zoo import run_zoo

from tests import rollout_engines
from tests.engines import scripts


def run_rollouts(work: Path) -> dict:
    """Engines of the benchmark of rollouts."""
    return rollout_engines.held_by_both(work / "rollouts", rollout.boot, lambda engine: look(engine, "live_bytes"))


def run_script(script: str, arguments: list[str], work: Path) -> dict:
    """A script of ours or a trainer's."""
    return scripts.run_script(script, arguments)


SCENARIOS = {
    "fresh": run_fresh,
    "refits": run_refits,
    "replicas": run_replicas,
    "served replicas": run_served_replicas,
    "container": run_container,
    "experts": run_experts,
    "latent": run_latent,
    "drafting": run_drafting,
    "adapters": run_adapters,
    "conformance": run_conformance,
    "served": run_served,
    "drop-in going on": run_drop_in_going_on,
    "oracle": run_oracle,
    "zoo": run_zoo,
    "script": run_script,
    "updates": run_updates,
    "precision": run_precision,
    "rollouts": run_rollouts,
    "drop-in": run_drop_in,
    "drop-in off": run_drop_in_off,
    "client": run_client,
    "client fresh": run_client_fresh,
}
SPAWNED = ({"name": "refits", "num_ranks": 1}, {"name": "served"})
"""Scenarios with engines whose processes import SGLang anew, as SGLang has it. Those of others are forks, which boot faster."""


def main(scenario: Path, result: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100)  # into the log: what hangs is ended soon after
    asked = json.loads(scenario.read_text())
    named = {"name": asked["name"], **asked["arguments"]}
    if not any(spawned.items() <= named.items() for spawned in SPAWNED):
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *_, **__: None
    arguments = asked["arguments"] | {"work": Path(asked["arguments"]["work"])}
    result.write_text(json.dumps(SCENARIOS[asked["name"]](**arguments)))
