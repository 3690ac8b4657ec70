"""The places in an engine that an adapter reaches for: what they are for, and what goes without them.

An adapter's table of them is in its `compat.py`. Nothing here says which version has what: an engine is looked at.
`tests/seam_reader.py` reads every place in an engine's source, without booting it.
"""

import re
from dataclasses import dataclass
from pkgutil import resolve_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Seam:
    """Places that serve one purpose."""

    purpose: str
    """What they are for, as "fp8refit needs it for ..." says it."""
    names: tuple[str, ...]
    """Dotted names, all of which an engine must have. `A | B` is one that versions call differently. `f(x, y=1)` says with how
    many arguments and which keywords it is called. `C().x` is an attribute of instances, which only the test looks for."""
    without: str = ""
    """What goes without them, and what to do; empty if nothing goes."""

    @property
    def missing(self) -> str | None:
        """The first of `names` that the installed engine lacks, without its call. Imports the engine's modules."""
        lacking = (name for name in self.names if not any(map(_is_there, name.split(" | "))))
        return next((re.sub(r"\([^|]*\)", "", name) for name in lacking), None)


def within(owner: str, names: str) -> tuple[str, ...]:
    """Names that a module or class holds, which stand apart by blanks."""
    return tuple(f"{owner}.{name}" for name in names.split())


def found(name: str) -> str:
    """What the installed engine calls the place that versions call `A | B`; A if it has neither."""
    alternatives = name.split(" | ")
    return next(filter(_is_there, alternatives), alternatives[0])


def _is_there(name: str) -> bool:
    dotted = re.match(r"[\w.]+", name)
    assert dotted is not None, f"{name=}"
    try:
        resolve_name(dotted[0])
    except (ImportError, AttributeError):
        return False
    return True
