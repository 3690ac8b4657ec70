"""Random mutants: what they change, and what the runner says of those of a small project."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.operators import mutants

ROOT = Path(__file__).parents[2]
CODE = '''
"""Words."""
LIMIT = 2

def clip(number):
    while number > LIMIT:
        number -= 1
    return number

def unused():
    return 3

def elsewhere(word):
    return f"{word}!"
'''
FINDER = """
import multiprocessing
import pytest
from fp8refit.code import clip, elsewhere

def test_high():
    assert clip(4) == 2

@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_elsewhere(start):
    with multiprocessing.get_context(start).Pool(1) as pool:
        assert pool.map(elsewhere, ["$%"]) == ["$%!"]
        pool.close()
        pool.join()
"""
RUN = "from tests.mutants import run_mutants as r; r.PRELOADED, r.HANGS_S = (), 10.0; r.main()"
EXPECTED = {
    (3, "constant", "3"): ("killed", "test_high"),
    (6, "comparison", "number >= LIMIT"): ("killed", "test_high"),
    (6, "comparison", "number <= LIMIT"): ("killed", "test_high"),
    (7, "drop statement", "pass"): ("timeout", None),
    (7, "constant", "2"): ("survived", None),  # 4 - 2
    (8, "return None", "return None"): ("killed", "test_"),
    (11, "return None", "return None"): ("survived", None),
    (11, "constant", "4"): ("survived", None),
    (14, "return None", "return None"): ("killed", "test_elsewhere"),
}


@pytest.fixture
def project(tmp_path):
    for name, content in {
        "fp8refit/__init__.py": "",
        "fp8refit/code.py": CODE,
        "tests/live/test_code.py": FINDER,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    user = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "."], [*user, "commit", "-q", "-m", "All"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def run(project, *more):
    out = project / "out.json"
    options = ["--tree", project, "--map", project / "build", "--out", out, *more]
    subprocess.run(
        [sys.executable, "-c", RUN, *map(str, options)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=True,
    )
    return json.loads(out.read_text())


def test_a_mutant_is_killed_if_a_test_that_runs_its_line_fails_or_hangs(project):
    begun = run(project, "--number", "2")["mutants"]
    written = run(project)
    assert written["mutants"][:2] == begun
    found = {(each["line"], each["operator"], each["after"]): each for each in written["mutants"]}
    assert found.keys() == EXPECTED.keys()
    for key, (outcome, by) in EXPECTED.items():
        assert found[key]["outcome"] == outcome, key
        assert (found[key]["by"] is None) == (by is None) and (by or "") in (found[key]["by"] or ""), key
        assert (found[key]["num_tests"] == 0) == (key[0] == 11)
    assert found[14, "return None", "return None"]["num_tests"] == 3
    assert written["totals"] == {"tried": 9, "killed": 5, "timeout": 1, "survived": 3, "kill_rate": 0.667}
    assert (project / "fp8refit" / "code.py").read_text() == CODE


@pytest.mark.parametrize(
    "code, expected",
    [
        ("if a and not b:\n    pass", {"not (a and (not b))", "a or not b", "b"}),
        ("x = [y for y in z if y]", {"True"}),
        ("x.y = -z // 2", {"pass", "-z * 2", "z", "3"}),
        ("for x in y:\n    break", {"continue"}),
        ("a = b < c", {"b <= c", "b >= c"}),
        ("a = b in c", {"b not in c"}),
        ("raise A(True)", {"pass", "False"}),
        ("@jit\ndef kernel():\n    return 1", set()),
        ("@dataclass(slots=True)\nclass A:\n    b: Abc | None = None\n    d: Abc[1]", set()),
        ('def f(a) -> None:\n    """Words."""\n    return', set()),
        ('isinstance(a, Abc | Bcd)\nb = f"{a + 1}" + "words"', {"pass"}),
    ],
)
def test_operators(code, expected):
    found = mutants(code, "code.py")
    assert {mutant.after for mutant in found} == expected
    for mutant in found:
        assert compile(mutant.source(code), "code.py", "exec") and mutant.source(code) != code


def test_what_survived_is_tried_again_with_new_tests(project):
    only = ("--only", "other.py")
    (project / "fp8refit" / "other.py").write_text("def one():\n    return 1\n")
    subprocess.run(["git", "add", "."], cwd=project, check=True)
    assert run(project, *only)["totals"] == {"tried": 2, "killed": 0, "timeout": 0, "survived": 2, "kill_rate": 0.0}
    shutil.rmtree(project / "build")
    finder = "from fp8refit.other import one\n\ndef test_one():\n    assert one() == 1\n"
    (project / "tests" / "live" / "test_other.py").write_text(finder)
    subprocess.run(["git", "add", "."], cwd=project, check=True)
    assert run(project, *only)["totals"]["killed"] == 0
    assert run(project, *only, "--again")["totals"]["killed"] == 2
