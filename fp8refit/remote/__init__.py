"""Engines whose ranks run in other processes: messages, the rank's end and the driver's.

`broadcast` sends policies over NCCL or gloo; `servers` reaches engines behind a server. Code that moves bytes without
knowing about refits belongs in `fp8refit.transport`.
"""
