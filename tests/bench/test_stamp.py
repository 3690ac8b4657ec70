"""Old results are told apart by what git knows of them, and no figure changes."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from fp8refit.bench.code import hash_sources

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stamper(monkeypatch, tmp_path):
    """The script, for a repository of its own."""
    spec = importlib.util.spec_from_file_location("stamp_results", ROOT / "benchmarks" / "stamp_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    git(tmp_path, "init", "-q")
    return module


def git(folder, *arguments):
    user = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", folder, *user, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder, **files):
    for name, text in files.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one more")
    return git(folder, "rev-parse", "HEAD")


RESULT, CODE = "soak_h200", {"fp8refit__fill__a.py": "a = 1\n", "fp8refit__ranks__b.py": "b = 1\n"}


def write(folder, found):
    (folder / f"{RESULT}.json").write_text(json.dumps(found, indent=1) + "\n")


def test_a_result_is_of_the_commit_that_first_had_its_figures(stamper, tmp_path):
    write(tmp_path, {"gpu": "a", "ms": [1.5]})
    commit(tmp_path, **CODE)
    write(tmp_path, {"gpu": "a", "ms": [2.5]})
    measured = commit(tmp_path, **{"fp8refit__fill__a.py": "a = 2\n"})
    write(tmp_path, {"gpu": "a", "milliseconds": [2.5]})
    commit(tmp_path, **{"fp8refit__fill__a.py": "a = 3\n"})
    before = (tmp_path / f"{RESULT}.json").read_text()
    stamper.main()
    text = (tmp_path / f"{RESULT}.json").read_text()
    assert text.startswith(before.rstrip()[:-1].rstrip())
    assert json.loads(text) == {
        "gpu": "a",
        "milliseconds": [2.5],
        "recorded_in": measured[:7],
        "code": {"kernels": None, "fill": hash_sources(["a = 2"]), "ranks": hash_sources(["b = 1"])},
    }
    stamper.main()
    assert (tmp_path / f"{RESULT}.json").read_text() == text


def test_a_package_is_found_where_the_commit_had_it(stamper, tmp_path):
    old = commit(tmp_path, **CODE, **{"fp8refit__fill__kernels__k.py": "k = 1\n"})
    folder = tmp_path / "fp8refit"
    (folder / "fill" / "kernels").rename(folder / "kernels")
    new = commit(tmp_path)
    hashes = stamper.hashes_of(old, ("kernels", "fill"))
    assert hashes == stamper.hashes_of(new, ("kernels", "fill"))
    assert hashes == {"kernels": hash_sources(["k = 1"]), "fill": hash_sources(["a = 1"])}


def test_a_commit_without_a_package_says_so(stamper, tmp_path):
    write(tmp_path, {"ms": 1})
    commit(tmp_path)
    stamper.main()
    assert json.loads((tmp_path / f"{RESULT}.json").read_text())["code"] == dict.fromkeys(stamper.INSIDE)


def test_a_result_measured_outside_a_checkout_is_of_a_commit_with_the_same_code_alone(stamper, tmp_path):
    head = commit(tmp_path, **CODE)
    code = stamper.hashes_of("HEAD", ("fill",))
    for found in ({"ms": 1, "code": code | {"fill": "0" * 12}}, {"ms": 1, "code": code}):
        write(tmp_path, found)
        stamper.main()
        expected = {"commit": head[:7]} if found["code"] == code else {}
        assert json.loads((tmp_path / f"{RESULT}.json").read_text()) == found | expected


def test_what_measures_no_refit_is_left_alone(stamper, tmp_path):
    (tmp_path / "planted.json").write_text('{"ms": 1}\n')
    stamper.main()
    assert (tmp_path / "planted.json").read_text() == '{"ms": 1}\n'


def test_a_result_on_one_line_stays_there(stamper):
    assert stamper.extended('{"a": 1}\n', {"code": {"fill": "0"}}) == '{"a": 1, "code": {"fill": "0"}}\n'
