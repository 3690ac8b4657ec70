"""Writes every figure in README.md and docs/ from benchmarks/results: tables, plots, and the pages made of nothing else.

python benchmarks/render.py
"""

import render_benchmarks
import render_learning
import render_pages


def main() -> None:
    """Write all of them."""
    render_pages.main()
    render_benchmarks.main()
    render_learning.main()


if __name__ == "__main__":
    main()
