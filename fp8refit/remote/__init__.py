"""Engines whose ranks run in other processes: messages, the rank's end and the driver's.

Policies that are sent over NCCL or gloo are in `broadcast`, engines behind a server in `servers`. What moves bytes and knows no
refit belongs in `fp8refit.transport`.
"""
