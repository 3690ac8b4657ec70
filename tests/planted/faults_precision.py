"""Faults of trainers that compute in their engine's precision."""

from tests.planted.fault import Fault

PRODUCTS = "fp8refit/precision/products.py"
WEIGHTS = "fp8refit/precision/weights.py"
SHARDS = "fp8refit/precision/shards.py"
ROUNDING = "fp8refit/precision/rounding.py"
FUZZ = "tests/fuzz/test_precision.py"

FAULTS = [
    Fault(
        name="the weight's gradient is taken with an input that is not quantized",
        path=PRODUCTS,
        before="return dy_MN.float().t() @ dequantize_reference(x_codes, x_scale, (1, block_size[1]))",
        after="return dy_MN.float().t() @ x_MK.float()",
        found_by=FUZZ,
    ),
    Fault(
        name="inputs take the rounding of weights to powers of two",
        path="fp8refit/fill/kernels/activations.py",
        before="exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0).to(torch.int32)",
        after="exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0x480000).to(torch.int32)",
        found_by="tests/fill/kernels/test_activations.py",
    ),
    Fault(
        name="codes are those of an older step",
        path=WEIGHTS,
        before="return (local.data_ptr(), local._version) != self._seen",
        after="return self._seen is None or local.data_ptr() != self._seen[0]",
        found_by=FUZZ,
    ),
    Fault(
        name="what leaves no trace is not quantized before it is served",
        path="fp8refit/precision/__init__.py",
        before="self._weights.refresh(force=True)",
        after="self._weights.refresh()",
        found_by=FUZZ,
    ),
    Fault(
        name="a table of a model that was copied or moved is used on",
        path=WEIGHTS,
        before="if self._table is None or key != self._table_key:",
        after="if self._table is None:",
        found_by=FUZZ,
    ),
    Fault(
        name="ranks do not share the maxima of their blocks",
        path=SHARDS,
        before="torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)",
        after="pass",
        found_by="tests/precision/test_shards.py::test_blocks_that_ranks_share_are_quantized_as_one",
    ),
    Fault(
        name="padding of Transformer Engine's scales is taken for scales",
        path="fp8refit/precision/native.py",
        before="scale[:, : -(-codes.shape[-1] // TE_BLOCK)]",
        after="scale",
        found_by="tests/precision/test_native.py",
    ),
    Fault(
        name="norms round before they multiply",
        path=ROUNDING,
        before="kind.forward(module, x.float())",
        after="kind.forward(module, x)",
        found_by="tests/precision/test_rounding.py",
    ),
    Fault(
        name="rotary embeddings of every model of a process round once",
        path=ROUNDING,
        before="""names = {name: value for name, value in old.__globals__.items() if name != "__name__"}""",
        after="names = old.__globals__",
        found_by="tests/precision/test_rounding.py",
    ),
    Fault(
        name="a compiled trainer finds the rotary embedding of its module",
        path=ROUNDING,
        before=""" if name != "__name__"}""",
        after="}",
        found_by="tests/precision/test_unify.py -k compiled",
    ),
]
