"""A small engine, reached in every way, for fuzzers of what it is given: what it holds is held against a second quantizer."""

from collections.abc import Callable

import pytest
import torch

from fp8refit import EngineHost, HostedEngine, RefitError, RefitReport, Refitter
from tests.fakes import FakeEntryPoint, FakeModel, box_of, live_bytes
from tests.second_quantizer import quantize_tensor

ROUTES = {
    "here": {},
    "here, looking twice": {"validate": "strict"},
    "through a bucket": {},
    "broadcast": {"transport": "collective"},
}
"""How a trainer reaches the engine, and how it refits."""


@pytest.fixture(autouse=True, scope="module")
def fake_engine():
    """The only adapter that is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [FakeEntryPoint()])
        yield


class Subject:
    """An engine, and what it has to hold.

    Args:
        route: One of `ROUTES`.
    """

    def __init__(self, route: str) -> None:
        self.model = FakeModel()
        self.on_message: Callable[[str], str] = lambda message: message
        """Called with what goes to the engine, on its way."""
        self.is_here = route.startswith("here")
        engine = self.model
        if not self.is_here:
            host = EngineHost(self.model)
            engine = HostedEngine(lambda message, _: host.answer(self.on_message(message)))
        self.refitter = Refitter(engine, timeout_s=60, **ROUTES[route])
        self.version = 0
        self.is_dirty = False
        self.held = live_bytes(self.model)

    def good(self, state_dict: object, policy: dict[str, torch.Tensor], **options: object) -> RefitReport:
        """Refit, and check that every byte is that of `policy`, and the version the next one."""
        report = self.refitter.refit(state_dict, **options)
        self._committed(report.version, policy)
        return report

    def bad(self, state_dict: object, *, is_seen_before: bool, **options: object) -> RefitError:
        """Refit, and check that it is refused: with a whole policy, the old one, or with none and no requests.

        Args:
            state_dict: What cannot be used.
            is_seen_before: Whether this has to be known before the first byte is written.
            options: Of the refit.
        """
        with pytest.raises(RefitError) as raised:
            self.refitter.refit(state_dict, **options)
        assert self.refitter.is_dirty or not self.is_dirty, "nothing but a good refit heals"
        if is_seen_before:
            assert self.refitter.is_dirty == self.is_dirty
        self.is_dirty = self.refitter.is_dirty
        self._check()
        return raised.value

    def either(self, state_dict: object, policy: dict[str, torch.Tensor], **options: object) -> bool:
        """Refit to what may have been spoilt in a way that matters or not; say whether it went well."""
        try:
            report = self.refitter.refit(state_dict, **options)
        except RefitError:
            assert self.refitter.is_dirty or not self.is_dirty
            self.is_dirty = self.refitter.is_dirty
            self._check()
            return False
        self._committed(report.version, policy)
        return True

    def _committed(self, version: int, policy: dict[str, torch.Tensor]) -> None:
        self.version += 1
        self.is_dirty = False
        assert_holds_exactly(self.model, policy)
        self.held = live_bytes(self.model)
        assert version == self.version
        self._check()

    def _check(self) -> None:
        """A clean engine holds what it held; a dirty one admits nobody."""
        assert self.refitter.version == self.version
        assert self.refitter.is_dirty == self.is_dirty == (self.model.blocked is not None)
        assert self.is_dirty or live_bytes(self.model) == self.held

    def close(self) -> None:
        """Give back what is held."""
        self.refitter.close()


def assert_holds_exactly(model: FakeModel, policy: dict[str, torch.Tensor]) -> None:
    """Every slot holds what a quantizer that is not ours makes of its part of `policy`."""
    for slot in model.slots():
        source = box_of(slot, policy[slot.name])
        if slot.format is None:
            assert torch.equal(slot.weight, source.to(slot.weight.dtype)), slot.name
            continue
        if source.dtype is torch.float32:
            source = source.to(torch.bfloat16)
        codes, scale = quantize_tensor(source, slot.format.block_size, slot.format.scale_format.value)
        assert torch.equal(slot.weight.view(torch.uint8), codes.view(torch.uint8)), slot.name
        assert torch.equal(slot.scale, scale), slot.name
