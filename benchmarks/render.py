"""Writes every figure in README.md and docs/ from benchmarks/results: tables, plots, and the pages made of nothing else.

python -m benchmarks.render
"""

from benchmarks import render_benchmarks, render_learning, render_pages


def main() -> None:
    """Write all of them."""
    render_pages.main()
    render_benchmarks.main()
    render_learning.main()


if __name__ == "__main__":
    main()
