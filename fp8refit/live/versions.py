"""Which versions of an engine can be refitted, and the errors for older and missing ones."""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from fp8refit.errors import UnsupportedEngineError, install
from fp8refit.live.seams import Seam


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """The supported versions of one engine. Newer ones are accepted; an incompatible change is reported when it is met."""

    engine: str
    """The name of the engine, as its project writes it."""
    oldest: str
    """The oldest version that can be refitted."""
    newest: str
    """The newest version that was tested."""

    def check(self, version: str) -> None:
        """Refuse a version that cannot be refitted.

        Args:
            version: The engine's version string. One without a number, such as that of a build from source, is accepted.

        Raises:
            UnsupportedEngineError: The version is too old.
        """
        numbers, oldest = _numbers(version), _numbers(self.oldest)
        if numbers < oldest[: len(numbers)]:
            raise UnsupportedEngineError(
                f"this is {self.engine} {version}; fp8refit works with {self.engine} {self.oldest} or later (tested up to "
                f"{self.newest}): install one of those"
            )

    def require(self, seam: Seam) -> None:
        """Refuse what a seam is for, if the engine of this process lacks it.

        Raises:
            UnsupportedEngineError: It does.
            ImportError: The engine is not installed.
        """
        name = seam.missing
        if name is not None:
            version = getattr(import_module(self.engine.lower()), "__version__", "?")
            remedy = f"install {self.engine} {self.oldest} to {self.newest}, or a newer fp8refit"
            raise UnsupportedEngineError(
                f"this {self.engine} ({version}) has no {name}, which fp8refit needs for {seam.purpose}; "
                f"{seam.without or remedy}"
            )

    def admits(self, version: str, seams: Iterable[Seam], logger: logging.Logger, *, is_asked: bool) -> bool:
        """Whether a plugin can work in this process. Logs one line if it cannot. Changes nothing.

        Args:
            version: As for `check`.
            seams: What the plugin cannot do without.
            logger: Where to log.
            is_asked: Whether somebody asked by name for what the plugin does.

        Raises:
            UnsupportedEngineError: It cannot, although it is asked for.
        """
        try:
            self.check(version)
            for seam in seams:
                self.require(seam)
        except UnsupportedEngineError as error:
            if is_asked:
                raise
            logger.warning("fp8refit does nothing in this process: %s", error)
            return False
        return True

    @contextmanager
    def importing(self, *seams: Seam) -> Iterator[None]:
        """A context in which to import the engine, or what seams name of it.

        Raises:
            UnsupportedEngineError: It is not installed, or lacks one of the seams.
        """
        try:
            for seam in seams:
                self.require(seam)
            yield
        except ImportError as error:
            hint = install(self.engine.lower())
            raise UnsupportedEngineError(f"{self.engine} is not installed ({error}); {hint}") from error


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, or an empty tuple. setuptools calls a checkout without tags 0.1.dev."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None or re.match(r"0\.[01]\.?(\d+\.)?dev", version):
        return ()
    return tuple(int(number) for number in found.groups() if number is not None)
