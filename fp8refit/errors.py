"""Every error this library raises on purpose.

An error caused by a caller's input is also a `ValueError`. Each message says what is wrong, why it is refused and what to
do.
"""

from collections.abc import Sequence

_WRITTEN_IN_PART = "The engine holds part of this policy and refuses requests until the next complete refit."


class RefitError(Exception):
    """Base class of everything fp8refit raises on purpose."""


class InvalidSourceError(RefitError, ValueError):
    """The source does not fit this engine: names, shapes, dtypes, devices or scales.

    Lists every problem at once. Raised before anything is written, except for problems that appear only while a stream is
    read.

    Attributes:
        problems: One line per problem, each naming its tensor.
        written: Whether the engine was written in part.
    """

    def __init__(self, problems: Sequence[str], *, written: bool = False) -> None:
        self.problems = tuple(problems)
        self.written = written
        count = len(self.problems)
        listing = "".join(f"\n  - {problem}" for problem in self.problems)
        consequence = f"\n{_WRITTEN_IN_PART}" if written else ""
        super().__init__(f"the source cannot be used ({count} problem{'s' * (count != 1)}):{listing}{consequence}")


class NonFiniteError(RefitError, ValueError):
    """A source tensor holds NaN or Inf (for fp32, after the cast to BF16).

    Attributes:
        names: Checkpoint names of the bad tensors.
        written: Whether the engine was written in part.
    """

    def __init__(self, names: Sequence[str], *, written: bool) -> None:
        self.names = tuple(names)
        self.written = written
        consequence = _WRITTEN_IN_PART if written else "Nothing was written."
        super().__init__(f"NaN or Inf in {len(self.names)} tensor(s): {', '.join(self.names)}. {consequence}")


class InvalidCalibrationError(RefitError, ValueError):
    """This engine cannot use the calibration batch or the KV scales: no tokens, unknown token ids, a scale of zero."""


class CalibrationError(RefitError):
    """The calibration pass produced no scales: NaN or Inf in an attention layer, or not enough memory.

    During a `refit` the weights are already written. The engine refuses requests until the next complete refit.
    """


class InvalidCorrectionError(RefitError, ValueError):
    """The functions of `fp8refit.training.correction` cannot use these arguments: shapes differ, or bounds are empty."""


class UnsupportedEngineError(RefitError, ValueError):
    """fp8refit cannot refit this engine: it is unknown, not block FP8, or has layers whose kernel repacks weights.

    Attributes:
        reasons: One line per reason, naming the module and what to set instead.
    """

    def __init__(self, summary: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join([summary, *(f"  - {reason}" for reason in self.reasons)]))


class CheckpointError(RefitError, ValueError):
    """A checkpoint cannot be quantized, or the result cannot be written.

    Attributes:
        problems: One line per problem.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  - {problem}" for problem in self.problems)]))


class PrecisionError(RefitError, ValueError):
    """A trainer cannot compute in the engine's precision: weights, layers or formats differ. Nothing was changed.

    Attributes:
        problems: One line per problem, each naming its tensor.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(["trainer and engine cannot share a precision:", *(f"  - {line}" for line in problems)])
        )


class EngineBusyError(RefitError):
    """The engine has unfinished requests, or another refit of it is running."""


class EngineAsleepError(RefitError):
    """The engine sleeps, so its weights are not mapped: writing them would be a fatal CUDA fault."""


class EngineDirtyError(RefitError):
    """The engine holds a mixture of two policies and refuses requests until a complete refit."""


class LiveTensorMovedError(RefitError):
    """A live tensor moved, or changed shape, stride or dtype, while it was being refitted."""


class CacheFlushError(RefitError):
    """The engine did not drop the KV cache of the previous policy."""


class StaleCacheError(RefitError, ValueError):
    """A request brings a KV cache computed under another policy."""


class StagingMemoryError(RefitError):
    """The engine's device has no room for the staging buckets."""


class RankFailedError(RefitError):
    """A rank of the engine or of the trainer failed with an error that is not a `RefitError`. The message quotes it.

    Raised on every rank. If anything was written, the engine is dirty until the next complete refit.
    """


class TransportError(RefitError):
    """An engine rank cannot reach the trainer's tensors."""


class EngineLostError(RefitError):
    """The engine cannot be repaired: a CUDA fault, or a rank that died or does not answer. Restart it."""
