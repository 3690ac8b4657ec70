"""Engines whose ranks run in other processes: the driver's end (`ranks`) and the rank's (`rank_server`, `rank_orders`).

`protocol` has what they say. `host` gives policies to ranks on the trainer's host, `broadcast` sends them over NCCL or
gloo; `servers` reaches engines behind a server. Code that moves bytes without
knowing about refits belongs in `fp8refit.transport`.
"""
