"""What travels, on layouts of engines that nobody boots here."""

import pytest
import torch

from fp8refit.config import CollectiveConfig, RefitConfig
from fp8refit.live.formats import FLOAT_SCALES, WHOLE, AmaxOver, ScaleFormat
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.slots import Stacked, TensorMeta
from fp8refit.remote.broadcast.sections import find_sections
from fp8refit.remote.broadcast.sender import Sender
from fp8refit.remote.broadcast.wire_formats import choose_wire
from tests.wire_bytes import num_bytes_sent, num_bytes_to

HIDDEN, MLP, HEAD, VOCABULARY, NUM_LAYERS = 1024, 3072, 128, 4096, 3
NUM_HEADS, NUM_KV_HEADS = 8, 4
STACK = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS = [f"model.layers.0.mlp.experts.{expert}" for expert in range(4)]


def slot(name, full_shape, rank=0, num_ranks=1, *, dim=0, is_fp8=True, scale_format=ScaleFormat.FP32):
    size = full_shape[dim] // num_ranks
    return SlotLayout(
        name=name,
        module="",
        full_shape=full_shape,
        shape=(*full_shape[:dim], size, *full_shape[dim + 1 :]),
        offset=tuple(rank * size if place == dim else 0 for place in range(len(full_shape))),
        dtype="float8_e4m3fn" if is_fp8 else "bfloat16",
        scale_format=scale_format if is_fp8 else None,
        block_size=(128, 128) if is_fp8 else None,
        kernel="",
    )


def layout(slots, stacked=()):
    return EngineLayout(
        engine="fake", versions={}, device="cuda:0", slots=tuple(slots), aliases={}, stacked=tuple(stacked), refusals=()
    )


def dense(rank, num_ranks):
    """One rank of a model of Qwen's shape."""
    yield slot("model.embed_tokens.weight", (VOCABULARY, HIDDEN), rank, num_ranks, is_fp8=False)
    yield slot("lm_head.weight", (VOCABULARY, HIDDEN), rank, num_ranks, is_fp8=False)
    for number in range(NUM_LAYERS):
        prefix = f"model.layers.{number}"
        for name, rows in {"q": NUM_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS}.items():
            yield slot(f"{prefix}.self_attn.{name}_proj.weight", (rows * HEAD, HIDDEN), rank, num_ranks)
        yield slot(f"{prefix}.self_attn.o_proj.weight", (HIDDEN, NUM_HEADS * HEAD), rank, num_ranks, dim=1)
        for name in ("gate", "up"):
            yield slot(f"{prefix}.mlp.{name}_proj.weight", (MLP, HIDDEN), rank, num_ranks)
        yield slot(f"{prefix}.mlp.down_proj.weight", (HIDDEN, MLP), rank, num_ranks, dim=1)
        yield slot(f"{prefix}.input_layernorm.weight", (HIDDEN,), is_fp8=False)


def send(metadata, layouts, **options):
    """The wire, and the sender's account of it."""
    sections, config = find_sections(layouts), RefitConfig(collective=CollectiveConfig(**options))
    wire = choose_wire(metadata, layouts, config, sections)
    return wire, Sender(wire, config, torch.device("cpu"), num_sections=sections.num_sections)


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_receives_about_its_part_and_the_trainer_sends_no_more_than_before(num_ranks, wire, num_replicas):
    layouts = [layout(dense(rank, num_ranks)) for _ in range(num_replicas) for rank in range(num_ranks)]
    metadata = {each.name: TensorMeta(shape=each.full_shape, dtype=torch.bfloat16) for each in layouts[0].slots}
    whole = num_bytes_sent(send(metadata, [layout(dense(0, 1))], wire=wire)[1])
    _, sender = send(metadata, layouts, wire=wire)
    for section in range(num_ranks):
        assert num_bytes_to(sender, section) == pytest.approx(whole / num_ranks, rel=0.01)
    assert num_bytes_sent(sender) == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_ranks_that_hold_columns_get_whole_rows_unless_the_trainer_quantizes(wire):
    """Each row has one scale, so a rank that quantizes needs what the other one holds."""
    rows = {"block_size": (1, WHOLE), "amax_over": AmaxOver.WHOLE_BLOCK}
    layouts = [layout([slot("w", (256, HIDDEN), rank, 2, dim=1).model_copy(update=rows)]) for rank in range(2)]
    wire_used, sender = send({"w": TensorMeta(shape=(256, HIDDEN), dtype=torch.bfloat16)}, layouts, wire=wire)
    (tensor,) = wire_used.tensors
    if wire == "bf16":
        assert (tensor.cut, tensor.format) == (None, None)
        assert num_bytes_sent(sender) == pytest.approx(256 * HIDDEN * 2, rel=0.01)
        return
    assert tensor.cut is not None and tensor.format == layouts[0].slots[0].format
    for section in range(2):
        assert num_bytes_to(sender, section) == pytest.approx(256 * (HIDDEN // 2 + 4), rel=0.01)


@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_ranks_that_hold_whole_rows_get_those_alone(wire):
    rows = {"block_size": (1, WHOLE), "amax_over": AmaxOver.WHOLE_BLOCK}
    layouts = [layout([slot("w", (256, HIDDEN), rank, 2).model_copy(update=rows)]) for rank in range(2)]
    wire_used, _ = send({"w": TensorMeta(shape=(256, HIDDEN), dtype=torch.bfloat16)}, layouts, wire=wire)
    assert wire_used.tensors[0].cut is not None


def experts(ids, rank=0, num_ranks=1, scale_format=ScaleFormat.FP32):
    """A rank that holds some experts, and the stack that they come in."""
    names = {f"{EXPERTS[each]}.{part}.weight": (each, row) for each in ids for part, row in (("w1", 0), ("w3", 256))}
    slots = [slot(name, (256, HIDDEN), rank, num_ranks, scale_format=scale_format) for name in names]
    return layout(slots, [Stacked(name=STACK, shape=(4, 512, HIDDEN), parts=names)])


def test_of_a_stack_each_rank_of_expert_parallelism_receives_its_own_experts():
    metadata = {STACK: TensorMeta(shape=(4, 512, HIDDEN), dtype=torch.float32)}
    wire, sender = send(metadata, [experts((0, 3)), experts((1, 2))])
    assert [tensor.name for tensor in wire.tensors] == [
        f"{name}.{part}.weight" for name in EXPERTS for part in ("w1", "w3")
    ]
    assert [(origin.expert, origin.first_row) for origin in wire.origins] == [
        (expert, row) for expert in range(4) for row in (0, 256)
    ]
    spans = [tensor.cut.spans for tensor in wire.tensors]
    assert spans == [((0, 256), (0, 0))] * 2 + [((0, 0), (0, 256))] * 4 + [((0, 256), (0, 0))] * 2
    codes = 2 * 512 * HIDDEN
    assert num_bytes_to(sender, 0) == num_bytes_to(sender, 1) == pytest.approx(codes, rel=0.01)


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
def test_a_trainer_quantizes_in_the_format_of_the_engines(scale_format):
    metadata = {STACK: TensorMeta(shape=(4, 512, HIDDEN), dtype=torch.float32)}
    wire, _ = send(metadata, [experts(range(4), scale_format=scale_format)] * 2)
    assert {(tensor.dtype, tensor.format.scale_format) for tensor in wire.tensors} == {("float8_e4m3fn", scale_format)}


@pytest.mark.parametrize("other", [each for each in FLOAT_SCALES if each is not ScaleFormat.FP32])
def test_a_stack_that_engines_want_in_different_formats_travels_unquantized(other):
    metadata = {STACK: TensorMeta(shape=(4, 512, HIDDEN), dtype=torch.float32)}
    replicas = [experts(range(4)), experts(range(4), scale_format=other)]
    assert {tensor.dtype for tensor in send(metadata, replicas)[0].tensors} == {"bfloat16"}


@pytest.mark.parametrize(
    "meta",
    [
        TensorMeta(shape=(4, 500, HIDDEN), dtype=torch.bfloat16),
        TensorMeta(shape=(4, 512, HIDDEN), dtype=torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_a_stack_that_does_not_fit_or_is_fp8_already_travels_as_it_is(meta):
    (tensor,) = send({STACK: meta}, [experts((0, 3)), experts((1, 2))])[0].tensors
    assert (tensor.name, tensor.shape, tensor.cut) == (STACK, meta.shape, None)


def test_a_stack_whose_experts_engines_call_by_different_names_travels_as_it_is():
    other = experts(range(4))
    parts = {name.replace("w1", "gate_proj"): place for name, place in other.stacked[0].parts.items()}
    other = other.model_copy(update={"stacked": (Stacked(name=STACK, shape=(4, 512, HIDDEN), parts=parts),)})
    metadata = {STACK: TensorMeta(shape=(4, 512, HIDDEN), dtype=torch.bfloat16)}
    (tensor,) = send(metadata, [experts(range(4)), other])[0].tensors
    assert tensor.name == STACK
