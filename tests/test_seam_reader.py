"""The reader of engines' sources, on a source that has everything it has to tell apart."""

import pytest

from fp8refit.live.seams import Seam
from tests.seam_reader import Source, assert_is_known, what_lacks

SOURCES = {
    "__init__": "from .core import Core as Engine\nfrom engine.parts import helper",
    "parts": "if True:\n    def helper(a, *, b): ...\nelse:\n    helper = None\nNAME = 1",
    "core": """
        from dataclasses import dataclass
        from engine.base import Base

        class Core(Base[int]):
            label: str

            def step(self, one, two=2, *, more=False): ...
            @classmethod
            def register(cls, name): ...
            @staticmethod
            def free(name): ...

        @dataclass
        class Message:
            id: str
            tokens: list
            reason: str = ""
        """,
    "base": """
        class Base:
            def __init__(self, config):
                self.config = config
                self.size: int = 1

            async def stop(self, *args, **options): ...
        """,
}
HAS = (
    "engine.Engine",
    "engine.helper(1, b=2)",
    "engine.parts.NAME",
    "engine.core.Core(config)",
    "engine.core.Core.step(core, 1)",
    "engine.core.Core.step(core, 1, 2, more=True)",
    "engine.core.Core.register('name')",
    "engine.core.Core.free('name')",
    "engine.core.Core.stop(core, 1, when=2)",
    "engine.Engine.stop",
    "engine.core.Core.label",
    "engine.core.Core().config",
    "engine.Engine().size",
    "engine.core.Message('id', [], reason='')",
    "engine.core.Elsewhere | engine.core.Core",
    "engine.core",
)
LACKS = (
    "engine.absent",
    "engine.core.Core.absent",
    "engine.core.Core().absent",
    "engine.helper(1)",
    "engine.helper(1, b=2, c=3)",
    "engine.core.Core()",
    "engine.core.Core.step(core)",
    "engine.core.Core.step(core, 1, 2, 3)",
    "engine.core.Core.step(core, 1, others=True)",
    "engine.core.Core.register(core, 'name')",
    "engine.core.Core.free(core, 'name')",
    "engine.core.Message('id', reason='')",
    "engine.core.Message('id', [], cause='')",
    "engine.core.Elsewhere | engine.core.Nowhere",
    "other.core",
)


@pytest.fixture
def root(tmp_path):
    package = tmp_path / "engine"
    package.mkdir()
    (tmp_path / "engine-0.7.1.dist-info").mkdir()
    for name, text in SOURCES.items():
        (package / f"{name}.py").write_text("\n".join(line.removeprefix(" " * 8) for line in text.split("\n")))
    return tmp_path


@pytest.mark.parametrize("name", HAS)
def test_what_is_there_and_is_called_as_it_says_is_found(name, root):
    assert what_lacks(root, [Seam(purpose="it", names=(name,))]) == {}


@pytest.mark.parametrize("name", LACKS)
def test_what_is_not_there_or_is_called_otherwise_is_named(name, root):
    assert list(what_lacks(root, [Seam(purpose="it", names=("engine.core", name))])) == [name]


def test_a_call_that_does_not_fit_is_told_with_the_signature(root):
    said = Source(root).problem("engine.core.Core.step(core, 1, others=True)")
    assert said == (
        "core, 1, others=True does not fit (self, one, two=None, *, more=None): got an unexpected keyword argument 'others'"
    )


@pytest.mark.parametrize(("first", "is_known"), [("0.8", True), ("0.7.1", False), (None, False)])
def test_only_what_a_version_is_too_old_for_may_be_lacking(first, is_known, root, monkeypatch):
    """And what it is too old for has to be lacking: else nobody would look at what it is that it has."""
    monkeypatch.setenv("FP8REFIT_ENGINE_WHEEL", str(root))
    seams = [Seam(purpose="all", names=("engine.core",)), Seam(purpose="it", names=("engine.absent",), without="x")]
    since = {} if first is None else {"it": first}
    if is_known:
        assert_is_known("engine", seams, since)
        return
    with pytest.raises(AssertionError, match=r"engine 0\.7\.1: .*there is no engine\.absent"):
        assert_is_known("engine", seams, since)
