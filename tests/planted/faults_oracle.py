"""What servers could do wrong, in the words of `tests.oracle`: stale, mixed, while dirty."""

from tests.planted.fault import Fault

VLLM, SGLANG = "tests/vllm/test_oracle.py", "tests/sglang/test_oracle_stubbed_kernels.py"

FAULTS = [
    Fault(
        name="vLLM keeps its prefix cache across a refit",
        path="adapters/fp8refit_vllm/async_driver.py",
        before="self._ask(self._llm.reset_prefix_cache(True, self.config.kv_transfer_config is not None))",
        after="asyncio.sleep(0, True)",
        found_by=VLLM,
        session="vllm",
    ),
    Fault(
        name="vLLM keeps its prefix cache where a refit is one exchange",
        path="adapters/fp8refit_vllm/core.py",
        before="    drop = partial(core.reset_prefix_cache, keeps_requests, has_connector)\n",
        after="    drop = partial(bool, True)\n",
        found_by=VLLM,
        session="vllm",
    ),
    Fault(
        name="requests that vLLM keeps go on with the KV of the policy before",
        path="adapters/fp8refit_vllm/async_driver.py",
        before="self._ask(self._llm.reset_prefix_cache(True, self.config.kv_transfer_config is not None))",
        after="self._ask(self._llm.reset_prefix_cache(False, False)) or True",
        found_by=VLLM,
        session="vllm",
    ),
    Fault(
        name="SGLang keeps its radix cache across a refit",
        path="adapters/fp8refit_sglang/live_scheduler.py",
        before="            return bool(self._scheduler.flush_cache(empty_cache=False))\n",
        after="            return True\n",
        found_by=SGLANG,
        session="sglang",
    ),
    Fault(
        name="a dirty vLLM server answers",
        path="adapters/fp8refit_vllm/async_driver.py",
        before="        self._close_gate().refuse(reason)\n",
        after="        return await self.resume()\n",
        found_by=VLLM,
        session="vllm",
    ),
    Fault(
        name="a dirty SGLang server answers",
        path="adapters/fp8refit_sglang/controls.py",
        before="        self._close_gate().refuse(reason)\n",
        after="        return await self.resume()\n",
        found_by=SGLANG,
        session="sglang",
    ),
    Fault(
        name="a refit counts as done although its driver died part way",
        path="fp8refit/remote/servers/order_handler.py",
        before="not any(reply.is_dirty or reply.error for reply in replies)",
        after="not any(reply.error for reply in replies)",
        found_by=VLLM,
        session="vllm",
    ),
    Fault(
        name="requests go on under a policy that is not written yet",
        path="fp8refit/driver/attempt.py",
        before="            written = await ranks.write(driver_error=busy.error)\n",
        after="            await engine.resume()\n            written = await ranks.write(driver_error=busy.error)\n",
        found_by=VLLM,
        session="vllm",
    ),
    Fault(
        name="a version is published before its policy is whole",
        path="fp8refit/remote/servers/order_handler.py",
        before="            num_requests = await controls.pause(order.config)\n",
        after="            await self._publish(self._version + 1)\n"
        "            num_requests = await controls.pause(order.config)\n",
        found_by=SGLANG,
        session="sglang",
    ),
    Fault(
        name="a driver that died while requests were waited for holds the server",
        path="fp8refit/remote/servers/order_handler.py",
        before="                self._end_soon(_DIED)\n                return\n",
        after="                return\n",
        found_by=VLLM,
        session="vllm",
    ),
]
