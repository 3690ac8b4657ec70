"""One engine under test, driven and looked at alike in every process layout.

`Subject` drives an `LLM`, `AsyncSubject` an `AsyncLLM`. What a rank holds is read in its own worker by `observer.py`.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from engines import CONFIG, PROMPTS, SAMPLING, refused, said, settings
from vllm import LLM
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from fp8refit import KvReport, RefitReport, Refitter, VerifyReport

LAYOUTS = {
    "multi-process": {},
    "tensor parallel": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"},
    "core in process": {"tensor_parallel_size": 2},
    "external launcher": {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher", "seed": 0},
    "asynchronous": {"kv_cache_dtype": "fp8"},
    "replicas": {"data_parallel_size": 2, "kv_cache_dtype": "fp8"},
    "pipeline parallel": {"pipeline_parallel_size": 2},
    "Ray executor": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "distributed_executor_backend": "ray"},
}
ASYNCHRONOUS = ("asynchronous", "replicas")
NOISE = {"load_format": "dummy", "hf_overrides": {"quantization_config": CONFIG}}
"""Options that give an engine of a BF16 model's shape block-FP8 noise for weights."""


class Subject:
    """A `vllm.LLM`."""

    def __init__(self, llm: LLM, num_ranks: int) -> None:
        self.llm = llm
        self.num_ranks = num_ranks
        self.engine = llm.llm_engine

    def refit(
        self, source: Any, *, manifest: Any = None, calibration: Any = None, kv_scales: Any = None, **options: Any
    ) -> RefitReport:
        refitter = Refitter(self.llm, **options)
        return refitter.refit(source, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    def verify(self, source: Any) -> VerifyReport:
        return Refitter(self.llm).verify(source)

    def calibrate(self, batch: Any, **options: Any) -> KvReport:
        return Refitter(self.llm, **options).calibrate(batch)

    def close(self) -> None:
        Refitter(self.llm).close()

    def layout(self):
        return Refitter(self.llm).layout()

    @property
    def is_dirty(self) -> bool:
        return Refitter(self.llm).is_dirty

    @property
    def version(self) -> int:
        return Refitter(self.llm).version

    def generate(self) -> list[dict]:
        """Greedy tokens, and every log-probability as an exact hexadecimal float.

        One prompt after another: another process schedules prompts as they arrive, and a product's last bits depend on what
        else is in the batch.
        """
        found = []
        for prompt in PROMPTS:
            (output,) = self.llm.generate({"prompt_token_ids": prompt}, SAMPLING, use_tqdm=False)
            found.append(said(output))
        return found

    def add_request(self) -> Any:
        return self.engine.add_request("late", {"prompt_token_ids": PROMPTS[0]}, SAMPLING)

    @property
    def entries(self) -> dict[str, Callable[[], object]]:
        """Every way in for a request."""
        return {"generate": self.generate, "add_request": self.add_request}

    def call(self, method: str, *arguments: Any) -> list:
        """vLLM's `collective_rpc`."""
        return self.llm.collective_rpc(method, args=arguments)

    @property
    def num_unfinished(self) -> int:
        return self.engine.get_num_unfinished_requests()

    @property
    def traces(self) -> list[str]:
        """What a refit left on the engine."""
        return [name for name in vars(self.engine) if name in ("add_request", "generate", "encode")]

    def shutdown(self) -> None:
        # Now, not when it is collected: that would take the process groups from under the engine booted next.
        self.engine.engine_core.shutdown()

    def look(self, what: str, *arguments: Any) -> list:
        """What each rank that this driver reaches answers; `observer.OBSERVATIONS` and `faults.FAULTS` are what there is."""
        answers = sorted(self.call("observe", what, *arguments), key=lambda answer: answer["rank"])
        errors = [answer for answer in answers if "error" in answer]
        assert not errors, errors
        return [answer["found"] for answer in answers]

    def update(self, *what: Any) -> list:
        """As `look`, over a prefix cache that holds what was served."""
        self.refused(self.generate)
        return self.look(*what)

    def num_cached(self) -> list[int]:
        """Tokens that the prefix cache gives to a request."""
        (output,) = self.llm.generate({"prompt_token_ids": PROMPTS[-1]}, SAMPLING, use_tqdm=False)
        return [output.num_cached_tokens]

    def live(self) -> list[dict[str, str]]:
        return self.look("live_bytes")

    def state(self) -> dict:
        """What every rank holds, and what the engine says."""
        return {"live": self.live(), "outputs": self.generate()}

    def refused(self, call: Any, *arguments: Any, **options: Any) -> dict | None:
        """Which error `call` raises, ours or not."""
        return refused(lambda: call(*arguments, **options), error_type=Exception)


class AsyncSubject(Subject):
    """A `vllm.v1.engine.async_llm.AsyncLLM`, driven from an event loop of the subject's own."""

    def __init__(self, llm: AsyncLLM, num_ranks: int, loop: asyncio.AbstractEventLoop) -> None:
        self.llm = self.engine = llm
        self.num_ranks = num_ranks
        self.loop = loop

    def run(self, awaitable: Awaitable) -> Any:
        return self.loop.run_until_complete(awaitable)

    def refit(
        self, source: Any, *, manifest: Any = None, calibration: Any = None, kv_scales: Any = None, **options: Any
    ) -> RefitReport:
        refitter = Refitter(self.llm, **options)
        return self.run(refitter.refit_async(source, manifest=manifest, calibration=calibration, kv_scales=kv_scales))

    def calibrate(self, batch: Any, **options: Any) -> KvReport:
        return self.run(Refitter(self.llm, **options).calibrate_async(batch))

    def close(self) -> None:
        self.run(Refitter(self.llm).close_async())

    def layout(self):
        return self.run(Refitter(self.llm).layout_async())

    def generate(self) -> list[dict]:
        return [said(self.run(self.answer(prompt))) for prompt in PROMPTS]

    async def answer(self, prompt: list[int], sampling=SAMPLING, *, started: asyncio.Event | None = None) -> Any:
        """Run one request, and give its last output."""
        last = None
        async for output in self.llm.generate({"prompt_token_ids": prompt}, sampling, f"request-{time.monotonic_ns()}"):
            last = output
            if started is not None:
                started.set()
        return last

    def add_request(self) -> Any:
        return self.run(self.llm.add_request("late", {"prompt_token_ids": PROMPTS[0]}, SAMPLING))

    def call(self, method: str, *arguments: Any) -> list:
        """Every replica's; vLLM returns the answers of the first."""
        client = self.llm.engine_core

        async def call() -> list[list]:
            asked = "collective_rpc", method, None, arguments, None
            return await asyncio.gather(
                *(client._call_utility_async(*asked, engine=core) for core in client.core_engines)
            )

        return list(chain.from_iterable(self.run(call())))

    @property
    def num_unfinished(self) -> int:
        return self.llm.output_processor.get_num_unfinished_requests()

    def shutdown(self) -> None:
        self.llm.shutdown()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        self.run(asyncio.gather(*pending, return_exceptions=True))


@contextmanager
def booted_as(layout: str, model: Path, kernel: str, **options: Any) -> Iterator[Subject]:
    """An engine in one of `LAYOUTS`, whose block-FP8 layers use `kernel` on every rank."""
    os.environ["FP8REFIT_TEST_KERNEL"] = kernel  # `cpu_plugin.py` reads it in every process of the engine
    asked = settings(model) | LAYOUTS[layout] | options
    num_ranks = math.prod(asked.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    if layout not in ASYNCHRONOUS:
        subject = Subject(LLM(**asked), num_ranks)
        if layout == "pipeline parallel":
            subject.call("execute_dummy_batch")  # on a CPU nothing else makes room for what comes from the rank before
    else:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)

        async def boot() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**asked))

        subject = AsyncSubject(loop.run_until_complete(boot()), num_ranks, loop)
    yield subject
    subject.shutdown()
