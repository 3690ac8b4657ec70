"""FP8 KV-cache scales: calibration batches, measuring live attention layers, computing and checking scales.

Adapters know how to run an engine for calibration and where it keeps its scales.
"""
