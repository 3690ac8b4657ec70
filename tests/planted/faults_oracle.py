"""What servers could do wrong, in the words of `tests.oracle`: stale, mixed, while dirty."""

from tests.planted.fault import Fault

VLLM, SGLANG = "tests/vllm/test_oracle.py", "tests/sglang/test_oracle_stubbed_kernels.py"

FAULTS = [
    Fault(
        name="vLLM keeps its prefix cache across a refit",
        at="adapters/fp8refit_vllm/async_driver.py::AsyncDriver._drop_prefix_caches",
        before="llm.reset_prefix_cache(*how)",
        after="asyncio.sleep(0, True)",
        found_by=VLLM,
    ),
    Fault(
        name="vLLM keeps its prefix cache where a refit is one exchange",
        at="adapters/fp8refit_vllm/core.py::_send",
        before="partial(core.reset_prefix_cache, bool(in_flight), has_connector)",
        after="partial(bool, True)",
        found_by=VLLM,
    ),
    Fault(
        name="vLLM's core waits for a message after it let requests run",
        at="adapters/fp8refit_vllm/core_compat.py::stop_requests",
        before="core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))",
        after="pass",
        found_by="tests/vllm/test_async_engine.py -k looks_for_work",
    ),
    Fault(
        name="vLLM's core lets requests run on a policy that a rank has not committed",
        at="adapters/fp8refit_vllm/core.py::_is_committed",
        before='outcome.ended == "done" and common_version(outcome.answers, if_written_by=request) is not None',
        after='outcome.ended == "done"',
        found_by="tests/adapters/test_vllm_core.py",
    ),
    Fault(
        name="vLLM's draft keeps the policy before",
        at="fp8refit/live/drafts.py::with_draft",
        before="(*target.slots, *draft.slots)",
        after="target.slots",
        found_by="tests/vllm/test_drafts.py -k 'fresh_ones and draft_model'",
    ),
    Fault(
        name="requests that vLLM keeps go on with the KV of the policy before",
        at="adapters/fp8refit_vllm/async_driver.py::AsyncDriver._drop_prefix_caches",
        before="llm.reset_prefix_cache(*how)",
        after="asyncio.gather(llm.reset_prefix_cache(False, False))",
        found_by=VLLM,
    ),
    Fault(
        name="requests that begin in vLLM later share blocks of one that goes on with its KV",
        at="adapters/fp8refit_vllm/core_compat.py::set_apart_in_core",
        before="block_hash[:_HALF_HASH] + own",
        after="block_hash",
        found_by="tests/vllm/test_async_engine.py",
    ),
    Fault(
        name="requests that begin in SGLang later share tokens of one that goes on with its KV",
        at="adapters/fp8refit_sglang/apart.py::stamp",
        before="if not number:\n    ...",
        after="return",
        found_by="tests/sglang/test_server_stubbed_kernels.py",
    ),
    Fault(
        name="SGLang keeps its radix cache across a refit",
        at="adapters/fp8refit_sglang/live_scheduler.py::Scheduler.flush",
        before="bool(self._scheduler.flush_cache(empty_cache=False))",
        after="True",
        found_by=SGLANG,
    ),
    Fault(
        name="a dirty vLLM server answers",
        at="adapters/fp8refit_vllm/async_driver.py::AsyncDriver.refuse",
        before="self._close_gate().refuse(reason)",
        after="return await self.resume()",
        found_by=VLLM,
    ),
    Fault(
        name="a dirty SGLang server answers",
        at="adapters/fp8refit_sglang/controls.py::TokenizerControls.refuse",
        before="self._close_gate().refuse(reason)",
        after="return await self.resume()",
        found_by=SGLANG,
    ),
    Fault(
        name="a refit counts as done although its driver died part way",
        at="fp8refit/remote/protocol/messages.py::common_version",
        before="outcome.is_dirty or outcome.error",
        after="outcome.error",
        found_by=VLLM,
    ),
    Fault(
        name="requests go on under a policy that is not written yet",
        at="fp8refit/driver/attempt.py::Attempt.refit",
        before='with clock.phase("transfer"):\n    ...',
        after='with clock.phase("transfer"):\n    await engine.resume()\n...',
        found_by=VLLM,
    ),
    Fault(
        name="a version is published before its policy is whole",
        at="fp8refit/remote/servers/order_handler.py::OrderHandler._obey",
        before="return Answer(value=await controls.pause(order.config))",
        after="await self._publish(self._version + 1)\nreturn Answer(value=await controls.pause(order.config))",
        found_by=SGLANG,
    ),
    Fault(
        name="a driver that died while requests were waited for holds the server",
        at="fp8refit/remote/servers/order_handler.py::OrderHandler._hold_for",
        before="self._end_soon(_DIED)",
        found_by=VLLM,
    ),
]
