"""A result knows the code that it measured: what computes counts, what is said about it does not."""

import subprocess

import pytest

from fp8refit.bench import code
from fp8refit.bench.result import Findings, stamp, write_result

SOURCE = '''"""A module."""
LIMIT = 3
"""Of both."""

def add(a, b=LIMIT):
    """Add."""
    # carefully
    return f"{a + b!r} of {LIMIT:>3}"
'''
SAME = """
import sys
from fp8refit.fill import plan

LIMIT = 3


def add(a,
        b = LIMIT):  # twice
    "Another sentence."
    return f'{a+b!r} of {LIMIT:>3}'
"""


def hash_of(*sources):
    return code.hash_sources(sources)


def test_comments_docstrings_layout_and_imports_do_not_count():
    assert hash_of(SOURCE) == hash_of(SAME)


@pytest.mark.parametrize(
    ("old", "new"), [("a + b", "a - b"), ("LIMIT = 3", "LIMIT = 4"), (":>3", ":>4"), ("b=LIMIT", "*, b"), ("!r", "!s")]
)
def test_what_computes_counts(old, new):
    assert old in SOURCE
    assert hash_of(SOURCE) != hash_of(SOURCE.replace(old, new))


def test_a_module_that_is_added_counts_and_one_that_is_moved_does_not():
    assert hash_of(SOURCE) != hash_of(SOURCE, "")
    assert hash_of(SOURCE, "one = 1") == hash_of("one = 1", SOURCE)


def test_the_digits_do_not_depend_on_the_version_of_python():
    """These are what Python 3.11, 3.12 and 3.13 give."""
    assert hash_of(SOURCE) == "0a74ac3bfc75"


def test_every_package_that_is_hashed_is_there():
    assert all(code.hash_parts(code.PARTS).values())
    assert code.hash_part("no such package") is None


def test_what_has_changed_since_is_told_by_package():
    found = code.hash_parts(code.PARTS)
    assert code.changed_parts(found) == []
    assert code.changed_parts(found | {"fill": "0" * 12, "remote": None}) == ["fill", "remote"]
    assert code.changed_parts({"no such package": None}) == ["no such package"]


def test_a_result_of_earlier_code_says_so():
    now = code.hash_parts(code.PARTS)
    old = now | {"fill": "0" * 12, "remote": None}
    assert code.age_of({"commit": "abc1234", "code": now}) == code.age_of({"command": "bench rollout"}) == ""
    changed = "before later changes of `fill` and `remote`"
    assert code.age_of({"commit": "abc1234", "code": old}) == f"measured at `abc1234`, {changed}"
    assert code.age_of({"recorded_in": "abc1234", "code": old}) == f"recorded in `abc1234`, {changed}"
    assert code.age_of({"code": old}) == f"measured outside a checkout, {changed}"
    assert code.age_of({"commit": "abc1234", "code": old}, ("remote",)).endswith("changes of `remote`")
    assert code.age_of({"commit": "abc1234", "code": old}, ("ranks",)) == ""
    assert code.age_of({"code": dict.fromkeys(code.PARTS)}).endswith(
        "of `kernels`, `fill`, `ranks`, `remote` and `transport`"
    )


def test_a_result_is_written_with_its_commit_and_code(tmp_path):
    file = tmp_path / "folder" / "found.json"
    found = Findings(command="bench", gpu="CPU", versions={}, **stamp(("fill",)), milliseconds=[1.5])
    write_result(found, file)
    read = Findings.model_validate_json(file.read_text())
    assert read == found
    assert read.code == {"fill": code.hash_part("fill")}
    assert (read.commit, read.milliseconds, read.age) == (code.current_commit(), [1.5], "")


def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        user = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", tmp_path, *user, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    package = tmp_path / "fp8refit"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(code, "PACKAGE", package)
    commit = code.current_commit.__wrapped__
    assert commit() is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "of another project")
    assert commit() is None
    git("add", ".")
    git("commit", "-q", "-m", "the package")
    assert commit() == git("rev-parse", "--short=7", "HEAD")
    (package / "__init__.py").write_text("changed = True")
    assert commit() == git("rev-parse", "--short=7", "HEAD") + "+"
