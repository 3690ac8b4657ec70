"""A fault that can be planted into the code, and the tests that have to find it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    name: str
    path: str
    """The file, from the project's root."""
    before: str
    """Lines of that file; they stand there exactly once."""
    after: str
    """What stands there once the fault is planted."""
    found_by: str
    """Arguments of pytest: a fuzzer or oracle that passes without the fault and fails with it."""
    session: str = "core"
    """Whose environment `found_by` needs: core, vllm or sglang."""
    crashes: bool = False
    """Whether it may kill the process that finds it, so that pytest ends by a signal."""
