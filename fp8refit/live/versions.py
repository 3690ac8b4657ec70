"""Which versions of an engine can be refitted."""

import re
from dataclasses import dataclass

from fp8refit.errors import UnsupportedEngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """Versions of one engine. Newer ones are not refused: whatever they changed is named when it is met."""

    engine: str
    """As its project writes it."""
    oldest: str
    """That can be refitted."""
    newest: str
    """That was seen."""

    def check(self, version: str) -> None:
        """Refuse a version that cannot be refitted.

        Args:
            version: As the engine says it. One that says no numbers is let through, such as a build from source.

        Raises:
            UnsupportedEngineError: It is too old.
        """
        numbers, oldest = _numbers(version), _numbers(self.oldest)
        if numbers < oldest[: len(numbers)]:
            raise UnsupportedEngineError(
                f"this is {self.engine} {version}; fp8refit works with {self.engine} {self.oldest} or later (seen up to "
                f"{self.newest}): install one of those"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Empty for what is no release, nor built from one: setuptools calls a checkout without tags 0.1.dev."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None or re.match(r"0\.[01]\.?(\d+\.)?dev", version):
        return ()
    return tuple(int(number) for number in found.groups() if number is not None)
