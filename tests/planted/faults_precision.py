"""Faults of trainers that compute in their engine's precision."""

from tests.planted.fault import Fault

PRODUCTS = "fp8refit/training/precision/products.py"
WEIGHTS = "fp8refit/training/precision/weights.py"
SHARDS = "fp8refit/training/precision/shards.py"
ROUNDING = "fp8refit/training/precision/rounding.py"
FUZZ = "tests/fuzz/test_precision.py"

FAULTS = [
    Fault(
        name="the weight's gradient is taken with an input that is not quantized",
        at=f"{PRODUCTS}::_weight_gradient",
        before="dequantize_reference(x_codes, x_scale, (1, block_format.block_size[1]))",
        after="x_MK.float()",
        found_by=FUZZ,
    ),
    Fault(
        name="inputs take the rounding of weights to powers of two",
        at="fp8refit/kernels/activations.py::quantize_activations",
        before="(bits & 0x7FFFFF) > 0",
        after="(bits & 0x7FFFFF) > 0x480000",
        found_by="tests/kernels/test_activations.py",
    ),
    Fault(
        name="only steps of optimizers are seen",
        at=f"{WEIGHTS}::TrainedWeights._quantize_whole",
        before="changed and not bad",
        after="changed and self.is_due and not bad",
        found_by=FUZZ,
    ),
    Fault(
        name="every layer has hooks, and torch.compile gives up after eight",
        at=f"{WEIGHTS}::TrainedWeights.watch",
        before="len(self.within(module)) == len(self.weights)",
        after="any(module.children())",
        found_by="tests/training/precision/test_changes.py -k share",
    ),
    Fault(
        name="what changed after the last forward pass is not quantized before it is served",
        at="fp8refit/training/precision/__init__.py::Unified.served",
        before="self._weights.refresh()",
        found_by=FUZZ,
    ),
    Fault(
        name="a table of weights that were copied or moved is used on",
        at=f"{WEIGHTS}::TrainedWeights._table_of",
        before="weights not in self._tables or key != self._tables[weights][0]",
        after="weights not in self._tables",
        found_by=FUZZ,
    ),
    Fault(
        name="a linear that is called by itself does not see what changed",
        at=f"{WEIGHTS}::TrainedWeight.ensure_fresh",
        before="self.owner.is_due if is_compiled else self.owner.inside is None",
        after="self.owner.is_due",
        found_by="tests/training/precision/test_changes.py -k 'multiply_data and linear'",
    ),
    Fault(
        name="after an interrupt no change is seen",
        at=f"{WEIGHTS}::TrainedWeights._begin",
        before="module is self._model or self.inside in (None, module)",
        after="self.inside is None",
        found_by="tests/training/precision/test_changes.py -k interrupt",
    ),
    Fault(
        name="a pass that is recomputed takes codes of later weights",
        at=f"{WEIGHTS}::TrainedWeights.before_forward",
        before="torch._C._current_graph_task_id() != -1",
        after="False",
        found_by="tests/training/precision/test_changes.py -k 'not_recomputed or within_the_backward'",
    ),
    Fault(
        name="a backward pass takes codes of a later step",
        at=f"{WEIGHTS}::TrainedWeights.refresh",
        before="increment_version(_written(changed))",
        found_by="tests/training/precision/test_changes.py -k older_step",
    ),
    Fault(
        name="a compiled part does not see steps",
        at=f"{WEIGHTS}::TrainedWeights._watch_optimizers.note_step",
        before="weights.is_due, weights.inside = True, None",
        after="weights.inside = None",
        found_by="tests/training/precision/test_changes.py -k compiled_part",
    ),
    Fault(
        name="what FSDP holds gathered stays when it is old",
        at=f"{SHARDS}::quantize_shards",
        before="weight.gathers.reshard()",
        found_by="tests/training/precision/test_shards.py -k 'next_forward_pass and whole'",
    ),
    Fault(
        name="shards that are whole blocks are quantized once",
        at=f"{SHARDS}::_encode_own_rows",
        before="held.copy_(codes)",
        after="held.copy_(torch.where(held.any(), held, codes))",
        found_by="tests/fuzz/test_precision_shards.py",
    ),
    Fault(
        name="ranks do not share the maxima of their blocks",
        at=f"{SHARDS}::_take_largest",
        before="torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)",
        found_by="tests/training/precision/test_shards.py::test_blocks_that_ranks_share_are_quantized_as_one",
    ),
    Fault(
        name="padding of Transformer Engine's scales is taken for scales",
        at="fp8refit/training/precision/native.py::_parts",
        before="scale[:, : -(-codes.shape[-1] // TE_BLOCK)]",
        after="scale",
        found_by="tests/training/precision/test_native.py",
    ),
    Fault(
        name="norms round before they multiply",
        at=f"{ROUNDING}::_norm.forward",
        before="x.float()",
        after="x",
        found_by="tests/training/precision/test_rounding.py",
    ),
    Fault(
        name="rotary embeddings of every model of a process round once",
        at=f"{ROUNDING}::_rotating_once",
        before='{name: value for name, value in old.__globals__.items() if name != "__name__"}',
        after="old.__globals__",
        found_by="tests/training/precision/test_rounding.py",
    ),
    Fault(
        name="a compiled trainer finds the rotary embedding of its module",
        at=f"{ROUNDING}::_rotating_once",
        before='{name: value for name, value in old.__globals__.items() if name != "__name__"}',
        after="{name: value for name, value in old.__globals__.items()}",
        found_by="tests/training/precision/test_unify.py -k compiled",
    ),
]
