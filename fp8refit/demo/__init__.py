"""The main job on a laptop: train a policy, refit an FP8 engine after every round, and see that it follows.

The demo is a user of the library, not a part of it: besides `fp8refit.cli` nothing imports it, and it alone under
`fp8refit/` may import an engine.
"""

from fp8refit.demo.loop import DemoConfig, DemoResult, Round, run_demo

__all__ = ["DemoConfig", "DemoResult", "Round", "run_demo"]
