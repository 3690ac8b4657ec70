"""Checkpoints on disk: quantizing one for an engine to boot from, and pushing one to running servers."""

from fp8refit.checkpoint.push import Pushed, PushResult, push_checkpoint
from fp8refit.checkpoint.quantize import CheckpointReport, quantize_checkpoint

__all__ = ["CheckpointReport", "PushResult", "Pushed", "push_checkpoint", "quantize_checkpoint"]
