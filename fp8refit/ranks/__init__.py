"""One rank of an engine: prepare, write and commit, and its vote with the others.

May import everything that fills. KV scales are in `kv`. A rank that is asked from another process is in `fp8refit.remote`.
"""
