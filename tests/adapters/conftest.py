"""Fake SGLang engines, for the tests of its adapter."""

import pytest

from tests.adapters.fake_sglang import Engine


@pytest.fixture
def make_engine():
    engines = []

    def make(*args, **kwargs) -> Engine:
        engines.append(Engine(*args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def engine(request, make_engine) -> Engine:
    return make_engine(request.param)


@pytest.fixture
def solo(make_engine) -> Engine:
    return make_engine()
