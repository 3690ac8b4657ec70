"""The main job on a laptop: train a policy, refit an FP8 engine after every round, and check that it follows.

The demo uses the library like any user. Only `fp8refit.cli` imports it, and only this package under `fp8refit/` may
import an engine.
"""

from fp8refit.cli.demo.loop import run_demo
from fp8refit.cli.demo.rounds import DemoConfig, DemoResult, Round

__all__ = ["DemoConfig", "DemoResult", "Round", "run_demo"]
