"""Every error this library raises on purpose.

What a caller's input causes is a `ValueError` too, so that a trainer may catch either. Each message says what is wrong,
why it is refused and what to do.
"""

from collections.abc import Sequence

_WRITTEN_IN_PART = "The engine holds part of this policy, refuses requests, and is healed by the next complete refit."


class RefitError(Exception):
    """Base class of everything fp8refit raises on purpose."""


class InvalidSourceError(RefitError, ValueError):
    """The source cannot become this engine's weights: names, shapes, dtypes, devices or scales do not fit.

    Raised once with every problem, before anything is written; for what shows only while a stream is written, after.

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
    """A source tensor holds NaN or Inf (after the cast to BF16 where it was fp32).

    Attributes:
        names: The checkpoint names of every tensor in which one was seen.
        written: Whether the engine was written in part.
    """

    def __init__(self, names: Sequence[str], *, written: bool) -> None:
        self.names = tuple(names)
        self.written = written
        consequence = _WRITTEN_IN_PART if written else "Nothing was written."
        super().__init__(f"NaN or Inf in {len(self.names)} tensor(s): {', '.join(self.names)}. {consequence}")


class InvalidCalibrationError(RefitError, ValueError):
    """A calibration batch, or KV scales, that this engine cannot use: no tokens, ids of no vocabulary, a scale of zero."""


class CalibrationError(RefitError):
    """The calibration pass gave no scales: NaN or Inf in an attention layer, or no memory for it.

    As part of a `refit` the weights are written by then: the engine refuses requests, and the next complete refit heals it.
    """


class InvalidCorrectionError(RefitError, ValueError):
    """What the functions of `fp8refit.correction` cannot use: tensors whose shapes differ, bounds that hold nothing."""


class UnsupportedEngineError(RefitError, ValueError):
    """The object is no engine that fp8refit can refit: unknown, not block FP8, or with layers whose kernel repacks.

    Attributes:
        reasons: One line a reason, naming the module and what to set instead.
    """

    def __init__(self, summary: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join([summary, *(f"  - {reason}" for reason in self.reasons)]))


class CheckpointError(RefitError, ValueError):
    """A checkpoint cannot be quantized: what is there does not fit, or the result cannot be written.

    Attributes:
        problems: One line a problem.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  - {problem}" for problem in self.problems)]))


class PrecisionError(RefitError, ValueError):
    """A trainer cannot compute with what the engine holds: other weights, layers or formats. Nothing was changed.

    Attributes:
        problems: One line per problem, each naming its tensor.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(["trainer and engine cannot share a precision:", *(f"  - {line}" for line in problems)])
        )


class EngineBusyError(RefitError):
    """The engine has unfinished requests, or another refit of it is under way."""


class EngineAsleepError(RefitError):
    """The engine's weights are not mapped (sleep mode): writing them would be a fatal CUDA fault."""


class EngineDirtyError(RefitError):
    """The engine holds a mixture of two policies and refuses requests until a complete refit."""


class LiveTensorMovedError(RefitError):
    """A live tensor moved, or changed shape, stride or dtype, while it was being refitted."""


class CacheFlushError(RefitError):
    """The engine did not drop the KV cache of the previous policy."""


class StaleCacheError(RefitError, ValueError):
    """A KV cache that a request brings holds tokens of another policy than the one that is served."""


class StagingMemoryError(RefitError):
    """There is no room on the engine's device for the buckets through which tensors from elsewhere go."""


class RankFailedError(RefitError):
    """A rank of the engine, or the trainer beside it, failed in a way that has no error of its own; it says what was raised.

    Raised on every rank. If a byte was written the engine is dirty, and the next complete refit heals it.
    """


class TransportError(RefitError):
    """Tensors of the trainer cannot be reached from an engine rank."""


class EngineLostError(RefitError):
    """The engine cannot be healed: a CUDA fault, or a rank that died or does not answer. Start it again."""
