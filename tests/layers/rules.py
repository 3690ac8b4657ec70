"""Rules of no engine's, for layers that say everything of themselves."""

from types import SimpleNamespace

from fp8refit.layers.rules import Kernel, Remedies
from fp8refit.slots import ScaleFormat
from tests.layers.models import Layer, family_of

KERNEL = Kernel(name="Plain", is_row_major=True, scale_format=ScaleFormat.FP32, remedy="Take another kernel")


class FakeRules:
    remedies = Remedies(
        no_block_fp8="Quantize it", other_quantization="Quantize it in blocks", one_rank="Boot on one rank"
    )
    whole_layers = frozenset({"WholeRMSNorm"})
    copying_loaders = frozenset(
        {
            "ShardedRMSNorm.weight_loader",
            "default_weight_loader",
            "row_parallel_weight_loader",
            "sharded_weight_loader.<locals>.loader",
        }
    )

    def why_refused(self, module):
        return getattr(module, "why_refused", None)

    def is_linear(self, module):
        return hasattr(module, "input_size")

    def ranks_of(self, module):
        return getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)

    def part_sizes_of(self, module):
        return tuple(getattr(module, "output_partition_sizes", ()))

    def kernel_of(self, module):
        return getattr(module, "kernel", KERNEL)

    def block_size_of(self, module):
        return (128, 128)

    def experts_of(self, prefix, module):
        return module.experts

    def kept(self, module):
        return getattr(module, "kept", ())


class FakeLayer(Layer):
    def describe(self, rank, num_ranks, sizes):
        self.tp_rank, self.tp_size, self.output_partition_sizes = rank, num_ranks, sizes


FAMILY: SimpleNamespace = family_of(FakeLayer)
