"""One rank of an engine that may serve LoRA adapters, which it moves between requests.

The copy of an adapter in host memory is written when a refit is committed, and kept from then on.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from operator import is_not
from typing import Any

from typing_extensions import override

from fp8refit.config import LORA
from fp8refit.errors import InvalidSourceError, LiveTensorMovedError
from fp8refit.fill.fills import Prepared
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import Inventory
from fp8refit.ranks.live_model import are_mapped
from fp8refit.ranks.target import Target
from fp8refit.ranks.write import Write
from fp8refit.report import RankReport
from fp8refit.tracing.loras import AdapterMemory, Loras

_AGAIN = "Nothing was written; refit again"


class LoraTarget(Target):
    """A rank that may serve adapters, which its engine moves between requests.

    Args:
        read_own: Reads the live model, without adapters.
        memory: Where the engine has its adapters.
        end_moves: Discards what the engine has copied apart to move experts later. Called on every rank before a write.
        **options: See `Target`.
    """

    def __init__(
        self,
        read_own: Callable[[], Inventory],
        *,
        memory: AdapterMemory,
        end_moves: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        super().__init__(self._read_inventory, **options)
        self._read_own, self._memory, self._end_moves = read_own, memory, end_moves
        self._own: Inventory | None = None
        """All but adapters."""
        self._loras = Loras()
        """What was read last of adapters."""

    def _read_inventory(self) -> Inventory:
        """List the model's slots, and those of adapters.

        If nothing but adapters has moved since the last time, nothing else is read, or proved, again. A refit of weights does
        not care where they are, so they are not among what is watched.
        """
        own = self._own
        if own is None or own.watch.was_any_replaced() or not self._loras.are_stale:
            have_moved = own is not None and own.has_moved()
            own = self._read_own()
            if self.is_dirty and have_moved:  # which rank has what a failed refit left of an expert, nobody knows now
                memory = {each.untyped_storage().data_ptr() for each in own.moving}
                self._torn |= {each.name for each in own.slots if each.weight.untyped_storage().data_ptr() in memory}
            self._own = own = replace(own, prove=cache(own.prove) if own.prove is not None else None)
        self._loras = loras = Loras() if own.refusals else Loras.of(self._memory)
        return replace(own, slots=(*own.slots, *loras.slots), adapters=loras.adapters)

    @override
    def layout(self) -> EngineLayout:
        """See `Target.layout`. Adapters that have no slot get free ones, so that they can be refitted."""
        if not self._has_lost_values and are_mapped(self.live.read()):
            self._memory.activate()
        self._forget_moved()
        return super().layout()

    @override
    def check_ready(self) -> Inventory:
        """See `Target.check_ready`. What a failed refit has left incomplete may have been removed since."""
        if self.is_dirty:
            self._forget_moved()
        return super().check_ready()

    @override
    def begin(self, prepared: Prepared) -> Write:
        """See `Target.begin`.

        Raises:
            LiveTensorMovedError: Adapters have moved since the refit of one was prepared, or experts; nothing was written.
        """
        if self.is_current(prepared) and prepared.writes:
            self._end_moves()
        if self.is_current(prepared) and prepared.inventory.has_moved():
            self.abandon()
            raise LiveTensorMovedError(f"the engine has moved experts since this refit was prepared (EPLB). {_AGAIN}")
        if self.is_current(prepared) and prepared.plan is not None:
            kept = frozenset(prepared.plan.kept)
            sent = [name for name, *_ in self._loras.copies if name not in kept]
            self._check_seats(sent, f"since this refit was prepared. {_AGAIN}")
        return super().begin(prepared)

    @override
    def finish(self) -> RankReport:
        report = super().finish()
        self._check_written_seats()
        return report

    @override
    def commit(self, version: int | None = None) -> int:
        self._check_written_seats()
        if self._is_whole:
            with self.live.on_device():
                self._loras.write_copies(self._memory, self._torn)
        return super().commit(version)

    @override
    def forget_values(self) -> None:
        """See `Target.forget_values`. Slots of adapters are filled again from host memory, so none is incomplete any more."""
        self._memory.deactivate()
        super().forget_values()
        self._torn = {name for name in self._torn if not name.startswith(LORA)}

    @override
    def distrust(self) -> None:
        """See `Target.distrust`. Adapters are not among what others write with the weights."""
        before = frozenset(self._torn)
        super().distrust()
        self._torn = {name for name in self._torn if name in before or not name.startswith(LORA)}

    def _check_written_seats(self) -> None:
        if self._is_whole:
            try:
                self._check_seats(self._torn, "while one was written; add it (add_lora), and refit it again")
            except LiveTensorMovedError:  # another adapter's slot may have been written
                self._memory.deactivate()
                raise

    def _check_seats(self, written: Collection[str], when: str) -> None:
        """Check that adapters have not moved, if any of theirs is among the slots that are written.

        Raises:
            LiveTensorMovedError: They have, and what was prepared is given up.
        """
        if any(name in written for name, *_ in self._loras.copies) and self._has_moved:
            self.abandon()
            self._forget_moved()
            raise LiveTensorMovedError(f"the engine has moved adapters {when}")

    @property
    def _has_moved(self) -> bool:
        """Whether any slot is another adapter's than when they were read."""
        return any(map(is_not, self._loras.seated, self._memory.seated()))

    def _forget_moved(self) -> None:
        """Read adapters again next time, if they have moved."""
        if self._has_moved:
            self._loras.are_stale = True
            self.live.forget()

    @override
    def _check_kept(self, prepared: Prepared) -> None:
        """See `Target._check_kept`. A sleep takes nothing from adapters: engines have them in host memory."""
        try:
            super()._check_kept(prepared)
        except InvalidSourceError as error:
            if problems := [each for each in error.problems if not (self._has_lost_values and each.startswith(LORA))]:
                raise InvalidSourceError(problems) from None
