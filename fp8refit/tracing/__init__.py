"""Reads slots from live models of engines whose layers descend from vLLM's: fused, block-quantized, split over ranks.

An adapter provides a `KernelRules` and calls `inventory.inventory_of`.
"""
