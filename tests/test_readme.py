"""The README quotes measured figures only."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load_renderer():
    spec = importlib.util.spec_from_file_location("render_readme", ROOT / "benchmarks" / "render_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_figures_are_those_of_the_committed_result():
    renderer = load_renderer()
    section = renderer.render()
    readme = renderer.README.read_text()
    assert section.strip()
    assert renderer.splice(readme, section) == readme, "run: python benchmarks/render_readme.py"
