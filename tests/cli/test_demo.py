"""The demo, much shortened: it runs, follows the trainer, judges itself and leaves its outputs."""

import math

import pytest
import torch

from fp8refit.cli.demo import DemoConfig, DemoResult, Round, run_demo
from fp8refit.cli.demo.corpus import read_corpus, sample_windows

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def make_round(step, refitted_loss, trainer_loss):
    return Round(
        step=step,
        version=step,
        train_loss=None,
        trainer_loss=trainer_loss,
        refitted_loss=refitted_loss,
        stale_loss=5.0,
        refit_ms=None,
        gb_per_s=None,
    )


def make_result(*losses):
    rounds = tuple(make_round(step, *pair) for step, pair in enumerate(losses))
    return DemoResult(rounds=rounds, seconds=1.0, chart="demo.png", sample="")


def test_a_short_demo_leaves_its_chart_and_finite_numbers(tmp_path):
    seen = []
    config = DemoConfig(
        steps=5, refit_every=2, out=tmp_path / "new", batch_size=2, window_bytes=33, num_held_out=4, sample_bytes=8
    )
    result = run_demo(config, on_round=seen.append)

    assert result.chart.read_bytes().startswith(PNG_SIGNATURE)
    assert tuple(seen) == result.rounds
    assert [row.step for row in seen] == [0, 2, 4, 5]
    assert [row.version for row in seen] == [0, 1, 2, 3]
    assert all(row.refit_ms > 0 and row.gb_per_s > 0 and math.isfinite(row.train_loss) for row in seen[1:])
    first, last = seen[0], seen[-1]
    assert first.refitted_loss == first.stale_loss == last.stale_loss
    assert last.refitted_loss < first.refitted_loss - 0.2
    assert result.gap < 0.02
    assert result.sample.startswith("The ") and len(result.sample) > 4


def test_the_same_seed_gives_the_same_losses(tmp_path):
    config = DemoConfig(steps=1, out=tmp_path, batch_size=2, window_bytes=17, num_held_out=2, sample_bytes=1)
    first, again = (run_demo(config).rounds[-1] for _ in range(2))
    assert (first.train_loss, first.refitted_loss) == pytest.approx((again.train_loss, again.refitted_loss), rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([(5.0, 5.0), (2.0, 2.0)], []),
        ([(5.0, 5.0), (4.5, 4.5)], ["fell by 10.0%"]),
        ([(5.0, 5.0), (2.0, 2.2)], ["strayed 9.1%"]),
        ([(5.0, 5.0), (4.5, 5.5)], ["fell by 10.0%", "strayed 18.2%"]),
        ([(5.0, 5.0), (math.nan, 2.0)], ["fell by nan%", "strayed"]),
    ],
    ids=["good", "no fall", "strays", "both", "nan"],
)
def test_the_demo_judges_itself(losses, words):
    problems = make_result(*losses).problems
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_held_out_text_is_not_trained_on():
    corpus = read_corpus()
    train, held_out = (bytes(tokens.tolist()) for tokens in (corpus.train, corpus.held_out))
    assert len(train) > 400_000 and len(held_out) > 40_000
    paragraphs = [part for part in held_out.split(b"\n\n") if len(part) > 80]
    assert len(paragraphs) > 100
    assert not set(paragraphs) & set(train.split(b"\n\n"))


def test_windows_are_stretches_of_the_text():
    tokens = torch.arange(1000)
    windows = sample_windows(tokens, num_windows=50, length=7, generator=torch.Generator().manual_seed(0))
    assert windows.shape == (50, 7)
    assert torch.equal(windows - windows[:, :1], torch.arange(7).expand(50, 7))
    assert len(windows[:, 0].unique()) > 30
