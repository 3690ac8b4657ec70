"""vLLM as `fp8refit.testing` wants to see it: an LLM in this process, an LLM in another one, an AsyncLLM."""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import PROMPTS, SAMPLING, _expected, make_policy, said, settings
from subject import NOISE
from torch import Tensor
from vllm import LLM
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from fp8refit import testing
from fp8refit.testing import run_checks
from tests.broken_adapters import tensor_bytes
from tests.engines.looking import digests
from tests.tiny_models import save_model


class Looks:
    """What both kinds of engine are asked by way of vLLM's own `collective_rpc`, on one rank."""

    family: str
    kernel: str

    def call(self, method: str, *arguments: Any) -> list[Any]:
        raise NotImplementedError

    def look(self, what: str) -> Any:
        (answer,) = self.call("observe", what)
        assert "error" not in answer, answer
        return answer["found"]

    def policy(self, seed: int) -> dict[str, Tensor]:
        return make_policy(self.family, seed)

    def live_bytes(self) -> dict[str, str]:
        return self.look("live_bytes")

    def places(self) -> dict[str, list]:
        return self.look("places")

    def kv_scales(self) -> dict[str, list[float]]:
        """Those of keys and values; vLLM has no use for the others on a CPU."""
        places: dict[str, list[float]] = {}
        for name, value in self.look("kv_scales").items():
            module, _, leaf = name.rpartition(".")
            kind = leaf[: len("_k_scale")].lstrip("_")
            if kind in ("k_scale", "v_scale"):
                places.setdefault(f"{module.removesuffix('.attn')}.{kind}", []).append(value)
        return places

    def calibration(self) -> list[list[int]]:
        return PROMPTS[:2]

    def expected_bytes(self, policy: dict[str, Tensor]) -> dict[str, str]:
        shapes = self.places()
        live = {name: torch.empty(shapes[name][2], device="meta") for name in self.live_bytes()}
        return digests({name: _expected(name, live, policy, self.kernel) for name in live})


class LlmSubject(Looks, testing.Subject):
    """A `vllm.LLM`, wherever its engine core runs."""

    def __init__(self, llm: LLM, family: str, kernel: str) -> None:
        self.engine, self.family, self.kernel = llm, family, kernel
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self.core_here = core
        """The engine core, if it is in this process: its caches can then be held and its mark of sleep be set."""

    def shutdown(self) -> None:
        self.engine.llm_engine.engine_core.shutdown()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.engine.collective_rpc(method, args=arguments)

    def generate(self) -> list[dict]:
        outputs = []
        for prompt in PROMPTS:
            outputs += self.engine.generate({"prompt_token_ids": prompt}, SAMPLING, use_tqdm=False)
        return [said(output) | {"cached": output.num_cached_tokens} for output in outputs]

    def drop_caches(self) -> None:
        assert self.engine.reset_prefix_cache()

    def num_unfinished(self) -> int:
        return self.engine.llm_engine.get_num_unfinished_requests()

    def traces(self) -> list[str]:
        return [name for name in vars(self.engine.llm_engine) if name == "add_request"]

    def memory_bytes(self) -> int | None:
        if self.core_here is None:
            return None
        gc.collect()
        return tensor_bytes()

    @contextmanager
    def busy(self) -> Iterator[Callable[[], list[dict]]]:
        engine = self.engine.llm_engine
        engine.add_request("by hand", {"prompt_token_ids": PROMPTS[2]}, SAMPLING)
        outputs = list(engine.step())

        def finish() -> list[dict]:
            while engine.has_unfinished_requests():
                outputs.extend(engine.step())
            return [said(output) for output in outputs if output.finished]

        try:
            yield finish
        finally:
            finish()

    def asleep(self):
        return None if self.core_here is None else self._asleep()

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """vLLM ignores sleep mode on a CPU: its mark is what is tested, not the memory."""
        executor = self.core_here.model_executor
        awake, executor.sleeping_tags = executor.sleeping_tags, {"weights"}
        try:
            yield
        finally:
            executor.sleeping_tags = awake

    def unflushable(self):
        return None if self.core_here is None else self._unflushable()

    @contextmanager
    def _unflushable(self) -> Iterator[None]:
        pool = self.core_here.scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(1)
        try:
            yield
        finally:
            pool.free_blocks(blocks)


class AsyncLlmSubject(Looks, testing.AsyncSubject):
    """A `vllm.v1.engine.async_llm.AsyncLLM`. It waits for its requests, and so is never busy."""

    def __init__(self, asked: dict, family: str, kernel: str) -> None:
        super().__init__()
        self.family, self.kernel = family, kernel
        self.engine = self.run(self._boot(asked))

    async def _boot(self, asked: dict) -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**asked))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.run(self.engine.collective_rpc(method, args=arguments))

    def generate(self) -> list[dict]:
        return [self.run(self._answer(prompt)) for prompt in PROMPTS]

    async def _answer(self, prompt: list[int]) -> dict:
        async for output in self.engine.generate({"prompt_token_ids": prompt}, SAMPLING, f"r{time.monotonic_ns()}"):
            last = output
        return said(last) | {"cached": last.num_cached_tokens}

    def drop_caches(self) -> None:
        assert self.run(self.engine.reset_prefix_cache())

    def num_unfinished(self) -> int:
        return self.engine.output_processor.get_num_unfinished_requests()

    def traces(self) -> list[str]:
        return [name for name in vars(self.engine) if name in ("add_request", "generate", "encode")]

    def shutdown(self) -> None:
        self.loop.call_soon_threadsafe(self.engine.shutdown)
        self.run(asyncio.sleep(0.1))
        self.stop()


def run_conformance(kind: str, family: str, kernel: str, work: str) -> list[dict]:
    """Every check of the kit on one engine; `kind` is that of its client, the environment says where its core runs."""
    os.environ["FP8REFIT_TEST_KERNEL"] = kernel  # `cpu_plugin.py` reads it in every process of the engine
    model = Path(work) / f"{family}-{kind}"
    save_model(family, 1, model)
    asked = settings(model) | NOISE | {"kv_cache_dtype": "fp8"}
    is_async = kind == "AsyncLLM"
    subject = AsyncLlmSubject(asked, family, kernel) if is_async else LlmSubject(LLM(**asked), family, kernel)
    results = [{"name": r.name, "outcome": r.outcome, "message": r.message} for r in run_checks(subject)]
    subject.shutdown()
    return results
