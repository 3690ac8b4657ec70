"""Fills slots from stream tensors that are already on the engine's device, reading them where they are.

The first stream compiles a table for each group of tensors that arrive together; at its end, the tables are joined. From
then on, a tensor is recognized by its name and layout, whatever it arrives with, and each run of tensors that were neighbors
in the first stream takes one launch. Filling never waits for the device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.fill.arrivals import Expected
from fp8refit.fill.plan import Step
from fp8refit.fill.program import Flags, Launched, Program
from fp8refit.fill.row_tasks import cut_to_run
from fp8refit.fill.tasks import Maxima, bind
from fp8refit.fill.together import share_scales
from fp8refit.kernels import Action, Task
from fp8refit.kernels.products import LowRank, ProductKind, kind_of
from fp8refit.kernels.rows import can_merge
from fp8refit.kernels.work import ALIGNMENT_BYTES, source_layout
from fp8refit.live.layout_guard import Addresses, LayoutGuard
from fp8refit.live.slots import Slot
from fp8refit.live.storage import why_unreadable

_MOST_GROUPED = 4
"""Groups are forgotten once they hold more than this many times the tensors of the table."""


@dataclass(kw_only=True, slots=True, eq=False)
class DeviceTensor:
    """A tensor on the engine's device, or a run of rows of one."""

    name: str
    tensor: Tensor
    steps: Sequence[Step] = ()
    first_row: int | None = None
    """First row, if this is a run of rows (which never cuts a block of the steps); None for the whole tensor."""
    place: int | None = None
    """Its place in the table, if it was recognized."""
    is_kept: bool = True
    """Whether a tensor like it will have the same steps in the next stream."""
    product: LowRank | None = None
    """The product to add while the tensor, which must be whole, is quantized."""

    @property
    def key(self) -> str:
        """The key by which later streams recognize it."""
        if self.first_row is None:
            return _key(self.name, self.product)
        return f"{self.name} from row {self.first_row} to {self.steps[0].slot}"


class _Known:
    """The layout of one tensor of the table."""

    __slots__ = ("alignment", "device", "dtype", "place", "product", "shape", "stride", "waits")

    def __init__(self, place: int, arrived: DeviceTensor) -> None:
        tensor, product = arrived.tensor, arrived.product
        self.place, self.waits = place, share_scales(arrived.steps)
        self.product = _kind_of(tensor, product) if product is not None else None
        self.shape, self.stride, self.dtype, self.device = source_layout(tensor)
        self.alignment = tensor.data_ptr() % ALIGNMENT_BYTES

    def fits(self, tensor: Any, product: LowRank | None = None) -> bool:
        """Whether `tensor` is readable and has this layout, and `product` is of the same kind."""
        return (
            why_unreadable(tensor) is None
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.get_device() == self.device
            and (tensor.is_contiguous() if self.stride is None else tensor.stride() == self.stride)
            and tensor.data_ptr() % ALIGNMENT_BYTES == self.alignment
            and (product is None or _kind_of(tensor, product) == self.product)
        )


class _Group:
    """Tensors that arrived together and were recognized, remembered so that next time one call recognizes all of them."""

    def __init__(self, known: Sequence[DeviceTensor], runs: list[tuple[int, int, int]]) -> None:
        self.runs = runs
        """Where each run begins in the group and in the table, and its length."""
        tensors, products = [each.tensor for each in known], [each.product for each in known]
        self.guard = LayoutGuard([each.key for each in known], [*tensors, *_matrices(products)])
        self._alignment = self.guard.addresses % ALIGNMENT_BYTES

    def holds(self, keys: Sequence[str], tensors: Sequence[Tensor], products: Sequence[LowRank | None]) -> bool:
        """Whether these are tensors and products of its layout, aligned alike."""
        if not self.guard.holds(keys, [*tensors, *_matrices(products)]):
            return False
        return bool((self.guard.addresses % ALIGNMENT_BYTES == self._alignment).all())


class DirectFill:
    """Fills from tensors on the engine's device, and keeps what it compiled from one stream to the next.

    Args:
        slots: The slots of the planned inventory.
        device: The slots' device.
        maxima: Those that slots share.

    Attributes:
        expected: What the streams bring that everything was compiled for; None if the next one compiles everything again.
    """

    def __init__(self, slots: Sequence[Slot], device: torch.device, maxima: Maxima | None = None) -> None:
        self.device = device
        self._maxima = maxima
        self.expected: Expected | None = None
        self._slots = slots
        self._config, self._action = RefitConfig(), Action.WRITE
        self._program: Program | None = None
        self._known: dict[str, _Known] = {}
        """By key."""
        self._groups: dict[str, _Group] = {}
        """By the key of their first tensor."""
        self._num_grouped = 0
        self._unmerged: set[str] = set()
        """Names of tensors whose slots do not allow to add products while they are quantized."""
        self._new: list[tuple[Program, list[tuple[str, _Known]]]] = []
        """Programs that this stream compiled, with the key and layout of each place."""
        self._launched = Launched()

    def expect(self, expected: Expected) -> None:
        """Expect other streams, and drop everything compiled."""
        self.forget()
        self.expected = expected

    def begin(self, config: RefitConfig, action: Action) -> None:
        """Start a new stream. Flags of earlier streams are dropped, and what was compiled by one that did not end.

        Args:
            config: Options of the refit. They may differ from earlier ones in nothing that tables depend on.
            action: Whether to write to the slots or to compare with them.
        """
        self._launched.forget()
        self._new.clear()
        if self.expected is None:
            self.forget()
        self._config, self._action = config, action

    def end(self, came: Expected) -> None:
        """End the stream, and keep what it compiled for streams like it. What is kept from earlier ones must be for `came`."""
        new, self._new, expected, self.expected = self._new, [], self.expected, None
        if came is not expected:
            self.forget()  # tensors of these names and layouts may have other steps
        if new and not self._join(new):
            self.forget()
        self.expected = came

    def _join(self, new: Sequence[tuple[Program, list[tuple[str, _Known]]]]) -> bool:
        """Add programs to the one that is kept; False if they have other layouts of its tensors, whose rows it cannot drop."""
        num_places = len(self._known)
        keys = [key for _, places in new for key, _ in places]
        if len(self._known.keys() | set(keys)) < num_places + len(keys):
            return False
        for _, places in new:
            for key, known in places:
                known.place += num_places
                self._known[key] = known
            num_places += len(places)
        earlier = [self._program] if self._program is not None else []
        self._program = Program.join([*earlier, *(program for program, _ in new)])
        self._forget_groups()
        return True

    def forget(self) -> None:
        """Drop everything compiled."""
        self.expected = self._program = None
        self._known.clear()
        self._unmerged.clear()
        self._new.clear()
        self._forget_groups()

    def _forget_groups(self) -> None:
        self._groups.clear()
        self._num_grouped = 0

    def place_of(self, key: str, tensor: Any, product: LowRank | None = None) -> int | None:
        """The table's place for a tensor and its product; None if they are not recognized, or wait for others."""
        known = self._known.get(key)
        return known.place if known is not None and not known.waits and known.fits(tensor, product) else None

    def place_together(self, arrived: Sequence[DeviceTensor]) -> None:
        """Give tensors that have waited for each other their places, if they follow each other in the table, too."""
        known = [self._known.get(each.key) for each in arrived]
        places = [at.place for at, each in zip(known, arrived, strict=True) if at is not None and at.fits(each.tensor)]
        are_there = len(places) == len(arrived) and len(_runs(places)) == 1
        for number, each in enumerate(arrived):
            each.place = places[number] if are_there else None
            each.is_kept = not any(known)

    def may_merge(self, name: str) -> bool:
        """False if it is known that a tensor's product cannot be added while the tensor is quantized."""
        return name not in self._unmerged

    def can_merge(self, arrived: DeviceTensor) -> bool:
        """Whether a new tensor's product can be added while it is quantized.

        If its slots do not allow that, `may_merge` is False from now on.
        """
        tensor, product = arrived.tensor, arrived.product
        is_there = why_unreadable(tensor) is None and tensor.device == self.device
        if not is_there or product is None or _kind_of(tensor, product) is None:
            return False
        is_possible = all(map(can_merge, self._tasks(arrived)))
        if not is_possible:
            self._unmerged.add(arrived.name)
        return is_possible

    def fill_group(
        self, names: Sequence[str], tensors: Sequence[Tensor], products: Sequence[LowRank | None] = ()
    ) -> bool:
        """Fill from tensors that have arrived together before. One call to torch recognizes them; False if it does not."""
        keys = [_key(*each) for each in zip(names, products, strict=True)] if any(products) else names
        group = self._groups.get(keys[0]) if keys else None
        if group is None or not group.holds(keys, tensors, products):
            return False
        addresses = group.guard.addresses
        for start, place, length in group.runs:
            end = start + length
            if not self._run(place, tensors[start:end], addresses[start:end], products=products[start:end]):
                return False
        return True

    def fill_one(self, place: int, tensor: Tensor) -> None:
        """Fill immediately from one tensor that was recognized."""
        is_done = self._run(place, (tensor,))
        assert is_done, "the alignment was checked"

    def fill(self, tensors: Sequence[DeviceTensor], *, are_together: bool) -> None:
        """Fill from the next tensors.

        Args:
            tensors: The tensors.
            are_together: Whether they arrived together, and may do so again.
        """
        known = [each for each in tensors if each.place is not None]
        runs = _runs([each.place for each in known if each.place is not None])
        for start, place, length in runs:
            run = known[start : start + length]
            is_done = self._run(place, [each.tensor for each in run], products=[each.product for each in run])
            assert is_done, "the alignment was checked"
        if len(known) < len(tensors):
            self._compile([each for each in tensors if each.place is None])
        elif are_together and len(known) > 1:
            if self._num_grouped > _MOST_GROUPED * len(self._known):
                self._forget_groups()
            self._groups[known[0].key] = _Group(known, runs)
            self._num_grouped += len(known)

    def _run(
        self,
        place: int,
        tensors: Sequence[Tensor],
        addresses: Addresses | None = None,
        *,
        products: Sequence[LowRank | None] = (),
    ) -> bool:
        assert self._program is not None, "something was recognized"
        self._launched.add(self._program)
        check, action = self._config.validate_values != "off", self._action
        return self._program.table.run(place, tensors, addresses, products=products, check=check, action=action)

    def _compile(self, arrived: Sequence[DeviceTensor]) -> None:
        """Compile a new program for tensors that are not recognized, and fill from them."""
        for is_kept in (True, False):
            part = [each for each in arrived if each.is_kept is is_kept]
            if not part:
                continue
            tasks = [(place, each.name, task) for place, each in enumerate(part) for task in self._tasks(each)]
            places = [place for place, _, _ in tasks]
            named = [(name, task) for _, name, task in tasks]
            program = Program.compile(named, self.device, places, num_places=len(part))
            self._launched.add(program)
            program.table.launch(check=self._config.validate_values != "off", action=self._action)
            program.table.release()
            if is_kept:
                known = [(each.key, _Known(at, each)) for at, each in enumerate(part)]
                self._new.append((program, known))

    def _tasks(self, arrived: DeviceTensor) -> list[Task]:
        tasks: list[Task | None] = [
            bind(step, self._slots[step.slot], arrived.tensor, self._config, self._maxima, arrived.product)
            for step in arrived.steps
        ]
        if arrived.first_row is not None:
            tasks = [cut_to_run(task, arrived.first_row, arrived.tensor.shape[0]) for task in tasks if task is not None]
        return [task for task in tasks if task is not None]

    def read_flags(self) -> Flags:
        """Wait for everything, and return what was flagged."""
        return self._launched.read_flags()

    @property
    def num_device_bytes(self) -> int:
        """Device memory held between streams."""
        return self._program.table.num_device_bytes if self._program is not None else 0


def _key(name: str, product: LowRank | None) -> str:
    return name if product is None else f"{name} and a product"


def _matrices(products: Iterable[LowRank | None]) -> Iterator[Tensor]:
    for each in products:
        if each is not None:
            yield each.up
            yield each.down


def _kind_of(tensor: Tensor, product: LowRank) -> ProductKind | None:
    """The kind of a product; None if its matrices cannot be read, or no kernel adds it while quantizing."""
    if why_unreadable(product.up) is not None or why_unreadable(product.down) is not None:
        return None
    return kind_of(tensor, product.up, product.down)


def _runs(places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Where each run of consecutive places begins in the list and in the table, and its length."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            runs.append((start, places[start], index - start))
            start = index
    return runs
