"""Puts drop-ins in the place of networks' own `load_weights`, and wraps an engine's functions while there are any."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import nn

from fp8refit.driver.drop_in import DropIn

_HELD = "_fp8refit_drop_in"


class Installed:
    """The networks of this process with a drop-in.

    Args:
        wrap: Replaces functions of the engine with `instead_of` them. It registers with the given stack what undoes that.
    """

    def __init__(self, wrap: Callable[[ExitStack], None]) -> None:
        self._networks: WeakSet[nn.Module] = WeakSet()
        self._wrap, self._undo = wrap, ExitStack()
        self._is_wrapped = False

    def __contains__(self, network: nn.Module) -> bool:
        return hasattr(network, _HELD)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._networks)

    def add(self, network: nn.Module, drop_in: DropIn | None, load: Callable[..., set[str]]) -> None:
        """Replace the network's `load_weights` by `load`.

        Args:
            network: A live network.
            drop_in: What takes its weights; None if it cannot be refitted, which `load` raises.
            load: The new `load_weights`.
        """
        object.__setattr__(network, _HELD, drop_in)
        object.__setattr__(network, "load_weights", load)
        self._networks.add(network)
        if not self._is_wrapped:
            self._is_wrapped = True
            self._wrap(self._undo)

    def remove(self, network: nn.Module) -> None:
        """Restore the network's own `load_weights`, and with the last network the engine's functions; close the drop-in."""
        drop_in = drop_in_of(network)
        for name in (_HELD, "load_weights"):
            object.__delattr__(network, name)
        self._networks.discard(network)
        if not self._networks:
            self._undo.close()
            self._is_wrapped = False
        if drop_in is not None:
            drop_in.close()
            drop_in.unwatch()


def instead_of(original: Callable[..., Any], take: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose first argument is `model`: for one with a drop-in, `take` gets that instead."""

    @wraps(original)
    def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
        drop_in = drop_in_of(model)
        return original(model, *args, **kwargs) if drop_in is None else take(drop_in, *args, **kwargs)

    return wrapper


def drop_in_of(network: Any) -> DropIn | None:
    """The network's drop-in, if it has one. The network may be wrapped for the replay of CUDA graphs."""
    found = getattr(network, _HELD, None)
    return found if isinstance(found, DropIn) else None
