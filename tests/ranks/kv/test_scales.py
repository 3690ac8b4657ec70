"""The scales of an FP8 KV cache: arithmetic, names, checks, passes and copies, over a fake cache."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8refit.config import KvConfig, KvOrder
from fp8refit.errors import (
    CalibrationError,
    InvalidCalibrationError,
    InvalidSourceError,
    UnsupportedEngineError,
)
from fp8refit.fill.plan import PlanBuilder
from fp8refit.live.names import kv_scale_names
from fp8refit.live.slots import Inventory, KvCache, KvLayer, KvScale, Refusal, Slot, TensorMeta
from fp8refit.ranks.kv.calibration import to_float32
from fp8refit.ranks.kv.scales import KINDS, MIN_SCALE, KvScales, report_of, scale_of
from fp8refit.ranks.kv.source_scales import SourceScales

CPU = torch.device("cpu")
K, V = "layers.0.attn.k_scale", "layers.0.attn.v_scale"
CONFIG = KvConfig()


@dataclass
class FakePrefill:
    """Shows keys that are the token ids, values that are half of them, and queries of 100."""

    vocab_size: int = 50
    max_length: int = 8
    max_tokens: int = 10
    passes: list[list[list[int]]] = field(default_factory=list)
    num_layers: int = 2
    error: BaseException | None = None

    def __call__(self, sequences, observe):
        assert torch.is_inference_mode_enabled()
        assert all(sequence.dtype is torch.int64 and sequence.ndim == 1 for sequence in sequences)
        self.passes.append([sequence.tolist() for sequence in sequences])
        if self.error is not None:
            raise self.error
        for layer in range(self.num_layers):
            tokens = torch.cat(list(sequences)).float()[:, None] * (layer + 1)
            observe(layer, torch.full_like(tokens, 100.0), -tokens, tokens / 2)


class FakeEngine:
    """Two layers: the first has scales for keys and values, the second for all three, in several places."""

    def __init__(self, **options):
        self.events = []
        self.prefill = options.pop("prefill", FakePrefill())
        self.tensors = {}
        layers = []
        for index, kinds in enumerate(("kv", "qkv")):
            name = f"layers.{index}.attn"
            scales = []
            for kind in kinds:
                shape = (1,) if kind == "v" else ()
                tensor = self.tensors[f"{name}.{kind}_scale"] = torch.full(shape, 9.0)
                scales.append(KvScale(kind=kind, tensor=tensor, write_copies=self.copy_to(f"{name}.{kind}_scale")))
            layers.append(KvLayer(name=name, scales=tuple(scales)))
        self.cache = KvCache(
            dtype="fp8",
            backend="fake",
            layers=tuple(layers),
            prefill=self.prefill,
            after_write=lambda: self.events.append("after"),
            **options,
        )
        self.scales = KvScales(self.cache, CPU)

    def copy_to(self, name):
        return lambda value: self.events.append((name, value))

    def values(self):
        return {name: tensor.item() for name, tensor in self.tensors.items()}


def tokens(*rows):
    return KvOrder(token_ids=tuple(tuple(row) for row in rows))


@pytest.mark.parametrize("amax", [1e-3, 0.1, 1.0, 2.375, 448.0, 2000.0, 3e38])
@pytest.mark.parametrize("margin", [1.0, 1.05, 2.0])
def test_a_scale_is_the_margin_times_the_maximum_over_448(amax, margin):
    scale = scale_of(amax, margin)
    assert scale == float(np.float32(margin * amax / 448))
    if margin == 1.0:
        code = torch.tensor(amax / scale).clamp(max=448).to(torch.float8_e4m3fn).float()
        assert code.item() == 448


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-12])
def test_no_scale_is_so_small_that_its_reciprocal_is_not_finite(amax):
    assert scale_of(amax, 1.0) == MIN_SCALE
    assert math.isfinite(float(torch.tensor(1 / MIN_SCALE, dtype=torch.bfloat16)))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-45, 1e39, -1e39])
def test_scales_are_float32_numbers(value):
    with np.errstate(over="ignore"):
        assert to_float32(value) == float(np.float32(value))


def test_what_was_seen_becomes_scales():
    engine = FakeEngine()
    measured = engine.scales.measure(tokens((3, 7), (5,)), CONFIG)
    assert measured.amax == {
        "layers.0.attn.k_scale": 7.0,
        "layers.0.attn.v_scale": 3.5,
        "layers.1.attn.q_scale": 100.0,
        "layers.1.attn.k_scale": 14.0,
        "layers.1.attn.v_scale": 7.0,
    }
    assert measured.num_passes == 1 and measured.seconds > 0
    assert engine.values() == dict.fromkeys(engine.tensors, 9.0) and engine.events == []
    scales = engine.scales.scales_for(measured.amax, CONFIG)
    assert scales == {name: float(np.float32(1.05 * amax / 448)) for name, amax in measured.amax.items()}


def test_the_margin_is_two_where_nothing_clamps_and_else_what_is_said():
    amax = {K: 448.0}
    assert FakeEngine(saturates=True).scales.scales_for(amax, CONFIG) == {K: to_float32(1.05)}
    assert FakeEngine(saturates=False).scales.scales_for(amax, CONFIG) == {K: 2.0}
    for saturates in (True, False):
        assert FakeEngine(saturates=saturates).scales.scales_for(amax, KvConfig(margin=1.5)) == {K: 1.5}


@pytest.mark.parametrize("amax", [0.5, 1e-3])
def test_a_maximum_below_one_becomes_a_scale_too(amax):
    scales = FakeEngine(saturates=True).scales.scales_for({K: amax, V: 0.0}, CONFIG)
    assert scales == {K: to_float32(1.05 * amax / 448)}


def test_only_the_kinds_that_are_wanted_are_measured():
    engine, config = FakeEngine(), KvConfig(scales=("q", "v"))
    measured = engine.scales.measure(tokens((4,)), config)
    assert measured.amax[K] == 0.0 and measured.amax[V] == 2.0
    assert set(engine.scales.scales_for(measured.amax, config)) == {
        V,
        "layers.1.attn.q_scale",
        "layers.1.attn.v_scale",
    }
    assert engine.scales.kept(measured.amax, config) == ()


def test_a_layer_that_saw_nothing_keeps_its_scale():
    engine = FakeEngine(prefill=FakePrefill(num_layers=1))
    measured = engine.scales.measure(tokens((4,), (0,)), CONFIG)
    names = ("layers.1.attn.q_scale", "layers.1.attn.k_scale", "layers.1.attn.v_scale")
    assert engine.scales.kept(measured.amax, CONFIG) == names
    assert set(engine.scales.scales_for(measured.amax, CONFIG)) == {K, V}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1,) * 4, (2,) * 6], [[4, 6]]),
        ([(1,) * 4, (2,) * 7], [[4], [7]]),
        ([(1,) * 30, (2,), (3,)], [[30], [1, 1]]),
        ([(1,), (2,) * 30, (3,)], [[1], [30], [1]]),
        ([(1,)] * 25, [[1] * 10, [1] * 10, [1] * 5]),
    ],
    ids=["exact", "one-over", "long-first", "long-between", "many"],
)
def test_passes_hold_whole_sequences(rows, expected):
    engine = FakeEngine()
    measured = engine.scales.measure(tokens(*rows), CONFIG)
    assert [[len(row) for row in batch] for batch in engine.prefill.passes] == expected
    assert [tuple(row) for batch in engine.prefill.passes for row in batch] == rows
    assert measured.num_passes == len(expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_no_maxima(bad):
    class Broken(FakePrefill):
        def __call__(self, sequences, observe):
            super().__call__(sequences, observe)
            observe(1, None, torch.tensor([[1.0, bad]]), None)

    with pytest.raises(CalibrationError, match=r"NaN or Inf .*1 place.*layers\.1\.attn\.k_scale"):
        FakeEngine(prefill=Broken()).scales.measure(tokens((4,)), CONFIG)


def test_nan_is_not_forgotten_by_later_passes():
    class Broken(FakePrefill):
        def __call__(self, sequences, observe):
            super().__call__(sequences, observe)
            if len(self.passes) == 1:
                observe(0, None, torch.tensor([[torch.nan]]), None)

    with pytest.raises(CalibrationError, match=r"layers\.0\.attn\.k_scale"):
        FakeEngine(prefill=Broken()).scales.measure(tokens((4,) * 8, (5,) * 8), CONFIG)


def test_no_memory_is_told_with_what_helps():
    engine = FakeEngine(prefill=FakePrefill(error=torch.OutOfMemoryError("tried to allocate")))
    with pytest.raises(CalibrationError, match=r"tried to allocate.*shorter sequences"):
        engine.scales.measure(tokens((4,)), CONFIG)
    with pytest.raises(ZeroDivisionError):
        FakeEngine(prefill=FakePrefill(error=ZeroDivisionError())).scales.measure(tokens((4,)), CONFIG)


def test_every_copy_is_written_and_then_the_engine_is_told():
    engine = FakeEngine()
    written = engine.scales.write({K: 0.1, "layers.1.attn.v_proj.v_scale": 0.3})
    tenth, third = to_float32(0.1), to_float32(0.3)
    assert written == {K: tenth, "layers.1.attn.v_scale": third}
    assert engine.events == [(K, tenth), ("layers.1.attn.v_scale", third), "after"]
    assert engine.values() == dict.fromkeys(engine.tensors, 9.0) | written


def test_tensors_are_written_where_they_are():
    engine = FakeEngine()
    places = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in engine.tensors.items()}
    engine.scales.write(dict.fromkeys(engine.tensors, 0.5))
    assert places == {name: (tensor.data_ptr(), tensor.shape) for name, tensor in engine.tensors.items()}
    assert engine.values() == dict.fromkeys(engine.tensors, 0.5)


def test_nothing_to_write_tells_nobody():
    engine = FakeEngine()
    assert engine.scales.write({}) == {} and engine.events == []


def test_a_scale_that_only_other_engines_use_is_let_be():
    engine = FakeEngine()
    engine.scales.check(KvOrder(scales={"layers.0.attn.q_scale": 0.5, K: 0.25}), CONFIG)
    assert engine.scales.write({"layers.0.attn.q_scale": 0.5, K: 0.25}) == {K: 0.25}


@pytest.mark.parametrize("kind", KINDS)
def test_every_spelling_of_a_name_is_one_scale(kind):
    for name in kv_scale_names("layers.1.attn", kind):
        engine = FakeEngine()
        engine.scales.check(KvOrder(scales={name: 0.5}), CONFIG)
        assert engine.scales.write({name: 0.5}) == {f"layers.1.attn.{kind}_scale": 0.5}


BAD_ORDERS = {
    "unknown": (KvOrder(scales={"layers.7.attn.k_scale": 1.0, K: 1.0}), r"has no layers\.7\.attn\.k_scale;"),
    "zero": (KvOrder(scales={K: 0.0}), rf"{K}: is 0; a KV-cache scale must be finite and positive"),
    "negative": (KvOrder(scales={K: -0.5}), "is -0.5"),
    "nan": (KvOrder(scales={K: math.nan, V: 1.0}), "is nan"),
    "inf": (KvOrder(scales={K: math.inf}), "is inf"),
    "underflow": (KvOrder(scales={K: 1e-60}), "is 1e-60"),
    "overflow": (KvOrder(scales={K: 1e60}), r"is 1e\+60"),
    "two": (KvOrder(scales={K: 0.0, V: -1.0}), rf"{K}: .*; {V}: "),
    "vocabulary": (tokens((1, 2), (50, 3)), "token id 50 is outside the vocabulary of 50"),
    "length": (tokens((1,), (1,) * 9), "a sequence has 9 tokens, but the engine takes at most 8"),
}


@pytest.mark.parametrize(("order", "message"), BAD_ORDERS.values(), ids=BAD_ORDERS)
def test_orders_that_do_not_fit_are_refused(order, message):
    engine = FakeEngine()
    with pytest.raises(InvalidCalibrationError, match=message):
        engine.scales.check(order, CONFIG)
    assert engine.prefill.passes == [] and engine.events == []


def test_orders_that_fit():
    engine = FakeEngine()
    engine.scales.check(tokens((49,) * 8, (0,)), CONFIG)
    engine.scales.check(KvOrder(scales=dict.fromkeys(engine.tensors, 1e-30)), CONFIG)
    assert engine.prefill.passes == [] and engine.events == []


REFUSAL = Refusal(module="layers.0.attn", reason="its scale is a constant of a graph", remedy="Set enforce_eager=True")


def test_an_engine_may_refuse_all_or_only_to_measure():
    fixed = FakeEngine(refusals=(REFUSAL,)).scales
    for order in (tokens((1,)), KvOrder(scales={K: 1.0})):
        with pytest.raises(UnsupportedEngineError, match=r"cannot be changed:\n.*enforce_eager"):
            fixed.check(order, CONFIG)
    given_only = FakeEngine(prefill_refusals=(REFUSAL,)).scales
    with pytest.raises(UnsupportedEngineError, match=r"cannot be measured, only given:\n.*enforce_eager"):
        given_only.check(tokens((1,)), CONFIG)
    given_only.check(KvOrder(scales={K: 1.0}), CONFIG)
    with pytest.raises(UnsupportedEngineError, match="not measured"):
        FakeEngine(prefill=None).scales.check(tokens((1,)), CONFIG)
    with pytest.raises(UnsupportedEngineError, match="no FP8 KV cache"):
        KvScales(KvCache(dtype="auto", backend="fake"), CPU).check(tokens((1,)), CONFIG)


def arrivals_of(engine):
    slot = Slot(name="w", full_shape=(2,), weight=torch.zeros(2))
    return SourceScales(engine.scales, Inventory(slots=(slot,), aliases={"tied": "w"}, kv=engine.cache), CPU)


def test_sources_may_bring_scales_under_every_name():
    engine = FakeEngine()
    inventory = arrivals_of(engine).inventory
    assert [(slot.name, slot.full_shape, slot.is_optional) for slot in inventory.slots] == [
        ("w", (2,), False),
        *((name, (1,), True) for name in engine.tensors),
    ]
    assert all(slot.weight.dtype is torch.float32 for slot in inventory.slots[1:])
    assert inventory.aliases["tied"] == "w" and inventory.aliases["layers.0.attn.attn.k_scale"] == K
    assert inventory.aliases["layers.0.attn.k_proj.output_scale"] == K
    assert {"layers.0.attn.q_scale", "layers.0.attn.attn.q_scale"} <= set(inventory.unneeded)
    assert "layers.1.attn.q_scale" not in inventory.unneeded
    assert {"layers.0.attn.prob_scale", "layers.1.attn.prob_scale"} <= set(inventory.unneeded)
    live = {tensor.data_ptr() for tensor in engine.tensors.values()}
    assert not live & {slot.weight.data_ptr() for slot in inventory.slots}, "judged before they are written"


def arrive(engine, **values):
    """Plan a source that brings `values`, and write it where the slots are."""
    arrivals = arrivals_of(engine)
    inventory = arrivals.inventory
    names = {"k": K, "v": V, "alias": "layers.0.attn.attn.k_scale"}
    brought = {names[key]: torch.tensor(value) for key, value in values.items()}
    metadata = {"w": TensorMeta(shape=(2,), dtype=torch.float32)} | {
        name: TensorMeta.of(tensor) for name, tensor in brought.items()
    }
    plan = PlanBuilder(inventory.slots, aliases=inventory.aliases, unneeded=inventory.unneeded).plan(metadata)
    for step in plan.steps:
        if step.source in brought:
            inventory.slots[step.slot].weight.view(()).copy_(brought[step.source])
    return arrivals.arrived(arrivals.steps(plan))


def test_what_arrived_is_told_by_our_names():
    assert arrive(FakeEngine()) == {}
    assert arrive(FakeEngine(), v=0.5) == {V: 0.5}
    assert arrive(FakeEngine(), alias=0.25, v=0.5) == {K: 0.25, V: 0.5}


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_scales_that_arrived_are_told_by_the_names_of_the_source(bad):
    with pytest.raises(InvalidSourceError, match=r"layers\.0\.attn\.attn\.k_scale: is") as raised:
        arrive(FakeEngine(), alias=bad, v=0.5)
    assert raised.value.written and len(raised.value.problems) == 1


def test_what_arrived_once_does_not_come_back():
    engine = FakeEngine()
    assert arrive(engine, k=0.5) == {K: 0.5}
    assert arrive(engine, v=0.25) == {V: 0.25}


def test_the_report_counts_sequences_and_tokens():
    report = report_of(tokens((1, 2), (3,)), {K: 0.5}, kept=(V,), num_passes=2, seconds=0.25)
    assert (report.origin, report.scales, report.kept) == ("calibration", {K: 0.5}, (V,))
    assert (report.num_sequences, report.num_tokens, report.num_passes, report.seconds) == (2, 3, 2, 0.25)
    assert (report_of(None, {}).origin, report_of(None, {}).num_tokens) == ("state_dict", 0)
    query = K.replace("k_scale", "q_scale")
    given = report_of(KvOrder(scales={K.replace(".k_", ".attn.k_"): 0.5, query: 2.0}), {K: 0.5})
    assert (given.origin, given.ignored) == ("kv_scales", (query,))
    assert isinstance(next(iter(FakeEngine().tensors.values())), Tensor)
