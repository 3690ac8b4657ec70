"""The vLLM adapter's reading of a model, on modules that look like vLLM's; no vLLM is needed. Real ones: tests/vllm."""

import functools
from collections.abc import Iterator
from math import prod
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.layout import read_inventory
from fp8refit_vllm.worker import LiveModel
from torch import Tensor, nn

from fp8refit.errors import InvalidSourceError
from fp8refit.plan import compile_plan
from fp8refit.slots import Inventory, ScaleFormat, Slot, TensorMeta

FP8 = torch.float8_e4m3fn


class TritonFp8BlockScaledMMKernel:
    """Carries the name of a kernel that reads row-major weights."""


class MarlinFP8ScaledMMLinearKernel:
    """Carries the name of one that repacks."""


class BlockLinear(nn.Module):
    """What a block-FP8 linear layer of vLLM shows."""

    def __init__(self, sizes=(256,), cols=256, kernel=None, **attributes):
        super().__init__()
        rows = sum(sizes)
        self.weight = nn.Parameter(torch.zeros(rows, cols, dtype=FP8), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(-(-rows // 128), -(-cols // 128)), requires_grad=False)
        self.weight_block_size = [128, 128]
        self.output_partition_sizes = list(sizes)
        self.quant_method = SimpleNamespace(fp8_linear=kernel or TritonFp8BlockScaledMMKernel())
        for name, value in attributes.items():
            setattr(self, name, value)


def model_of(**modules) -> nn.Module:
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def only_refusal(model) -> str:
    (refusal,) = read_inventory(model).refusals
    return str(refusal)


def test_the_parts_of_a_fused_module_are_slots_of_their_own():
    model = model_of(qkv_proj=BlockLinear(sizes=(256, 128, 128)))
    slots = read_inventory(model).slots
    assert [slot.name for slot in slots] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert [tuple(slot.scale.shape) for slot in slots] == [(2, 2), (1, 2), (1, 2)]
    assert slots[2].weight.data_ptr() == model.qkv_proj.weight[384:].data_ptr()
    assert slots[2].scale.data_ptr() == model.qkv_proj.weight_scale_inv[3:].data_ptr()


def test_the_scale_format_is_the_live_kernel_s():
    powers = TritonFp8BlockScaledMMKernel()
    powers.use_deep_gemm_e8m0 = True
    behind = TritonFp8BlockScaledMMKernel()
    behind.fallback = powers
    model = model_of(a=BlockLinear(), b=BlockLinear(kernel=powers), c=BlockLinear(kernel=behind))
    formats = [slot.scale_format for slot in read_inventory(model).slots]
    assert formats == [ScaleFormat.FP32, ScaleFormat.UE8M0, ScaleFormat.UE8M0]


def test_a_tied_weight_is_an_alias_and_a_bias_beside_it_a_slot():
    embed, head = nn.Embedding(64, 128), nn.Linear(128, 64)
    head.weight = embed.weight
    inventory = read_inventory(model_of(embed=embed, head=head, proj=BlockLinear()))
    assert inventory.aliases == {"head.weight": "embed.weight"}
    assert [slot.name for slot in inventory.slots] == ["embed.weight", "head.bias", "proj.weight"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (BlockLinear(kernel=MarlinFP8ScaledMMLinearKernel()), "MarlinFP8ScaledMMLinearKernel repacks weights"),
        (BlockLinear(tp_size=2), "is a BlockLinear, split over 2 ranks by a rule of its own"),
        (BlockLinear(w13_weight=None), "mixture-of-experts"),
        (BlockLinear(W_UK_T=torch.zeros(1)), "absorbed copies"),
    ],
)
def test_what_cannot_be_refitted_is_refused_by_name(module, reason):
    refusal = only_refusal(model_of(thing=module))
    assert refusal.startswith("thing: ")
    assert reason in refusal


def test_absorbed_copies_are_seen_on_a_module_without_parameters():
    attention = nn.Module()
    attention.W_UK_T = torch.zeros(1)
    assert "absorbed copies" in only_refusal(model_of(attention=attention, proj=BlockLinear()))


def test_a_module_fused_otherwise_than_the_model_says_is_refused():
    assert "holds 2 fused matrices" in only_refusal(model_of(qkv_proj=BlockLinear(sizes=(128, 128))))


@pytest.mark.parametrize(
    "module", [BlockLinear(), nn.Linear(128, 128), nn.LayerNorm(64)], ids=lambda m: type(m).__name__
)
def test_a_module_that_is_not_fused_and_should_be_is_refused(module):
    refusal = only_refusal(model_of(qkv_proj=module))
    assert "holds no fused matrices, and the model says it is made of q_proj, k_proj, v_proj" in refusal


def test_a_module_of_one_part_needs_no_other():
    model = model_of(o_proj=BlockLinear())
    model.packed_modules_mapping["o_proj"] = ["dense"]
    assert [slot.name for slot in read_inventory(model).slots] == ["dense.weight"]


def test_a_module_fused_in_an_order_nobody_says_is_refused():
    assert "holds 3 fused matrices" in only_refusal(model_of(query_key_value=BlockLinear(sizes=(128, 128, 128))))


def test_parts_off_the_block_grid_are_refused():
    assert "do not start on blocks" in only_refusal(model_of(qkv_proj=BlockLinear(sizes=(192, 64, 128))))


def test_another_quantization_is_refused():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(128, 128, dtype=FP8), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(1))
    assert "not block FP8" in only_refusal(model_of(layer=layer))


def test_a_model_without_block_fp8_is_refused():
    assert "holds no block-FP8 weight" in only_refusal(model_of(proj=nn.Linear(128, 128)))


class LayerOfRank(nn.Module):
    """What a tensor-parallel linear layer of vLLM shows, with live values that a test cut from a checkpoint."""

    def __init__(self, weight: Tensor, *, full, rank, num_ranks, scale=None, bias=None, sizes=None, **attributes):
        super().__init__()
        self.output_size, self.input_size = full
        self.tp_rank, self.tp_size = rank, num_ranks
        self.output_partition_sizes = sizes or [weight.shape[0]]
        self.weight_block_size = [128, 128]
        self.quant_method = SimpleNamespace(fp8_linear=TritonFp8BlockScaledMMKernel())
        for name, value in attributes.items():
            setattr(self, name, value)
        for name, tensor in {"weight": weight, "weight_scale_inv": scale, "bias": bias}.items():
            if tensor is not None:
                live = nn.Parameter(tensor.clone(), requires_grad=False)
                live.weight_loader = self.weight_loader
                self.register_parameter(name, live)

    def weight_loader(self):
        """Only its owner's name is looked at."""


class ColumnParallelLinear(LayerOfRank):
    def weight_loader(self): ...
    def weight_loader_v2(self): ...


class MergedColumnParallelLinear(ColumnParallelLinear):
    def weight_loader(self): ...
    def weight_loader_v2(self): ...


class QKVParallelLinear(ColumnParallelLinear):
    def weight_loader(self): ...
    def weight_loader_v2(self): ...


class QKVParallelLinearWithIndexer(QKVParallelLinear):
    def weight_loader_v2(self): ...


class RowParallelLinear(LayerOfRank):
    def weight_loader(self): ...
    def weight_loader_v2(self): ...


class ReplicatedLinear(LayerOfRank):
    def weight_loader(self): ...


class VocabParallelEmbedding(nn.Module):
    """What a vocabulary of vLLM shows. `num_rows` and `start` are what this rank holds of it before padding."""

    def __init__(self, weight: Tensor, *, num_rows, start, size, num_ranks, bias=None, num_added=0):
        super().__init__()
        self.tp_size, self.org_vocab_size, self.num_added_embeddings = num_ranks, size, num_added
        self.num_embeddings_per_partition = weight.shape[0]
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=start + num_rows)
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.bias = nn.Parameter(bias.clone(), requires_grad=False) if bias is not None else None

    def weight_loader(self): ...


class ParallelLMHead(VocabParallelEmbedding):
    pass


class RMSNorm(nn.Module):
    def __init__(self, weight: Tensor, loader=None, **attributes):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        if loader is not None:
            self.weight.weight_loader = loader
        for name, value in attributes.items():
            setattr(self, name, value)


class TPAwareRMSNorm(RMSNorm):
    pass


HIDDEN, HEAD, NUM_HEADS, MLP = 256, 128, 4, 1024


def checkpoint_of(num_kv_heads: int, vocabulary: int) -> dict[str, Tensor]:
    """Every matrix in block FP8 except the vocabulary and a plain one; no two values of a tensor alike but codes."""
    shapes = {
        "q_proj": (NUM_HEADS * HEAD, HIDDEN),
        "k_proj": (num_kv_heads * HEAD, HIDDEN),
        "v_proj": (num_kv_heads * HEAD, HIDDEN),
        "o_proj": (HIDDEN, NUM_HEADS * HEAD),
        "gate_proj": (MLP, HIDDEN),
        "up_proj": (MLP, HIDDEN),
        "down_proj": (HIDDEN, MLP),
        "fc_proj": (MLP, HIDDEN),
        "router": (128, HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)
    checkpoint = {}
    for name, (rows, cols) in shapes.items():
        codes = torch.randint(0, 0x78, (rows, cols), generator=generator, dtype=torch.uint8)
        grid = (-(-rows // 128), -(-cols // 128))
        checkpoint[f"{name}.weight"] = codes.view(FP8)
        checkpoint[f"{name}.weight_scale_inv"] = 1 + torch.arange(prod(grid), dtype=torch.float32).view(grid)
        checkpoint[f"{name}.bias"] = torch.arange(rows, dtype=torch.float32)
    for name, shape in {"embed": (vocabulary, HIDDEN), "plain": (HIDDEN, MLP), "q_norm": (HEAD,)}.items():
        checkpoint[f"{name}.weight"] = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    return checkpoint | {
        "head.weight": checkpoint["embed.weight"] + 0.5,
        "head.bias": torch.arange(vocabulary, dtype=torch.float32),
    }


def model_of_rank(checkpoint: dict[str, Tensor], rank: int, num_ranks: int) -> nn.Module:
    """The model of one rank, cut by chunks and heads as vLLM's documentation says it, not by offsets."""
    who = {"rank": rank, "num_ranks": num_ranks}
    num_kv_heads = checkpoint["k_proj.bias"].shape[0] // HEAD
    kv_heads = range(rank * num_kv_heads // num_ranks, ((rank + 1) * num_kv_heads - 1) // num_ranks + 1)
    of_part = {
        "q_proj": lambda tensor: tensor.chunk(num_ranks)[rank],
        "k_proj": lambda tensor: torch.cat([tensor.chunk(num_kv_heads)[head] for head in kv_heads]),
        "gate_proj": lambda tensor: tensor.chunk(num_ranks)[rank],
    }
    of_part |= {"v_proj": of_part["k_proj"], "up_proj": of_part["gate_proj"], "fc_proj": of_part["gate_proj"]}

    def rows_of(*parts):
        cut = {
            key: [of_part[part](checkpoint[f"{part}.{name}"]) for part in parts]
            for key, name in {"weight": "weight", "scale": "weight_scale_inv", "bias": "bias"}.items()
        }
        return {key: torch.cat(tensors) for key, tensors in cut.items()} | {"sizes": [len(t) for t in cut["weight"]]}

    def columns_of(name):
        cut = {"weight": f"{name}.weight", "scale": f"{name}.weight_scale_inv"}
        cut = {key: checkpoint[found].chunk(num_ranks, 1)[rank] for key, found in cut.items() if found in checkpoint}
        return cut | {"full": tuple(checkpoint[f"{name}.weight"].shape), "bias": checkpoint.get(f"{name}.bias")}

    def vocabulary_of(name):
        held = {}
        for key in ("weight", "bias"):
            tensor = checkpoint.get(f"{name}.{key}")
            if tensor is not None:
                num_padded = -tensor.shape[0] % 64
                padded = torch.cat([tensor, tensor.new_full((num_padded, *tensor.shape[1:]), -1.0)])
                held[key] = padded.chunk(num_ranks)[rank]
        size = checkpoint[f"{name}.weight"].shape[0]
        num_rows = int((held["weight"][:, 0] >= 0).sum())
        start = min(rank * held["weight"].shape[0], size)
        return held | {"num_rows": num_rows, "start": start, "size": size, "num_ranks": num_ranks}

    model = model_of(
        embed=VocabParallelEmbedding(**vocabulary_of("embed")),
        qkv_proj=QKVParallelLinear(
            **rows_of("q_proj", "k_proj", "v_proj"),
            **who,
            full=((NUM_HEADS // num_ranks + 2 * len(kv_heads)) * num_ranks * HEAD, HIDDEN),
            num_kv_head_replicas=max(1, num_ranks // num_kv_heads),
        ),
        q_norm=RMSNorm(checkpoint["q_norm.weight"]),
        o_proj=RowParallelLinear(**columns_of("o_proj"), **who),
        gate_up_proj=MergedColumnParallelLinear(**rows_of("gate_proj", "up_proj"), **who, full=(2 * MLP, HIDDEN)),
        down_proj=RowParallelLinear(**columns_of("down_proj"), **who),
        fc_proj=ColumnParallelLinear(**rows_of("fc_proj"), **who, full=(MLP, HIDDEN)),
        router=ReplicatedLinear(
            checkpoint["router.weight"],
            scale=checkpoint["router.weight_scale_inv"],
            bias=checkpoint["router.bias"],
            full=(128, HIDDEN),
            **who,
        ),
        plain=RowParallelLinear(**columns_of("plain"), **who),
        head=ParallelLMHead(**vocabulary_of("head")),
    )
    model.packed_modules_mapping["gate_up_proj"] = ["gate_proj", "up_proj"]
    return model


def box(tensor: Tensor, origin: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    for dim, (start, size) in enumerate(zip(origin, shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def is_what_the_rank_holds(slot: Slot, checkpoint: dict[str, Tensor]) -> bool:
    tensor = checkpoint[slot.name]
    same = slot.full_shape == tuple(tensor.shape) and torch.equal(
        raw(box(tensor, slot.origin, tuple(slot.weight.shape))), raw(slot.weight)
    )
    if slot.scale is None:
        return same
    origin = tuple(start // 128 for start in slot.origin)
    scale = box(checkpoint[f"{slot.name}_scale_inv"], origin, tuple(slot.scale.shape))
    return same and torch.equal(scale, slot.scale)


def inventories(checkpoint: dict[str, Tensor], num_ranks: int) -> Iterator[tuple[nn.Module, Inventory]]:
    for rank in range(num_ranks):
        model = model_of_rank(checkpoint, rank, num_ranks)
        inventory = read_inventory(model)
        assert not inventory.refusals
        yield model, inventory


SPLITS = [
    pytest.param(
        num_ranks, num_kv_heads, vocabulary, id=f"{num_ranks} ranks, {num_kv_heads} kv heads, {vocabulary} rows"
    )
    for num_ranks, num_kv_heads, vocabulary in [
        (1, 2, 259),
        (2, 1, 259),
        (2, 2, 320),
        (4, 2, 259),
        (4, 4, 130),
        (4, 1, 10),
    ]
]


@pytest.mark.parametrize(("num_ranks", "num_kv_heads", "vocabulary"), SPLITS)
def test_each_slot_says_which_slice_its_rank_holds(num_ranks, num_kv_heads, vocabulary):
    checkpoint = checkpoint_of(num_kv_heads, vocabulary)
    for _, inventory in inventories(checkpoint, num_ranks):
        assert [slot.name for slot in inventory.slots if not is_what_the_rank_holds(slot, checkpoint)] == []
        assert all(slot.offset == () or any(slot.offset) for slot in inventory.slots)


@pytest.mark.parametrize(("num_ranks", "num_kv_heads", "vocabulary"), SPLITS)
def test_the_ranks_together_hold_every_value_as_often_as_they_should(num_ranks, num_kv_heads, vocabulary):
    checkpoint = checkpoint_of(num_kv_heads, vocabulary)
    weights = {name: tensor for name, tensor in checkpoint.items() if not name.endswith("_scale_inv")}
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in weights.items()}
    for _, inventory in inventories(checkpoint, num_ranks):
        assert {slot.name for slot in inventory.slots} == set(weights)
        for slot in inventory.slots:
            box(counts[slot.name], slot.origin, tuple(slot.weight.shape)).add_(1)
    on_every_rank = ("q_norm.weight", "router.weight", "router.bias", "o_proj.bias", "down_proj.bias")
    for name, count in counts.items():
        copies = max(1, num_ranks // num_kv_heads) if name.startswith(("k_proj", "v_proj")) else 1
        assert (count == (num_ranks if name in on_every_rank else copies)).all(), name


@pytest.mark.parametrize(("num_ranks", "num_kv_heads", "vocabulary"), SPLITS)
def test_every_live_byte_is_a_slot_s_or_padding(num_ranks, num_kv_heads, vocabulary):
    for model, inventory in inventories(checkpoint_of(num_kv_heads, vocabulary), num_ranks):
        slots = [tensor for slot in inventory.slots for tensor in (slot.weight, slot.scale) if tensor is not None]
        for tensor in slots:
            raw_view(tensor).fill_(0)
        for tensor in inventory.padding:
            assert (tensor == -1).all()
            tensor.zero_()
        assert not any(raw_view(parameter).any() for parameter in model.parameters())


def raw_view(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)


def test_a_rank_without_a_row_of_the_vocabulary_has_an_empty_slot_and_padding():
    checkpoint = checkpoint_of(2, 10)
    inventory = read_inventory(model_of_rank(checkpoint, 3, 4))
    empty = {slot.name: slot for slot in inventory.slots if slot.weight.numel() == 0}
    assert {name: (slot.full_shape, slot.offset) for name, slot in empty.items()} == {
        "embed.weight": ((10, HIDDEN), (10, 0)),
        "head.weight": ((10, HIDDEN), (10, 0)),
        "head.bias": ((10,), (10,)),
    }
    assert [tuple(padding.shape) for padding in inventory.padding] == [(16, HIDDEN), (16, HIDDEN), (16,)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tied_vocabulary_is_an_alias_on_every_rank(rank):
    model = model_of_rank(checkpoint_of(2, 259), rank, 2)
    model.head.weight = model.embed.weight
    inventory = read_inventory(model)
    assert inventory.aliases == {"head.weight": "embed.weight"}
    (embed,) = (slot for slot in inventory.slots if slot.name == "embed.weight")
    assert (embed.full_shape, embed.origin) == ((259, HIDDEN), (160 * rank, 0))
    assert len(inventory.padding) == 2 * rank


def test_a_slice_off_the_checkpoint_s_grid_has_a_grid_of_its_own():
    weight, scale = torch.zeros(160, HIDDEN, dtype=torch.uint8).view(FP8), torch.ones(2, 2)
    layer = ColumnParallelLinear(weight, scale=scale, full=(320, HIDDEN), rank=1, num_ranks=2)
    (slot,) = read_inventory(model_of(proj=layer)).slots
    assert (slot.full_shape, slot.offset, tuple(slot.scale.shape)) == ((320, HIDDEN), (160, 0), (2, 2))
    compile_plan((slot,), {"proj.weight": TensorMeta(shape=(320, HIDDEN), dtype=torch.bfloat16)})
    quantized = {"proj.weight": ((320, HIDDEN), FP8), "proj.weight_scale_inv": ((3, 2), torch.float32)}
    with pytest.raises(InvalidSourceError, match="off the 128x128 grid"):
        compile_plan((slot,), {name: TensorMeta(shape=s, dtype=d) for name, (s, d) in quantized.items()})


def test_parts_off_the_live_grid_are_refused_on_every_rank():
    sizes = {"sizes": [128, 64, 64], "full": (512, HIDDEN), "rank": 1, "num_ranks": 2}
    codes, scale = torch.zeros(256, HIDDEN, dtype=torch.uint8).view(FP8), torch.ones(2, 2)
    layer = QKVParallelLinear(codes, scale=scale, num_kv_head_replicas=1, **sizes)
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


class MiniMaxText01RMSNormTP(RMSNorm):
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
        (layer_of(LayerOfRank), "is a LayerOfRank, split over 2 ranks by a rule of its own"),
        (layer_of(ColumnParallelLinear, (100, HIDDEN)), "holds [100, 256] of [256, 256], which is no even split"),
        (layer_of(ColumnParallelLinear, (128, HIDDEN, 1)), "holds [128, 256, 1] of [256, 256]"),
        (layer_of(ColumnParallelLinear, sizes=[64]), "holds [128, 256] of [256, 256], which is no even split"),
    ],
)
def test_what_nobody_knows_the_slice_of_is_refused_by_name(module, reason):
    refusal = only_refusal(split_model(thing=module))
    assert refusal.startswith("thing: ")
    assert reason in refusal
    assert "tensor_parallel_size=1" in refusal


def test_a_fused_layer_that_loads_otherwise_than_vllm_s_own_is_refused():
    layer = layer_of(QKVParallelLinearWithIndexer, sizes=[32] * 4, num_kv_head_replicas=1)
    model = split_model(qkvi_proj=layer)
    model.packed_modules_mapping["qkvi_proj"] = ["q_proj", "k_proj", "v_proj", "index_proj"]
    assert "is a QKVParallelLinearWithIndexer, split over 2 ranks by a rule of its own" in only_refusal(model)


def test_a_parameter_beside_weight_and_bias_of_a_split_layer_is_refused():
    layer = layer_of(ColumnParallelLinear)
    layer.per_head = nn.Parameter(torch.zeros(2))
    assert "thing: loads `per_head` by a rule of its own" in only_refusal(split_model(thing=layer))


def test_a_weight_that_the_model_s_own_code_cuts_is_refused():
    layer = layer_of(ColumnParallelLinear)
    layer.weight.is_sharded_weight = True
    assert "thing: loads `weight` by a rule of its own" in only_refusal(split_model(thing=layer))


def test_a_parameter_beside_the_rows_of_a_vocabulary_is_whole():
    vocabulary = VocabParallelEmbedding(torch.zeros(64, HIDDEN), num_rows=10, start=0, size=10, num_ranks=1)
    vocabulary.scale = nn.Parameter(torch.ones(HIDDEN))
    inventory = read_inventory(model_of(proj=BlockLinear(), embed=vocabulary))
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
        f=TPAwareRMSNorm(torch.ones(64), tp_size=2),
        wrapped=wrapped,
    )
    inventory = read_inventory(model)
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
    attention.o_proj = BlockLinear()
    attention.sinks.weight_loader = loader
    norms = {
        "a": RMSNorm(torch.ones(64), under_online_quantization(loader)),
        "b": MiniMaxText01RMSNormTP(torch.ones(64)),
    }
    inventory = read_inventory(model_of(attn=attention, **norms))
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
    refusal = only_refusal(model_of(proj=BlockLinear(), norm=RMSNorm(torch.ones(64), loader)))
    assert refusal.startswith("norm: loads `weight` by a rule of its own, which may change its values")


def worker_of(model, *, speculative=None, load_format="auto"):
    """What a vLLM worker shows of its model."""
    config = SimpleNamespace(
        speculative_config=speculative, load_config=SimpleNamespace(load_format=SimpleNamespace(value=load_format))
    )
    return SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(get_model=lambda: model))


@pytest.mark.parametrize(("method", "refused"), [("eagle3", True), ("ngram", False), (None, False)])
def test_drafts_with_weights_of_their_own_are_refused(method, refused):
    speculative = SimpleNamespace(method=method) if method else None
    inventory = LiveModel(worker_of(model_of(proj=BlockLinear()), speculative=speculative)).read_inventory()
    assert [slot.name for slot in inventory.slots] == ["proj.weight"]
    assert [refusal.module for refusal in inventory.refusals] == ["draft model"] * refused
    assert all(method in refusal.reason for refusal in inventory.refusals)


def test_a_draft_model_is_refused_beside_what_the_model_is_refused_for():
    worker = worker_of(model_of(norm=nn.LayerNorm(8)), speculative=SimpleNamespace(method="eagle3"))
    modules = [refusal.module for refusal in LiveModel(worker).read_inventory().refusals]
    assert modules == ["Module", "draft model"]


class Attention(nn.Module):
    """Scales of a KV cache as a dummy boot leaves them: noise."""

    def __init__(self):
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(0.25))
        self._k_scale_float = 0.25


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_noise_in_the_kv_scales_of_a_dummy_boot_is_put_right_once(load_format):
    attention = Attention()
    live = LiveModel(worker_of(model_of(attn=attention, proj=BlockLinear()), load_format=load_format))
    refreshes = live.read_inventory().refreshes
    for refresh in refreshes:
        refresh.run()
    scale = 1.0 if load_format == "dummy" else 0.25
    assert (attention._k_scale.item(), attention._k_scale_float) == (scale, scale)
    attention._k_scale.fill_(0.5)
    for refresh in refreshes:
        refresh.run()
    assert attention._k_scale.item() == 0.5
    assert live.read_inventory().refreshes == ()
