"""What every test shares.

Without a GPU the Triton kernels run in Triton's CPU interpreter. Triton reads that choice when a kernel is defined, so
the kernels are imported here, before a test module can import Triton otherwise; subprocesses do not inherit it.
"""

import gc
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.fakes import FakeEntryPoint, FakeModel

if not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch, suppress(ImportError):
        patch.setenv("TRITON_INTERPRET", "1")
        import fp8refit.kernels.triton_groups
        import fp8refit.kernels.triton_table  # noqa: F401


HERE = Path(__file__).parent
MORE = (
    *("fuzz/", "kernels/test_launches.py", "training/precision/test_unify.py"),
    *("test_examples.py", "test_grpo.py", "test_soak.py", "test_testing.py", "test_wheel.py"),
    *(
        f"vllm/test_{name}.py"
        for name in ("bench", "clients", "conformance", "containers", "grpo", "inspect", "kept_copies")
    ),
    *(f"vllm/test_{name}.py" for name in ("killed_streams", "rank_faults", "ray", "updates", "zoo")),
    *(
        f"sglang/test_{name}_stubbed_kernels.py"
        for name in ("bench", "conformance", "containers", "grpo", "updates", "zoo")
    ),
)
"""What takes long for what it says more than the rest does: `FP8REFIT_TESTS=all nox -s tests` runs it too, and CI does."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).as_posix().startswith(MORE):
            item.add_marker("more")


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
