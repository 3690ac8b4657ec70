"""Which versions of an engine can be refitted, and the errors for older and missing ones."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fp8refit.errors import UnsupportedEngineError


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

    @contextmanager
    def importing(self) -> Iterator[None]:
        """A context in which to import the engine.

        Raises:
            UnsupportedEngineError: It is not installed.
        """
        try:
            yield
        except ImportError as error:
            extra = self.engine.lower()
            raise UnsupportedEngineError(
                f"{self.engine} is not installed ({error}); pip install 'fp8refit[{extra}]'"
            ) from error


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, or an empty tuple. setuptools calls a checkout without tags 0.1.dev."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None or re.match(r"0\.[01]\.?(\d+\.)?dev", version):
        return ()
    return tuple(int(number) for number in found.groups() if number is not None)
