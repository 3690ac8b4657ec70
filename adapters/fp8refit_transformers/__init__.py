"""The transformers adapter: makes any Hugging Face causal LM a block-FP8 engine, and refits it in place."""

from fp8refit_transformers.convert import to_block_fp8
from fp8refit_transformers.engine import TransformersEngine
from fp8refit_transformers.linear import BlockFp8Linear

__all__ = ["BlockFp8Linear", "TransformersEngine", "to_block_fp8"]
