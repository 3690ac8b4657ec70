"""Gets a source into live slots: a pure plan, and the ways to carry it out.

Quantization is in `fp8refit.kernels`. Votes, versions and everything else that makes a write a transaction belong in
`fp8refit.ranks`.
"""
