"""What a user copies works."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_transformers_loop_serves_every_version():
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "transformers_loop.py")], capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]


def test_an_fsdp_trainer_keeps_the_engine_of_its_first_rank_up_to_date():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launch, str(EXAMPLES / "fsdp_trainer.py")],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
