"""What the driver and ranks in other processes say to each other: messages, the channel for them, and what is sent of a source.

How tensors travel is in `fp8refit.remote.host` and `fp8refit.remote.broadcast`.
"""
