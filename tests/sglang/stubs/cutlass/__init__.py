"""Stands for NVIDIA's CuTe DSL, without which SGLang 0.5.15 does not import DeepSeek's models: kernels are defined, never run.

CUDA's bindings are found too, if nobody else has them.
"""

from absent import stand_for

__getattr__ = stand_for(__name__, "cuda")
