"""Move a live block-FP8 inference engine to a new policy in place, at memory speed, all or nothing."""

from fp8refit._version import __version__
from fp8refit.broadcaster import Broadcaster
from fp8refit.config import CollectiveConfig, KvConfig, RefitConfig
from fp8refit.errors import (
    CacheFlushError,
    CalibrationError,
    CheckpointError,
    EngineAsleepError,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
    InvalidCalibrationError,
    InvalidCorrectionError,
    InvalidSourceError,
    LiveTensorMovedError,
    NonFiniteError,
    PrecisionError,
    RankFailedError,
    RefitError,
    StagingMemoryError,
    StaleCacheError,
    TransportError,
    UnsupportedEngineError,
)
from fp8refit.gather import gathered
from fp8refit.hosted import EngineHost, HostedEngine
from fp8refit.kernels import dequantize_blockwise, quantize_blockwise
from fp8refit.refitter import Refitter, refit
from fp8refit.report import KvReport, RefitReport, VerifyReport
from fp8refit.update import Update, update

__all__ = [
    "Broadcaster",
    "CacheFlushError",
    "CalibrationError",
    "CheckpointError",
    "CollectiveConfig",
    "EngineAsleepError",
    "EngineBusyError",
    "EngineDirtyError",
    "EngineHost",
    "EngineLostError",
    "HostedEngine",
    "InvalidCalibrationError",
    "InvalidCorrectionError",
    "InvalidSourceError",
    "KvConfig",
    "KvReport",
    "LiveTensorMovedError",
    "NonFiniteError",
    "PrecisionError",
    "RankFailedError",
    "RefitConfig",
    "RefitError",
    "RefitReport",
    "Refitter",
    "StagingMemoryError",
    "StaleCacheError",
    "TransportError",
    "UnsupportedEngineError",
    "Update",
    "VerifyReport",
    "__version__",
    "dequantize_blockwise",
    "gathered",
    "quantize_blockwise",
    "refit",
    "update",
]
