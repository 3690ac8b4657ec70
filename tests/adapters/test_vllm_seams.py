"""A vLLM that lacks anything the plugin reaches for is left alone."""

import importlib
import logging
import sys

import pytest
from fp8refit_vllm import clients, compat, worker

from fp8refit import UnsupportedEngineError
from tests.adapters.fake_modules import contents, names_in, put_modules

ASKED = {"FP8REFIT_DROP_IN": "1", "FP8REFIT_QUANTIZATION": "fp8_per_block"}
NEEDED, DROP_IN = names_in(compat.NEEDED), names_in([compat.DROP_IN])
ALL = (*NEEDED, *DROP_IN)


def without(missing: str) -> list[str]:
    """All names but one, and but what is in it."""
    return [name for name in ALL if f"{name}.".find(f"{missing}.") != 0]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name in ASKED:
        monkeypatch.delenv(name, raising=False)


def ours(caplog):
    """What was logged, but for what others log when something of an earlier test is collected."""
    return [record for record in caplog.records if "fp8refit" in record.name]


@pytest.mark.parametrize("asked", [{}, *({name: value} for name, value in ASKED.items())], ids=["off", *ASKED])
def test_what_registration_reaches_for_is_known(asked, monkeypatch):
    """There is nothing else in these modules."""
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    modules = put_modules(monkeypatch, ALL if asked else NEEDED, __version__="0.32.0")
    before = contents(modules)
    worker.register()
    assert contents(modules) != before
    assert hasattr(modules["vllm.v1.worker.worker_base"].WorkerBase, worker.PLUGIN_METHOD)


@pytest.mark.parametrize("missing", [*ALL, "nothing but it is too old"])
def test_an_engine_that_lacks_one_is_left_alone_and_a_line_is_logged(missing, monkeypatch, caplog):
    modules = put_modules(monkeypatch, without(missing), __version__="0.32.0" if missing in ALL else "0.21.0")
    before = contents(modules)
    with caplog.at_level(logging.INFO):
        worker.register()
    if missing in DROP_IN:
        assert not ours(caplog)
        return
    (record,) = ours(caplog)
    assert "fp8refit does nothing in this process" in record.getMessage()
    assert (missing if missing in ALL else "vLLM 0.21") in record.getMessage()
    assert "\n" not in record.getMessage()
    assert contents(modules) == before


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("missing", [*ALL, "nothing but it is too old"])
def test_a_boot_that_asks_for_the_drop_in_is_refused(missing, name, monkeypatch):
    monkeypatch.setenv(name, ASKED[name])
    modules = put_modules(monkeypatch, without(missing), __version__="0.32.0" if missing in ALL else "0.21.0")
    before = contents(modules)
    with pytest.raises(UnsupportedEngineError, match=missing if missing in ALL else r"this is vLLM 0\.21\.0"):
        worker.register()
    assert contents(modules) == before


def test_the_worker_extension_is_refused_where_vllm_looks_it_up(monkeypatch):
    put_modules(monkeypatch, NEEDED, __version__="0.21.0")
    with pytest.raises(UnsupportedEngineError, match=r"this is vLLM 0\.21\.0"):
        _ = worker.WorkerExtension
    put_modules(monkeypatch, NEEDED, __version__="0.32.0")
    assert hasattr(worker.WorkerExtension, worker.EXTENSION_METHOD)
    with pytest.raises(AttributeError, match="has no attribute 'Another'"):
        _ = worker.Another


def test_a_refitter_of_an_engine_without_the_plugin_is_refused_with_where_to_look(monkeypatch):
    put_modules(monkeypatch, NEEDED, __version__="0.32.0")
    monkeypatch.setattr(clients, "loads_plugin", lambda name: True)
    with pytest.raises(UnsupportedEngineError, match="the log says what this vLLM lacks"):
        clients.check_workers(worker.PLUGIN_METHOD)
    clients.check_workers(worker.EXTENSION_METHOD)
    worker.register()
    clients.check_workers(worker.PLUGIN_METHOD)


TRANSFER = names_in([compat.TRANSFER])


@pytest.mark.parametrize("missing", TRANSFER)
def test_weight_transfer_that_a_version_lacks_is_named_where_it_is_used_and_the_plugin_works(missing, monkeypatch):
    names = [*NEEDED, *(name for name in TRANSFER if name != missing)]
    modules = put_modules(monkeypatch, names, __version__="0.24.0")
    worker.register()
    assert hasattr(modules["vllm.v1.worker.worker_base"].WorkerBase, worker.PLUGIN_METHOD)
    for module in ("fp8refit_vllm.trainer", "fp8refit_vllm.transfer"):
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(UnsupportedEngineError) as caught:
            importlib.import_module(module)
        assert f"this vLLM (0.24.0) has no {missing}, which fp8refit needs for weight transfer; " in str(caught.value)
        assert compat.TRANSFER.without in str(caught.value)
        assert "\n" not in str(caught.value)
