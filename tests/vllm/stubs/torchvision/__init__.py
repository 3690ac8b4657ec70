"""Stands for torchvision, which vision-language models import with their image processors; no test processes an image."""

from absent import stand_for

__version__ = "0.28.0"
__getattr__ = stand_for(__name__)
