"""One rank of an engine: prepare, write and commit, and its votes with the other ranks.

KV scales are in `kv`. Ranks driven from another process are in `fp8refit.remote`.
"""
