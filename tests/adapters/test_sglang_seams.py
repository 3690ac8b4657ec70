"""An SGLang that lacks anything the plugin reaches for is left alone. A real one: `tests/sglang`."""

import logging

import pytest
from fp8refit_sglang import compat, drop_in, plugin

from tests.adapters.fake_modules import contents, names_in, put_modules

HOOKED = (*plugin._DOORS, compat.IN_ATTENTION, compat.IN_SLEEP)
NEEDED, DROP_IN = names_in(compat.NEEDED), names_in([compat.DROP_IN])
ALL = tuple(dict.fromkeys((*(name.split(" | ")[0] for name in HOOKED), *NEEDED, *DROP_IN)))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The targets of hooks that are registered."""
    monkeypatch.delenv("FP8REFIT_DROP_IN", raising=False)
    targets = []
    monkeypatch.setattr(plugin, "register_hook", lambda target, hook: targets.append(target))
    return targets


def ours(caplog):
    """What was logged, but for what others log when something of an earlier test is collected."""
    return [record for record in caplog.records if "fp8refit" in record.name]


@pytest.mark.parametrize("is_asked", [False, True])
def test_what_registration_reaches_for_is_known(is_asked, monkeypatch, registered):
    if is_asked:
        monkeypatch.setenv("FP8REFIT_DROP_IN", "1")
    put_modules(monkeypatch, ALL if is_asked else NEEDED, __version__="0.5.23")
    plugin.register()
    assert registered == [*HOOKED, *(map(compat.in_updater, drop_in.ANSWERED[2:]) if is_asked else ())]


@pytest.mark.parametrize("missing", [*ALL, "nothing but it is too old"])
def test_an_engine_that_lacks_one_is_left_alone_and_a_line_is_logged(missing, monkeypatch, caplog, registered):
    modules = put_modules(monkeypatch, set(ALL) - {missing}, __version__="0.5.23" if missing in ALL else "0.5.11")
    before = contents(modules)
    with caplog.at_level(logging.INFO):
        plugin.register()
    assert contents(modules) == before
    if missing in DROP_IN:
        assert (registered, ours(caplog)) == ([*HOOKED], [])
        return
    assert registered == []
    (record,) = ours(caplog)
    assert "fp8refit does nothing in this process" in record.getMessage()
    assert (missing if missing in ALL else "SGLang 0.5.11") in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("missing", [*ALL, "nothing but it is too old"])
def test_a_boot_that_asks_for_the_drop_in_is_refused(missing, monkeypatch, registered):
    """By an exit: SGLang logs errors of plugins, and serves."""
    monkeypatch.setenv("FP8REFIT_DROP_IN", "1")
    put_modules(monkeypatch, set(ALL) - {missing}, __version__="0.5.23" if missing in ALL else "0.5.11")
    with pytest.raises(SystemExit, match=missing if missing in ALL else r"this is SGLang 0\.5\.11"):
        plugin.register()
    assert registered == []
