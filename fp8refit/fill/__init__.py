"""From a source and slots to bytes in live memory: the plan, which is pure, and the ways to carry it out.

Quantizing is in `kernels`. Votes, versions and what else makes a write a transaction belong in `fp8refit.ranks`.
"""
