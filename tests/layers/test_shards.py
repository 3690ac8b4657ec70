"""Which slices ranks hold, on layers and rules of no engine's."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fp8refit.errors import InvalidSourceError
from fp8refit.layers.inventory import read_inventory
from fp8refit.plan import compile_plan
from fp8refit.slots import Inventory, TensorMeta
from tests.layers.models import (
    FP8,
    HIDDEN,
    SPLITS,
    RMSNorm,
    VocabParallelEmbedding,
    box,
    check_ranks,
    checkpoint_of,
    is_what_the_rank_holds,
    model_of,
    model_of_rank,
)
from tests.layers.rules import FAMILY, FakeLayer, FakeRules

ColumnParallelLinear, RowParallelLinear = FAMILY.ColumnParallelLinear, FAMILY.RowParallelLinear
ReplicatedLinear = FAMILY.ReplicatedLinear


class QKVParallelLinearWithIndexer(FAMILY.QKVParallelLinear):
    def weight_loader_v2(self): ...


class WholeRMSNorm(RMSNorm):
    pass


def read(model: nn.Module) -> Inventory:
    return read_inventory(model, FakeRules())


def only_refusal(model: nn.Module) -> str:
    (refusal,) = read(model).refusals
    return str(refusal)


def block_layer() -> nn.Module:
    """A block-FP8 layer of an engine of one rank."""
    weight, scale = torch.zeros(256, HIDDEN, dtype=torch.uint8).view(FP8), torch.ones(2, 2)
    return ColumnParallelLinear(weight, scale=scale, full=(256, HIDDEN), rank=0, num_ranks=1)


@pytest.mark.parametrize(("num_ranks", "num_kv_heads", "vocabulary"), SPLITS)
def test_each_rank_holds_what_its_slots_say(num_ranks, num_kv_heads, vocabulary):
    check_ranks(read, FAMILY, checkpoint_of(num_kv_heads, vocabulary), num_ranks)


def test_a_rank_without_a_row_of_the_vocabulary_has_an_empty_slot_and_padding():
    checkpoint = checkpoint_of(2, 10)
    inventory = read(model_of_rank(FAMILY, checkpoint, 3, 4))
    empty = {slot.name: slot for slot in inventory.slots if slot.weight.numel() == 0}
    assert {name: (slot.full_shape, slot.offset) for name, slot in empty.items()} == {
        "embed.weight": ((10, HIDDEN), (10, 0)),
        "head.weight": ((10, HIDDEN), (10, 0)),
        "head.bias": ((10,), (10,)),
    }
    assert [tuple(padding.shape) for padding in inventory.padding] == [(16, HIDDEN), (16, HIDDEN), (16,)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tied_vocabulary_is_an_alias_on_every_rank(rank):
    model = model_of_rank(FAMILY, checkpoint_of(2, 259), rank, 2)
    model.head.weight = model.embed.weight
    inventory = read(model)
    assert inventory.aliases == {"head.weight": "embed.weight"}
    (embed,) = (slot for slot in inventory.slots if slot.name == "embed.weight")
    assert (embed.full_shape, embed.origin) == ((259, HIDDEN), (160 * rank, 0))
    assert len(inventory.padding) == 2 * rank


def test_a_slice_off_the_checkpoint_s_grid_has_a_grid_of_its_own():
    weight, scale = torch.zeros(160, HIDDEN, dtype=torch.uint8).view(FP8), torch.ones(2, 2)
    layer = ColumnParallelLinear(weight, scale=scale, full=(320, HIDDEN), rank=1, num_ranks=2)
    (slot,) = read(model_of(proj=layer)).slots
    assert (slot.full_shape, slot.offset, tuple(slot.scale.shape)) == ((320, HIDDEN), (160, 0), (2, 2))
    compile_plan((slot,), {"proj.weight": TensorMeta(shape=(320, HIDDEN), dtype=torch.bfloat16)})
    quantized = {"proj.weight": ((320, HIDDEN), FP8), "proj.weight_scale_inv": ((3, 2), torch.float32)}
    with pytest.raises(InvalidSourceError, match="off the 128x128 grid"):
        compile_plan((slot,), {name: TensorMeta(shape=s, dtype=d) for name, (s, d) in quantized.items()})


def test_parts_off_the_live_grid_are_refused_on_every_rank():
    sizes = {"sizes": [128, 64, 64], "full": (512, HIDDEN), "rank": 1, "num_ranks": 2}
    codes, scale = torch.zeros(256, HIDDEN, dtype=torch.uint8).view(FP8), torch.ones(2, 2)
    layer = FAMILY.QKVParallelLinear(codes, scale=scale, num_kv_head_replicas=1, **sizes)
    assert "do not start on blocks" in only_refusal(model_of(qkv_proj=layer))


def split_model(**modules) -> nn.Module:
    """`modules` in a model whose other layer is split over two ranks."""
    weight, scale = torch.zeros(128, HIDDEN, dtype=torch.uint8).view(FP8), torch.ones(1, 2)
    layer = ColumnParallelLinear(weight, scale=scale, full=(HIDDEN, HIDDEN), rank=1, num_ranks=2)
    return model_of(split_layer=layer, **modules)


def layer_of(cls, shape=(128, HIDDEN), *, full=(HIDDEN, HIDDEN), num_ranks=2, loader=None, **more) -> nn.Module:
    """A plain layer of the second of two ranks."""
    layer = cls(torch.zeros(shape), full=full, rank=num_ranks - 1, num_ranks=num_ranks, **more)
    if loader is not None:
        layer.weight.weight_loader = loader
    return layer


def attention_with_sinks() -> nn.Module:
    attention = nn.Module()
    attention.sinks = nn.Parameter(torch.zeros(2))
    attention.o_proj = layer_of(RowParallelLinear, (HIDDEN, 128))
    return attention


def default_weight_loader(): ...
def row_parallel_weight_loader(): ...
def composed_loader(): ...


def sharded_weight_loader():
    def loader(): ...

    return loader


def composed_weight_loader():
    def composed_loader(): ...

    return composed_loader


class ShardedRMSNorm(RMSNorm):
    def __init__(self, weight: Tensor):
        super().__init__(weight, functools.partial(self.weight_loader, shard_rank=0))

    @staticmethod
    def weight_loader(shard_rank): ...


def under_online_quantization(loader):
    @functools.wraps(loader)
    def online_process_loader(): ...

    return online_process_loader


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (attention_with_sinks(), "holds `sinks` beside its layers"),
        (RMSNorm(torch.ones(64), tp_size=2), "is a RMSNorm, split over 2 ranks by a rule of its own"),
        (RMSNorm(torch.ones(64), composed_loader), "loads `weight` by a rule of its own"),
        (RMSNorm(torch.ones(64), functools.partial(default_weight_loader)), "loads `weight` by a rule of its own"),
        (RMSNorm(torch.ones(2, 32), row_parallel_weight_loader), "loads `weight` by a rule of its own"),
        (layer_of(ColumnParallelLinear, loader=composed_loader), "loads `weight` by a rule of its own"),
        (layer_of(FakeLayer), "is a FakeLayer, split over 2 ranks by a rule of its own"),
        (layer_of(ColumnParallelLinear, (100, HIDDEN)), "holds [100, 256] of [256, 256], which is no even split"),
        (layer_of(ColumnParallelLinear, (128, HIDDEN, 1)), "holds [128, 256, 1] of [256, 256]"),
        (layer_of(ColumnParallelLinear, sizes=[64]), "holds [128, 256] of [256, 256], which is no even split"),
    ],
)
def test_what_nobody_knows_the_slice_of_is_refused_by_name(module, reason):
    refusal = only_refusal(split_model(thing=module))
    assert refusal.startswith("thing: ")
    assert reason in refusal
    assert refusal.endswith("Boot on one rank")


def test_a_fused_layer_that_loads_otherwise_than_known_is_refused():
    layer = layer_of(QKVParallelLinearWithIndexer, sizes=[32] * 4, num_kv_head_replicas=1)
    model = split_model(qkvi_proj=layer)
    model.packed_modules_mapping["qkvi_proj"] = ["q_proj", "k_proj", "v_proj", "index_proj"]
    assert "is a QKVParallelLinearWithIndexer, split over 2 ranks by a rule of its own" in only_refusal(model)


def test_a_parameter_beside_weight_and_bias_of_a_split_layer_is_refused():
    layer = layer_of(ColumnParallelLinear)
    layer.per_head = nn.Parameter(torch.zeros(2))
    assert "thing: loads `per_head` by a rule of its own" in only_refusal(split_model(thing=layer))


def test_a_parameter_beside_the_weight_of_a_router_that_every_rank_holds_is_whole():
    layer = layer_of(ReplicatedLinear, (256, HIDDEN))
    layer.correction = nn.Parameter(torch.zeros(256))
    inventory = read(split_model(thing=layer))
    assert not inventory.refusals
    (slot,) = [slot for slot in inventory.slots if slot.name == "thing.correction"]
    assert slot.full_shape == tuple(slot.weight.shape) == (256,)
    layer.correction.weight_loader = lambda: None
    assert "thing: loads `correction` by a rule of its own" in only_refusal(split_model(thing=layer))


@pytest.mark.parametrize("mark", ["is_sharded_weight", "use_presharded_weights"])
def test_a_weight_that_is_cut_before_it_is_loaded_is_refused(mark):
    layer = layer_of(ColumnParallelLinear)
    setattr(layer if mark == "use_presharded_weights" else layer.weight, mark, True)
    assert "thing: loads `weight` by a rule of its own" in only_refusal(split_model(thing=layer))


def test_a_parameter_beside_the_rows_of_a_vocabulary_is_whole():
    vocabulary = VocabParallelEmbedding(torch.zeros(64, HIDDEN), num_rows=10, start=0, size=10, num_ranks=1)
    vocabulary.scale = nn.Parameter(torch.ones(HIDDEN))
    inventory = read(model_of(proj=block_layer(), embed=vocabulary))
    assert {slot.name: slot.full_shape for slot in inventory.slots if "embed" in slot.name} == {
        "embed.weight": (10, HIDDEN),
        "embed.scale": (HIDDEN,),
    }


def test_rows_added_to_a_vocabulary_for_lora_are_refused():
    held = {"num_rows": 64, "start": 0, "size": 64, "num_ranks": 1}
    vocabulary = VocabParallelEmbedding(torch.zeros(128, HIDDEN), **held, num_added=16)
    assert "thing: its vocabulary has 16 rows added for LoRA" in only_refusal(model_of(thing=vocabulary))


def test_what_every_rank_holds_is_whole():
    wrapped = layer_of(ColumnParallelLinear)

    @functools.wraps(wrapped.weight_loader)
    def online_process_loader(): ...

    wrapped.weight.weight_loader = online_process_loader
    model = split_model(
        a=RMSNorm(torch.ones(64)),
        b=RMSNorm(torch.ones(64), default_weight_loader),
        c=RMSNorm(torch.ones(64), row_parallel_weight_loader),
        d=layer_of(ColumnParallelLinear, (HIDDEN, HIDDEN), num_ranks=1, loader=composed_loader),
        e=nn.Conv1d(8, 8, 3),
        f=WholeRMSNorm(torch.ones(64), tp_size=2),
        wrapped=wrapped,
    )
    inventory = read(model)
    assert inventory.refusals == ()
    places = {slot.name: (slot.full_shape, slot.offset) for slot in inventory.slots}
    assert places["wrapped.weight"] == places["split_layer.weight"] == ((HIDDEN, HIDDEN), (128, 0))
    whole = [name for name in places if not name.startswith(("wrapped", "split_layer"))]
    assert {name: places[name] for name in whole} == {
        name: (tuple(model.get_parameter(name).shape), ()) for name in whole
    }


@pytest.mark.parametrize(
    "loader",
    [default_weight_loader, row_parallel_weight_loader, sharded_weight_loader()],
    ids=lambda loader: loader.__qualname__,
)
def test_on_one_rank_no_rule_is_asked_for_how_a_tensor_is_cut(loader):
    attention = attention_with_sinks()
    attention.o_proj = block_layer()
    attention.sinks.weight_loader = loader
    norms = {
        "a": RMSNorm(torch.ones(64), under_online_quantization(loader)),
        "b": ShardedRMSNorm(torch.ones(64)),
    }
    inventory = read(model_of(attn=attention, **norms))
    assert inventory.refusals == ()
    assert [slot.name for slot in inventory.slots] == ["attn.sinks", "attn.o_proj.weight", "a.weight", "b.weight"]


@pytest.mark.parametrize(
    "loader",
    [
        composed_loader,
        composed_weight_loader(),
        under_online_quantization(composed_weight_loader()),
        functools.partial(composed_loader),
    ],
)
def test_a_norm_whose_loader_may_change_its_values_is_refused_on_one_rank_too(loader):
    refusal = only_refusal(model_of(proj=block_layer(), norm=RMSNorm(torch.ones(64), loader)))
    assert refusal.startswith("norm: loads `weight` by a rule of its own, which may change its values")


@pytest.mark.parametrize(("num_ranks", "num_kv_heads", "vocabulary"), SPLITS)
def test_what_the_checkpoint_holds_fused_is_cut_as_its_parts_are(num_ranks, num_kv_heads, vocabulary):
    parts = checkpoint_of(num_kv_heads, vocabulary)
    checkpoint = fused(parts)
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in checkpoint.items()}
    for rank in range(num_ranks):
        model = model_of_rank(FAMILY, parts, rank, num_ranks)
        model.config = SimpleNamespace(base_model_tp_plan={"layers.*.qkv_proj": "", "layers.*.mlp.gate_up_proj": ""})
        inventory = read(model)
        assert inventory.refusals == ()
        assert {slot.name for slot in inventory.slots} == {n for n in checkpoint if not n.endswith("_scale_inv")}
        assert [slot.name for slot in inventory.slots if not is_what_the_rank_holds(slot, checkpoint)] == []
        for slot in inventory.slots:
            box(counts[slot.name], slot.origin, tuple(slot.weight.shape)).add_(1)
        plan = compile_plan(inventory.slots, {name: TensorMeta.of(tensor) for name, tensor in checkpoint.items()})
        assert plan.num_bytes_written == sum(
            tensor.nbytes for slot in inventory.slots for tensor in (slot.weight, slot.scale) if tensor is not None
        )
    for name in ("qkv_proj.weight", "qkv_proj.bias", "gate_up_proj.weight", "gate_up_proj.bias"):
        num_kv_copies = max(1, num_ranks // num_kv_heads) if name.startswith("qkv") else 1
        rows = counts[name].flatten(1).amax(1) if counts[name].ndim == 2 else counts[name]
        num_whole = len(parts["q_proj.bias"]) if name.startswith("qkv") else len(rows)
        assert (rows[:num_whole] == 1).all()
        assert (rows[num_whole:] == num_kv_copies).all()


def fused(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint as Phi-3 writes it: queries, keys and values in one tensor, gate and up in another."""
    kept = dict(checkpoint)
    for whole, parts in {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}.items():
        for leaf in ("weight", "weight_scale_inv", "bias"):
            tensors = [kept.pop(f"{part}.{leaf}") for part in parts]
            raw = [tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor for tensor in tensors]
            kept[f"{whole}.{leaf}"] = torch.cat(raw).view(tensors[0].dtype)
    return kept
