"""The process that calls `refit`: what an engine is to it, how engines are found, and the steps of a refit.

Nothing below imports this package. `Adapter` and `Engine` in `engine` are what an adapter implements,
with `Ranks` from `fp8refit.ranks.ranks`.
"""
