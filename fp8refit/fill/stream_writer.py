"""Takes the tensors of one stream, one by one or in groups, and fills slots from them directly or through staging."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8refit.fill.arrivals import Arrivals, CutTensor
from fp8refit.fill.direct import DeviceTensor, DirectFill
from fp8refit.fill.fill import Arriving
from fp8refit.fill.plan import Step
from fp8refit.fill.staging import ReadBox, Staging
from fp8refit.fill.together import Together, share_scales
from fp8refit.kernels.products import LowRank
from fp8refit.live.slots import TensorMeta
from fp8refit.live.turn import DisplacedError
from fp8refit.sources.files import StoredTensor
from fp8refit.sources.pairs import check_readable
from fp8refit.sources.row_runs import Piece, Recipe
from fp8refit.sources.work_stream import WorkStream

_SMALL_BYTES = 16 << 20
"""Copying this much takes a device about as long as a launch."""
_MOST_COPIED_BYTES = 64 << 20


@dataclass(kw_only=True, slots=True, eq=False)
class _Shared:
    """A tensor that waits for those with which its slots share scales."""

    name: str
    tensor: Tensor
    steps: Sequence[Step]
    read_box: ReadBox | None = None
    is_kept: bool = False
    """Whether nobody overwrites it before the refit is over."""


class StreamWriter:
    """Judges each tensor of a stream, and carries out its steps.

    Args:
        arrivals: Judges what arrives.
        staging: Buckets for tensors that are elsewhere.
        direct: Fills from tensors on the engine's device; None to stage them too.
        is_stable: Whether tensors keep their bytes until the refit is over.
    """

    def __init__(self, arrivals: Arrivals, staging: Staging, direct: DirectFill | None, *, is_stable: bool) -> None:
        self._arrivals, self._staging, self._direct = arrivals, staging, direct
        self._is_stable = is_stable
        self._work = WorkStream(staging.device)
        self._cut: CutTensor | None = None
        self._waiting: list[DeviceTensor] = []
        """Tensors on the engine's device that the next launch reads."""
        self._waiting_bytes = 0
        self._together = Together[_Shared](staging.slots)
        self._is_released = False

    def flush(self) -> None:
        """Write what is staged."""
        with self._work.joined():
            self._staging.flush()

    def release(self) -> None:
        """Let go of tensors, and take no more."""
        self._is_released = True
        self._waiting.clear()
        self._together.forget()

    def take(self, tensors: Iterable[Arriving | list[Arriving]]) -> None:
        """Take tensors. Those of a list stay valid together; any other may be overwritten when the next is asked for.

        Raises:
            InvalidSourceError: One does not fit, or cannot be read.
        """
        if isinstance(tensors, list):
            with self._work.joined():
                self._take_together(tensors)
                self._keep_waiting()
            return
        for each in tensors:
            with self._work.joined():
                if isinstance(each, list):
                    self._take_together(each)
                else:
                    self._take_one(each, is_lent=True)
                self._keep_waiting()
        with self._work.joined():
            self._fill_waiting()

    def take_at_rest(self, runs: Iterable[Piece | Recipe]) -> list[Recipe]:
        """Take tensors that stay valid, and add their products. Returns the recipes that must be computed first."""
        rest: list[Recipe] = []
        there: list[tuple[Piece | Recipe, LowRank | None]] = []
        for each in runs:
            product = self._product_of(each) if isinstance(each, Recipe) else None
            if isinstance(each, Recipe) and product is None:
                rest.append(each)
            else:
                there.append((each, product))
        with self._work.joined():
            names, tensors = [each.name for each, _ in there], [each.tensor for each, _ in there]
            are_whole = all(product is not None or each.is_whole for each, product in there)
            if are_whole and self._take_group(names, tensors, [product for _, product in there]):
                return rest
            for each, product in there:
                if isinstance(each, Piece):
                    self._take_one(each, is_lent=False)
                elif product is not None and not self._take_sum(each.name, each.tensor, product):
                    rest.append(each)
            self._fill_waiting(are_together=True)
        return rest

    def _take_together(self, tensors: Sequence[Any]) -> None:
        self._check_goes_on()
        are_whole = all(type(each) is tuple for each in tensors)
        if not (are_whole and self._take_group([each[0] for each in tensors], [each[1] for each in tensors])):
            for tensor in tensors:
                self._take_one(tensor, is_lent=len(tensors) == 1)
            self._fill_waiting(are_together=True)

    def _check_goes_on(self) -> None:
        if self._is_released:
            raise DisplacedError

    def _take_one(self, tensor: Arriving, *, is_lent: bool) -> None:
        self._check_goes_on()
        if isinstance(tensor, Piece) and not tensor.is_whole:
            self._take_rows(tensor, is_lent=is_lent)
            return
        name, value = (tensor.name, tensor.tensor) if isinstance(tensor, Piece) else tensor
        if self._take_known(name, value, is_lent=is_lent):
            return
        direct = self._direct
        if direct is None or not isinstance(value, Tensor) or value.device != direct.device:
            self._take_whole(name, value, is_lent=is_lent)
        else:
            self._take_where_it_lies(name, value, is_lent=is_lent)

    def _take_group(
        self, names: Sequence[str], tensors: Sequence[Tensor], products: Sequence[LowRank | None] = ()
    ) -> bool:
        """Fill from whole tensors that have arrived together before; otherwise return False."""
        direct = self._direct
        if direct is None or len(tensors) < 2 or self._cut is not None or not self._arrivals.are_new(names):
            return False
        if not direct.fill_group(names, tensors, products):
            return False
        self._arrivals.note(names)
        return True

    def _product_of(self, recipe: Recipe) -> LowRank | None:
        """Return the product to add while the tensor is quantized; None if the tensor must be computed first."""
        direct = self._direct
        is_certain = self._arrivals.plan is not None and self._arrivals.is_settled(recipe.name)
        if direct is None or not is_certain or not direct.may_merge(recipe.name):
            return None
        return recipe.product

    def _take_sum(self, name: str, tensor: Tensor, product: LowRank) -> bool:
        """Queue a tensor and its product for the next launch; False if their sum must be computed first."""
        assert self._direct is not None, "it may be merged"
        arrived = DeviceTensor(name=name, tensor=tensor, product=product)
        arrived.place = self._direct.place_of(arrived.key, tensor, product)
        if arrived.place is None:
            arrived.tensor, arrived.steps = tensor.detach(), self._arrivals.announced_steps(name)
            if not self._direct.can_merge(arrived):
                return False
        self.check_is_complete()
        if arrived.place is None or not self._arrivals.note_new(name):
            self._arrivals.steps_of(name, TensorMeta.of(tensor))
        self._waiting.append(arrived)
        return True

    def _take_known(self, name: str, tensor: Any, *, is_lent: bool) -> bool:
        """Take a tensor if it is recognized from earlier streams; otherwise return False."""
        direct = self._direct
        if direct is None or self._cut is not None:
            return False
        place = direct.place_of(name, tensor)
        if place is None or not self._arrivals.note_new(name):
            return False
        if is_lent:
            direct.fill_one(place, tensor)
        else:
            self._waiting.append(DeviceTensor(name=name, tensor=tensor, place=place))
        return True

    def _take_where_it_lies(self, name: str, tensor: Tensor, *, is_lent: bool) -> None:
        """Fill from a tensor on the engine's device without staging it, with the next launch.

        A lent tensor may be overwritten once this returns, so it gets a launch of its own. A small one is copied instead,
        because one table for many tensors costs the host less than many tables.
        """
        self.check_is_complete()
        check_readable(name, tensor)
        steps = self._arrivals.steps_of(name, TensorMeta.of(tensor))
        if self._arrivals.is_second(name):
            self._stage(name, steps, tensor)
            return
        if share_scales(steps):
            self._take_shared(_Shared(name=name, tensor=tensor.detach(), steps=steps), is_lent=is_lent)
            return
        is_kept = self._arrivals.is_settled(name)
        self._let_wait(DeviceTensor(name=name, tensor=tensor.detach(), steps=steps, is_kept=is_kept), is_lent)

    def _let_wait(self, arrived: DeviceTensor, is_lent: bool) -> None:
        """Queue a tensor for the next launch; see `_take_where_it_lies`."""
        num_bytes = arrived.tensor.nbytes
        is_small = is_lent and num_bytes <= _SMALL_BYTES
        if is_small:
            arrived.tensor = arrived.tensor.detach().clone()
            self._waiting_bytes += num_bytes
        self._waiting.append(arrived)
        if is_lent and (not is_small or self._waiting_bytes > _MOST_COPIED_BYTES):
            self._fill_waiting()

    def _fill_waiting(self, *, are_together: bool = False) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting:
            assert self._direct is not None, "they are on the engine's device"
            self._direct.fill(waiting, are_together=are_together)

    def _take_whole(self, name: str, tensor: Tensor | StoredTensor, *, is_lent: bool) -> None:
        self.check_is_complete()
        if isinstance(tensor, StoredTensor):
            values, read_box = tensor.meta, tensor.read_box
        else:
            check_readable(name, tensor)
            values, read_box = tensor, None
        steps = self._arrivals.steps_of(name, TensorMeta.of(values))
        if share_scales(steps) and not self._arrivals.is_second(name):
            is_kept = self._is_stable or read_box is not None
            shared = _Shared(name=name, tensor=values, steps=steps, read_box=read_box, is_kept=is_kept)
            self._take_shared(shared, is_lent=is_lent)
        else:
            self._stage(name, steps, values, read_box)

    def _keep_waiting(self) -> None:
        """Copy what waits for others and may be overwritten from now on."""
        for each in self._together.take_new():
            if not each.is_kept:
                each.tensor, each.is_kept = each.tensor.detach().clone(), True

    def clear_maxima(self) -> None:
        """Forget the maxima of an earlier refit."""
        with self._work.joined():
            self._staging.clear_maxima()

    def _take_shared(self, shared: "_Shared", *, is_lent: bool) -> None:
        """Fill from a tensor whose slots may share scales with others, once all of these are there."""
        ready = self._together.add(shared, shared.steps)
        direct = self._direct
        if direct is not None and all(each.tensor.device == direct.device for each in ready):
            there = [DeviceTensor(name=each.name, tensor=each.tensor, steps=each.steps) for each in ready]
            direct.place_together(there)
            self._waiting += there
            if is_lent:
                self._fill_waiting()
            return
        for is_maximum in (True, False):
            for each in ready:
                steps = [step for step in each.steps if step.op.finds_maximum is is_maximum]
                self._stage(each.name, steps, each.tensor, each.read_box)

    def _stage(self, name: str, steps: Sequence[Step], tensor: Tensor, read_box: ReadBox | None = None) -> None:
        with self._comparing(self._arrivals.is_second(name)):
            for step in steps:
                self._staging.add(step, tensor, is_stable=self._is_stable and read_box is None, read_box=read_box)

    def _comparing(self, is_second: bool) -> AbstractContextManager[None]:
        """While active, what is staged is compared with its slots if it has come before under another name."""
        if not is_second:
            return nullcontext()
        self._fill_waiting()
        return self._staging.comparing()

    def _take_rows(self, piece: Piece, *, is_lent: bool) -> None:
        """Fill from rows as they arrive, without staging if they are on the engine's device."""
        check_readable(piece.name, piece.tensor)
        cut = self._cut
        if cut is None or piece.name != cut.name:
            self.check_is_complete()
            meta = TensorMeta(shape=piece.full_shape, dtype=piece.tensor.dtype)
            steps = self._arrivals.steps_of(piece.name, meta)
            cut = self._cut = CutTensor(name=piece.name, full_shape=piece.full_shape, steps=steps)
            if share_scales(steps):
                with torch.inference_mode(False):  # rows may come in any mode
                    cut.whole = torch.empty(piece.full_shape, dtype=meta.dtype, device=piece.tensor.device)
        cut.check_follows(piece)
        if cut.whole is not None:
            self._collect(cut, cut.whole, piece)
            return
        is_second = self._arrivals.is_second(piece.name)
        is_there = self._direct is not None and piece.tensor.device == self._direct.device and not is_second
        with self._comparing(is_second):
            for step in cut.steps:
                if is_there:
                    for first_row, run in self._staging.runs_of(step, piece.tensor.detach(), piece.first_row):
                        arrived = DeviceTensor(name=piece.name, tensor=run, steps=(step,), first_row=first_row)
                        self._let_wait(self._recognized(arrived), is_lent)
                else:
                    self._staging.add_rows(step, piece.tensor, piece.first_row)
        cut.next_row = piece.end_row
        if cut.is_complete:
            self._cut = None

    def _collect(self, cut: CutTensor, whole: Tensor, piece: Piece) -> None:
        """Keep rows of a tensor whose slots may share scales with others, until it is whole."""
        whole[piece.first_row : piece.end_row] = piece.tensor.detach()
        cut.next_row = piece.end_row
        if cut.is_complete:
            self._cut = None
            self._take_shared(_Shared(name=cut.name, tensor=whole, steps=cut.steps, is_kept=True), is_lent=False)
            self._fill_waiting()

    def _recognized(self, arrived: DeviceTensor) -> DeviceTensor:
        """A run of rows, with its place in the table of earlier streams, if it has one."""
        arrived.is_kept = self._arrivals.is_settled(arrived.name)
        if self._direct is not None and self._arrivals.expected is not None and arrived.is_kept:
            arrived.place = self._direct.place_of(arrived.key, arrived.tensor)
        return arrived

    def check_is_complete(self) -> None:
        """Check that the last tensor that arrived in runs of rows is complete.

        Raises:
            InvalidSourceError: It is not.
        """
        if self._cut is not None:
            self._cut.check_is_complete()
