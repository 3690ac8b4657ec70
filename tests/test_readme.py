"""The README quotes measured figures only, and says of engines only what a test shows."""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load_renderer():
    spec = importlib.util.spec_from_file_location("render_readme", ROOT / "benchmarks" / "render_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_figures_and_engines_are_those_of_the_committed_files():
    renderer = load_renderer()
    sections = renderer.render()
    readme = renderer.README.read_text()
    assert all(section.strip() for section in sections.values())
    assert renderer.splice(readme, sections) == readme, "run: python benchmarks/render_readme.py"


def test_a_broadcast_is_rendered_beside_its_wire_and_a_server_beside_its_requests():
    machine = {"gpu": "a GPU", "versions": {"torch": "2"}}
    broadcast = machine | {
        "what": "a broadcast",
        "broadcast_gb_per_s": 350.4,
        "wire_bytes": {"fp8": 9.43e9, "bf16": 16.4e9},
        "seconds": {"fp8": 0.030, "bf16": 0.054, "pull": 0.041, "fp8_on_the_wire_alone": 0.027},
        "over_wire": 1.11,
        "seconds_by_bucket_bytes": {str(1 << 30): 0.028},
    }
    pushed = {"pushes": 50, "requests": 900, "failed_requests": 0, "idle_push_s": 0.04, "push_s": 0.5}
    pushed["phases_s"] = {"plan": 1, "pause": 1, "flush": 1, "transfer": 2, "fill": 3, "verify": 0, "resume": 1}
    said = load_renderer().render_broadcasts(
        [broadcast], [machine | {"what": "a server", "wait": pushed, "keep": pushed}]
    )
    wire = "350 GB/s | 9.43 of 16.40 GB | 54.0 ms | 41.0 ms | **30.0 ms**, 1.8 x faster than BF16 | 1.11 x | 28.0 ms, 1.04 x"
    assert f"| a broadcast | {wire} |" in said
    assert "| a server | `keep` | 50 | 900, 0 failed | 40.0 ms | 500.0 ms | 7000.0 ms |" in said


def test_what_an_oracle_found_is_rendered_and_its_wrong_answers_are_added_up():
    found = {
        "gpu": "a GPU",
        "versions": {"torch": "2"},
        "what": "a server",
        "pushes": 250,
        "poisoned": 25,
        "kills": 240,
    }
    found |= {"kills_inside_the_write": 200, "kills_inside_by": {"broadcast": 80, "stream": 120, "mapped": 0}}
    found["judged"] = {
        "answers": 9000,
        "refused": 70,
        "cut_short": 8,
        "of_two_across_keep": 300,
        "stale": 1,
        "mixed": 2,
    }
    said = load_renderer().render_oracle([found])
    inside = "200 (80 by broadcast, 120 by stream)"
    assert f"| a server | 250 | 25 | 240 | {inside} | 9000 | 70 | 8 | 300 | **3** | **0** |" in said
    assert "has not run on GPUs yet" in load_renderer().render_oracle([])


ENGINES = {engine["package"]: engine for engine in load_renderer().read_engines()}


def test_every_adapter_is_in_the_table():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(ENGINES) == set(project["entry-points"]["fp8refit.engines"])


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_engines_were_tested_on_both_kinds_of_machine(package):
    assert ENGINES[package]["gpu_versions"]
    assert ENGINES[package]["cpu_versions"]


def test_the_versions_of_sglang_are_those_that_the_noxfile_installs():
    (versions,) = re.findall(r"^SGLANG = (\{.*\})$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert set(ast.literal_eval(versions)) == set(ENGINES["sglang"]["cpu_versions"])


def shown_by_families() -> set[str]:
    families = tomllib.loads((ROOT / "docs" / "families.toml").read_text())["family"]
    cells = [cell for family in families for column, cell in family.items() if column != "name"]
    return {cell if isinstance(cell, str) else cell["refused"] for cell in cells}


REFUSALS = {test for engine in ENGINES.values() for test in engine["refused"].values()}


@pytest.mark.parametrize("test", sorted(REFUSALS | shown_by_families()))
def test_what_the_tables_say_has_its_test(test):
    file, name = test.split("::")
    functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions
