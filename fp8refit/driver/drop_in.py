"""Turns an engine's own `load_weights` into a refit: whatever a trainer loads, in tensors or buckets, is one update per
policy.

`load_weights` does not say which tensor is the last. So a policy is complete once every tensor that any rank needs has
arrived, and all ranks end it at the same tensor. If the engine has calls for begin and end, those count instead.

What comes again is compared with what the engine holds: pipeline stages may each send a tied embedding. If it is equal, it
is ignored, or is the beginning of a policy that begins as the last one did. If it is another, another policy has begun.
What shares a scale with other tensors cannot be compared alone, and always is another.

An interrupted stream leaves the engine dirty. The rest of it is refused: the next policy must begin with the tensor that
began this one or the one before, so that tensors of two policies are not mixed.
"""

import glob
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, Self, TypeVar

import torch
from pydantic import BaseModel, field_validator, model_validator
from torch import Tensor

from fp8refit.config import ReadRename, RefitConfig
from fp8refit.driver.attach import attach_engine
from fp8refit.driver.attempt import warn_of_idle
from fp8refit.driver.completeness import Kind, Stream, claims_of_all
from fp8refit.driver.update import Update, update
from fp8refit.errors import (
    EngineBusyError,
    EngineDirtyError,
    InvalidSourceError,
    RankFailedError,
    RefitError,
    UnsupportedEngineError,
    prefixes_for,
)
from fp8refit.fill.plan import is_any_of, why_unknown
from fp8refit.fill.ties import tie_problem
from fp8refit.live.slots import SOURCE_DTYPES
from fp8refit.live.storage import has_memory
from fp8refit.live.turn import DisplacedError, Turn
from fp8refit.ranks.rank import Rank
from fp8refit.report import RefitReport
from fp8refit.sources.pairs import named
from fp8refit.sources.renamed import Names, also_as_sent, refuse_scales, why_one
from fp8refit.transport.running import run

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_LIST = 8
_SHORT_LIST = 3
_MOST_REPEATED = 8
"""Tensors that may come again, unchanged, after a policy is whole, before another one has begun."""
_NUM_SAMPLES = 64
_last_report: RefitReport | None = None


class DropInOptions(BaseModel, frozen=True, extra="forbid"):
    """The drop-in's options, from the environment or from the engine's plugin options, which take precedence."""

    drop_in: bool = False
    """`FP8REFIT_DROP_IN=1`: whether loading weights into a live engine is a refit."""
    quantization: str | None = None
    """`FP8REFIT_QUANTIZATION`: how to quantize an engine at boot if nothing else says so."""
    calibration: Path | None = None
    """`FP8REFIT_CALIBRATION`: a JSON file with lists of token ids; KV scales are calibrated with them at every
    commit."""
    keep: tuple[str, ...] = ()
    """`FP8REFIT_KEEP`: comma-separated patterns of frozen parameters that the trainer never sends."""
    ignore: tuple[str, ...] = ()
    """`FP8REFIT_IGNORE`: comma-separated patterns of what the trainer sends too much."""
    rename: ReadRename = None
    """`FP8REFIT_RENAME`: how the trainer's names become the engine's; `OLD=NEW` for each prefix, with commas between."""
    in_flight: Literal["keep", "continue"] = "keep"
    """`FP8REFIT_IN_FLIGHT`: whether KV of requests that a trainer froze is computed again, or stays; see
    `RefitConfig.in_flight`."""

    @model_validator(mode="after")
    def _check_scales_stay(self) -> Self:
        if self.in_flight == "continue" and self.calibration is not None:
            raise ValueError(
                "in_flight=continue keeps KV of the old scales: leave out calibration, or set in_flight=keep"
            )
        return self

    @property
    def is_asked(self) -> bool:
        """Whether anything is to change in an engine."""
        return self.drop_in or self.quantization is not None

    @field_validator("keep", "ignore", mode="before")
    @classmethod
    def _split(cls, patterns: Any) -> Any:
        return tuple(filter(None, patterns.split(","))) if isinstance(patterns, str) else patterns

    @classmethod
    def read(cls, environment: Mapping[str, str], options: Mapping[str, Any] | None = None) -> "DropInOptions":
        """Read the options.

        Raises:
            ValueError: An option is unknown or has an invalid value.
        """
        names = {name: f"FP8REFIT_{name.upper()}" for name in cls.model_fields}
        found = {name: environment[variable] for name, variable in names.items() if environment.get(variable)}
        return cls.model_validate(found | dict(options or {}))

    def read_calibration(self) -> list[list[int]] | None:
        """The token ids, if a file is set."""
        return None if self.calibration is None else json.loads(self.calibration.read_text())


def _alone(call: Callable[Concatenate["DropIn", P], T]) -> Callable[Concatenate["DropIn", P], T]:
    """Refuse a call while another one of the same drop-in is not over, in whichever thread."""

    @wraps(call)
    def alone(drop_in: "DropIn", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with drop_in._calls.during(drop_in, lambda: 0.0) as is_held:
            if not is_held:
                raise _SecondCallError(
                    "weights are being loaded in another call, which goes on; load them in one thread, one call after the other"
                )
            return call(drop_in, *args, **kwargs)

    return alone


class _SecondCallError(EngineBusyError):
    """A call came while another one of the same drop-in was not over."""


class DropIn:
    """Handles one rank's `load_weights` calls. Created on every rank together.

    Args:
        owner: What `fp8refit.update` takes: a worker, or a scheduler.
        rank: The owner's rank.
        options: The options.
        logger: Logs commits.

    Raises:
        RefitError: The engine cannot be refitted.
    """

    def __init__(self, owner: Any, rank: Rank, options: DropInOptions, logger: logging.Logger) -> None:
        self.owner, self._rank, self._logger = owner, rank, logger
        self._config = RefitConfig(keep=options.keep, ignore=options.ignore)
        self._names = Names.of(options.rename)
        self._has_old_kv, self._is_ignored = options.in_flight == "continue", is_any_of(options.ignore)
        self._sent: dict[str, str] = {}
        """Under which of the trainer's names each of the engine's came last, if it has others."""
        self._calibration = options.read_calibration()
        self._stream = Stream(claims_of_all(rank, self._config), self._config.keep)
        self._update: Update | None = None
        self._skipped: dict[str, None] = {}
        """Names that arrived while no policy was open, and that no slot takes."""
        self._repeated: dict[str, int] = {}
        """What came again in a row and is as the engine has it, at this version: it may be the beginning of another policy."""
        self._is_marked = False
        self.source: str | None = None
        """Where what is loaded comes from, if it is known."""
        self._bucket: list[tuple[str, Tensor]] = []
        self._samples: list[Tensor] = []
        self._has_warned_of_scales = False
        self._is_receiving = False
        self._late: Exception | None = None
        self._calls = Turn()
        self._take_back: Callable[[], bool] = lambda: True
        """Takes the engine's turn, which is lent to others between two calls."""

    @property
    def is_open(self) -> bool:
        """Whether a policy has partly arrived."""
        return self._update is not None

    @property
    def missing(self) -> list[str]:
        """Names that have not arrived, sorted."""
        return sorted(self._stream.missing)

    def load(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replaces the network's `load_weights`.

        Returns:
            The names that arrived.

        Raises:
            RefitError: Something does not fit. With several ranks it is raised at the end of the policy, on all of
                them.
            EngineBusyError: Another call of this drop-in is not over, in any thread; it goes on.
        """
        if not self._is_receiving:
            with also_as_sent(self._names):
                return self._load(weights)
        if self._late is None:
            try:
                with also_as_sent(self._names):
                    return self._load(weights)
            except _SecondCallError:  # another thread's; what is being received goes on
                raise
            except Exception as error:  # noqa: BLE001 - raised by `receiving`
                self._late = _without_frames(error)
        return set()

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Raise errors only at the end of the block, after the last collective operation; else the trainer would hang.

        Raises:
            RefitError: Something does not fit. The rest was received and ignored.
        """
        self._is_receiving, self._late = True, None
        try:
            yield
        finally:
            self._is_receiving = False
        late, self._late = self._late, None
        if late is not None:
            raise late

    @_alone
    def _load(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> set[str]:
        pairs = list(weights.items()) if isinstance(weights, Mapping) else weights
        are_together = isinstance(pairs, list | tuple)
        came = set()
        self._go_on()
        try:
            for sent, _, tensor in named(pairs):
                name = sent if self._names is None else self._named(sent)
                if self._has_old_kv:
                    refuse_scales([name], self._is_ignored)
                came.add(name)
                self._take(name, tensor)
                if not are_together:
                    self._hand_over()
            self._hand_over()
            if self._update is not None and self._stream.is_whole and not self._is_marked:
                self._commit()  # only now: what else came with the last tensor belongs to the policy
        except BaseException as error:  # the source failed or was interrupted: end it on every rank
            self._give_up(f"loading it failed ({type(error).__name__}: {error})")
            raise
        finally:
            self._rest()
        return came

    def _named(self, sent: str) -> str:
        """The engine's name for one of the trainer's.

        Raises:
            InvalidSourceError: Another one in the open policy has become the same.
        """
        assert self._names is not None, "they differ"
        name = self._names[sent]
        other, self._sent[name] = self._sent.get(name, sent), sent
        if other != sent and self._update is not None and name in self._stream.came:
            raise InvalidSourceError(why_one([(other, name), (sent, name)]))
        return name

    @_alone
    def begin(self) -> None:
        """Begin a policy that `end` will end.

        Raises:
            RefitError: The engine cannot be refitted now, on any rank; nothing was written.
        """
        self._give_up("another one begins")
        self._stream.begin_anew()
        self._is_marked = True
        try:
            self._open()
        except BaseException:
            self._is_marked = False
            raise
        self._rest()

    @_alone
    def end(self) -> None:
        """End the policy.

        Raises:
            RefitError: It is incomplete, or does not fit; or none was begun.
        """
        if not self._is_marked:
            raise InvalidSourceError(["update: ended without having begun, or a second time; begin it first"])
        self._is_marked = False
        self._go_on()
        if self._update is None:
            raise EngineDirtyError("this update failed before its end; send the whole policy again")
        try:
            self._commit()
        except BaseException:
            self._give_up("its end was interrupted")
            raise
        finally:
            self._stream.begin_anew()

    @_alone
    def cut(self) -> None:
        """A trainer has dropped the caches, as before or after a policy: what has come of one belongs to none. Any tensor may
        begin the next. Every rank calls this together.
        """
        if not self._is_marked:
            self._give_up("caches were dropped")
            self._stream.begin_anew()

    def accept(self) -> None:
        """Take what the weights hold now for what they should hold; `look` refuses what others write from now on."""
        target = self._rank.target
        if not target.is_dirty:
            target.is_watched = True
            target.accept()

    def unwatch(self) -> None:
        """Look no more: whoever writes may."""
        self._rank.target.is_watched = False

    def look(self, caller: str) -> None:
        """Look whether weights were written past `load`. If so, requests are refused until a whole policy is loaded. Every rank
        calls this together.

        Args:
            caller: What was called since the last look.

        Raises:
            UnsupportedEngineError: They were.
        """
        if self.is_open:
            return
        try:
            self._rank.check_untouched(
                self._config,
                f"{caller} wrote live weights past every loader, so fp8refit checked nothing and dropped no caches: requests "
                "are refused until a whole policy is loaded. Let the trainer send a checkpoint's tensors to load_weights, in "
                "BF16 or block FP8, or leave out FP8REFIT_DROP_IN",
            )
        except UnsupportedEngineError as error:
            self._stream.begin_anew()
            run(attach_engine(self.owner).engine.refuse(str(error)))
            raise

    @_alone
    def close(self) -> None:
        """Stop taking weights. A policy that has partly arrived leaves the engine dirty."""
        self._give_up("nothing is taken any more")
        self._is_marked = False

    def _rest(self) -> None:
        """Let others refit the engine until the trainer calls again: it may never do so."""
        if self._update is not None:
            stream = self._stream
            self._take_back = self._update.lend_turn(
                f"a policy is arriving, and is whole with {len(stream.missing)} more: {stream.said_missing(_SHORT_LIST)}"
            )

    def _go_on(self) -> None:
        """Go on with the open policy.

        Raises:
            DisplacedError: Another refit took over.
        """
        if self._update is not None and not self._take_back():
            self._give_up("another refit took over")
            raise DisplacedError

    def _take(self, name: str, tensor: Tensor) -> None:
        stream, kind = self._stream, self._stream.kind_of(name)
        if kind is Kind.UNKNOWN:
            prefixes = prefixes_for(name, stream.missing_after(()))
            said = f"; FP8REFIT_RENAME={prefixes} makes it fit" if prefixes is not None else ""
            raise InvalidSourceError([f"{why_unknown(name)}{said}"])
        if self._update is not None and (name in stream.came or name in stream.held):
            if stream.is_whole and not self._is_marked:
                self._commit()
            elif self._holds(name, tensor):
                if not stream.begins_alike((*self._repeated, name)):
                    self._repeated.clear()
                self._repeated[name] = self._rank.target.version
                return
            elif self._is_marked:
                is_other = stream.is_comparable(name)
                how = (
                    "with different values"
                    if is_other
                    else "and its scale is shared, so that nobody can say whether alike"
                )
                raise InvalidSourceError([f"{name}: sent twice, {how}; send it once"])
            elif name in stream.came:
                self._start_over(name)
        if self._update is None and not self._begins(name, kind, tensor):
            return
        self._repeated.clear()
        if kind in (Kind.NEEDED, Kind.OPTIONAL):
            stream.note(name, tensor)
        self._witness(tensor)
        self._bucket.append((name, tensor))

    def _witness(self, tensor: Tensor) -> None:
        """Record some values, so that ranks notice if they were given different policies under the same names."""
        is_read = isinstance(tensor, Tensor) and tensor.dtype in SOURCE_DTYPES and has_memory(tensor)
        if self._rank.group.size > 1 and is_read:
            per_dim = round(_NUM_SAMPLES ** (1 / max(1, tensor.ndim)))
            some = tensor.detach()[tuple(slice(None, None, max(1, size // per_dim)) for size in tensor.shape)]
            self._samples.append(some.to(torch.float32, copy=True).reshape(-1))

    def _begins(self, name: str, kind: Kind, tensor: Tensor) -> bool:
        """Begin a policy with a tensor that arrives while none is open, if it can be the first one.

        Raises:
            RefitError: It belongs to no policy.
        """
        stream = self._stream
        if self._is_marked and self._rank.target.is_dirty:
            raise EngineDirtyError("this update failed; end it, and send the whole policy again")
        if self._is_marked:  # a refit has healed the engine
            self._is_marked = False
            stream.begin_anew()
        if kind is Kind.SKIPPED:
            self._skipped[name] = None
            return False
        is_served = stream.is_whole and not self._rank.target.is_dirty
        if not is_served:
            self._repeated.clear()
        if not is_served and not stream.may_begin(name, is_served=False):
            self._refuse(name)
        if is_served and self._is_served(name, tensor):
            return False
        self._begin_with(name)
        return True

    def _is_served(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor that comes after a whole policy is as in that one.

        Raises:
            InvalidSourceError: It is not, and no policy can begin with it. The engine is dirty.
        """
        stream, version = self._stream, self._rank.target.version
        if not stream.may_begin(name, is_served=True):
            if not stream.is_comparable(name):
                why = "came after the policy was whole, and shares a scale with others; send it earlier, or never"
                raise InvalidSourceError([f"{name}: {why}"])
            if not self._holds(name, tensor):
                self._open()
                problem = f"{name}: came after the policy was whole, and is not as the engine has it"
                self._leave(
                    InvalidSourceError([tie_problem(name) if stream.is_second(name) else problem], written=True)
                )
            stream.note(name, tensor)
            return True
        if len(self._repeated) == _MOST_REPEATED or not stream.missing_after({*self._repeated, name}):
            return False
        if not self._holds(name, tensor):
            return False
        self._repeated[name] = version
        if name == stream.last:  # so far, only the end of that policy came again
            self._repeated.clear()
        return True

    def _holds(self, name: str, tensor: Tensor) -> bool:
        """Whether all ranks hold what a refit would write from a tensor, so far as one tensor tells."""
        if not self._stream.is_comparable(name):
            return False
        self._hand_over()
        return self._rank.holds({name: tensor}, self._config)

    def _start_over(self, name: str) -> None:
        """Give up the open policy: what comes again is another one, if it comes in the same order.

        Raises:
            EngineDirtyError: It does not.
        """
        again, begins_alike = self._repeated.copy(), self._stream.begins_alike((*self._repeated, name))
        self._give_up(f"{name} came again")
        if not begins_alike:
            self._refuse(name)
        self._repeated = again
        self._begin_with(name)

    def _refuse(self, name: str) -> NoReturn:
        """Refuse a tensor of a policy whose beginning is missing.

        Raises:
            EngineDirtyError: Always.
        """
        raise EngineDirtyError(
            f"{name}: not taken, because the policy before it broke off, and it may belong to another one; send a whole "
            f"policy, beginning with {self._stream.first}"
        )

    def _begin_with(self, name: str) -> None:
        """Begin a policy, also with what came again just before."""
        self._repeated.pop(name, None)
        repeated, self._repeated = self._repeated, {}
        self._rank.target.trust(repeated)
        self._stream.begin_anew(next(iter(repeated), name), repeated)
        self._stream.came[name] = None  # even if it is refused
        self._open(repeated)
        if set(repeated.values()) - {self._rank.target.version}:  # another refit came between
            self._stream.begin_anew(name)

    def _open(self, held: Iterable[str] = ()) -> None:
        config = self._config.model_copy(update={"keep": (*self._config.keep, *map(glob.escape, held))})
        unjudged = [f'keep="{glob.escape(name)}"' for name in held]
        unjudged += [f'ignore="{pattern}"' for pattern in config.ignore if self._skipped]
        attach_engine(self.owner).idle.update(unjudged)
        opened = update(self.owner, config, calibration=self._calibration)
        opened.__enter__()
        self._update, self._rank.witness = opened, ""
        self._samples.clear()

    def _hand_over(self) -> None:
        """Pass on what has arrived since the last call."""
        bucket, self._bucket = self._bucket, []
        if bucket and self._update is not None:
            try:
                self._update.load(bucket)
            except BaseException:
                self._update = None
                raise

    def _commit(self) -> None:
        """Commit the complete policy."""
        global _last_report
        self._hand_over()
        if self._samples:
            with self._rank.target.live.on_device():
                self._rank.witness = _digest(self._samples)
        ended, self._update = self._update, None
        assert ended is not None, "one is under way"
        try:
            ended.__exit__(None, None, None)
        finally:
            self._rank.witness = ""
        report = ended.report
        assert report is not None, "it is over"
        kv = self._rank.target.live.kv
        num_old = len(kv.names) if kv is not None and report.kv is None else 0
        ignored, self._skipped = tuple(dict.fromkeys((*self._skipped, *report.ignored))), {}
        report = report.model_copy(update={"num_old_scales": num_old, "ignored": ignored, "source": self.source})
        if num_old and not self._has_warned_of_scales:
            self._has_warned_of_scales = True
            self._logger.warning(
                "the %d scales of the FP8 KV cache are those of an older policy: set FP8REFIT_CALIBRATION to a JSON file of "
                "token ids, or send scales among the weights",
                num_old,
            )
        _last_report = report
        if self._names is not None:
            warn_of_idle(self._config, self._names, report, attach_engine(self.owner).idle)
        self._logger.info("%s", report.summary())

    def _give_up(self, why: str) -> None:
        """Give up the open policy: log why, and leave the engine dirty."""
        if self._update is None:
            return
        stream = self._stream
        said = f"a policy did not become whole: {why}, and {len(stream.missing)} tensors were missing"
        said += f" ({stream.said_missing(_LONGEST_LIST)})"
        self._logger.warning("%s; the engine refuses requests until one is", said)
        try:
            self._leave(RankFailedError(said))
        except RefitError as error:
            self._logger.debug("%s", error)

    def _leave(self, error: BaseException) -> None:
        """End the open update with an error, on every rank."""
        self._bucket.clear()
        self._repeated.clear()
        left, self._update = self._update, None
        assert left is not None, "one is under way"
        left.__exit__(type(error), error, None)


def _without_frames(error: Exception) -> Exception:
    """An error that holds on to no bucket: its receiver could not give back the memory that it got it in."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _digest(samples: Sequence[Tensor]) -> str:
    """A digest of the tensors' values, in order. Synchronizes with each device once."""
    places: dict[torch.device, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.device, []).append(place)
    values = [b""] * len(samples)
    for device, here in places.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # each was sampled on its tensor's stream
        together = torch.cat([samples[place] for place in here]).cpu()
        for place, part in zip(here, torch.split(together, [samples[place].numel() for place in here]), strict=True):
            values[place] = part.numpy().tobytes()
    return hashlib.sha256(b"".join(values)).hexdigest()


def last_report() -> RefitReport | None:
    """The report of the drop-in's last refit in this process; None before the first one.

    Call it in a trainer with its engine in the same process, or in a worker. `report.model_dump()` has its figures.
    """
    return _last_report
