"""Move a live block-FP8 inference engine to a new policy in place, at memory speed, all or nothing."""

__version__ = "0.2.0"

from fp8refit.config import CollectiveConfig, KvConfig, RefitConfig
from fp8refit.driver.broadcaster import Broadcaster
from fp8refit.driver.drop_in import last_report
from fp8refit.driver.hosted_engine import EngineHost, HostedEngine
from fp8refit.driver.refitter import Refitter, refit
from fp8refit.driver.update import Update, update
from fp8refit.errors import (
    CacheFlushError,
    CalibrationError,
    CheckpointError,
    DifferentPolicyError,
    EngineAsleepError,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
    InvalidCalibrationError,
    InvalidCorrectionError,
    InvalidOptionError,
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
from fp8refit.kernels import dequantize_blockwise, quantize_blockwise
from fp8refit.moved import keep_old_paths
from fp8refit.report import KvReport, RefitReport, VerifyReport
from fp8refit.sources.sharded.gather import gathered

__all__ = [
    "Broadcaster",
    "CacheFlushError",
    "CalibrationError",
    "CheckpointError",
    "CollectiveConfig",
    "DifferentPolicyError",
    "EngineAsleepError",
    "EngineBusyError",
    "EngineDirtyError",
    "EngineHost",
    "EngineLostError",
    "HostedEngine",
    "InvalidCalibrationError",
    "InvalidCorrectionError",
    "InvalidOptionError",
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
    "last_report",
    "quantize_blockwise",
    "refit",
    "update",
]

keep_old_paths()
