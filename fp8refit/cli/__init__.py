"""The command line: inspecting engines, quantizing checkpoints, pushing to servers, benchmarks, the demo."""

from fp8refit.cli.commands import app

__all__ = ["app"]
