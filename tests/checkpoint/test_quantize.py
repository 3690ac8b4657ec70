"""Quantized checkpoints: the bytes, the files around them, and all or nothing."""

import json
import re
import resource
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8refit import InvalidSourceError, NonFiniteError, quantize_blockwise
from fp8refit.checkpoint import quantize, quantize_checkpoint
from fp8refit.errors import CheckpointError
from fp8refit.live.formats import (
    FLOAT_SCALES,
    NVFP4,
    PER_TENSOR,
    WHOLE,
    Container,
    ScaleFormat,
    quantization_config,
)
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.slots import FP8_DTYPE, Stacked
from fp8refit.sources.source import as_source
from tests.fakes import FakeModel, live_bytes, make_policy, make_target, refit_target

CONFIG = {"architectures": ["FakeForCausalLM"], "torch_dtype": "bfloat16", "tie_word_embeddings": False}
LAYER = "model.layers.0"
Q_PROJ = f"{LAYER}.self_attn.q_proj.weight"
O_PROJ = f"{LAYER}.self_attn.o_proj.weight"
NORM = f"{LAYER}.input_layernorm.weight"
BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"
EXTRA = {
    "lm_head.weight": (10, 192),
    f"{LAYER}.mlp.gate.weight": (4, 192),
    f"{LAYER}.mlp.experts.3.w1.weight": (130, 192),
    f"{LAYER}.mlp.shared_experts.up_proj.weight": (130, 192),
    f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": (130, 192),
    f"{LAYER}.self_attn.q_proj.bias": (256,),
}
QUANTIZED = {
    *(f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo"),
    f"{LAYER}.mlp.up_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
    f"{LAYER}.mlp.experts.3.w1.weight",
    f"{LAYER}.mlp.shared_experts.up_proj.weight",
    f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight",
}


def make_weights(dtype: torch.dtype = torch.bfloat16, *, extra: bool = True, seed: int = 1) -> dict[str, Tensor]:
    weights = make_policy(FakeModel(), seed=seed, dtype=dtype)
    if extra:
        generator = torch.Generator().manual_seed(seed)
        weights |= {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in EXTRA.items()}
    return weights


def write_checkpoint(folder: Path, weights: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def read_shards(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def read_json(file: Path) -> dict:
    return json.loads(file.read_text())


def fake_layout() -> EngineLayout:
    return make_target(FakeModel()).live.layout()


def assert_quantized(written: dict[str, Tensor], name: str, weight: Tensor, **options: object) -> None:
    codes, scale = quantize_blockwise(weight, **options)
    assert torch.equal(written[name].view(torch.uint8), codes.view(torch.uint8)), name
    assert torch.equal(written[name + "_scale_inv"], scale), name


@pytest.fixture
def src(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "src", make_weights())


@pytest.fixture
def dst(tmp_path) -> Path:
    return tmp_path / "dst"


def refuse(
    tmp_path: Path, error: type[BaseException], match: str | None, src: Path, dst: Path, **options: object
) -> Exception:
    """Check that nothing is left behind."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=match) as caught:
        quantize_checkpoint(src, dst, **options)
    assert sorted(tmp_path.iterdir()) == before
    return caught.value


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
def test_linear_weights_are_quantized_and_the_rest_is_copied(scale_format, src, dst):
    report = quantize_checkpoint(src, dst, scale_format=scale_format)
    weights, written = load_file(src / "model.safetensors"), read_shards(dst)
    assert written.keys() == weights.keys() | {name + "_scale_inv" for name in QUANTIZED}
    for name, weight in weights.items():
        if name in QUANTIZED:
            assert_quantized(written, name, weight, scale_format=scale_format)
        else:
            assert written[name].dtype == weight.dtype and torch.equal(written[name], weight), name
    assert (report.num_quantized, report.num_copied) == (len(QUANTIZED), len(weights) - len(QUANTIZED))
    assert report.scale_formats == {scale_format: len(QUANTIZED)}
    assert report.bytes_read == sum(tensor.nbytes for tensor in weights.values())
    assert report.bytes_written == sum(tensor.nbytes for tensor in written.values())
    assert json.loads(report.model_dump_json())["num_quantized"] == len(QUANTIZED)


def test_other_blocks(src, dst):
    quantize_checkpoint(src, dst, block_size=(64, 32))
    assert_quantized(read_shards(dst), Q_PROJ, load_file(src / "model.safetensors")[Q_PROJ], block_size=(64, 32))
    assert read_json(dst / "config.json")["quantization_config"]["weight_block_size"] == [64, 32]


def test_config_is_what_vllm_reads(src, dst):
    quantize_checkpoint(src, dst)
    config = read_json(dst / "config.json")
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", f"{LAYER}.mlp.gate"],
    }
    assert config == CONFIG


@pytest.mark.parametrize("container", Container)
def test_every_container_has_the_same_bytes_under_its_names(container, src, dst):
    report = quantize_checkpoint(src, dst, container=container)
    written, weights = read_shards(dst), load_file(src / "model.safetensors")
    suffix = {"fp8": "_scale_inv"}.get(container, "_scale")
    assert written.keys() == weights.keys() | {name + suffix for name in QUANTIZED}
    for name in QUANTIZED:
        scale = written.pop(name + suffix)
        rows, columns = (-(-size // 128) for size in weights[name].shape)
        assert scale.shape == ((rows, 1, columns, 1) if container == "modelopt" else (rows, columns))
        assert_quantized(written | {f"{name}_scale_inv": scale.reshape(rows, columns)}, name, weights[name])
    index = read_json(dst / "model.safetensors.index.json")
    assert index["weight_map"].keys() == read_shards(dst).keys()
    assert report.bytes_written == index["metadata"]["total_size"]
    config = read_json(dst / "config.json")["quantization_config"]
    assert config["quant_method"] == container


@pytest.mark.parametrize("container", [Container.FP8, Container.MODELOPT])
def test_a_container_without_scales_of_rows_is_refused(container, src, dst):
    with pytest.raises(ValueError, match=f"container {container} has no fp32 scales per row; use compressed-tensors"):
        quantize_checkpoint(src, dst, block_size=(1, WHOLE), container=container)
    assert not dst.exists()


QKV = {f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"}


def layout_with_shared_scales(container: Container = Container.FP8, **changed: object) -> EngineLayout:
    """Of an engine with one scale per weight, which q, k and v share."""
    layout = fake_layout()
    slots = [
        slot.model_copy(
            update={
                "block_size": PER_TENSOR.block_size,
                "scale_format": PER_TENSOR.scale_format,
                "amax_over": PER_TENSOR.amax_over,
                "shared_with": Q_PROJ if slot.name in QKV else slot.name,
            }
            | changed
        )
        if slot.format is not None
        else slot
        for slot in layout.slots
    ]
    return layout.model_copy(update={"slots": tuple(slots), "container": container})


@pytest.mark.parametrize(
    ("container", "dtype"),
    [(Container.FP8, torch.bfloat16), (Container.FP8, torch.float32), (Container.COMPRESSED_TENSORS, torch.bfloat16)],
)
def test_what_an_engine_holds_with_one_scale_gets_one_wherever_it_is_stored(container, dtype, dst, tmp_path):
    weights = make_weights(dtype, extra=False)
    src = write_checkpoint(tmp_path / "src", weights)
    told = []
    layout = layout_with_shared_scales(container)
    report = quantize_checkpoint(
        src, dst, like=layout, max_shard_bytes=50_000, on_progress=lambda *each: told.append(each)
    )
    written = read_shards(dst)
    fused = torch.cat([weights[name] for name in sorted(QKV)]).to(torch.bfloat16)
    codes, scale = quantize_blockwise(fused, format=PER_TENSOR)
    assert torch.equal(torch.cat([written[name].view(torch.uint8) for name in sorted(QKV)]), codes.view(torch.uint8))
    assert {tuple(written[f"{name}_scale"].shape) for name in QKV} == {(1,)}
    assert {written[f"{name}_scale"].item() for name in QKV} == {scale.item()}
    alone, own = quantize_blockwise(weights[O_PROJ].to(torch.bfloat16), format=PER_TENSOR)
    assert torch.equal(written[O_PROJ].view(torch.uint8), alone.view(torch.uint8))
    assert written[f"{O_PROJ}_scale"].item() == own.item() != scale.item()
    assert len({read_json(dst / "model.safetensors.index.json")["weight_map"][name] for name in QKV}) > 1
    config = read_json(dst / "config.json")["quantization_config"]
    assert config["quant_method"] == container and "weight_block_size" not in config
    if container == Container.COMPRESSED_TENSORS:
        group = config["config_groups"]["group_0"]
        assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("tensor", "tensor")
    num_quantized = sum(tensor.nbytes for name, tensor in weights.items() if name in QUANTIZED)
    assert told[-1][0] == told[-1][1] == report.bytes_read + num_quantized
    assert told == sorted(told)


def test_of_tensors_that_share_a_scale_only_bad_ones_are_named(dst, tmp_path):
    weights = make_weights(extra=False)
    bad = sorted(QKV)[1]
    weights[bad][3, 4] = torch.nan
    weights[O_PROJ][0, 0] = torch.inf
    src = write_checkpoint(tmp_path / "src", weights)
    error = refuse(tmp_path, NonFiniteError, None, src, dst, like=layout_with_shared_scales())
    assert error.names == tuple(sorted([bad, O_PROJ]))


def test_a_tensor_that_shares_scales_with_others_in_two_places_is_refused(dst, tmp_path):
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False))
    layout = layout_with_shared_scales()
    other = next(slot for slot in layout.slots if slot.name == Q_PROJ).model_copy(update={"shared_with": O_PROJ})
    layout = layout.model_copy(update={"slots": (*layout.slots, other)})
    refuse(
        tmp_path, CheckpointError, f"{Q_PROJ}: slots of this engine need it in different formats", src, dst, like=layout
    )


def test_a_layout_that_does_not_say_what_shares_a_scale_is_refused(dst, tmp_path):
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False))
    layout = layout_with_shared_scales(shared_with="")
    refuse(tmp_path, CheckpointError, f"{Q_PROJ}: an earlier version wrote this layout", src, dst, like=layout)


def test_what_is_left_out_is_named_so_that_vllm_leaves_out_nothing_else(src, dst, tmp_path):
    quantize_checkpoint(src, dst, container=Container.COMPRESSED_TENSORS)
    kept = ["lm_head", f"{LAYER}.mlp.gate"]
    assert read_json(dst / "config.json")["quantization_config"]["ignore"] == kept
    quantize_checkpoint(src, tmp_path / "other", container=Container.MODELOPT)
    assert read_json(tmp_path / "other" / "config.json")["quantization_config"]["ignore"] == kept
    # vLLM leaves out what a name is a part of, and what a pattern matches, but members of what it fuses by their names alone.
    quantized = [f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"]
    kept = [f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate"]
    for block_format in (None, NVFP4):
        config = quantization_config(block_format, kept, Container.MODELOPT, quantized)
        plain, pattern = config["ignore"]
        assert plain == kept[0]
        assert fnmatch(kept[1], pattern)
        assert not fnmatch(f"{kept[1]}_up_proj", pattern) and pattern not in f"{kept[1]}_up_proj"


def test_other_files_are_copied_and_other_weights_are_not(src, dst):
    (src / "tokenizer.json").write_text('{"vocab": {}}')
    (src / "merges.txt").write_text("a b")
    (src / "pytorch_model.bin").write_bytes(b"weights")
    (src / "pytorch_model.bin.index.json").write_text("{}")
    (src / "original").mkdir()
    quantize_checkpoint(src, dst)
    assert sorted(file.name for file in dst.iterdir()) == [
        "config.json",
        "merges.txt",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (dst / "tokenizer.json").read_text() == '{"vocab": {}}'


@pytest.mark.parametrize("max_shard_bytes", [1, 50_000, 100_000])
def test_shards_stay_below_their_size_and_the_index_finds_every_tensor(max_shard_bytes, src, dst):
    report = quantize_checkpoint(src, dst, max_shard_bytes=max_shard_bytes)
    files = sorted(file.name for file in dst.glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]
    assert report.shards == tuple(files) and count > 2
    index = read_json(dst / "model.safetensors.index.json")
    found, total = {}, 0
    for file in files:
        tensors = load_file(dst / file)
        found |= dict.fromkeys(tensors, file)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        assert num_bytes <= max_shard_bytes or len([name for name in tensors if not name.endswith("_scale_inv")]) == 1
        total += num_bytes
        with safe_open(dst / file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
    assert index == {"metadata": {"total_size": total}, "weight_map": found}
    assert report.bytes_written == total
    quantize_checkpoint(src, dst.with_name("one"))
    whole, parts = read_shards(dst.with_name("one")), read_shards(dst)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name].view(torch.uint8), parts[name].view(torch.uint8)) for name in whole)


def test_a_sharded_source_is_read_through_its_index(tmp_path, src, dst):
    quantize_checkpoint(src, dst)
    weights = load_file(src / "model.safetensors")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(CONFIG))
    files = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    quantize_checkpoint(sharded, tmp_path / "other")
    one, other = read_shards(dst), read_shards(tmp_path / "other")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


def test_fp32_masters_are_rounded_to_bf16_first(tmp_path, dst):
    weights = make_weights(torch.float32)
    quantize_checkpoint(write_checkpoint(tmp_path / "src", weights, torch_dtype="float32"), dst)
    written = read_shards(dst)
    assert_quantized(written, Q_PROJ, weights[Q_PROJ].bfloat16())
    assert torch.equal(written[NORM], weights[NORM].bfloat16())
    assert torch.equal(written[BIAS], weights[BIAS]), "routers add this bias in fp32"
    assert read_json(dst / "config.json")["torch_dtype"] == "bfloat16"


def test_fp16_is_quantized_as_it_is(tmp_path, dst):
    weights = make_weights(torch.float16)
    quantize_checkpoint(write_checkpoint(tmp_path / "src", weights, torch_dtype="float16"), dst)
    written = read_shards(dst)
    assert_quantized(written, Q_PROJ, weights[Q_PROJ])
    assert torch.equal(written[NORM], weights[NORM]) and written[NORM].dtype is torch.float16
    assert read_json(dst / "config.json")["torch_dtype"] == "float16"


def test_a_tied_model_is_written_without_its_head(tmp_path, dst):
    quantize_checkpoint(write_checkpoint(tmp_path / "src", make_weights(), tie_word_embeddings=True), dst)
    assert "lm_head.weight" not in read_shards(dst)
    assert "lm_head.weight" not in read_json(dst / "model.safetensors.index.json")["weight_map"]


@pytest.mark.parametrize("has_layout", [True, False])
def test_a_tied_model_whose_head_differs_is_refused(has_layout, tmp_path, dst):
    weights, like = make_weights(extra=False), fake_layout() if has_layout else None
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    same = write_checkpoint(tmp_path / "same", weights, tie_word_embeddings=not has_layout)
    quantize_checkpoint(same, tmp_path / "of the same", like=like)
    weights["lm_head.weight"][-1, -1] += 1
    src = write_checkpoint(tmp_path / "src", weights, tie_word_embeddings=not has_layout)
    refuse(tmp_path, CheckpointError, "lm_head.weight: is tied, and differs", src, dst, like=like)


def test_progress_ends_at_the_bytes_of_the_source(src, dst):
    seen = []
    report = quantize_checkpoint(src, dst, on_progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {report.bytes_read}
    assert seen[-1][0] == report.bytes_read and len(seen) == report.num_quantized + report.num_copied


# The layout of an engine.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_tensor_has_the_format_of_its_slot(dtype, tmp_path, dst):
    weights = make_weights(dtype, extra=False)
    report = quantize_checkpoint(write_checkpoint(tmp_path / "src", weights), dst, like=fake_layout())
    written = read_shards(dst)
    source = {name: weight.bfloat16() if dtype is torch.float32 else weight for name, weight in weights.items()}
    assert_quantized(written, Q_PROJ, source[Q_PROJ], scale_format="fp32")
    assert_quantized(written, O_PROJ, source[O_PROJ], scale_format="ue8m0")
    assert report.scale_formats == {ScaleFormat.FP32: 5, ScaleFormat.UE8M0: 1}
    assert torch.equal(written[BIAS], weights[BIAS]), "the engine holds this one in fp32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("max_shard_bytes", [50_000, 5_000_000])
def test_a_refit_from_the_checkpoint_equals_one_from_its_source(dtype, max_shard_bytes, tmp_path, dst):
    # Slices off the block grid cannot be copied from any checkpoint: this engine holds `up_proj` whole.
    weights = make_weights(dtype, extra=False)
    direct, booted = FakeModel(), FakeModel()
    for model in (direct, booted):
        slots = [slot for slot in model.slots() if slot.name != f"{LAYER}.mlp.up_proj.weight"]
        model.slots = lambda slots=slots: slots
        model.layers[0].up.data.view(torch.uint8).zero_()
    del weights[f"{LAYER}.mlp.up_proj.weight"]
    src = write_checkpoint(tmp_path / "src", weights)
    quantize_checkpoint(src, dst, like=make_target(booted).live.layout(), max_shard_bytes=max_shard_bytes)
    refit_target(make_target(direct), as_source(src))
    refit_target(make_target(booted), as_source(dst))
    assert live_bytes(direct) == live_bytes(booted)


def test_only_what_the_engine_quantizes_is_quantized(tmp_path, dst):
    layout = fake_layout()
    slots = tuple(
        slot.model_copy(update={"scale_format": None, "block_size": None, "dtype": "bfloat16"})
        if slot.name == Q_PROJ
        else slot
        for slot in layout.slots
    )
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False))
    quantize_checkpoint(src, dst, like=layout.model_copy(update={"slots": slots}))
    written = read_shards(dst)
    assert written[Q_PROJ].dtype is torch.bfloat16 and Q_PROJ + "_scale_inv" not in written
    kept = read_json(dst / "config.json")["quantization_config"]["modules_to_not_convert"]
    assert kept == ["lm_head", Q_PROJ.removesuffix(".weight")]


def test_a_draft_with_a_checkpoint_of_its_own_is_not_asked_for(dst, tmp_path):
    layout = fake_layout()
    draft = next(slot for slot in layout.slots if slot.name == Q_PROJ).model_copy(update={"name": f"draft.{Q_PROJ}"})
    src = write_checkpoint(tmp_path / "without extras", make_weights(extra=False))
    quantize_checkpoint(src, dst, like=layout.model_copy(update={"slots": (*layout.slots, draft)}))
    assert read_shards(dst).keys() == read_shards(quantized(src, tmp_path / "alone", layout)).keys()


def test_the_projection_of_two_halves_of_a_draft_stays_as_engines_multiply_by_it(dst, tmp_path):
    projection = {"model.layers.2.eh_proj.weight": make_weights()[Q_PROJ].clone()}
    quantize_checkpoint(write_checkpoint(tmp_path / "src", make_weights() | projection), dst)
    assert {read_shards(dst)[name].dtype for name in projection} == {torch.bfloat16}


def quantized(src: Path, dst: Path, layout: EngineLayout) -> Path:
    quantize_checkpoint(src, dst, like=layout)
    return dst


def test_a_router_that_the_engine_quantizes_is_quantized(tmp_path, dst):
    """As `fp8_per_block` does in vLLM, and no published checkpoint."""
    layout, weights = fake_layout(), make_weights(extra=False)
    like = next(slot for slot in layout.slots if slot.name == Q_PROJ)
    router = like.model_copy(update={"name": "model.layers.0.mlp.gate.weight"})
    src = write_checkpoint(tmp_path / "src", weights | {router.name: weights[Q_PROJ].clone()})
    quantize_checkpoint(src, tmp_path / "by name")
    assert read_shards(tmp_path / "by name")[router.name].dtype is torch.bfloat16
    quantize_checkpoint(src, dst, like=layout.model_copy(update={"slots": (*layout.slots, router)}))
    written = read_shards(dst)
    assert torch.equal(written[router.name].view(torch.uint8), written[Q_PROJ].view(torch.uint8))
    kept = read_json(dst / "config.json")["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.mlp.gate" not in kept


def test_aliases_and_rotary_tables_fit_any_layout(tmp_path, dst):
    weights = make_weights(extra=False)
    more = {"lm_head.weight": weights["model.embed_tokens.weight"].clone(), "model.rotary_emb.inv_freq": torch.ones(32)}
    quantize_checkpoint(write_checkpoint(tmp_path / "src", weights | more), dst, like=fake_layout())
    assert read_shards(dst)["model.rotary_emb.inv_freq"].dtype is torch.float32


def test_every_tensor_that_does_not_fit_the_layout_is_named(tmp_path, dst):
    weights = make_weights(extra=False)
    del weights[O_PROJ]
    weights |= {"model.extra.weight": torch.ones(1), "model.more.weight": torch.ones(1), NORM: torch.ones(3)}
    src = write_checkpoint(tmp_path / "src", weights)
    error = refuse(tmp_path, CheckpointError, "does not fit the layout of fake", src, dst, like=fake_layout())
    assert sorted(problem.split(":")[0] for problem in error.problems) == sorted(
        ["model.extra.weight", "model.more.weight", NORM, O_PROJ]
    )


def test_slots_of_one_tensor_in_two_formats_are_refused(tmp_path, dst):
    layout = fake_layout()
    other = next(slot for slot in layout.slots if slot.name == Q_PROJ).model_copy(
        update={"scale_format": ScaleFormat.UE8M0}
    )
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False))
    like = layout.model_copy(update={"slots": (*layout.slots, other)})
    refuse(
        tmp_path, CheckpointError, f"{Q_PROJ}: slots of this engine need it in different formats", src, dst, like=like
    )


def test_blocks_of_two_sizes_are_refused(tmp_path, dst):
    layout = fake_layout()
    slots = tuple(
        slot.model_copy(update={"block_size": (64, 64)}) if slot.name == Q_PROJ else slot for slot in layout.slots
    )
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False))
    like = layout.model_copy(update={"slots": slots})
    refuse(
        tmp_path,
        CheckpointError,
        "has fp32 scales per .* block and fp32 scales per .* block, but a checkpoint can have only one kind",
        src,
        dst,
        like=like,
    )


def test_parts_of_rows_that_each_have_a_scale_are_refused(tmp_path, dst):
    """As SGLang's own FP8 has them on several ranks. A checkpoint has one scale per row."""
    layout = fake_layout()
    columns = next(slot.shape[1] for slot in layout.slots if slot.name == Q_PROJ)
    of_rows = {"block_size": (1, WHOLE), "full_shape": (128, 2 * columns)}
    slots = tuple(slot.model_copy(update=of_rows) if slot.name == Q_PROJ else slot for slot in layout.slots)
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False))
    why = f"each rank of this engine has a scale of its own for its part of {Q_PROJ}, where .* boot the engine from the BF16"
    refuse(tmp_path, CheckpointError, why, src, dst, like=layout.model_copy(update={"slots": slots}))


STACK = f"{LAYER}.moe.input.weight"
EXPERTS = f"{LAYER}.moe.experts.gate_up_proj"


def layout_with_stack(*, is_transposed: bool = False, **others: object) -> EngineLayout:
    """A layer of two experts, 192 x 256 each."""
    layout = fake_layout()
    like = next(slot for slot in layout.slots if slot.name == Q_PROJ)
    parts = {f"{STACK}[{expert}]": (expert, 0) for expert in range(2)}
    slots = [like.model_copy(update={"name": part, "full_shape": (192, 256), "shape": (192, 256)}) for part in parts]
    stacked = Stacked(name=STACK, shape=(2, 192, 256), parts=parts, is_transposed=is_transposed)
    update = {"slots": (*layout.slots, *slots), "stacked": (stacked,), "aliases": {**layout.aliases, EXPERTS: STACK}}
    return EngineLayout.model_validate_json(layout.model_copy(update=update | others).model_dump_json())


@pytest.mark.parametrize("name", [STACK, EXPERTS])
@pytest.mark.parametrize("written", [STACK, EXPERTS])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_matrix_of_a_stack_is_quantized_under_the_name_that_the_engine_loads(
    name, written, is_transposed, tmp_path, dst
):
    stack = torch.randn(2, *((256, 192) if is_transposed else (192, 256))).to(torch.bfloat16)
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False) | {name: stack})
    report = quantize_checkpoint(
        src, dst, like=layout_with_stack(is_transposed=is_transposed, written_as={STACK: (written,)})
    )
    shards = read_shards(dst)
    assert (name in shards) == (name == written)
    for index, matrix in enumerate(stack):
        found = {written: shards[written][index], f"{written}_scale_inv": shards[f"{written}_scale_inv"][index]}
        assert_quantized(found, written, matrix)
    index = read_json(dst / "model.safetensors.index.json")
    assert set(index["weight_map"]) == set(shards)
    assert report.bytes_written == sum(tensor.nbytes for tensor in shards.values())


def test_a_stack_may_be_written_expert_by_expert_and_part_by_part(tmp_path, dst):
    stack = torch.randn(2, 192, 256).to(torch.bfloat16)
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False) | {STACK: stack})
    written = tuple(f"{LAYER}.moe.experts.{{}}.{part}_proj.weight" for part in ("gate", "up"))
    report = quantize_checkpoint(src, dst, like=layout_with_stack(written_as={STACK: written}))
    shards = read_shards(dst)
    for expert, matrix in enumerate(stack):
        for name, part in zip(written, matrix.chunk(2), strict=True):
            assert_quantized(shards, name.format(expert), part)
    assert STACK not in shards
    assert set(read_json(dst / "model.safetensors.index.json")["weight_map"]) == set(shards)
    assert report.bytes_written == sum(tensor.nbytes for tensor in shards.values())


def test_weights_whose_scales_the_engine_does_not_load_are_refused_by_name(tmp_path, dst):
    stack = torch.ones(2, 192, 256, dtype=torch.bfloat16)
    src = write_checkpoint(tmp_path / "src", make_weights(extra=False) | {STACK: stack})
    reason = "this engine's own loader takes its block scales under no name"
    like = layout_with_stack(written_as={STACK: (), Q_PROJ: ()})
    error = refuse(tmp_path, CheckpointError, reason, src, dst, like=like)
    assert {problem.split(":")[0] for problem in error.problems} == {STACK, Q_PROJ}
    assert all(reason in problem for problem in error.problems)
    error = refuse(
        tmp_path, CheckpointError, "all experts of a layer in one tensor", src, dst, like=layout_with_stack()
    )
    assert [problem.split(":")[0] for problem in error.problems] == [STACK]


def test_a_name_for_scales_is_one_that_every_rank_takes():
    ranks = [layout_with_stack(written_as={STACK: (EXPERTS,), Q_PROJ: other}) for other in ((Q_PROJ,), ())]
    assert EngineLayout.merge(ranks).written_as == {STACK: (EXPERTS,), Q_PROJ: ()}


# What is refused, and what is left behind: nothing.


@pytest.mark.parametrize("name", [Q_PROJ, NORM, "lm_head.weight"])
@pytest.mark.parametrize("max_shard_bytes", [1, 5_000_000])
def test_nan_is_named_and_leaves_nothing_behind(name, max_shard_bytes, tmp_path, dst):
    weights = make_weights()
    for bad in (name, O_PROJ):
        weights[bad].view(-1)[-1] = float("nan")
    src = write_checkpoint(tmp_path / "src", weights)
    error = refuse(tmp_path, NonFiniteError, "Nothing was written", src, dst, max_shard_bytes=max_shard_bytes)
    assert sorted(error.names) == sorted([name, O_PROJ])


def test_fp32_beyond_bf16_is_not_finite(tmp_path, dst):
    weights = make_weights(torch.float32)
    for name in (Q_PROJ, NORM, BIAS):
        weights[name].view(-1)[0] = 3.4e38
    src = write_checkpoint(tmp_path / "src", weights)
    assert sorted(refuse(tmp_path, NonFiniteError, "NaN or Inf", src, dst).names) == sorted([Q_PROJ, NORM])


def test_a_quantized_checkpoint_is_refused(tmp_path, src, dst):
    quantize_checkpoint(src, dst)
    refuse(tmp_path, CheckpointError, "is quantized already", dst, tmp_path / "again")


def test_fp8_tensors_are_refused_even_without_a_config_that_says_so(tmp_path, dst):
    weights = make_weights() | {Q_PROJ: torch.zeros(256, 192, dtype=FP8_DTYPE), Q_PROJ + "_scale_inv": torch.ones(2, 2)}
    error = refuse(tmp_path, CheckpointError, "FP8 already", write_checkpoint(tmp_path / "src", weights), dst)
    assert sorted(problem.split(":")[0] for problem in error.problems) == [Q_PROJ, Q_PROJ + "_scale_inv"]


def test_experts_in_one_tensor_are_refused_without_a_layout_that_keeps_them(tmp_path, dst):
    stack = f"{LAYER}.mlp.experts.gate_up_proj"
    weights = make_weights(extra=False) | {stack: torch.ones(2, 4, 4)}
    src = write_checkpoint(tmp_path / "src", weights)
    with pytest.raises(CheckpointError, match="save_pretrained") as caught:
        quantize_checkpoint(src, dst)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [stack]
    assert not dst.exists()
    layout = fake_layout()
    kept = SlotLayout(
        name=stack,
        module="experts",
        full_shape=(2, 4, 4),
        shape=(2, 4, 4),
        offset=(0, 0, 0),
        dtype="float32",
        scale_format=None,
        block_size=None,
        kernel="",
    )
    quantize_checkpoint(src, dst, like=layout.model_copy(update={"slots": (*layout.slots, kept)}))
    assert torch.equal(read_shards(dst)[stack], weights[stack])


def test_a_checkpoint_without_linear_weights_is_refused(tmp_path, dst):
    src = write_checkpoint(tmp_path / "src", {NORM: torch.ones(3)})
    refuse(tmp_path, CheckpointError, "no weight to quantize", src, dst)


def test_a_result_that_exists_is_not_touched(tmp_path, src, dst):
    dst.mkdir()
    (dst / "notes.txt").write_text("mine")
    refuse(tmp_path, CheckpointError, "not an empty folder", src, dst)
    refuse(tmp_path, CheckpointError, "not an empty folder", src, dst / "notes.txt")
    assert [file.name for file in dst.iterdir()] == ["notes.txt"]


def test_an_empty_folder_is_filled(src, dst):
    dst.mkdir()
    quantize_checkpoint(src, dst)
    assert (dst / "config.json").is_file()


def test_a_missing_parent_is_made(src, dst):
    quantize_checkpoint(src, dst / "deep" / "er")
    assert (dst / "deep" / "er" / "config.json").is_file()


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_source_without_a_config_is_refused(content, tmp_path, src, dst):
    (src / "config.json").unlink()
    if content is not None:
        (src / "config.json").write_text(content)
    refuse(tmp_path, CheckpointError, r"config\.json: .* pass a Hugging Face checkpoint folder", src, dst)


def test_a_truncated_source_is_refused(tmp_path, src, dst):
    file = src / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refuse(tmp_path, InvalidSourceError, "cannot be read", src, dst)


def test_a_shard_size_of_nothing_is_refused(tmp_path, src, dst):
    refuse(tmp_path, ValueError, "at least 1", src, dst, max_shard_bytes=0)


def test_a_full_disk_leaves_nothing_behind(tmp_path, src, dst, monkeypatch):
    saved = []

    def save_until_full(tensors, file, **options):
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(file)
        save_file(tensors, file, **options)

    monkeypatch.setattr("safetensors.torch.save_file", save_until_full)
    refuse(tmp_path, CheckpointError, "No space left on device", src, dst, max_shard_bytes=50_000)
    assert saved and not saved[0].exists()


def test_an_interrupt_leaves_nothing_behind(tmp_path, src, dst):
    def interrupt(done, total):
        raise KeyboardInterrupt

    refuse(tmp_path, KeyboardInterrupt, None, src, dst, on_progress=interrupt)


def test_an_interrupt_while_files_move_into_a_folder_that_was_there_leaves_nothing_behind(
    tmp_path, src, dst, monkeypatch
):
    dst.mkdir()
    moved, rename = [], Path.rename

    def rename_two(file, to):
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(rename(file, to))

    monkeypatch.setattr(Path, "rename", rename_two)
    refuse(tmp_path, KeyboardInterrupt, None, src, dst, max_shard_bytes=50_000)
    assert len(moved) == 2 and list(dst.iterdir()) == []


def test_a_layout_of_an_engine_that_cannot_be_refitted_is_refused(tmp_path, dst):
    like = fake_layout().model_copy(update={"refusals": ("a.b: its kernel repacks weights. Set y",)})
    refuse(
        tmp_path, CheckpointError, "its kernel repacks weights", write_checkpoint(tmp_path / "src", {}), dst, like=like
    )


# Where it is written.


def place(tmp_path: Path, kind: str) -> Path:
    """A destination."""
    place = tmp_path / kind
    match kind:
        case "empty":
            place.mkdir()
        case "link":
            (tmp_path / "behind").mkdir()
            place.symlink_to("behind")
        case "dangling":
            place.symlink_to("nowhere")
        case "far":
            place = place / "away"
    return place


PLACES = ["new", "empty", "link", "dangling", "far"]


@pytest.mark.parametrize("kind", PLACES)
def test_every_free_place_is_taken_and_kept(kind, src, tmp_path):
    dst = place(tmp_path, kind)
    inode = dst.stat().st_ino if dst.exists() else None
    quantize_checkpoint(src, dst)
    assert read_json(dst / "config.json")["quantization_config"]
    assert read_shards(dst).keys() == read_json(dst / "model.safetensors.index.json")["weight_map"].keys()
    assert sorted(path.name for path in dst.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    assert inode in (None, dst.stat().st_ino)


def test_a_place_inside_of_the_source(src):
    quantize_checkpoint(src, src / "fp8")
    assert read_shards(src / "fp8")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        quantize_checkpoint(src, src)


def test_what_can_be_no_folder_is_refused_before_the_work(src, tmp_path, work):
    (tmp_path / "loop").symlink_to("loop")
    refuse(tmp_path, CheckpointError, "loop: cannot be written", src, tmp_path / "loop")
    refuse(tmp_path, CheckpointError, "cannot be written .*File name too long", src, tmp_path / ("n" * 300) / "dst")
    (tmp_path / "file").touch()
    refuse(
        tmp_path,
        CheckpointError,
        "could not be written .*(File exists|Not a directory)",
        src,
        tmp_path / "file" / "dst",
    )
    assert work == []


@pytest.fixture
def work(monkeypatch) -> list[str]:
    """Files that were written."""
    files: list[str] = []
    save = quantize._save
    monkeypatch.setattr(quantize, "_save", lambda tensors, file: (files.append(file.name), save(tensors, file)))
    return files


def test_too_little_room_is_seen_before_the_work(src, tmp_path, work, monkeypatch):
    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    error = refuse(tmp_path, CheckpointError, "too little room", src, tmp_path / "far" / "dst")
    assert re.search(r"it needs 0\.\d MB, and 0\.0 MB are free", str(error))
    assert work == []


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(
    ("num_bytes", "file"), [(100_000, "model-00001"), (300, "model.safetensors.index.json"), (5000, "tokenizer.json")]
)
def test_a_disk_that_is_full_in_the_middle_is_named_with_its_file(kind, num_bytes, file, src, tmp_path, monkeypatch):
    (src / "tokenizer.json").write_text(6000 * " ")
    if not file.startswith("model-"):
        monkeypatch.setattr(quantize, "_save", lambda tensors, file: file.touch())
    if file.startswith("tokenizer"):
        monkeypatch.setattr(quantize, "_write_index", lambda shards, file: None)
    dst = place(tmp_path, kind)
    before = sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"could not be written \({file}.*too large.* MB are free"):
            quantize_checkpoint(src, dst)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_it_leaves_nothing(kind, error, src, tmp_path):
    def end(done, total):
        if done == total:
            raise error

    dst = place(tmp_path, kind)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error):
        quantize_checkpoint(src, dst, on_progress=end)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["new", "empty"])
def test_two_at_once_do_not_mix(kind, src, tmp_path):
    """One has begun when the other does all of its work: either is refused."""
    dst = place(tmp_path, kind)
    errors = []

    def run_another(done, total):
        if done == total:
            try:
                quantize_checkpoint(src, dst, scale_format=ScaleFormat.UE8M0)
            except CheckpointError as error:
                errors.append(str(error))

    try:
        quantize_checkpoint(src, dst, on_progress=run_another)
    except CheckpointError as error:
        errors.append(str(error))
    (error,) = errors
    assert "not an empty folder" in error or "not empty" in error
    written = read_shards(dst)
    form = ScaleFormat.UE8M0 if kind == "new" else ScaleFormat.FP32
    assert_quantized(written, Q_PROJ, load_file(src / "model.safetensors")[Q_PROJ], scale_format=form)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([kind, "src"])
    assert not list(tmp_path.rglob(".*"))


def test_what_others_write_into_the_folder_meanwhile_is_theirs(src, tmp_path):
    dst = place(tmp_path, "empty")
    with pytest.raises(CheckpointError, match=r"another process wrote config\.json"):
        quantize_checkpoint(src, dst, on_progress=lambda *_: (dst / "config.json").write_text("theirs"))
    assert [path.name for path in dst.iterdir()] == ["config.json"]
    assert (dst / "config.json").read_text() == "theirs"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"{", b"5"])
def test_a_config_that_cannot_be_read_is_named(content, src, dst, tmp_path):
    (src / "config.json").write_bytes(content)
    refuse(tmp_path, CheckpointError, "config.json: (cannot be read|is not a JSON object)", src, dst)


def test_matrices_that_cannot_be_quantized_are_named(tmp_path, dst):
    src = write_checkpoint(tmp_path / "src", make_weights() | {"a.q_proj.weight": torch.ones(4, 4, dtype=torch.int64)})
    error = refuse(tmp_path, CheckpointError, "cannot be quantized", src, dst)
    assert error.problems[0].startswith("a.q_proj.weight: is int64 with shape [4, 4]")


def test_weights_without_values_are_written(tmp_path, dst):
    quantize_checkpoint(write_checkpoint(tmp_path / "src", {Q_PROJ: torch.ones(3, 0).bfloat16()}), dst)
    assert {name: list(tensor.shape) for name, tensor in read_shards(dst).items()} == {
        Q_PROJ: [3, 0],
        Q_PROJ + "_scale_inv": [1, 0],
    }
