"""A trainer's sharded state dict as a source: whole tensors, or blocks of rows, gathered while they are read.

Every rank of the trainer creates a `Gathered` from its state dict. Names, shapes and placements are known without a
gather, and compared before the first one. Each pass gathers everything once; one half of a bucket is gathered while the
other is read. If one rank fails, before or during a pass, every rank raises the same error.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from itertools import count, islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8refit.config import MAX_TIMEOUT_S, NewNames
from fp8refit.errors import InvalidSourceError, RankFailedError, RefitError
from fp8refit.live.slots import TensorMeta
from fp8refit.live.storage import why_unreadable
from fp8refit.sources.pairs import named, readable
from fp8refit.sources.renamed import why_one
from fp8refit.sources.row_runs import Piece, cut
from fp8refit.sources.sharded.batches import Batch, PartRows, batches
from fp8refit.sources.sharded.owned import Holding, Shared, owner_batches, unite, why_differ
from fp8refit.sources.sharded.renaming import Renamer, Renaming, only_names
from fp8refit.sources.sharded.shards import Part, PartReader, has_shards, is_shard
from fp8refit.sources.sharded.trainer_group import Statement, Step, Trainers, trainer_group, waits_at_most
from fp8refit.sources.source import NamedTensors, StateDict
from fp8refit.transport.error_capture import ErrorCapture

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BUCKET_BYTES = 256 << 20


_TENSORS_A_VOTE = 16
"""How many tensors of a stream all ranks read between two votes."""


def gathered(
    state_dict: Mapping[str, Tensor] | NamedTensors | Callable[[], NamedTensors],
    group: ProcessGroup | None = None,
    *,
    rename: Renamer | NewNames | None = None,
    is_apart: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = 300.0,
) -> "Gathered":
    """Share a sharded state dict, so that some ranks can refit engines from it while all the others take part.

    Call it on every rank of the trainer with that rank's state dict, and use it as a context. Ranks that do not read
    inside the block take part when they leave it, until the readers have left it too. Instead of leaving, you can call
    `join` and `close`.

    Args:
        state_dict: Names to DTensors (FSDP2, or any placement on any mesh) and plain tensors, which must be the same
            everywhere; their checksums are compared before the first gather. Or a function that returns a new iterator
            of pairs. Reading it is a collective operation: every rank must yield the same number of pairs. If one rank
            refuses a tensor, all stop after some more tensors. If an iterator raises on one rank alone, operations of
            `group` in which the others wait for it end after `timeout_s`, and all ranks raise: `group` carries no votes.
        group: All ranks that take part. By default, those of the shards' mesh.
        rename: Turns them into checkpoint tensors; see `Renamer` and `fp8refit.training.megatron.MegatronNames`. Or prefixes
            or a mapping, as in `RefitConfig.rename`.
        is_apart: Set this if ranks hold different tensors, like pipeline stages or ranks with different experts. The
            policy is then the union. Names, shapes and placements are compared before the first gather. Ranks get what
            they lack from the first rank that has it. `group` must contain all of these ranks, and a name must mean the
            same on every rank; see `fp8refit.training.megatron.global_names`.
        bucket_bytes: Size of one bucket; a reader may ask for less. One half is gathered while the other is read. A
            larger tensor comes in blocks of rows. A rank needs about two buckets of memory, plus what the reader keeps.
        timeout_s: Seconds to wait for the other ranks at each step, at most one day.

    Raises:
        InvalidSourceError: `group` is missing and cannot be derived from the shards.
        ValueError: `bucket_bytes` or `timeout_s` is out of range, or `rename` is none of these.

    Examples:
        >>> with fp8refit.gathered(model.state_dict()) as weights:     # doctest: +SKIP
        ...     if torch.distributed.get_rank() == 0:
        ...         print(refitter.refit(weights))
    """
    if rename is not None and not callable(rename):
        rename = only_names(rename)
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; it must be a whole number of at least 1")
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0 and at most a day ({MAX_TIMEOUT_S})"
        )
    if callable(state_dict):
        if rename is not None or is_apart:
            raise TypeError("a function must yield whole tensors under checkpoint names; leave out rename and is_apart")
        return GatheredStream(state_dict, group, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return Gathered(state_dict, group, rename=rename, is_apart=is_apart, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


class Gathered(AbstractContextManager["Gathered"]):
    """The `Source` that `gathered` returns. Each `iter()` and each `pieces()` is a pass over everything."""

    is_repeatable = True

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | NamedTensors,
        group: ProcessGroup | None = None,
        *,
        rename: Renamer | None = None,
        is_apart: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 300.0,
    ) -> None:
        self._parts: list[Part] = []
        self._problems: dict[str, str] = {}
        self._read(state_dict)
        self._renaming = Renaming(rename)
        self._bucket_bytes = bucket_bytes
        self._has_read = self._has_stopped = False
        if group is None and not is_apart:
            group = _group_of({part.mesh for part in self._parts if part.mesh is not None})
        self._group = group
        self._trainers = Trainers(trainer_group(group), timeout_s=timeout_s)
        self._is_apart = is_apart and self._trainers.num_ranks > 1
        self._shared: list[Shared] | None = None
        self._holdings: list[Sequence[Holding]] = []

    @property
    def metadata(self) -> dict[str, TensorMeta]:
        """Shape and dtype of every whole tensor, by its checkpoint name. Includes tensors of other ranks once they are
        known. Does not communicate.
        """
        return {name: meta for _, name, meta in self._made}

    @property
    def _made(self) -> Iterator[tuple[str, str, TensorMeta]]:
        """The trainer's name of each tensor, and name and metadata of what it becomes."""
        parts = self._parts if self._shared is None else [shared.part for shared in self._shared]
        return ((part.name, name, meta) for part in parts for name, meta in self._renaming.metadata(part))

    @property
    def problems(self) -> tuple[str, ...]:
        """What cannot be gathered, one line each."""
        return tuple(self._problems.values())

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]] | None:
        """Return metadata and problems, after every rank has confirmed that its own are the same.

        Either every rank that reads calls it, or none. The others join.

        Raises:
            InvalidSourceError: The ranks hold different tensors, or hold them differently; names each.
            RankFailedError: A rank died, does not join, or does something else.
            RefitError: Another rank raised it.
        """
        self._agree("plan")
        made = list(self._made)
        problems = (*self.problems, *why_one((sent, name) for sent, name, _ in made))
        return {name: meta for _, name, meta in made}, problems

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Gather everything once, in pieces of at most `max_bytes`, or one row of blocks if that is larger.

        Pieces of a tensor follow each other in row order and begin at multiples of 128 rows. Pieces of a matrix are
        matrices; those of a stack are whole experts. Every rank that reads must iterate to the end. The smallest
        `max_bytes` applies to all.

        Yields:
            Pieces that are ready on the current stream. They belong to the reader.

        Raises:
            InvalidSourceError: The ranks hold different tensors, or tensors that cannot be gathered.
            RankFailedError: A rank died, does not join, or does something else.
            RefitError: Another rank raised it.
        """
        max_bytes = min(max_bytes, self._bucket_bytes)
        answers = self._agree("read", max_bytes=max_bytes)
        yield from self._renaming.pieces(self._gather(_least_bytes(answers), reads=True), max_bytes)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather everything once, as whole tensors. One larger than a bucket takes its own size in addition to the
        bucket.

        Callers and errors are those of `pieces`.
        """
        whole: Tensor | None = None
        for piece in self.pieces(self._bucket_bytes):
            if piece.is_whole:
                yield piece.name, piece.tensor
                continue
            if piece.first_row == 0:
                whole = piece.tensor.new_empty(piece.full_shape)
            assert whole is not None, "pieces come in order"
            whole[piece.first_row : piece.end_row].copy_(piece.tensor)
            if piece.end_row == piece.full_shape[0]:
                yield piece.name, whole
                whole = None

    def join(self) -> None:
        """Take part in whatever the other ranks read, until they are done.

        Raises:
            RefitError: As in `pieces`.
        """
        while not self._trainers.is_over:
            answers = self._agree("follow")
            lead = next((said for said in answers if said.step != "follow"), None)
            if lead is None or lead.step == "done":
                self._trainers.is_over = True
            elif lead.step == "read":
                for _ in self._gather(_least_bytes(answers), reads=False):
                    pass

    def close(self, error: BaseException | None = None) -> None:
        """Finish, after a pass or with an error that the other ranks then raise.

        Raises:
            RefitError: Another rank is not done, or had an error.
        """
        if self._trainers.is_over:
            return
        if error is None and self._has_stopped:
            error = RankFailedError("a rank of the trainer stopped before it had read the whole state dict")
        if error is not None:
            self._withdraw(error)
            return
        self._agree("done")
        self._trainers.is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None or self._has_read:
            self.close(error)
        else:
            self.join()

    def _read(self, state_dict: Mapping[str, Tensor] | NamedTensors) -> None:
        reader, items = PartReader(), state_dict.items() if isinstance(state_dict, Mapping) else state_dict
        for name, tensor in readable(
            items, self._problems, lambda value: None if is_shard(value) else why_unreadable(value)
        ):
            try:
                self._parts.append(reader.read(name, tensor))
            except InvalidSourceError as error:
                self._problems[name] = error.problems[0]

    @cached_property
    def _held(self) -> tuple[Holding, ...]:
        return tuple(map(Holding.of, self._parts))

    @cached_property
    def _lines(self) -> tuple[str, ...]:
        """What must be equal on every rank."""
        held = zip(self._parts, self._held, strict=True)
        return (*(f"{part.name}: {part.meta}, {holding.placed}" for part, holding in held), *self.problems)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def _agree(self, step: Step, *, max_bytes: int = 0) -> list[Statement]:
        """Announce what comes next, and check that every rank holds the same tensors before a gather.

        Raises:
            RefitError: As in `pieces`.
        """
        self._has_read = self._has_read or step in ("plan", "read")
        digest = ""
        with ErrorCapture() as failed:
            digest = self._digest if self._trainers.num_ranks > 1 and not self._is_apart else ""
        answers = self._trainers.exchange(Statement(step=step, max_bytes=max_bytes, digest=digest), failed.error)
        is_wanted = any(said.step in ("plan", "read") for said in answers)
        if is_wanted and self._is_apart:
            self._unite()
        elif is_wanted and len({said.digest for said in answers}) > 1:
            compared = self._trainers.exchange(Statement(step="names", names=self._lines))
            self._trainers.is_over = True
            raise InvalidSourceError(_differences([said.names for said in compared]))
        return answers

    def _unite(self) -> None:
        """Exchange, once, what every rank holds.

        Raises:
            InvalidSourceError: Some hold one tensor differently, or have some that cannot be gathered; names each.
        """
        if self._shared is not None:
            return
        error = InvalidSourceError(self.problems) if self._problems else None
        answers = self._trainers.exchange(Statement(step="names", holdings=self._held), error)
        self._holdings = [said.holdings for said in answers]
        self._shared, problems = unite(self._parts, self._holdings)
        if problems:
            self._trainers.is_over = True
            raise InvalidSourceError(problems)

    def _batches(self, max_bytes: int) -> Iterator[Batch]:
        if self._shared is None:
            return batches(self._parts, max_bytes)
        group = self._group if self._group is not None else torch.distributed.group.WORLD
        assert group is not None, "there are several ranks"
        return owner_batches(self._shared, max_bytes, group, self._holdings, timeout_s=self._trainers.timeout_s)

    def _gather(self, max_bytes: int, *, reads: bool) -> PartRows:
        """Gather every batch, with a vote before each. One is under way while the last is read; each is half a bucket."""
        trainers = self._trainers
        try:
            if self._problems:
                raise InvalidSourceError(self.problems)
            arrived: Batch | None = None
            for place, batch in enumerate(self._batches(max_bytes // 2)):
                with ErrorCapture() as failed:
                    batch.allocate()
                trainers.exchange(Statement(step="batch", place=place), failed.error)
                batch.begin()
                if arrived is not None:
                    yield from arrived.tensors()
                batch.finish(trainers.timeout_s)
                arrived = batch if reads else None
            if arrived is not None:
                yield from arrived.tensors()
            trainers.exchange(Statement(step="end"))
        except GeneratorExit:
            self._has_stopped = True  # close() reports the reader's error, which is not known here
            raise
        except BaseException as error:
            self._withdraw(error)
            raise

    def _withdraw(self, error: BaseException) -> None:
        """Tell the other ranks why this one stops, if they do not know."""
        if not self._trainers.is_over:
            with suppress(RefitError, type(error)):
                self._trainers.exchange(Statement(step="done"), error)


class GatheredStream(Gathered):
    """A `Gathered` whose contents are unknown until read: every rank reads its own iterator, in the same order.

    Args:
        make_iterator: Returns a new iterator.
        group: All ranks that read.
        bucket_bytes: As in `gathered`.
        timeout_s: As in `gathered`.
    """

    def __init__(
        self,
        make_iterator: Callable[[], NamedTensors],
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__({}, group, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._make_iterator = make_iterator

    def scan(self) -> None:
        """Return None: what will come is unknown."""
        self._agree("plan")

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Read everything once, as `Gathered.pieces` does."""
        max_bytes = min(max_bytes, self._bucket_bytes)
        self._agree("read", max_bytes=max_bytes)
        for name, tensor in self._read_all():
            yield from cut(name, tensor, max_bytes)
            del tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Read everything once."""
        self._agree("read", max_bytes=self._bucket_bytes)
        yield from self._read_all()

    def _gather(self, max_bytes: int, *, reads: bool) -> PartRows:
        for _ in self._read_all():
            pass
        return iter(())

    def _read_all(self) -> Iterator[tuple[str, Tensor]]:
        """Read some tensors after each vote. If a reader stops, the others read those too, as they may wait for it."""
        iterator = self._in_time((name, tensor) for name, _, tensor in named(self._make_iterator()))
        stretch: Iterator[tuple[str, Tensor]] = iter(())
        try:
            for place in count():
                self._trainers.exchange(Statement(step="batch", place=place))
                stretch = islice(iterator, _TENSORS_A_VOTE)
                num_read = 0
                for name, tensor in stretch:
                    num_read += 1
                    yield name, tensor
                    del tensor
                if num_read < _TENSORS_A_VOTE:
                    break
            self._trainers.exchange(Statement(step="end"))
        except GeneratorExit:
            self._has_stopped = True
            for _ in stretch:
                pass
            raise
        except BaseException as error:
            self._withdraw(error)
            raise

    def _in_time(self, iterator: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same items, and limit how long one rank waits for another to what a vote allows."""
        while True:
            with waits_at_most(self._group, self._trainers.timeout_s):
                item = next(iterator, None)
            if item is None:
                return
            yield item
            del item


def opened(state_dict: StateDict, *, bucket_bytes: int, timeout_s: float) -> AbstractContextManager[StateDict]:
    """Open what `refit` reads: every refitting rank gathers a sharded state dict; anything else passes unchanged."""
    if isinstance(state_dict, Mapping) and has_shards(state_dict.values()):
        return Gathered(state_dict, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return nullcontext(state_dict)


def _least_bytes(answers: Sequence[Statement]) -> int:
    return min(said.max_bytes for said in answers if said.step == "read")


def _group_of(meshes: Iterable["DeviceMesh"]) -> ProcessGroup | None:
    """Return the group of all ranks that hold shards; None for the default group.

    Raises:
        InvalidSourceError: There is no such group.
    """
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())): mesh for mesh in meshes}
    if not ranks or all(len(held) == torch.distributed.get_world_size() for held in ranks):
        return None
    if len(ranks) == 1:
        mesh = next(iter(ranks.values()))
        if mesh.ndim == 1:
            return mesh.get_group()
    raise InvalidSourceError(
        [
            f"source: its shards lie on {len(ranks)} mesh(es) that do not cover all ranks; pass a group of the ranks that "
            "hold them to fp8refit.gathered"
        ]
    )


def _differences(lines: Sequence[Sequence[str]]) -> list[str]:
    """Describe what the ranks disagree on, one line per name."""
    said = [dict(line.split(": ", 1) for line in of_rank) for of_rank in lines]
    names = dict.fromkeys(name for of_rank in said for name in of_rank)
    problems = []
    for name in names:
        if views := why_differ({rank: of_rank.get(name, "absent") for rank, of_rank in enumerate(said)}):
            problems.append(f"{name}: {views}")
    return problems or [
        "source: the ranks of the trainer hold the same tensors in different orders; give all the same order"
    ]
