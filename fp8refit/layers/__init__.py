"""Reads slots off live models of engines whose layers descend from vLLM's: fused, block quantized, split over ranks.

An adapter gives a `LayerRules` and calls `read_inventory`.
"""
