"""The page on learning says what was found, and the committed one what the committed results say."""

import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COLUMNS = ["step", "reward", "expected_reward", "k3", "token_mult_prob_error", "ess", "masked_fraction"]
COLUMNS += ["rollout_s", "train_s", "refit_s"]


@pytest.fixture(scope="module")
def renderer():
    spec = importlib.util.spec_from_file_location("render_learning", BENCHMARKS / "render_learning.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(renderer, tmp_path):
    example = renderer.load_example()
    about = {"command": "python examples/grpo.py", "gpu": "a GPU", "versions": {"vllm": "0.26.0"}}
    for seed in range(3):
        records = [
            dict.fromkeys((*COLUMNS, *example.CHANGED), 0.25) | {"step": step, "reward": 0.1 * seed + 0.5}
            for step in range(1, 6)
        ]
        run = {"variant": "fp8+token", "seed": seed, "lr": 1e-5, "warm_up_reward": 0.3, "kernels": ["Cutlass fp32"]}
        run |= {"is_alone": True}
        example.add_run(tmp_path, run, records, about)
    (tmp_path / "grpo.json").rename(tmp_path / "grpo_vllm_gpu.json")
    return renderer.read(tmp_path)


def test_the_committed_page_is_of_the_committed_results(renderer):
    results = renderer.read(renderer.RESULTS)
    page = renderer.DOCS / "learning.md"
    assert page.exists() == bool(results), "run: python -m benchmarks.render"
    assert not results or page.read_text() == renderer.render(results), "run: python -m benchmarks.render"


def test_every_variant_has_its_rewards_and_densities(renderer, results):
    page = renderer.render(results)
    said = "| fp8+token | 1e-05 | 3 | 0.300 | 0.600 (0.500 to 0.700) | 0.250 | 2.5e-01 | 0.2500 | 0.2500 | 250.0 ms | 33.3% |"
    assert said in page
    assert "| fp8+token | 1e-05 | 25.000% | 25.000% | 25.000% | 25.000% | 25.000% |" in page
    assert "a GPU, vllm 0.26.0" in page and "Cutlass fp32" in page


def test_pictures_lie_where_the_page_shows_them(renderer, results, tmp_path):
    renderer.write(results, tmp_path)
    page = (tmp_path / "learning.md").read_text()
    shown = [line.partition("](")[2].rstrip(")") for line in page.splitlines() if line.startswith("![")]
    assert len(shown) == 3
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in shown)
