"""What tests of real servers have in common, whatever the engine."""

import json
from typing import Any


def option(name: str, value: Any) -> list[str]:
    """One setting of a server as its command line takes it."""
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


def read_answer(answer: bytes) -> Any:
    """What a server says: JSON, or else text."""
    try:
        return json.loads(answer)
    except ValueError:
        return answer.decode()
