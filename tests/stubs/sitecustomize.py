"""Lets `import torchvision` pass on a CPU, in every process whose PYTHONPATH has this folder.

SGLang imports torchvision, and so do the image processors that vision-language models name. Its PyPI build registers its
operators from a CUDA library, which does not load here, and then describes two of them to torch: they are declared before,
without any code behind them.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; declares torchvision's operators just before it is imported."""

    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            DeclareOperators.library = torch.library.Library("torchvision", "DEF")  # they live as long as it does
            for operator in OPERATORS:
                DeclareOperators.library.define(operator + SCHEMA)
        return None


sys.meta_path.insert(0, DeclareOperators())
