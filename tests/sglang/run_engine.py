"""Real SGLang engines, doing what the tests beside this file ask. The result is a JSON file.

python run_engine.py SCENARIO.json RESULT.json      {"name": "refits", "arguments": {...}}
"""

import faulthandler
import json
import sys
from pathlib import Path

import torch
from conformance import run_conformance
from experts import run_experts
from fresh import run_fresh
from latent import run_latent
from refits import run_refits
from served import run_served

SCENARIOS = {
    "fresh": run_fresh,
    "refits": run_refits,
    "experts": run_experts,
    "latent": run_latent,
    "conformance": run_conformance,
    "served": run_served,
}


def main(scenario: Path, result: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100)  # into the log: what hangs is ended soon after
    asked = json.loads(scenario.read_text())
    arguments = asked["arguments"] | {"work": Path(asked["arguments"]["work"])}
    result.write_text(json.dumps(SCENARIOS[asked["name"]](**arguments)))


if __name__ == "__main__":  # SGLang's processes import this file again
    main(*map(Path, sys.argv[1:]))
