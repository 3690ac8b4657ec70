"""Recognizes checkpoint tensors that a loader leaves out because its model has no use for them.

Only those listed here may be left out. A refit refuses all others that no rank reads.
"""

import re
from collections.abc import Collection

_LAYER = re.compile(r"^((?:.*\.)?vision_\w+\..*?)layers\.(\d+)\.")
"""A model may take its features from an inner layer of a vision tower. Engines do not build the layers after it."""
_LAST_NORM = re.compile(r"^((?:.*\.)?vision_\w+\..*?)post_layernorm\.")
"""Engines do not build the norm after the last layer either, because such features never pass through it."""


def unused_names(names: Collection[str], left_out: Collection[str]) -> tuple[str, ...]:
    """Return the names of what a loader leaves out for a known reason.

    Args:
        names: All tensors of the checkpoint.
        left_out: Those that the loader skips whole and without an error.
    """
    if not left_out:
        return ()
    read = [name for name in names if name not in left_out]
    built: dict[str, int] = {}
    for name in read:
        if found := _LAYER.match(name):
            built[found[1]] = max(built.get(found[1], 0), int(found[2]))

    def is_unused(name: str) -> bool:
        if found := _LAYER.match(name):
            return found[1] in built and int(found[2]) > built[found[1]]
        norm = _LAST_NORM.match(name)
        if norm is None or any(other.startswith(norm[0]) for other in read):
            return False
        return any(tower.startswith(norm[1]) for tower in built)

    return tuple(name for name in left_out if is_unused(name))
