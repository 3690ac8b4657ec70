"""One `vllm serve` that answers without end, under good pushes, bad ones, and trainers that are killed."""

import os
from collections.abc import Sequence
from pathlib import Path

from servers import KEY, Server

from fp8refit.bench.shapes import write_config
from tests.oracle.campaign import Campaign, Plan
from tests.oracle.load import Heard
from tests.oracle.trainers import Setup

SHAPE = "tiny"
PLANS = {
    "short": Plan(pushes=3, poisoned=3, kills=24, kills_inside=3, seconds=480),
    "long": Plan(pushes=8, poisoned=6, kills=48, kills_inside=8, seconds=480),
}


def run_oracle(length: str, work: str) -> dict:
    """A campaign, and what was found."""
    write_config(SHAPE, Path(work))
    os.environ["FP8REFIT_API_KEY"] = KEY
    with Server(Path(work)) as server:
        server.wait()

        def ask(prompt: Sequence[int], num_tokens: int) -> Heard:
            said = server.complete(prompt, num_tokens)
            return Heard(said["status"], said.get("tokens", ()))

        *_, found = Campaign(Setup(url=server.url, shape=SHAPE), ask, PLANS[length]).run()
        return found
