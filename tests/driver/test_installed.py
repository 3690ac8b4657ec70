"""An engine's functions are wrapped while a network has a drop-in, and do something else for those networks alone."""

import pytest
from torch import nn

from fp8refit.driver.drop_in import DropIn
from fp8refit.driver.installed import Installed, instead_of


class Loader:
    """An engine's functions around loading."""

    @staticmethod
    def finish(model, dtype):
        return f"the engine finished in {dtype}"


class Recording(DropIn):
    """Only records that it was closed, and looks no more."""

    def __init__(self):
        self.is_closed, self.is_watching = False, True

    def close(self):
        self.is_closed = True

    def unwatch(self):
        self.is_watching = False


@pytest.fixture
def installed():
    def wrap(undo):
        original = Loader.__dict__["finish"]
        Loader.finish = staticmethod(instead_of(original.__func__, lambda drop_in, dtype: (drop_in, dtype)))
        undo.callback(setattr, Loader, "finish", original)

    return Installed(wrap)


def test_a_network_loads_by_its_drop_in_until_it_is_removed(installed):
    network, other, drop_in = nn.Linear(1, 1), nn.Linear(1, 1), Recording()
    installed.add(network, drop_in, lambda weights: {"all"})
    assert network.load_weights([]) == {"all"}
    assert network in installed and other not in installed
    assert Loader.finish(network, "bf16") == (drop_in, "bf16")
    assert Loader.finish(model=other, dtype="bf16") == "the engine finished in bf16"
    installed.remove(network)
    assert drop_in.is_closed
    assert not drop_in.is_watching
    assert network not in installed and not hasattr(network, "load_weights")


def test_functions_are_restored_with_the_last_network_and_wrapped_again(installed):
    own, networks = Loader.finish, [nn.Linear(1, 1) for _ in range(2)]
    for _ in range(2):
        for network in networks:
            installed.add(network, Recording(), lambda weights: set())
        wrapper = Loader.finish
        installed.remove(networks[0])
        assert Loader.finish is wrapper is not own
        installed.remove(networks[1])
        assert Loader.finish is own


def test_a_network_that_cannot_be_refitted_is_left_to_the_engine_s_functions(installed):
    network = nn.Linear(1, 1)
    installed.add(network, None, lambda weights: set())
    assert network in installed
    assert Loader.finish(network, "bf16") == "the engine finished in bf16"
    installed.remove(network)
    assert network not in installed
