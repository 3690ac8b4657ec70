"""How processes reach each other: votes between ranks, process groups, Unix sockets, a flag in shared memory.

This package knows nothing about refits or sources. `stamps` describes files in messages. `memory` maps
tensors from other processes on the same host, `collective` broadcasts. `fp8refit.remote` decides what is said over them.
"""
