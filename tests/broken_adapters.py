"""A fake engine that keeps every promise, and one broken adapter a promise, to show that the conformance kit can fail.

The faults are such as adapters of real engines have: a derived tensor forgotten, a flush that does nothing, a request let
in, a source kept. Each is a few lines over `ServingModel` and `ServingEngine`, which are the whole ones.
"""

import asyncio
import gc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8refit import (
    EngineAsleepError,
    EngineDirtyError,
    KvConfig,
    RefitConfig,
    dequantize_blockwise,
    quantize_blockwise,
)
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, Inventory, KvScale
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.source import MappingSource, Source
from fp8refit.testing import AsyncSubject, Subject
from tests.fake_kv import FakeKvCache
from tests.fakes import PADDED_VOCAB, VOCAB, FakeEngine, FakeModel, bytes_of, live_bytes, make_policy

PROMPTS = ("a prompt", "another prompt")
BATCH = [[1, 2, 3], [99]]


class ServingModel(FakeModel):
    """A `FakeModel` that answers prompts, and remembers what it computed for them first."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix_cache: dict[str, str] = {}
        self.unfinished: list[str] = []
        self.is_asleep = False
        self.traces: list[str] = []
        self.kept: list[Any] = []
        self.kv = FakeKvCache()
        self.kv.on_pass = self.show
        self.scales_read = self.kv.tensors
        """What attention reads."""

    def show(self) -> None:
        """Let the calibration pass see keys and values that the weights make."""
        sums = (weight.view(torch.uint8).double().sum().item() for weight in (self.layers[0].qkv, self.layers[0].o))
        self.kv.largest = {name: total / 1e4 for name, total in zip(self.kv.largest, sums, strict=True)}

    def admit(self, prompt: str) -> str:
        """Take a request, and give what later steps read instead of the prompt."""
        if self.blocked is not None:
            raise EngineDirtyError(self.blocked)
        computed = digest_of(prompt.encode(), bytes_of(self.layers[0].qkv), *map(bytes_of, self.scales_read.values()))
        return self.prefix_cache.setdefault(prompt, computed)

    def answer(self, prompt: str, cached: str) -> str:
        return digest_of(prompt.encode(), cached.encode(), *live_bytes(self).values())

    def generate(self) -> list[str]:
        return [self.answer(prompt, self.admit(prompt)) for prompt in PROMPTS]


class Ranks:
    """Ranks that do what those of `FakeEngine` do."""

    def __init__(self, inner: Any, model: ServingModel) -> None:
        self.inner, self.model = inner, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ServingEngine(FakeEngine):
    """The adapter of `ServingModel`."""

    ranks_type: type[Ranks] = Ranks

    def __init__(self, candidate: ServingModel) -> None:
        super().__init__(candidate)
        self.model = candidate
        self.ranks = self.ranks_type(self.ranks, candidate)

    async def check_ready(self) -> None:
        if self.model.is_asleep:
            raise EngineAsleepError("the weights are asleep")
        await super().check_ready()

    async def flush_caches(self) -> None:
        await super().flush_caches()
        self.model.prefix_cache.clear()


class ServingSubject(Subject):
    """A `ServingModel` under test."""

    def __init__(self, model: ServingModel) -> None:
        self.model = self.engine = model

    def policy(self, seed: int) -> Mapping[str, Tensor]:
        policy = make_policy(self.model, seed)
        return {**policy, "lm_head.weight": policy["model.embed_tokens.weight"]}

    def live_bytes(self) -> Mapping[str, object]:
        return live_bytes(self.model)

    def expected_bytes(self, policy: Mapping[str, Tensor]) -> Mapping[str, object]:
        embed = policy["model.embed_tokens.weight"].float()
        embed = torch.cat([embed, torch.zeros(PADDED_VOCAB - VOCAB, embed.shape[1])]).bfloat16()
        layer = {name.removeprefix("model.layers.0."): tensor for name, tensor in policy.items()}
        norm = layer["input_layernorm.weight"]
        expected = {"embed": embed, "norm_sum": norm.float().sum(), "layers.0.norm": norm}
        expected["layers.0.bias"] = layer["mlp.gate.e_score_correction_bias"].float()
        matrices = {
            "o": (layer["self_attn.o_proj.weight"], "ue8m0"),
            "up": (layer["mlp.up_proj.weight"][64:], "fp32"),
            "down": (layer["mlp.down_proj.weight"][:, 128:], "fp32"),
        }
        qkv = [quantize_blockwise(layer[f"self_attn.{part}_proj.weight"]) for part in "qkv"]
        quantized = {name: quantize_blockwise(weight, scale_format=form) for name, (weight, form) in matrices.items()}
        codes, scales = zip(*qkv, strict=True)
        quantized["qkv"] = torch.cat([part.view(torch.uint8) for part in codes]), torch.cat(scales)
        for name, (weight, scale) in quantized.items():
            expected |= {f"layers.0.{name}": weight, f"layers.0.{name}_scale": scale}
        return {name: bytes_of(tensor.contiguous()) for name, tensor in expected.items()}

    def places(self) -> Mapping[str, object]:
        named = [*self.model.named_parameters(), *self.model.named_buffers(), *self.model.kv.tensors.items()]
        return {name: (id(t), t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in named}

    def generate(self) -> Any:
        return self.model.generate()

    def drop_caches(self) -> None:
        self.model.prefix_cache.clear()

    def num_unfinished(self) -> int:
        return len(self.model.unfinished)

    def traces(self) -> list[str]:
        return [*self.model.traces, *(["blocked"] if self.model.blocked is not None else [])]

    def memory_bytes(self) -> int:
        return tensor_bytes()

    def kv_scales(self) -> Mapping[str, Sequence[float]]:
        kv = self.model.kv
        return {name: [tensor.item(), kv.copies[name]] for name, tensor in kv.tensors.items()}

    def calibration(self) -> list[list[int]]:
        return BATCH

    @contextmanager
    def busy(self):
        cached = self.model.admit(PROMPTS[0])
        self.model.unfinished.append(PROMPTS[0])
        self.model.is_busy = True
        try:
            yield lambda: self.model.answer(PROMPTS[0], cached)
        finally:
            self.model.is_busy = False
            self.model.unfinished.clear()

    @contextmanager
    def asleep(self):
        self.model.is_asleep = True
        try:
            yield
        finally:
            self.model.is_asleep = False

    @contextmanager
    def unflushable(self):
        self.model.flush_fails = True
        try:
            yield
        finally:
            self.model.flush_fails = False


class AsynchronousEngine(ServingEngine):
    """An adapter whose engine lives in an event loop: requests that come during a refit wait for it."""

    is_asynchronous = True

    def __init__(self, candidate: ServingModel) -> None:
        super().__init__(candidate)
        candidate.gate = asyncio.Event()
        candidate.gate.set()

    async def pause(self, config: RefitConfig) -> int:
        self.model.gate.clear()
        await asyncio.sleep(0)
        return 0

    async def resume(self) -> None:
        await super().resume()
        self.model.gate.set()

    async def refuse(self, reason: str) -> None:
        await super().refuse(reason)
        self.model.gate.set()


class AsynchronousSubject(AsyncSubject, ServingSubject):
    """A `ServingModel` in an event loop."""

    def __init__(self, model: ServingModel) -> None:
        AsyncSubject.__init__(self)
        ServingSubject.__init__(self, model)
        model.gate = None

    def generate(self) -> Any:
        return self.run(self._generate())

    async def _generate(self) -> Any:
        if self.model.gate is not None:
            await self.model.gate.wait()
        return self.model.generate()


def digest_of(*parts: bytes) -> str:
    return hashlib.sha256(b"|".join(parts)).hexdigest()


def tensor_bytes() -> int:
    """Bytes of all storage that a tensor in this process refers to."""
    tensors = (thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An adapter with one fault, and the check that finds it."""

    check: str
    message: str
    """Pattern of what the check says."""
    model: type[ServingModel] = ServingModel
    engine: type[ServingEngine] = ServingEngine
    ranks: type[Ranks] = Ranks
    subject: type[ServingSubject] = ServingSubject

    @property
    def name(self) -> str:
        """What is wrong."""
        return next(kind.__name__ for kind in (self.model, self.engine, self.ranks) if kind not in WHOLE)

    def adapter(self) -> type[ServingEngine]:
        return type("BrokenEngine", (self.engine,), {"ranks_type": self.ranks})


WHOLE = (ServingModel, ServingEngine, Ranks)


class ForgetsADerivedTensor(ServingModel):
    def read_inventory(self) -> Inventory:
        return replace(super().read_inventory(), refreshes=())


class LeavesPaddingAsItWas(ServingModel):
    def read_inventory(self) -> Inventory:
        return replace(super().read_inventory(), padding=())


class IsRightTheFirstTimeOnly(ServingModel):
    def _refresh(self) -> None:
        if not self.kept:
            super()._refresh()
        self.kept.append("refreshed")


class ReplacesALiveTensor(ServingModel):
    def read_inventory(self) -> Inventory:
        self.home = (self.layers[0].bias,)
        return replace(super().read_inventory(), live=())

    def _refresh(self) -> None:
        super()._refresh()
        self.layers[0].bias = nn.Parameter(self.home[0].detach().clone(), requires_grad=False)


class LeavesAPatch(ServingEngine):
    async def resume(self) -> None:
        self.model.traces.append("add_request")
        await super().resume()


class CountsEachVersionTwice(Ranks):
    @property
    def version(self) -> int:
        return 2 * self.inner.version


class LetsUnexpectedNamesPass(ServingModel):
    def read_inventory(self) -> Inventory:
        return replace(super().read_inventory(), unneeded=("model.layers.9999.mlp.up_proj.weight",))


class WritesBeforeItJudges(Ranks):
    async def prepare(self, *arguments, **options) -> bool:
        self.model.layers[0].bias.zero_()
        return await self.inner.prepare(*arguments, **options)


class OverridesTheConfig(Ranks):
    update: ClassVar[Mapping[str, str]]

    async def prepare(self, make_source, job, **options) -> bool:
        config = job.config.model_copy(update=self.update)
        return await self.inner.prepare(make_source, job.model_copy(update={"config": config}), **options)


class LetsBadValuesPass(OverridesTheConfig):
    update: ClassVar = {"validate_values": "off"}


class FindsBadValuesTooLate(OverridesTheConfig):
    update: ClassVar = {"validate_values": "fused"}


class KeepsMastersUnrounded(OverridesTheConfig):
    update: ClassVar = {"fp32_sources": "exact"}


class AnswersWhileDirty(ServingModel):
    def admit(self, prompt: str) -> str:
        if "failed" in (self.blocked or ""):
            self.blocked = None
        return super().admit(prompt)


class AnswersWhileItIsWritten(ServingModel):
    def admit(self, prompt: str) -> str:
        if "under way" in (self.blocked or ""):
            self.blocked = None
        return super().admit(prompt)


class KeepsARefusedRequest(ServingModel):
    def admit(self, prompt: str) -> str:
        self.unfinished.append(prompt)
        cached = super().admit(prompt)
        self.unfinished.remove(prompt)
        return cached


class SaysItIsClean(Ranks):
    @property
    def is_dirty(self) -> bool:
        return False


class AlteredSource:
    """A stream on its way to the ranks."""

    def __init__(self, inner: Any, alter: Any) -> None:
        self.inner, self.alter = inner, alter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.alter(iter(self.inner))


class AltersTheSource(Ranks):
    async def prepare(self, make_source, job, **options) -> bool:
        return await self.inner.prepare(lambda: self.altered(make_source()), job, **options)

    def altered(self, source: Source) -> Source:
        if isinstance(source, MappingSource):
            return MappingSource(self.alter(iter(source.tensors.items())))
        return AlteredSource(source, self.alter)

    def alter(self, items: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


class HidesWhatTheSourceRaised(AltersTheSource):
    def alter(self, items):
        try:
            yield from items
        except Exception:  # noqa: BLE001 - the fault
            raise SystemError("error return without exception set") from None


class SwallowsInterrupts(AltersTheSource):
    def alter(self, items):
        try:
            yield from items
        except KeyboardInterrupt:
            raise RuntimeError("interrupted") from None


class MakesUpWhatDidNotCome(AltersTheSource):
    def alter(self, items):
        absent = {slot.name: slot.full_shape for slot in self.model.slots()}
        for name, tensor in items:
            absent.pop(name, None)
            yield name, tensor
        for name, shape in absent.items():
            yield name, torch.zeros(shape, dtype=torch.bfloat16)


class QuantizesFp8Again(AltersTheSource):
    def altered(self, source: Source) -> Source:
        return super().altered(source) if isinstance(source, MappingSource) else source

    def alter(self, items):
        tensors = dict(items)
        for name, tensor in tensors.items():
            if tensor.dtype is FP8_DTYPE:
                yield name, dequantize_blockwise(tensor, tensors[name + SCALE_SUFFIX], dtype=torch.bfloat16)
            elif not name.endswith(SCALE_SUFFIX):
                yield name, tensor


class MixesUpScales(AltersTheSource):
    def alter(self, items):
        return ((name, tensor.flip(0) if name.endswith(SCALE_SUFFIX) else tensor) for name, tensor in items)


class DropsTiedNames(AltersTheSource):
    def alter(self, items):
        return ((name, tensor) for name, tensor in items if name != "lm_head.weight")


class OpensWhenAskedToRefit(ServingEngine):
    async def check_ready(self) -> None:
        self.model.blocked = None
        await super().check_ready()


@dataclass(frozen=True)
class Handle:
    """What such a subject passes to `Refitter`, made anew every time."""

    model: ServingModel


class AttachesToAHandle(ServingEngine):
    @classmethod
    def accepts(cls, candidate: object) -> bool:
        return isinstance(candidate, Handle)

    def __init__(self, candidate: Handle) -> None:
        super().__init__(candidate.model)


class HandleSubject(ServingSubject):
    @property
    def engine(self) -> Handle:
        return Handle(self.model)

    @engine.setter
    def engine(self, engine: ServingModel) -> None:
        pass


class RefitsWhileBusy(ServingEngine):
    async def check_ready(self) -> None:
        self.model.is_busy = False
        await super().check_ready()


class AbortsRequests(ServingEngine):
    async def check_ready(self) -> None:
        self.model.unfinished.clear()
        await super().check_ready()


class RefitsWhileAsleep(ServingEngine):
    async def check_ready(self) -> None:
        await FakeEngine.check_ready(self)


class CallsAKeptCacheFlushed(ServingEngine):
    async def flush_caches(self) -> None:
        self.model.flush_fails = False
        await super().flush_caches()


class WritesAlthoughCachesStay(Ranks):
    async def write(self, *, driver_error=None) -> Sequence[RankReport]:
        reports = await self.inner.write()
        if driver_error is not None:
            raise driver_error
        return reports


class StaysClosedIfCachesStay(ServingEngine):
    async def resume(self) -> None:
        if not self.model.flush_fails:
            await super().resume()


class FlushesNothing(ServingEngine):
    async def flush_caches(self) -> None:
        await FakeEngine.flush_caches(self)


class ForgetsItsVersionWhenClosed(Ranks):
    start = 0

    @property
    def version(self) -> int:
        return self.inner.version - self.start

    async def close(self) -> None:
        self.start = self.inner.version
        await self.inner.close()


class IsCleanWhenClosed(Ranks):
    is_closed = False

    @property
    def is_dirty(self) -> bool:
        return self.inner.is_dirty and not self.is_closed

    async def prepare(self, *arguments, **options) -> bool:
        self.is_closed = False
        return await self.inner.prepare(*arguments, **options)

    async def close(self) -> None:
        self.is_closed = True
        await self.inner.close()


class KeepsTheSource(AltersTheSource):
    def altered(self, source: Source) -> Source:
        self.source = source
        return source


class WritesIntoTheSource(KeepsTheSource):
    async def write(self, **options) -> Sequence[RankReport]:
        reports = await self.inner.write(**options)
        for tensor in getattr(self.source, "tensors", {}).values():
            tensor.zero_()
        self.source = None
        return reports


class KeepsSomethingOfEveryRefit(Ranks):
    async def write(self, **options) -> Sequence[RankReport]:
        self.model.kept.append(torch.zeros(1000))
        return await self.inner.write(**options)


class MeasuresOnce(ServingModel):
    def show(self) -> None:
        if not self.kept:
            super().show()
        self.kept.append("shown")


class MeasuresTheOldWeights(Ranks):
    async def write(self, **options) -> Sequence[RankReport]:
        self.model.show()
        self.model.kv.on_pass = lambda: None
        return await self.inner.write(**options)


class KeepsTheLargestEver(ServingModel):
    def show(self) -> None:
        before = self.kept[-1:] or [self.kv.largest]
        super().show()
        self.kv.largest = {name: max(amax, before[0][name]) for name, amax in self.kv.largest.items()}
        self.kept.append(self.kv.largest)


class ChangesWeightsWhileItMeasures(ServingModel):
    def show(self) -> None:
        super().show()
        self.layers[0].bias.zero_()


class LeavesAHookOfACalibration(ServingModel):
    def show(self) -> None:
        super().show()
        self.traces.append("forward")


class AltersScales(ServingModel):
    def read_inventory(self) -> Inventory:
        inventory = super().read_inventory()
        layers = [replace(one, scales=tuple(map(self.altered, one.scales))) for one in inventory.kv.layers]
        return replace(inventory, kv=replace(inventory.kv, layers=tuple(layers)))

    def altered(self, scale: KvScale) -> KvScale:
        raise NotImplementedError


class WritesOnlyTheNumber(AltersScales):
    def altered(self, scale: KvScale) -> KvScale:
        return replace(scale, tensor=scale.tensor.clone())


class WritesOnlyTheTensor(AltersScales):
    def altered(self, scale: KvScale) -> KvScale:
        return replace(scale, write_copies=lambda value: None)


class MixesUpKeysAndValues(AltersScales):
    def altered(self, scale: KvScale) -> KvScale:
        return replace(scale, kind={"k": "v", "v": "k"}[scale.kind])


class RoundsScales(AltersScales):
    def altered(self, scale: KvScale) -> KvScale:
        def write(value: float) -> None:
            rounded = torch.tensor(value).bfloat16().float()
            scale.tensor.copy_(rounded)
            scale.write_copies(rounded.item())

        return replace(scale, write_copies=write)


class ReplacesAScale(ServingModel):
    def read_inventory(self) -> Inventory:
        inventory = super().read_inventory()
        return replace(inventory, kv=replace(inventory.kv, after_write=self._replace))

    def _replace(self) -> None:
        self.kept.append(self.kv.tensors)
        self.kv.tensors = self.scales_read = {name: tensor.clone() for name, tensor in self.kv.tensors.items()}


class ReadsScalesOfTheBoot(ServingModel):
    def __init__(self) -> None:
        super().__init__()
        self.scales_read = {name: tensor.clone() for name, tensor in self.kv.tensors.items()}


class ForgetsScales(ServingModel):
    def _refresh(self) -> None:
        super()._refresh()
        for name, tensor in self.kv.tensors.items():
            tensor.fill_(1.0)
            self.kv.copies[name] = 1.0


class WritesScalesBeforeItJudges(Ranks):
    async def prepare(self, make_source, job, *, driver_error=None) -> bool:
        for name, tensor in self.model.kv.tensors.items() if job.kv is not None else ():
            self.model.kv.copies[name] = tensor.fill_(job.kv.scales.get(name, 3.0)).item()
        return await self.inner.prepare(make_source, job, driver_error=driver_error)


class LetsAnyTokenPass(ServingModel):
    def __init__(self) -> None:
        super().__init__()
        self.kv.vocab_size = 2**40


class CountsACalibration(Ranks):
    num_calibrations = 0

    @property
    def version(self) -> int:
        return self.inner.version + self.num_calibrations

    async def calibrate(self, *arguments, **options) -> KvReport:
        self.num_calibrations += 1
        return await self.inner.calibrate(*arguments, **options)


class CalibratesByAMarginOfItsOwn(Ranks):
    async def calibrate(self, job, **options) -> KvReport:
        config = job.config.model_copy(update={"kv": KvConfig(margin=3.0)})
        return await self.inner.calibrate(job.model_copy(update={"config": config}), **options)


BROKEN = (
    Broken(
        check="serves_exactly_the_new_policy",
        message=r"a refit left wrong bytes in norm_sum",
        model=ForgetsADerivedTensor,
    ),
    Broken(check="serves_exactly_the_new_policy", message=r"wrong bytes in embed", model=LeavesPaddingAsItWas),
    Broken(check="serves_exactly_the_new_policy", message=r"wrong bytes in norm_sum", model=IsRightTheFirstTimeOnly),
    Broken(check="live_tensors_keep_their_places", message=r"moved layers\.0\.bias;", model=ReplacesALiveTensor),
    Broken(check="nothing_is_left_on_the_engine", message=r"left add_request", engine=LeavesAPatch),
    Broken(
        check="versions_count_up_and_are_shared", message=r"the report says \d+ and three", ranks=CountsEachVersionTwice
    ),
    Broken(
        check="versions_count_up_and_are_shared",
        message=r"refitters of the engine say",
        engine=AttachesToAHandle,
        subject=HandleSubject,
    ),
    Broken(
        check="misfits_are_told_all_at_once",
        message=r"should name .*model\.layers\.9999.*, but this one names (?!.*9999)",
        model=LetsUnexpectedNamesPass,
    ),
    Broken(
        check="misfits_are_told_all_at_once",
        message=r"a refused refit from .* left wrong bytes in layers\.0\.bias",
        ranks=WritesBeforeItJudges,
    ),
    Broken(
        check="bad_values_are_named_and_never_served",
        message=r"NaN and Inf should raise NonFiniteError, but raised nothing",
        ranks=LetsBadValuesPass,
    ),
    Broken(
        check="bad_values_are_named_and_never_served",
        message=r"a request after a refit with NaN and Inf should raise EngineDirtyError, but raised nothing",
        model=AnswersWhileDirty,
    ),
    Broken(
        check="bad_values_are_named_and_never_served",
        message=r"1 refused requests remain unfinished",
        model=KeepsARefusedRequest,
    ),
    Broken(
        check="bad_values_are_named_and_never_served",
        message=r"a refit with NaN and Inf left wrong bytes",
        ranks=SaysItIsClean,
    ),
    Broken(check="strict_writes_nothing_bad", message=r"left the engine dirty", ranks=FindsBadValuesTooLate),
    Broken(
        check="a_source_that_fails_is_all_or_nothing",
        message=r"raises halfway raised SystemError .*neither the source's error nor",
        ranks=HidesWhatTheSourceRaised,
    ),
    Broken(
        check="an_interrupt_is_all_or_nothing",
        message=r"should raise KeyboardInterrupt, but raised RuntimeError: interrupted",
        ranks=SwallowsInterrupts,
    ),
    Broken(
        check="a_stream_that_ends_early_is_all_or_nothing",
        message=r"ends after half the tensors should raise InvalidSourceError, but raised nothing",
        ranks=MakesUpWhatDidNotCome,
    ),
    Broken(
        check="a_refused_source_does_not_open_a_dirty_engine",
        message=r"a request after a refit that was refused on a dirty engine should raise EngineDirtyError",
        engine=OpensWhenAskedToRefit,
    ),
    Broken(
        check="one_refit_at_a_time",
        message=r"a second refit during the first should raise EngineBusyError, but raised nothing",
        engine=AttachesToAHandle,
        subject=HandleSubject,
    ),
    Broken(
        check="requests_meet_no_half_written_policy",
        message=r"answered while a refit was writing",
        model=AnswersWhileItIsWritten,
    ),
    Broken(
        check="a_busy_engine_is_left_alone",
        message=r"unfinished requests should raise EngineBusyError, but raised nothing",
        engine=RefitsWhileBusy,
    ),
    Broken(
        check="a_busy_engine_is_left_alone", message=r"the refused refit left 0 of 1 requests", engine=AbortsRequests
    ),
    Broken(
        check="sleeping_weights_are_not_written",
        message=r"weights sleep should raise EngineAsleepError, but raised nothing",
        engine=RefitsWhileAsleep,
    ),
    Broken(
        check="caches_that_stay_keep_the_old_policy",
        message=r"keeps its caches should raise CacheFlushError, but raised nothing",
        engine=CallsAKeptCacheFlushed,
    ),
    Broken(
        check="caches_that_stay_keep_the_old_policy",
        message=r"keeps its caches left wrong bytes in embed",
        ranks=WritesAlthoughCachesStay,
    ),
    Broken(
        check="caches_that_stay_keep_the_old_policy",
        message=r"keeps its caches left the engine refusing requests: a refit is under way",
        engine=StaysClosedIfCachesStay,
    ),
    Broken(
        check="no_answer_from_the_old_policys_cache",
        message=r"something computed under the old policy was reused",
        engine=FlushesNothing,
    ),
    Broken(
        check="every_kind_of_source_gives_the_same_bytes",
        message=r"fp32 masters: other bytes in",
        ranks=KeepsMastersUnrounded,
    ),
    Broken(check="prequantized_tensors_are_copied", message=r"FP8 left wrong bytes in", ranks=MixesUpScales),
    Broken(
        check="prequantized_tensors_are_copied",
        message=r"quantized again in layers\.0\.down, layers\.0\.o, layers\.0\.qkv$",
        ranks=QuantizesFp8Again,
    ),
    Broken(
        check="tied_names_may_be_sent_or_not",
        message=r"whole policy failed: InvalidSourceError: .*\n.*embed_tokens\.weight: missing",
        ranks=DropsTiedNames,
    ),
    Broken(
        check="closing_keeps_version_and_state",
        message=r"close\(\) changed version \d+ to 0",
        ranks=ForgetsItsVersionWhenClosed,
    ),
    Broken(
        check="closing_keeps_version_and_state", message=r"close\(\) made a dirty engine clean", ranks=IsCleanWhenClosed
    ),
    Broken(
        check="the_source_is_left_as_it_was",
        message=r"a refit from a mapping wrote into the source's",
        ranks=WritesIntoTheSource,
    ),
    Broken(check="the_source_is_let_go", message=r"a refit from a mapping: model\.", ranks=KeepsTheSource),
    Broken(
        check="memory_does_not_grow",
        message=r"\d+ bytes were allocated before 5 more refits, and \d+ after",
        ranks=KeepsSomethingOfEveryRefit,
    ),
    Broken(
        check="scales_fit_the_policy_that_is_served", message=r"two policies gave the same scales", model=MeasuresOnce
    ),
    Broken(
        check="scales_fit_the_policy_that_is_served",
        message=r"the second calibration of a policy gave other scales, in model\.layers\.0\.self_attn\.[kv]_scale",
        model=KeepsTheLargestEver,
    ),
    Broken(
        check="scales_fit_the_policy_that_is_served",
        message=r"the second calibration of a policy gave other scales",
        ranks=MeasuresTheOldWeights,
    ),
    Broken(
        check="scales_fit_the_policy_that_is_served",
        message=r"copies of a scale differ in .*k_scale \(1\.0, \d",
        model=WritesOnlyTheNumber,
    ),
    Broken(
        check="scales_fit_the_policy_that_is_served",
        message=r"instead of one, left wrong bytes in layers\.0\.bias",
        model=ChangesWeightsWhileItMeasures,
    ),
    Broken(
        check="calibrating_alone_gives_the_scales_of_a_refit",
        message=r"after a calibration, a prompt asked before got another answer",
        engine=FlushesNothing,
    ),
    Broken(
        check="calibrating_alone_gives_the_scales_of_a_refit",
        message=r"a calibration alone changed version \d+ to \d+",
        ranks=CountsACalibration,
    ),
    Broken(
        check="calibrating_alone_gives_the_scales_of_a_refit",
        message=r"a calibration alone gave other scales than a refit with its batch, in model",
        ranks=CalibratesByAMarginOfItsOwn,
    ),
    Broken(
        check="calibrating_alone_gives_the_scales_of_a_refit",
        message=r"a calibration alone left forward.* on the engine",
        model=LeavesAHookOfACalibration,
    ),
    Broken(
        check="scales_stay_without_calibration",
        message=r"from a mapping without scales left wrong scales: .*, is 1\.0\)",
        model=ForgetsScales,
    ),
    Broken(
        check="given_scales_are_written_exactly",
        message=r"copies of a scale differ in",
        model=WritesOnlyTheTensor,
    ),
    Broken(
        check="given_scales_are_written_exactly",
        message=r"a refit with scales by kv_scales= left wrong scales",
        model=MixesUpKeysAndValues,
    ),
    Broken(
        check="given_scales_are_written_exactly",
        message=r"left wrong scales: .*k_scale \(should be 64\.14\d*, is 64\.0\)",
        model=RoundsScales,
    ),
    Broken(
        check="given_scales_are_written_exactly",
        message=r"writing scales moved model\.layers\.0\.self_attn\.k_scale",
        model=ReplacesAScale,
    ),
    Broken(check="scales_are_read", message=r"did not change the answers: are they used", model=ReadsScalesOfTheBoot),
    Broken(
        check="bad_scales_and_batches_write_nothing",
        message=r"a refit with .* left wrong scales: .*, is 3\.0\)",
        ranks=WritesScalesBeforeItJudges,
    ),
    Broken(
        check="bad_scales_and_batches_write_nothing",
        message=r"a token id outside the vocabulary should raise InvalidCalibrationError, but raised nothing",
        model=LetsAnyTokenPass,
    ),
    Broken(
        check="a_dirty_engine_is_not_calibrated",
        message=r"a calibration of a dirty engine should raise EngineDirtyError, but raised nothing",
        engine=AttachesToAHandle,
        subject=HandleSubject,
    ),
)
