"""The notes of a matrix of versions: one row each, and a run that fails is not forgotten."""

import json

import pytest

pytest.importorskip("torch")
from tests import run_matrix


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_a_row_takes_the_place_of_the_same_versions(tmp_path):
    out = tmp_path / "matrix.json"
    for version, passed in (("0.32.0", 1), ("0.28.0", 2), ("0.32.0", 3), ("0.9.1", 4)):
        row = {"engine": "vllm", "version": version, "torch": "2", "parts": {"refit": {"passed": passed, "failed": 0}}}
        run_matrix.note(row, out)
    run_matrix.note({"engine": "sglang", "version": "0.5.23", "torch": "2", "parts": {}}, out)
    found = [(row["engine"], row["version"], row["parts"].get("refit", {}).get("passed")) for row in rows_of(out)]
    assert run_matrix.parts_of({"engine": "vllm", "version": "0.32.0", "torch": "2"}, out) == {
        "refit": {"passed": 3, "failed": 0}
    }
    assert run_matrix.parts_of({"engine": "vllm", "version": "0.32.0", "torch": "3"}, out) == {}
    assert run_matrix.parts_of({"engine": "vllm"}, tmp_path / "absent.json") == {}
    assert found == [("sglang", "0.5.23", None), ("vllm", "0.9.1", 4), ("vllm", "0.28.0", 2), ("vllm", "0.32.0", 3)]


def test_what_passed_failed_and_was_skipped_is_counted(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_one(): pass\n"
        "def test_two(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_three(): pass\n"
        "def test_four(absent): pass\n"
    )
    assert run_matrix.run([str(file)]) == {"passed": 1, "failed": 2, "skipped": 1}
    assert run_matrix.run([str(tmp_path / "absent.py")]) == {"passed": 0, "failed": 0, "skipped": 0}


def test_every_file_of_the_matrix_is_there():
    files = {file for parts in run_matrix.PARTS.values() for tests in parts.values() for file in tests}
    assert [file for file in files if not (run_matrix.ROOT / file).exists()] == []


def test_a_trainers_row_takes_its_place_in_the_order_of_the_table(tmp_path):
    out, (first, second, *_) = tmp_path / "trainers.json", run_matrix.read_trainers()
    for name, passed in ((second, 1), (first, 2), (second, 3)):
        run_matrix.note_trainer({"name": name, "passed": passed}, out)
    assert [(row["name"], row["passed"]) for row in rows_of(out)] == [(first, 2), (second, 3)]


def test_every_trainer_of_the_table_has_files_or_says_why_not():
    for name, table in run_matrix.read_trainers().items():
        files = [test for test in table.get("tests", []) if test.endswith(".py")]
        assert [file for file in files if not (run_matrix.ROOT / file).exists()] == [], name
        assert files if table["proof"] in ("run", "replayed") else table["why"], name
