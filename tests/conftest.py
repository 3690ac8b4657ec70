"""What every test shares.

Without a GPU the Triton kernels run in Triton's CPU interpreter. Triton reads that choice when a kernel is defined, so
the kernels are imported here, before a test module can import Triton otherwise; subprocesses do not inherit it.
"""

import gc
from contextlib import suppress

import pytest
import torch

from tests.fakes import FakeEntryPoint, FakeModel

if not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch, suppress(ImportError):
        patch.setenv("TRITON_INTERPRET", "1")
        import fp8refit.kernels.triton_groups
        import fp8refit.kernels.triton_table  # noqa: F401


def pytest_collection_finish():
    """What was imported is here for good: tests that collect garbage need not go through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tensors here are small, and ranks are threads: each would start a pool of workers of its own."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def model(monkeypatch):
    """A fake engine of one layer; its adapter is the only one installed."""
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [FakeEntryPoint()])
    return FakeModel()
