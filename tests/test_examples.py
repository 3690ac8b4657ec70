"""What a user copies works."""

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
