"""A fake engine: a small model with fused, sliced, padded and tied storage, and an adapter that records what is called.

Its arithmetic is never run; what counts is which bytes lie where.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8refit.config import RefitConfig
from fp8refit.driver.attach import AttachedEngine
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.errors import CacheFlushError, EngineBusyError
from fp8refit.fill.plan import PlanBuilder, RefitPlan
from fp8refit.kernels.reference import quantize_reference
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, Inventory, Refresh, Refusal, Slot, TensorMeta
from fp8refit.ranks.rank import Rank
from fp8refit.ranks.target import Target
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.source import Source
from tests.fake_kv import FakeKvCache

HIDDEN = 192  # no multiple of 128: every matrix has ragged blocks
VOCAB, PADDED_VOCAB = 10, 16


def _codes(rows: int, cols: int) -> nn.Parameter:
    rubbish = torch.full((rows, cols), 0x11, dtype=torch.uint8).view(FP8_DTYPE)
    return nn.Parameter(rubbish, requires_grad=False)


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 9.0, dtype=dtype), requires_grad=False)


class FakeLayer(nn.Module):
    """Storage of one layer, full of rubbish."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.qkv_scale = _codes(512, HIDDEN), _values(4, 2)
        self.o, self.o_scale = _codes(HIDDEN, 256), _values(2, 2)
        self.up, self.up_scale = _codes(192, HIDDEN), _values(2, 2)
        self.down, self.down_scale = _codes(HIDDEN, 256), _values(2, 2)
        self.norm = _values(HIDDEN, dtype=torch.bfloat16)
        self.bias = _values(4)

    def slots(self, prefix: str) -> list[Slot]:
        """Checkpoint tensors of this layer: q, k and v fused, `o` in powers of two, `up` and `down` sliced over ranks."""
        qkv = [("q_proj", 0, 256), ("k_proj", 256, 128), ("v_proj", 384, 128)]
        return [
            *(
                Slot(
                    name=f"{prefix}.self_attn.{name}.weight",
                    full_shape=(rows, HIDDEN),
                    weight=self.qkv[start : start + rows],
                    scale=self.qkv_scale[start // 128 : (start + rows) // 128],
                    format=BlockFormat(),
                )
                for name, start, rows in qkv
            ),
            Slot(
                name=f"{prefix}.self_attn.o_proj.weight",
                full_shape=(HIDDEN, 256),
                weight=self.o,
                scale=self.o_scale,
                format=BlockFormat(scale_format=ScaleFormat.UE8M0),
            ),
            Slot(
                name=f"{prefix}.mlp.up_proj.weight",
                full_shape=(256, HIDDEN),
                weight=self.up,
                offset=(64, 0),
                scale=self.up_scale,
                format=BlockFormat(),
            ),
            Slot(
                name=f"{prefix}.mlp.down_proj.weight",
                full_shape=(HIDDEN, 384),
                weight=self.down,
                offset=(0, 128),
                scale=self.down_scale,
                format=BlockFormat(),
            ),
            Slot(name=f"{prefix}.input_layernorm.weight", full_shape=(HIDDEN,), weight=self.norm),
            Slot(name=f"{prefix}.mlp.gate.e_score_correction_bias", full_shape=(4,), weight=self.bias),
        ]


class FakeModel(nn.Module):
    """What a user passes to `Refitter`."""

    def __init__(self, num_layers: int = 1) -> None:
        super().__init__()
        self.embed = _values(PADDED_VOCAB, HIDDEN, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(FakeLayer() for _ in range(num_layers))
        self.register_buffer("norm_sum", torch.zeros(()))
        self.events: list[str] = []
        """What the adapter was called for, in order."""
        self.num_inventories = 0
        self.blocked: str | None = None
        self.refusals: tuple[Refusal, ...] = ()
        self.aliases = {"lm_head.weight": "model.embed_tokens.weight"}
        self.kv: FakeKvCache | None = None
        self.is_busy = False
        self.flush_fails = False
        self.on_refresh = lambda: None

    def slots(self) -> list[Slot]:
        embed = Slot(name="model.embed_tokens.weight", full_shape=(VOCAB, HIDDEN), weight=self.embed[:VOCAB])
        return [
            embed,
            *(slot for index, layer in enumerate(self.layers) for slot in layer.slots(f"model.layers.{index}")),
        ]

    def read_inventory(self) -> Inventory:
        self.num_inventories += 1
        return Inventory(
            slots=tuple(self.slots()),
            live=live_tensors(self),
            aliases=self.aliases,
            unneeded=("mtp.*",),
            padding=(self.embed[VOCAB:],),
            refreshes=(Refresh(name="norm_sum", run=self._refresh),),
            refusals=self.refusals,
            kv=self.kv.read() if self.kv is not None else None,
        )

    def _refresh(self) -> None:
        self.norm_sum.copy_(sum(layer.norm.float().sum() for layer in self.layers))
        self.on_refresh()


class RecordingRanks(LocalRanks):
    """Ranks whose steps are recorded."""

    def __init__(self, target: Target, events: list[str]) -> None:
        super().__init__(Rank(target))
        self._events = events

    async def prepare(self, make_source, job, *, driver_error=None) -> bool:
        self._events.append("prepare")
        return await super().prepare(make_source, job, driver_error=driver_error)

    async def write(self, *, driver_error=None) -> Sequence[RankReport]:
        self._events.append("write")
        return await super().write(driver_error=driver_error)

    async def calibrate(self, job, *, driver_error=None) -> KvReport:
        self._events.append("calibrate")
        return await super().calibrate(job, driver_error=driver_error)


class FakeEngine:
    """See `fp8refit.driver.engine.Engine`."""

    name = "fake"
    is_asynchronous = False

    def __init__(self, candidate: FakeModel) -> None:
        self._model = candidate
        self.ranks = RecordingRanks(make_target(candidate), candidate.events)

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        return isinstance(candidate, FakeModel)

    @classmethod
    def boot(cls, model: str) -> FakeModel:
        return FakeModel()

    async def check_ready(self) -> None:
        self._model.events.append("check_ready")
        if self._model.is_busy:
            raise EngineBusyError("2 requests are unfinished")

    async def pause(self, config: RefitConfig) -> int:
        self._model.events.append("pause")
        self._model.blocked = "a refit is under way"
        return 0

    async def resume(self) -> None:
        self._model.events.append("resume")
        self._model.blocked = None

    async def refuse(self, reason: str) -> None:
        self._model.events.append("refuse")
        self._model.blocked = reason

    async def flush_caches(self) -> None:
        self._model.events.append("flush")
        if self._model.flush_fails:
            raise CacheFlushError("the prefix cache holds blocks of running requests")

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        self._model.events.append("tokenize")
        return [list(prompt.encode()) for prompt in prompts]

    async def publish_version(self, version: int) -> None:
        self._model.events.append(f"version {version}")


class FakeEntryPoint:
    """Entry point of `FakeEngine`."""

    name = "fake"

    def load(self) -> type[FakeEngine]:
        return FakeEngine


def compile_plan(slots: tuple[Slot, ...], sources: Mapping[str, TensorMeta], **options: object) -> RefitPlan:
    """The plan of a source whose tensors are all known."""
    return PlanBuilder(slots, **options).plan(sources)


def make_target(model: FakeModel) -> Target:
    """The data plane of `model` alone."""
    return Target(model.read_inventory, device=torch.device("cpu"), engine="fake", versions={"fake": "1.0"})


def copies_of(slots: Sequence[Slot]) -> list[tuple[Tensor, Tensor | None]]:
    """What slots hold."""
    return [(slot.weight.clone(), slot.scale.clone() if slot.scale is not None else None) for slot in slots]


def changes_of(slots: Sequence[Slot], before: Sequence[tuple[Tensor, Tensor | None]]) -> dict[str, tuple[int, int]]:
    """What a report says of slots that no two share a scale, and that held something else before."""
    counts: dict[str, list[tuple[int, int]]] = {}
    for slot, (weight, scale) in zip(slots, before, strict=True):
        found = {"codes": slot.weight.view(torch.uint8) != weight.view(torch.uint8)} if slot.is_quantized else {}
        found |= {"values": slot.weight != weight} if scale is None else {"scales": slot.scale != scale}
        for kind, is_other in found.items():
            counts.setdefault(kind, []).append((int(is_other.sum()), is_other.numel()))
    return {kind: (sum(num for num, _ in each), sum(of for _, of in each)) for kind, each in counts.items()}


def refit_target(target: Target, source: Source, **options: object) -> RankReport:
    """Prepare, write and commit."""
    prepared = target.prepare(source, RefitConfig(**options))
    result = target.write(prepared)
    target.commit()
    return result


def make_policy(model: FakeModel, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The whole checkpoint tensors of one policy."""
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.full_shape, generator=generator).to(dtype) for slot in model.slots()}


def prequantize(policy: Mapping[str, Tensor], name: str, scale_format: ScaleFormat) -> dict[str, Tensor]:
    """`policy` with the tensor `name` sent as FP8."""
    codes, scale, _ = quantize_reference(policy[name], BlockFormat(scale_format=scale_format))
    return {**policy, name: codes, name + SCALE_SUFFIX: scale}


def box_of(slot: Slot, tensor: Tensor) -> Tensor:
    """The part of a checkpoint tensor that `slot` holds."""
    return tensor[tuple(slice(start, start + n) for start, n in zip(slot.origin, slot.weight.shape, strict=True))]


def assert_holds(model: FakeModel, policy: Mapping[str, Tensor]) -> None:
    """Every live byte is that of `policy`, which is unquantized."""
    assert_slots_hold(model.slots(), policy)
    assert not model.embed[VOCAB:].any(), "padding rows are zero"
    assert model.norm_sum == sum(layer.norm.float().sum() for layer in model.layers), "derived tensors are refreshed"


def assert_slots_hold(slots: Iterable[Slot], policy: Mapping[str, Tensor]) -> None:
    """Every byte of `slots` is that of `policy`, which is unquantized."""
    for slot in slots:
        source = box_of(slot, policy[slot.name])
        if slot.format is None:
            assert torch.equal(slot.weight, source.to(slot.weight.dtype)), slot.name
            continue
        if source.dtype is torch.float32:
            source = source.to(torch.bfloat16)
        codes, scale, _ = quantize_reference(source, slot.format)
        assert torch.equal(slot.weight.view(torch.uint8), codes.view(torch.uint8)), slot.name
        assert torch.equal(slot.scale, scale), slot.name


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor's values."""
    return tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


def live_bytes(model: nn.Module) -> dict[str, bytes]:
    """Every live byte."""
    return {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}


@contextmanager
def unchanged(model: FakeModel):
    """Check that the block leaves every live byte, the version and admission as they were."""
    before, version, blocked = live_bytes(model), _version(model), model.blocked
    yield
    assert live_bytes(model) == before
    assert (_version(model), model.blocked) == (version, blocked)


def _version(model: FakeModel) -> int | None:
    attached: AttachedEngine | None = getattr(model, "_fp8refit_engine", None)
    return attached.engine.ranks.version if attached is not None else None
