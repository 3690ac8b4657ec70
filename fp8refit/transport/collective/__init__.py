"""Broadcasts of bytes: a communicator over NCCL or gloo, a store where its members meet, and the layout of buckets.

`fp8refit.remote.broadcast` decides what is sent and when.
"""
