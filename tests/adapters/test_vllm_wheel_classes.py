"""Weight transfer by the classes of an official vLLM wheel that does not run here: its files alone, unpacked and not installed.

`nox -s matrix` fetches the wheel and says where it is. What those files import of vLLM's configuration is stubbed; everything
they say of weight transfer is vLLM's own. The engine is `fake_weight_transfer.Engine`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "FP8REFIT_VLLM_WHEEL"
"""Folder of the unpacked wheel."""

pytestmark = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no unpacked wheel of vLLM")


def test_a_policy_goes_through_vllms_own_trainer_api():
    code = Path(__file__).with_name("official_transfer.py")
    ran = subprocess.run([sys.executable, code, os.environ[VARIABLE]], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["stream", "module", "partly", "local", "engine"]
