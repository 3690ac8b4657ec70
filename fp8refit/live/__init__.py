"""What a live engine holds, by checkpoint name: slots, layouts, live tensors, fingerprints.

The lowest package: it imports only `fp8refit.errors` and knows nothing about sources. `fp8refit.tracing` reads slots from
a live model; `fp8refit.fill` writes them.
"""
