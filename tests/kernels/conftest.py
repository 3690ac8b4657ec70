"""The same tests hold the kernels on a GPU, where there is one, and in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Where the kernels run."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    from tests.kernels.interpreter import convert_float, create_dot, create_fma

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.runtime.interpreter._convert_float", convert_float)
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_dot", create_dot)
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_fma", create_fma)
    return torch.device("cpu")
