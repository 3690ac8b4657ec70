"""Tensors that another process on this host can map, by CUDA IPC handle or memfd.

Only handles are sent, never tensors. `fp8refit.remote` asks for them.
"""
