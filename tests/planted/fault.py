"""A fault that can be planted into the code, and the tests that have to find it."""

from dataclasses import dataclass

from tests import syntax


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    name: str
    at: str
    """The file, from the project's root; then `::` and the class, function or method (`Class.method`), if it is in one."""
    before: str
    """What stands there exactly once, in any layout: an expression or statements (`tests/syntax.py`)."""
    after: str = ""
    """What stands there once the fault is planted; by default nothing is done there."""
    found_by: str
    """Arguments of pytest: a fuzzer or oracle that passes without the fault and fails with it."""
    crashes: bool = False
    """Whether it may kill the process that finds it, so that pytest ends by a signal."""

    @property
    def path(self) -> str:
        return self.at.partition("::")[0]

    @property
    def session(self) -> str:
        """Whose environment `found_by` needs: core, vllm or sglang."""
        folder = self.found_by.split("/")[1]
        return folder if folder in ("vllm", "sglang") else "core"

    def planted(self, source: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: The code has no such place, or several.
        """
        return syntax.replace(source, self.at.partition("::")[2], self.before, self.after)
