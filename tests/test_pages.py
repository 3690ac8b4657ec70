"""README and docs quote measured figures only, and say of engines only what a test shows."""

import ast
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

from fp8refit.bench import code

ROOT = Path(__file__).parents[1]


def load_renderer(name="render_pages"):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RENDERER = load_renderer()


@pytest.mark.parametrize("page", sorted(RENDERER.render()))
def test_figures_and_engines_are_those_of_the_committed_files(page):
    sections = RENDERER.render()[page]
    text = (ROOT / page).read_text()
    assert all(section.strip() for section in sections.values())
    assert RENDERER.splice(text, sections) == text, "run: python -m benchmarks.render"


def test_no_page_has_a_section_that_nobody_renders():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    marked = {str(page.relative_to(ROOT)): set(re.findall(r"<!-- (\w+):begin -->", page.read_text())) for page in pages}
    assert {page: names for page, names in marked.items() if names} == {
        page: set(sections) for page, sections in RENDERER.render().items()
    }


def test_the_picture_is_of_the_readmes_diagram():
    """And loads nothing."""
    picture = load_renderer("render_picture")
    drawn = picture.PICTURE.read_text()
    assert picture.digest_of(picture.read_source()) in drawn, "run: python benchmarks/render_picture.py"
    assert set(re.findall(r"https?://[^\"]+", drawn)) == {"http://www.w3.org/2000/svg"}


def test_plots_are_of_the_committed_results_and_on_a_page():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for name, (title, bars) in RENDERER.figures().items():
        drawn = (ROOT / "docs" / "figures" / name).read_bytes()
        assert RENDERER.digest_of(title, bars).encode() in drawn, "run: python -m benchmarks.render"
        assert f"figures/{name})" in pages


def test_every_figure_is_shown():
    shown = "".join(file.read_text() for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.*[dy]")])
    figures = [file.name for file in (ROOT / "docs" / "figures").iterdir()]
    assert [name for name in figures if f"figures/{name})" not in shown] == []


def read(name):
    return json.loads((RENDERER.RESULTS / name).read_text())


def highlights(**changed):
    given = {
        "single": read("vllm_qwen3-8b_h200.json"),
        "sglang": read("sglang_qwen3-8b_h200.json"),
        "refits": RENDERER.read_refits(),
    }
    given |= changed
    checked = given.pop("single"), given.pop("sglang")
    return RENDERER.render_highlights(RENDERER.highlights(**given), *checked)


def figures_of(said):
    return {row.split(" | ")[0].removeprefix("| "): row.split("**")[1] for row in rows_of(said)}


def rows_of(said):
    return [line for line in said.splitlines() if line.startswith("| ")][2:]


def test_each_row_of_the_readmes_table_is_from_its_own_result():
    said = highlights(**of_code(code.hash_parts(code.PARTS)))
    vllm, elsewhere, experts, sglang, sent, served = map(read, RENDERER.REFITS.values())
    measured = [vllm["plan_fill_verify_ms"]["median"], sglang["wall_ms"]["median"]]
    measured += [median_of(sent, "broadcast"), median_of(served, "broadcast"), median_of(vllm, "drop-in-tensors")]
    measured += [median_of(experts, way) for way in ("update-2gib", "generator")]
    measured += [median_of(elsewhere, way) for way in ("new-memory", "cpu")]
    assert list(figures_of(said).values()) == [f"{ms:.1f} ms" for ms in measured]
    beside = [median_of(vllm, "reload_weights"), median_of(sglang, "update_weights_from_tensor-512mib")]
    assert all(f": {ms:.0f} ms |" in row for row, ms in zip(rows_of(said), beside, strict=False))
    assert f"{served['clients']['failed']} of {served['clients']['requests']} requests failed" in said


def median_of(result, way):
    (found,) = (other["wall_ms"]["median"] for other in result["others"] if other["name"] == way)
    return found


NOT_MEASURED = {"vLLM server answering 16 clients"}
"""Rows of the README that wait for a GPU."""


def test_the_readme_has_every_row_that_does_not_wait_for_a_gpu():
    """A row whose packages have changed is measured again or goes."""
    every = figures_of(highlights(**of_code(code.hash_parts(code.PARTS))))
    shown = (
        (ROOT / "README.md").read_text().partition("<!-- highlights:begin -->")[2].partition("<!-- highlights:end")[0]
    )
    assert figures_of(shown).keys() == every.keys() - NOT_MEASURED


def of_code(parts):
    """What the README's rows are rendered from, as if it had been measured with these packages."""
    now = {"commit": "abc1234", "recorded_in": None, "code": parts}
    found = {kind: read(f"{kind_of}_qwen3-8b_h200.json") | now for kind, kind_of in CHECKED.items()}
    refits = {name: result.model_copy(update=now) for name, result in RENDERER.read_refits().items()}
    return found | {"refits": refits}


CHECKED = {"single": "vllm", "sglang": "sglang"}


def test_a_row_goes_if_what_it_runs_through_has_changed_and_by_nothing_else():
    """Some rows are of refits in the trainer's process."""
    now = code.hash_parts(code.PARTS)
    every = figures_of(highlights(**of_code(now))).keys()
    assert every - figures_of(highlights(**of_code(now | {"remote": "0" * 12}))).keys() == {
        "SGLang",
        "broadcast to vLLM on another GPU",
        "vLLM server answering 16 clients",
        "slow: another state dict each time, vLLM in another process",
        "slow: CPU tensors, vLLM in another process",
    }
    assert figures_of(highlights(**of_code(now | {"fill": "0" * 12}))) == {}


def test_it_is_said_that_a_comparison_with_a_fresh_boot_was_made_before_a_change():
    old = of_code(code.hash_parts(code.PARTS))
    old["single"] |= {"code": old["single"]["code"] | {"fill": "0" * 12}}
    said = highlights(**old)
    assert "equals a freshly booted one † in bytes" in " ".join(said.split())
    assert "\n† abc1234: before changes of fill." in said


def test_a_table_without_old_rows_has_no_footnote():
    assert "†" not in highlights(**of_code(code.hash_parts(code.PARTS)))


def test_results_of_earlier_code_are_named_by_what_has_changed_since():
    now = code.hash_parts(code.PARTS)
    old = [
        {"file": "one.json", "commit": "aaaaaaa", "code": now | {"fill": None}},
        {"file": "two.json", "recorded_in": "bbbbbbb", "code": now | {"fill": "0"}},
        {"file": "now.json", "commit": "ccccccc", "code": now},
        {"file": "builds.json"},
    ]
    one, two = (f"[`{name}`](../benchmarks/results/{name})" for name in ("one.json", "two.json"))
    expected = f"\nBefore later changes of `fill`: {one} (measured at `aaaaaaa`), {two} (recorded in `bbbbbbb`).\n"
    assert RENDERER.render_ages(old) == expected
    assert RENDERER.render_ages(old[2:]) == ""


def test_every_result_of_a_refit_says_which_code_it_measured():
    """Others name builds, or measure no refit. `python benchmarks/stamp_results.py` adds what git knows."""
    kinds = (
        "builds",
        "compiled",
        "interleaved",
        "bench_rollout",
        "linear",
        "grpo",
        "matrix",
        "mutants",
        "planted",
        "trainers",
    )
    silent = [
        file.name for file in sorted(RENDERER.RESULTS.glob("*.json")) if not json.loads(file.read_text()).get("code")
    ]
    assert [name for name in silent if not name.startswith(kinds)] == []
    assert all(found.get("commit") or found.get("recorded_in") for found in map(read, stamped())), (
        "run stamp_results.py"
    )


def stamped():
    return [file.name for file in RENDERER.RESULTS.glob("*.json") if json.loads(file.read_text()).get("code")]


def test_the_readme_says_it_if_an_engine_did_not_equal_a_fresh_one():
    single = read("vllm_qwen3-8b_h200.json")
    equal = single["equal_to_fresh_boot"] | {"tokens": False}
    assert "equals a freshly booted one" in " ".join(highlights().split())
    assert "does NOT equal" in highlights(single=single | {"equal_to_fresh_boot": equal})


def test_layouts_say_it_if_a_rank_did_not_equal_a_fresh_one():
    found = read("vllm_layouts_4_external4_h200.json")
    served = read("vllm_layouts_served_h200.json")
    assert RENDERER.render_layouts([found, served]).count("| equal |") == 2
    found["tensor_parallel"]["4"]["equal_to_fresh_boot"]["tokens"] = False
    found["external_launcher"]["4"][3]["equal_to_fresh_boot"] = False
    assert RENDERER.render_layouts([found, served]).count("| NOT equal |") == 2


def test_a_server_is_rendered_beside_its_requests_and_how_long_it_stands_still():
    served = RENDERER.read_refits()["server"]
    pushed = served.other("broadcast").model_copy(update={"standstill_ms": 35.0})
    clients = served.clients.model_copy(update={"requests": 900, "failed": 3})
    said = RENDERER.render_servers([served.model_copy(update={"others": (pushed,), "clients": clients})])
    pushes = f"{pushed.wall_ms.count} | 900, 3 failed | {pushed.wall_ms.median:.1f} ms"
    assert f"| vLLM | `keep` | {pushes} | 35.0 ms |" in said


def test_what_a_sync_took_is_rendered_beside_that_of_a_bf16_engine():
    found = {
        "gpu": "NVIDIA H200",
        "versions": {"ms_swift": "4.6.0", "vllm": "0.26.0"},
        "trainer": "ms-swift",
        "what": "its mixin",
        "shape": "a shape",
        "sleeps": True,
        "command": "python -m it",
        "sync_ms": {"drop-in": {"first": 900.0, "median": 12.34}, "bf16": {"first": 30.0, "median": 20.0}},
        "num_syncs": 10,
    }
    said = RENDERER.render_synced([found])
    times = "12.3 ms, first 900 | 20.0 ms, first 30"
    assert f"| ms-swift 4.6.0 | its mixin, which sleeps between | a shape | {times} | 10 |" in said
    assert "None has run on a GPU yet" in RENDERER.render_synced([])


def test_a_first_refit_that_nothing_was_compared_with_says_so():
    """A run that is cut short keeps what it has."""
    found = read("traced_vllm_qwen3-8b_h200.json")
    assert "579 live tensors equal" in RENDERER.render_traced([found])
    del found["equal_to_fresh_boot"], found["live_tensors_compared"]
    assert "| not compared | yes |" in RENDERER.render_traced([found])


def test_weight_transfer_says_which_way_left_other_bytes():
    found = read("weight_transfer_h200.json")
    assert "those of a refit" not in RENDERER.render_transfer(found)
    found["equal_to_refit"] = {"module": True, "stream": True}
    assert "bytes are those of a refit." in RENDERER.render_transfer(found)
    found["equal_to_refit"]["stream"] = False
    assert "NOT those of a refit by stream" in RENDERER.render_transfer(found)


def test_formats_are_held_against_bf16_by_what_was_measured_of_each():
    mismatches, gains = RENDERER.read_worth()
    assert gains["_bf16"] == (1.0, 1.0, 1.0) and len(gains[""]) == 3
    said = RENDERER.render_worth({"_mxfp8": mismatches[""] | {"formats": ["a kernel"]}}, {"": (1.28, 1.2, 1.1)})
    k3, error = (mismatches[""]["ordinary"]["plain"][key] for key in ("k3", "token_mult_prob_error"))
    assert f"| 32 values of a row (MXFP8) | a kernel | {k3:.3f} | {error:.2f} |" in said
    assert "| block of 128 x 128 |  |  |  |  |  | 1.28 x, 1.20 x, 1.10 x |" in said
    assert "| row |" not in said


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
    said = RENDERER.render_oracle([found])
    inside = "200 (80 by broadcast, 120 by stream)"
    assert f"| a server | 250 | 25 | 240 | {inside} | 9000 | 70 | 8 | 300 | **3** | **0** |" in said
    assert "has not run on GPUs yet" in RENDERER.render_oracle([])


ENGINES = {engine["package"]: engine for engine in RENDERER.read_engines()}


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


def shown_by_tables() -> set[str]:
    files = (ROOT / "docs" / f"{name}.toml" for name in ("families", "deployments"))
    rows = [row for file in files for row in tomllib.loads(file.read_text())["row"]]
    cells = [cell for row in rows for column, cell in row.items() if column != "name"]
    return {cell if isinstance(cell, str) else cell["refused"] for cell in cells}


REFUSALS = {test for engine in ENGINES.values() for test in engine["refused"].values()}


PROMISED = set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", (ROOT / "docs" / "promises.md").read_text()))


def test_every_promise_has_its_test():
    rows = re.findall(r"^\|(?! against | ---).*\|$", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)
    assert len(PROMISED) > 20
    assert [row for row in rows if not PROMISED & set(re.findall(r"`([^`]+)` \|$", row))] == []


@pytest.mark.parametrize("test", sorted(REFUSALS | PROMISED | shown_by_tables()))
def test_what_the_tables_say_has_its_test(test):
    file, name = test.split("::")
    assert name in functions_in(ROOT / file)


def functions_in(file: Path) -> set[str]:
    """Those that a module has, and those of the modules of which it imports everything."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= functions_in(ROOT / f"{node.module.replace('.', '/')}.py")
    return found
