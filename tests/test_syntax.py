"""Code that is found by its syntax and replaced: planted faults and mutants rest on it."""

import ast

import pytest

from tests import syntax

SOURCE = """\
class Tank:
    def fill(self, *amounts):
        total = (  # what came
            self.level
            + sum(amounts)
        )
        if total > 10 and not self.is_open:
            # too much
            raise OverflowError(f"{total} of 10")
        elif total < 0:
            self.level = "ü" * total
        return self

    def empty(self):
        try:
            self.level = 0
        except OSError:
            return self
        finally:
            self.is_open = False
        return self


def empty(tank):
    return tank.empty()
"""
CASES = {
    "an expression in another layout": ("Tank.fill", "self.level+sum( amounts, )", "7", {"(7": 4, ")": 5}),
    "an expression after a wide letter": ("Tank.fill", "total < 0", "False", {"elif (False):": 10}),
    "a call that is not made": ("empty", "tank.empty()", "", {"return (None)": 25}),
    "a statement that is not done": ("Tank.fill", "self.level = 'ü' * total", "", {"pass": 11}),
    "a branch with its body": ("Tank.fill", "if total < 0: ...", "if total:\n ...", {"elif total:": 10}),
    "bodies that stay": (
        "Tank.empty",
        "try: ...\nexcept OSError: ...\nfinally: ...",
        "try:\n ...\nexcept EOFError:\n ...\nfinally:\n ...",
        {"except EOFError:": 17},
    ),
    "a body that moves inwards": (
        "Tank.empty",
        "try: ...\nexcept OSError: ...\nfinally: self.is_open = False",
        "with self: ...",
        {"with self:": 15, "self.level = 0": 16},
    ),
    "statements that follow each other": (
        "",
        "total = self.level + sum(amounts)\nif total > 10 and not self.is_open: ...\nelif total < 0: ...",
        "if self: ...",
        {"if self:": 3, 'raise OverflowError(f"{total} of 10")': 4},
    ),
    "more lines than before": (
        "empty",
        "return tank.empty()",
        "tank = 1\nreturn tank",
        {"tank = 1": 25, "return tank": 26},
    ),
}


@pytest.mark.parametrize(("scope", "before", "after", "lines"), CASES.values(), ids=CASES)
def test_it_is_replaced_and_other_lines_stay_where_they_are(scope, before, after, lines):
    changed = syntax.replace(SOURCE, scope, before, after)
    ast.parse(changed)
    rows = [row.strip() for row in changed.splitlines()]
    for text, number in lines.items():
        assert rows[number - 1] == text, changed
    assert (rows[13], rows[23]) == ("def empty(self):", "def empty(tank):")


@pytest.mark.parametrize(
    ("scope", "before", "times"),
    [
        ("Tank.fill", "self.level - sum(amounts)", 0),
        ("Tank.empty", "tank.empty()", 0),
        ("Tank.gone", "return self", 0),
        ("Tank.empty", "return self", 2),
        ("", "self.is_open", 2),
        ("Tank.fill", "if total > 10 and not self.is_open: ...", 0),  # it has an `elif`
    ],
)
def test_what_stands_there_not_exactly_once_is_an_error(scope, before, times):
    with pytest.raises(ValueError, match=f"stands {times} times in {scope or 'the module'}"):
        syntax.replace(SOURCE, scope, before, "")
