"""One rank's live model as the core sees it: its inventory, its device, and whether it can be used now."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.errors import EngineAsleepError, EngineLostError, LiveTensorMovedError, UnsupportedEngineError
from fp8refit.fill.fills import Fills
from fp8refit.live.collector import collector_paused
from fp8refit.live.fingerprint import fingerprint
from fp8refit.live.layout import EngineLayout
from fp8refit.live.overlaps import aliases_of_shared_scales, shared_bytes
from fp8refit.live.slots import Inventory, Refusal, Write
from fp8refit.ranks.kv.scales import KvScales, Measured
from fp8refit.ranks.kv.source_scales import SourceScales


class LiveModel:
    """Reads a live model, and reads it again whenever the engine has replaced a tensor.

    Args:
        read_inventory: Reads the inventory of the live model.
        device: Expected device of the live tensors; corrected when they are read.
        engine: Name of the engine, for layouts.
        versions: Package versions, for layouts.

    Attributes:
        device: Device of the live tensors.
        lost_because: Why the engine is lost; None if it is not.
        inventory: The last inventory; None if it must be read again.
        fills: What was compiled for it.
        kv: The scales of its KV cache, if it has any.
        source_scales: Receives KV scales that are sent with the weights.
        has_constants: Whether its constants hold their values; a dummy boot and sleep lose them.
        unproved: What the engine's loader does otherwise than the inventory says; None if that was not looked at.
    """

    def __init__(
        self,
        read_inventory: Callable[[], Inventory],
        *,
        device: torch.device,
        engine: str,
        versions: Mapping[str, str],
    ) -> None:
        self._read_inventory = read_inventory
        self._engine = engine
        self._versions = dict(versions)
        self.device = device
        self.lost_because: str | None = None
        self.inventory: Inventory | None = None
        self.fills: Fills | None = None
        self.kv: KvScales | None = None
        self.source_scales: SourceScales | None = None
        self.has_constants = False
        self.unproved: tuple[Refusal, ...] | None = None

    @property
    def memory(self) -> frozenset[int]:
        """Addresses of the weights' storages, as far as known."""
        slots = self.inventory.slots if self.inventory is not None else ()
        return frozenset(slot.weight.untyped_storage().data_ptr() for slot in slots) - {0}

    @collector_paused()
    def read(self) -> Inventory:
        """The inventory, with slots for KV scales that a source may send.

        Raises:
            UnsupportedEngineError: The live weights are not on one device.
        """
        inventory = self.inventory
        if inventory is None or inventory.watch.was_any_replaced():
            if inventory is not None:
                self.forget()
            inventory = self._read_inventory()
            found = (*shared_bytes(inventory.slots), *aliases_of_shared_scales(inventory))
            inventory = replace(inventory, refusals=(*inventory.refusals, *found))
            self.device = _device_of(inventory) or self.device
            torn = self.kv.torn if self.kv is not None else None
            self.kv = KvScales(inventory.kv, self.device, torn=torn) if inventory.kv is not None else None
            self.source_scales = SourceScales(self.kv, inventory, self.device) if self.kv is not None else None
            inventory = self.source_scales.inventory if self.source_scales is not None else inventory
            self.fills = Fills(inventory, self.device)
            self.inventory = inventory
        return inventory

    @collector_paused()
    def refusals(self, inventory: Inventory | None = None, *, at_a_glance: bool = False) -> tuple[Refusal, ...]:
        """Why the model cannot be refitted: how it was built, or copies of weights that it has made since.

        Args:
            inventory: What was just read; by default it is read.
            at_a_glance: Look for copies in one of several layers that are alike.
        """
        inventory = self.read() if inventory is None else inventory
        if inventory.refusals or not are_mapped(inventory):
            return inventory.refusals
        with self.on_device():
            return tuple(inventory.find_copies(self.has_constants, at_a_glance))

    @collector_paused()
    def prove(self, write: Write) -> tuple[Refusal, ...]:
        """Return what the engine's loader does otherwise than the inventory says. Looks at it once for an inventory.

        Args:
            write: Writes a policy into another inventory.

        Raises:
            EngineLostError: A CUDA fault.
        """
        if self.unproved is None and (inventory := self.read()).prove is not None:
            with self.on_device():
                self.unproved = inventory.prove(write, self.device)
        return self.unproved or ()

    def read_mapped(self) -> Inventory:
        """`read`, for callers that access the weights.

        Raises:
            EngineAsleepError: The weights are not mapped.
        """
        inventory = self.read()
        if not are_mapped(inventory):
            raise EngineAsleepError("the weights are asleep: their memory is not mapped; wake them up first")
        return inventory

    def forget(self) -> None:
        """Read the model again next time."""
        self.inventory = self.fills = self.unproved = None
        self.has_constants = False

    def close(self) -> None:
        """Drop everything except the last whole set of partly overwritten KV scales."""
        self.forget()
        if self.kv is not None and self.kv.torn is None:
            self.kv = self.source_scales = None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the engine's device the current one, and mark the engine as lost after a CUDA fault.

        Raises:
            EngineLostError: A CUDA fault.
        """
        try:
            with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
                yield
        except torch.AcceleratorError as error:
            self.lost_because = f"a CUDA fault ended a refit of this engine ({error}); restart the engine"
            raise EngineLostError(self.lost_because) from error

    def synchronize(self) -> None:
        """Wait for all streams of the device, including the trainer's and the engine's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def layout(self) -> EngineLayout:
        """Describe slots, kernels, formats and refusals."""
        unproved = self.unproved
        is_proved = None if unproved is None else not unproved
        inventory = replace(self.read(), refusals=(*self.refusals(), *(unproved or ())))
        layout = EngineLayout.of(inventory, engine=self._engine, versions=self._versions, device=str(self.device))
        return layout.model_copy(update={"is_proved": is_proved})

    def fingerprint(self) -> str:
        """Digest of the current weights; see `fp8refit.live.fingerprint`.

        Raises:
            EngineAsleepError: The weights are not mapped.
            EngineLostError: A CUDA fault.
        """
        inventory = self.read_mapped()
        with self.on_device():
            return fingerprint(inventory)

    def require_kv(self) -> KvScales:
        """The KV scales.

        Raises:
            UnsupportedEngineError: There are none that fp8refit knows.
        """
        if self.kv is None:
            raise UnsupportedEngineError(f"fp8refit knows no KV cache of {self._engine}, so it cannot set KV scales")
        return self.kv

    def measure_kv(self, order: KvOrder, config: RefitConfig) -> Measured:
        """Run a calibration batch through the live network. Changes nothing.

        Raises:
            CalibrationError: NaN or Inf, or not enough memory.
            EngineLostError: A CUDA fault.
        """
        with self.on_device():
            self.synchronize()
            return self.require_kv().measure(order, config.kv)


def are_mapped(inventory: Inventory) -> bool:
    """Whether memory backs the weights. Sleep mode unmaps all of them and keeps the addresses."""
    slots = inventory.slots
    # Optional slots follow the weights.
    last = next((slot for slot in reversed(slots) if not slot.is_optional), None)
    weights = [slot.weight for slot in (*slots[:1], last) if slot is not None and slot.weight.is_cuda]
    if not weights:
        return True
    from fp8refit.transport.memory.cuda_driver import is_mapped

    return all(is_mapped(weight.data_ptr()) for weight in weights)


def assert_in_place(inventory: Inventory) -> None:
    """Check that no live tensor moved.

    Raises:
        LiveTensorMovedError: One did.
    """
    moved = inventory.watch.moved()
    if moved:
        raise LiveTensorMovedError(
            f"{len(moved)} live tensor(s) were replaced while they were refitted: {', '.join(moved)}. CUDA graphs may read "
            "stale memory; refit again, and if this repeats, restart the engine"
        )


def _device_of(inventory: Inventory) -> torch.device | None:
    """The one device of all weights; None if there are none.

    Raises:
        UnsupportedEngineError: There are several, or it is the meta device.
    """
    devices = {slot.weight.device for slot in inventory.slots}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        places = ", ".join(sorted(map(str, devices)))
        raise UnsupportedEngineError(f"the live weights are on {places}; put the engine onto one device")
    return next(iter(devices), None)
