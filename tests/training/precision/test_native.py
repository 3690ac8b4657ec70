"""Trainers whose parameters are block FP8 already: bit for bit where formats agree, else refused, or quantized from masters."""

import pytest
import torch

from fp8refit import PrecisionError, Refitter, quantize_blockwise
from fp8refit.live.slots import FP8_DTYPE
from fp8refit.training import precision
from tests.training.precision.models import layout_of, make_trainer, slot


class Float8BlockwiseQTensor:
    """The fields of Transformer Engine's, which needs a GPU: codes as bytes, scales padded to fours along K."""

    def __init__(self, codes, scale, *, is_2d=True, fp8_dtype="DType.kFloat8E4M3"):
        padding = -scale.shape[1] % 4
        self._rowwise_data = codes.view(torch.uint8)
        self._rowwise_scale_inv = torch.nn.functional.pad(scale, (0, padding), value=7.0)
        self._columnwise_data = self._columnwise_scale_inv = None
        self._is_2D_scaled, self._fp8_dtype = is_2d, fp8_dtype


def of_torchao(weight):
    """torchao's own quantization of a matrix, with its own rounding."""
    torchao = pytest.importorskip("torchao.quantization")
    return torchao.Float8Tensor.from_hp(weight, granularity=torchao.PerBlock([128, 128]))


def of_transformer_engine(weight, scale_format="ue8m0"):
    """As TE rounds: powers of two up, not by the rule of our quantizer."""
    blocks = weight.float().view(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    if scale_format == "ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (blocks / scale[:, None, :, None]).to(FP8_DTYPE).view_as(weight)
    return Float8BlockwiseQTensor(codes, scale), codes, scale


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_parameters_of_transformer_engine_pass_through(scale_format):
    weight = torch.randn(256, 384)
    weight[0, 0] = 450 / 64  # where the rule of 464 has another power of two than rounding up
    value, codes, scale = of_transformer_engine(weight, scale_format)
    plain = torch.randn(3)
    sent = precision.block_scaled(
        {"module.a.weight": value, "norm": plain}, like=layout_of([slot("a.weight", (256, 384), scale_format)])
    )
    assert sent.keys() == {"a.weight", "a.weight_scale_inv", "norm"} and sent["norm"] is plain
    assert torch.equal(sent["a.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(sent["a.weight_scale_inv"], scale)
    ours, _ = quantize_blockwise(weight, scale_format="ue8m0")
    assert scale_format == "fp32" or not torch.equal(ours.view(torch.uint8), codes.view(torch.uint8))


def test_parameters_of_torchao_reach_the_engine_bit_for_bit():
    from fp8refit_transformers import to_block_fp8

    model, engine = make_trainer(dtype=torch.bfloat16), to_block_fp8(make_trainer(dtype=torch.bfloat16, seed=1))
    refitter = Refitter(engine)
    state = {n: of_torchao(t) if "_proj" in n else t for n, t in model.state_dict().items()}
    report = refitter.refit(precision.block_scaled(state, like=refitter.layout()))
    assert report.num_quantized == 0
    live = engine.state_dict()
    for name, value in state.items():
        if "_proj" in name:
            assert torch.equal(live[name].view(torch.uint8), value.qdata.view(torch.uint8)), name
            assert torch.equal(live[f"{name}_scale_inv"], value.scale), name


UNFIT = {
    "scales that are not powers of two": (lambda w: of_transformer_engine(w, "fp32")[0], "ue8m0", "are not all ue8m0"),
    "groups instead of blocks": (
        lambda w: Float8BlockwiseQTensor(w.to(FP8_DTYPE), torch.ones(2, 256), is_2d=False),
        "fp32",
        "holds no codes in blocks",
    ),
    "E5M2": (
        lambda w: Float8BlockwiseQTensor(w.to(FP8_DTYPE), torch.ones(2, 3), fp8_dtype="DType.kFloat8E5M2"),
        "fp32",
        "this engine holds E4M3",
    ),
    "other blocks": (
        lambda w: Float8BlockwiseQTensor(w.to(FP8_DTYPE), torch.ones(4, 3)),
        "fp32",
        "blocks of 128x128 need [2, 3]",
    ),
    "an engine that holds BF16": (lambda w: of_transformer_engine(w)[0], None, "does not hold it as block FP8"),
}


@pytest.mark.parametrize(("make", "scale_format", "problem"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_refused_or_sent_as_its_master(make, scale_format, problem):
    weight, like = torch.randn(256, 384), layout_of([slot("a.weight", (256, 384), scale_format)])
    with pytest.raises(PrecisionError) as raised:
        precision.block_scaled({"a.weight": make(weight)}, like=like)
    (line,) = raised.value.problems
    assert line.startswith("a.weight: ") and problem in line and "masters=" in line
    sent = precision.block_scaled({"a.weight": make(weight)}, like=like, masters={"module.a.weight": weight})
    assert sent == {"a.weight": weight}
