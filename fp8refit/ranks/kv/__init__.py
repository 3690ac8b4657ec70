"""FP8 KV-cache scales: calibration batches, measuring live attention layers, computing and checking scales.

How an engine is run to measure, and where it keeps its scales, is the adapter's.
"""
