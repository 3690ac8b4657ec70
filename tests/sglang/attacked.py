"""One `sglang.launch_server` that answers without end, under good pushes, bad ones, and trainers that are killed."""

from collections.abc import Sequence
from pathlib import Path

from engines import NOISE
from served import Server

from fp8refit.bench.shapes import write_config
from tests.oracle.campaign import Campaign, Plan
from tests.oracle.load import Heard
from tests.oracle.trainers import Setup

SHAPE = "tiny"
PLANS = {
    "short": Plan(pushes=3, poisoned=3, kills=21, kills_inside=2, seconds=480),
    "long": Plan(pushes=6, poisoned=5, kills=42, kills_inside=5, seconds=480),
}


def run_oracle(length: str, work: Path) -> dict:
    """A campaign, and what was found."""
    folder = work / "oracle"
    write_config(SHAPE, folder)
    with Server(folder, **NOISE) as server:

        def ask(prompt: Sequence[int], num_tokens: int) -> Heard:
            sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
            status, said = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
            return (
                Heard(status, said["output_ids"], said["meta_info"]["weight_version"])
                if status == 200
                else Heard(status)
            )

        *_, found = Campaign(Setup(url=server.url, shape=SHAPE), ask, PLANS[length]).run()
        return found
