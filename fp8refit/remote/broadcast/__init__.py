"""One policy sent to every rank of one or several engines: who needs what, in which form, sender and receiver.

The group that carries the bytes is in `fp8refit.transport.collective`.
"""
