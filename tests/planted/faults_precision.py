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
        name="only steps of optimizers are seen",
        path=WEIGHTS,
        before="if changed and not bad:",
        after="if changed and self.is_due and not bad:",
        found_by=FUZZ,
    ),
    Fault(
        name="every layer has hooks, and torch.compile gives up after eight",
        path=WEIGHTS,
        before="len(self.within(module)) == len(self.weights)",
        after="any(module.children())",
        found_by="tests/precision/test_changes.py -k share",
    ),
    Fault(
        name="what changed after the last forward pass is not quantized before it is served",
        path="fp8refit/precision/__init__.py",
        before="self._weights.refresh()\n        for weight",
        after="for weight",
        found_by=FUZZ,
    ),
    Fault(
        name="a table of weights that were copied or moved is used on",
        path=WEIGHTS,
        before="if weights not in self._tables or key != self._tables[weights][0]:",
        after="if weights not in self._tables:",
        found_by=FUZZ,
    ),
    Fault(
        name="a linear that is called by itself does not see what changed",
        path=WEIGHTS,
        before="if self.owner.is_due if is_compiled else self.owner.inside is None:",
        after="if self.owner.is_due:",
        found_by="tests/precision/test_changes.py -k 'multiply_data and linear'",
    ),
    Fault(
        name="after an interrupt no change is seen",
        path=WEIGHTS,
        before="elif module is self._model or self.inside in (None, module):",
        after="elif self.inside is None:",
        found_by="tests/precision/test_changes.py -k interrupt",
    ),
    Fault(
        name="a pass that is recomputed takes codes of later weights",
        path=WEIGHTS,
        before="is_repeated = torch._C._current_graph_task_id() != -1",
        after="is_repeated = False",
        found_by="tests/precision/test_changes.py -k 'not_recomputed or within_the_backward'",
    ),
    Fault(
        name="a backward pass takes codes of a later step",
        path=WEIGHTS,
        before="increment_version(_written(changed))",
        after="pass",
        found_by="tests/precision/test_changes.py -k older_step",
    ),
    Fault(
        name="a compiled part does not see steps",
        path=WEIGHTS,
        before="weights.is_due, weights.inside = True, None",
        after="weights.inside = None",
        found_by="tests/precision/test_changes.py -k compiled_part",
    ),
    Fault(
        name="what FSDP holds gathered stays when it is old",
        path=SHARDS,
        before="weight.gathers.reshard()",
        after="pass",
        found_by="tests/precision/test_shards.py -k 'next_forward_pass and whole'",
    ),
    Fault(
        name="shards that are whole blocks are quantized once",
        path=SHARDS,
        before="held.copy_(codes)",
        after="held.copy_(torch.where(held.any(), held, codes))",
        found_by="tests/fuzz/test_precision_shards.py",
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
