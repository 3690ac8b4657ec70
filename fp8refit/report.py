"""What a refit did and how long each phase took."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

from pydantic import BaseModel, computed_field

from fp8refit.errors import DifferentPolicyError, told


class KvReport(BaseModel, frozen=True):
    """Which KV-cache scales were written, and where they came from."""

    origin: Literal["calibration", "kv_scales", "state_dict"]
    scales: dict[str, float]
    """Checkpoint names and the dequantizing multipliers written. If ranks differ, the largest."""
    kept: tuple[str, ...] = ()
    """Scales left unchanged, because their layer saw only zeros or no token."""
    ignored: tuple[str, ...] = ()
    """Scales that were given but that this engine does not use."""
    num_sequences: int = 0
    num_tokens: int = 0
    num_passes: int = 0
    """How many prefills the measurement took."""
    seconds: float = 0.0
    """Host time of the slowest rank, until the last scale was written."""

    @classmethod
    def merge(cls, ranks: Sequence["KvReport"]) -> "KvReport":
        """Combine what all ranks wrote."""
        scales: dict[str, float] = {}
        for rank in ranks:
            for name, scale in rank.scales.items():
                scales[name] = max(scale, scales.get(name, scale))
        kept = dict.fromkeys(name for rank in ranks for name in rank.kept if name not in scales)
        seconds = max(rank.seconds for rank in ranks)
        return ranks[0].model_copy(update={"scales": scales, "kept": tuple(kept), "seconds": seconds})


class RankReport(BaseModel, frozen=True):
    """What one rank wrote, and how long it took."""

    rank: int = 0
    device: str = ""
    num_tensors: int
    """Source tensors that this rank holds a part of."""
    num_quantized: int = 0
    """How many of them this rank quantized. The others arrived as FP8 codes and scales and were copied bit for bit."""
    ignored: tuple[str, ...] = ()
    """Source tensors that this rank holds no part of."""
    kept: tuple[str, ...] = ()
    """Tensors that were missing from the source and kept."""
    differing: tuple[str, ...] = ()
    """Source tensors that differ from what this rank holds, if it was asked to compare."""
    changed: dict[str, tuple[int, int]] = {}
    """How many `codes`, `scales`, and `values` that are not quantized the refit changed, and of how many, if that was asked.
    Two codes of half a byte count as one."""
    bytes_read: int
    bytes_written: int
    fill_s: float
    """Host seconds until everything was launched."""
    verify_s: float
    """Host seconds from then until the device had finished and its status word was read."""
    fill_device_s: float | None = None
    """Seconds between the first and the last byte written, on the device's own clock; None on a CPU."""
    extra_bytes: int = 0
    """Device memory that the refit allocated."""
    is_first: bool = False
    """Whether this refit compiled the plan."""
    source_digest: str = ""
    """SHA-256 of the names, shapes and dtypes of the source."""
    kv: KvReport | None = None
    flush_s: float = 0.0
    """Seconds spent dropping caches, if the engine was told to do that and write in one order; 0 if it did both at
    once."""
    pause_s: float = 0.0
    """Seconds until requests had stopped, if that was in the same order, too."""
    still_s: float = 0.0
    """Seconds from then until they ran again, if the engine did all of that by itself; otherwise 0."""


class RefitReport(BaseModel, frozen=True):
    """The result of one refit. `str(report)` is a table, `report.model_dump_json()` is JSON."""

    version: int
    """The policy version that the engine now serves. The first refit makes it 1."""
    engine: str
    num_tensors: int
    """Source tensors that were written."""
    num_quantized: int = 0
    """How many of them a rank of the engine quantized; the largest number of any rank. 0 if the source was block FP8
    already, or if a broadcast's sender quantized."""
    ignored: tuple[str, ...] = ()
    """Source tensors that this engine does not need, such as the LM head of a tied model."""
    kept: tuple[str, ...] = ()
    """Tensors that were missing from the source and kept, because `RefitConfig.keep` names them."""
    bytes_read: int
    bytes_written: int
    phases_s: dict[str, float]
    """Host seconds in each phase, in order. `plan` checks the source. `stage` sends a broadcast ahead, while requests
    run. `pause` stops running requests. `flush` drops the caches of the old policy, unless that overlaps the write.
    `transfer` is the exchange with ranks in other processes. It includes the check of a source with the same layout as last
    time, if that is sent together with the write. `fill` ends when everything is launched, `verify` when the device has
    finished and its status word is read. `kv` measures and writes KV-cache scales. `resume` admits requests again; a
    server does that with the write, in `transfer`."""
    standstill_s: float = 0.0
    """Seconds in which no request could run: at most from the end of `pause` to that of `resume` on the driver's clock, or as
    its own clock says if the engine stops requests and lets them run again in one step. That is what vLLM's AsyncLLM and
    servers do with `in_flight="keep"` and `"continue"`, if the policy is announced as the last one was."""
    fill_device_s: float | None = None
    """Seconds between the first and the last byte written, on the device's own clock; None on a CPU."""
    extra_bytes: int = 0
    """Device memory that the refit allocated on one rank: the work table and the staging buffers."""
    is_first: bool = False
    """Whether this refit compiled the plan."""
    num_interrupted: int = 0
    """Requests that the refit interrupted: aborted, or kept and continued under the new policy. With `in_flight="wait"`,
    requests that had not started when the wait began."""
    ranks: tuple[RankReport, ...] = ()
    """One entry per rank, in rank order."""
    kv: KvReport | None = None
    """KV-cache scales that were written, combined over all ranks; None if they did not change."""
    num_old_scales: int = 0
    """How many scales of an FP8 KV cache still belong to an older policy, after a drop-in refit."""
    changed: dict[str, tuple[int, int]] = {}
    """With `count_changes`: how many `codes`, `scales`, and `values` that are not quantized the refit changed, and of how many
    that it wrote, over all ranks. Two codes of half a byte count as one."""
    source: str | None = None
    """The model that an engine has reloaded by itself, in a drop-in refit; None if a trainer sent the policy."""

    @classmethod
    def of(cls, ranks: Sequence[RankReport], **fields: Any) -> Self:
        """Combine what every rank wrote: bytes are summed, times are the slowest rank's."""
        device_s = [rank.fill_device_s for rank in ranks if rank.fill_device_s is not None]
        kv = [rank.kv for rank in ranks if rank.kv is not None]
        ignored = _ignored_by_all(ranks)
        return cls(
            num_tensors=_num_taken(ranks) - len(ignored),
            num_quantized=max(rank.num_quantized for rank in ranks),
            ignored=tuple(name for name in ranks[0].ignored if name in ignored),
            kept=tuple(dict.fromkeys(name for rank in ranks for name in rank.kept)),
            bytes_read=sum(rank.bytes_read for rank in ranks),
            bytes_written=sum(rank.bytes_written for rank in ranks),
            fill_device_s=max(device_s, default=None),
            extra_bytes=max(rank.extra_bytes for rank in ranks),
            is_first=any(rank.is_first for rank in ranks),
            ranks=tuple(ranks),
            kv=KvReport.merge(kv) if kv else None,
            changed={
                kind: _sum_of(ranks, kind) for kind in dict.fromkeys(kind for rank in ranks for kind in rank.changed)
            },
            **fields,
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total_s(self) -> float:
        """Seconds from call to return."""
        return sum(self.phases_s.values())

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gb_per_s(self) -> float:
        """Bytes read and written per second of fill time, in units of 1e9 bytes."""
        seconds = self.fill_device_s if self.fill_device_s is not None else self.phases_s.get("fill", 0.0)
        return (self.bytes_read + self.bytes_written) / seconds / 1e9 if seconds > 0 else 0.0

    def metrics(self, prefix: str = "fp8refit/") -> dict[str, float]:
        """Flat scalars for W&B, TensorBoard and the like: seconds of each phase (`fp8refit/fill_s`), bytes, counts, and with
        `count_changes` which share of codes, scales and values changed (`fp8refit/changed_codes`).

        Args:
            prefix: What each name begins with.
        """
        found = {
            "version": self.version,
            "num_tensors": self.num_tensors,
            "num_quantized": self.num_quantized,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "extra_bytes": self.extra_bytes,
            "num_interrupted": self.num_interrupted,
            "num_kept": len(self.kept),
            "gb_per_s": self.gb_per_s,
            "total_s": self.total_s,
            "standstill_s": self.standstill_s,
            **{f"{phase}_s": seconds for phase, seconds in self.phases_s.items()},
            **{f"changed_{kind}": num / of for kind, (num, of) in self.changed.items()},
        }
        if self.fill_device_s is not None:
            found["fill_device_s"] = self.fill_device_s
        return _scalars(prefix, found)

    def summary(self) -> str:
        """Describe the refit in one line."""
        phases = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in self.phases_s.items())
        return (
            f"refit {self.engine} to version {self.version}{f' from {self.source}' if self.source else ''}: "
            f"{self.num_tensors} tensors, "
            f"{self.bytes_read / 1e9:.3f} GB read, {self.bytes_written / 1e9:.3f} GB written, "
            f"{self.gb_per_s:.0f} GB/s ({phases})"
        )

    def __str__(self) -> str:
        rows = [
            ("engine", self.engine),
            ("version", str(self.version)),
            *([("source", self.source)] if self.source else []),
            ("tensors", str(self.num_tensors)),
            ("quantized", str(self.num_quantized)),
            ("read", f"{self.bytes_read / 1e9:.3f} GB"),
            ("written", f"{self.bytes_written / 1e9:.3f} GB"),
            ("rate", f"{self.gb_per_s:.1f} GB/s"),
            *([("kept", str(len(self.kept)))] if self.kept else []),
            *([("ranks", str(len(self.ranks)))] if len(self.ranks) > 1 else []),
            *([("scales", f"{len(self.kv.scales)} KV")] if self.kv is not None else []),
            *([("scales", f"{self.num_old_scales} old")] if self.num_old_scales else []),
            *((kind, f"{num:,} new") for kind, (num, _) in self.changed.items()),
            *((name, f"{seconds * 1e3:.3f} ms") for name, seconds in self.phases_s.items()),
            ("total", f"{self.total_s * 1e3:.3f} ms"),
        ]
        return _table(rows)


class VerifyReport(BaseModel, frozen=True):
    """How the weights in an engine compare with a policy. It is false if they differ or the engine is dirty, and `str(report)`
    is a table.
    """

    version: int
    """The version that the engine says it serves."""
    num_tensors: int
    """Source tensors that at least one rank holds a part of."""
    differing: dict[str, tuple[int, ...]] = {}
    """Source tensors that differ from what a refit would write, and the ranks where they differ."""
    is_dirty: bool = False
    """Whether a refit began and did not succeed: the engine refuses requests until one does, whatever it holds."""
    ranks: tuple[RankReport, ...] = ()
    """One entry per rank, in rank order."""

    @property
    def is_equal(self) -> bool:
        """Whether every rank holds this policy, bit for bit."""
        return not self.differing

    def __bool__(self) -> bool:
        return self.is_equal and not self.is_dirty

    def raise_if_different(self) -> None:
        """Check that every rank holds this policy, and serves it.

        Raises:
            DifferentPolicyError: One does not; names every tensor that differs.
        """
        if self.differing:
            count = f"{len(self.differing)} tensor(s) differ"
            raise DifferentPolicyError(
                f"the engine, at version {self.version}, does not hold this policy; {count}:", tuple(self.differing)
            )
        if self.is_dirty:
            raise DifferentPolicyError("the engine is dirty: it holds this policy, but refuses requests; refit it")

    def metrics(self, prefix: str = "fp8refit/verify/") -> dict[str, float]:
        """Flat scalars for W&B, TensorBoard and the like: version, tensors, how many differ and on how many ranks, and whether
        the engine is dirty.

        Args:
            prefix: What each name begins with.
        """
        found = {
            "version": self.version,
            "num_tensors": self.num_tensors,
            "num_differing": len(self.differing),
            "num_differing_ranks": len({rank for ranks in self.differing.values() for rank in ranks}),
            "is_dirty": self.is_dirty,
        }
        return _scalars(prefix, found)

    def __str__(self) -> str:
        rows = [("version", self.version), ("tensors", self.num_tensors), ("differing", len(self.differing))]
        dirty = [("dirty", "yes")] if self.is_dirty else []
        lines = told(
            [f"{name}: differs on rank {', '.join(map(str, ranks))}" for name, ranks in self.differing.items()]
        )
        return "\n".join([_table([*rows, *dirty]), *lines])

    @classmethod
    def of(cls, ranks: Sequence[RankReport], *, version: int, is_dirty: bool = False) -> Self:
        """Combine what every rank found."""
        names = sorted({name for rank in ranks for name in rank.differing})
        differing = {name: tuple(rank.rank for rank in ranks if name in rank.differing) for name in names}
        return cls(
            version=version,
            num_tensors=_num_taken(ranks) - len(_ignored_by_all(ranks)),
            differing=differing,
            is_dirty=is_dirty,
            ranks=tuple(ranks),
        )


def _sum_of(ranks: Sequence[RankReport], kind: str) -> tuple[int, int]:
    found = [rank.changed.get(kind, (0, 0)) for rank in ranks]
    return sum(num for num, _ in found), sum(of for _, of in found)


def _table(rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join(f"{name:<9} {value!s:>13}" for name, value in rows)


def _scalars(prefix: str, found: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": float(value) for name, value in found.items()}


def _num_taken(ranks: Sequence[RankReport]) -> int:
    return max(rank.num_tensors + len(rank.ignored) for rank in ranks)


def _ignored_by_all(ranks: Sequence[RankReport]) -> set[str]:
    return set.intersection(*(set(rank.ignored) for rank in ranks))


class PhaseClock:
    """Adds up the seconds spent in named phases."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] = self.phases_s.get(name, 0.0) + time.perf_counter() - start

    def move(self, source: str, **phases_s: float) -> None:
        """Move seconds measured inside the phase `source` to other phases."""
        for name, seconds in phases_s.items():
            self.phases_s[name] = self.phases_s.get(name, 0.0) + seconds
            self.phases_s[source] = max(self.phases_s[source] - seconds, 0.0)


def longest_phases(ranks: Sequence[RankReport]) -> dict[str, float]:
    """Seconds in each phase of a transfer, as measured by the rank that was slowest in it."""
    pause_s = max(rank.pause_s for rank in ranks)
    phases_s = {
        **({"pause": pause_s} if pause_s else {}),
        "flush": max(rank.flush_s for rank in ranks),
        "fill": max(rank.fill_s for rank in ranks),
        "verify": max(rank.verify_s for rank in ranks),
    }
    kv_s = max(rank.kv.seconds if rank.kv is not None else 0.0 for rank in ranks)
    return {**phases_s, "kv": kv_s} if kv_s else phases_s
