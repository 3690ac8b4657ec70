"""State dicts that are spread over a trainer's ranks: FSDP, HSDP, Megatron.

The ranks agree through `fp8refit.transport`. `fp8refit.training.megatron` names what they hold.
"""
