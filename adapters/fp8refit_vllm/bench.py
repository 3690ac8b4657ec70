"""vLLM in the refit benchmark, beside vLLM's own ways to update weights."""

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8refit.bench.eager import eager_checkpoint, eager_quantize
from fp8refit.bench.engine import Place, RefitBoot, Strategy
from fp8refit.bench.server import BenchServer
from fp8refit.bench.shapes import CHECKPOINTS
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import Inventory
from fp8refit.tracing.inventory import inventory_of
from fp8refit_vllm.bench_transfers import Receiver, Wire, by_buckets, by_calls
from fp8refit_vllm.compat import VERSIONS
from fp8refit_vllm.core_compat import in_process_executor
from fp8refit_vllm.layout import VllmRules
from fp8refit_vllm.twin import twin_of

_KV_BYTES = 1 << 30
"""A small KV cache; refits do not depend on its size."""
_SERVED = "policy"


class VllmBench:
    """Implements `fp8refit.bench.engine.BenchEngine`. A single rank runs in this process if nothing else is wanted.

    Ranks elsewhere have none of vLLM's own methods: `reload_weights` takes an iterator only in its worker's process.
    """

    def __init__(self, wanted: RefitBoot) -> None:
        is_inside = wanted.place is Place.INSIDE or (wanted.place is None and wanted.tp == 1)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if is_inside else "1"
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # the command line runs a progress thread
        os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")  # it compiles for minutes, and nothing is generated
        from vllm import LLM

        self.settings: dict[str, object] = {
            "load_format": "dummy",
            **(
                {"quantization": wanted.quantization}
                if wanted.is_online
                else {"hf_overrides": {"quantization_config": wanted.checkpoint}}
            ),
            "tensor_parallel_size": wanted.tp,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "worker_extension_cls": f"{Receiver.__module__}.{Receiver.__qualname__}",
        }
        if torch.cuda.is_available():
            self.settings["kv_cache_memory_bytes"] = _KV_BYTES  # nothing is profiled
            self.settings["gpu_memory_utilization"] = 0.1  # then vLLM only checks at boot that this much is free
        self.candidate = LLM(model=str(wanted.model), **self.settings)
        try:
            self._find_strategies(wanted)
        except BaseException:
            self.close()
            raise

    def _find_strategies(self, wanted: RefitBoot) -> None:
        executor, is_online = in_process_executor(self.candidate.llm_engine), wanted.is_online
        self.worker = None
        self._inventory = Inventory(slots=())
        self.strategies: Sequence[Strategy] = ()
        if wanted.tp == 1 and executor is None:
            buckets = by_buckets(self.candidate, is_online=is_online) if torch.cuda.is_available() else ()
            self.strategies = (*buckets, Wire(self.candidate).strategy)
        if executor is not None:
            self.worker = worker = executor.driver_worker.worker
            network = worker.model_runner.get_model()
            self._inventory = inventory_of(network, VllmRules(), twin_of(worker.vllm_config))
            self._names = {parameter.data_ptr(): name for name, parameter in network.named_parameters()}
            self.strategies = (
                Strategy(
                    name="reload_weights",
                    summary="vLLM's `reload_weights` of BF16 weights: it loads, fuses, quantizes and processes them as at boot",
                    update=lambda policy: self._reload(iter(policy.items())),
                )
                if is_online
                else Strategy(
                    name="reload_weights",
                    summary="quantize each weight in eager PyTorch into a checkpoint's tensors, which vLLM's `reload_weights` "
                    "loads, fuses and processes as at boot",
                    update=self._reload_checkpoint,
                ),
                *(
                    [
                        Strategy(
                            name="reload_weights-kernel-format",
                            summary="quantize each weight in eager PyTorch into tensors as the kernels hold them, which vLLM's "
                            "`reload_weights(is_checkpoint_format=False)` copies",
                            update=self._reload_kernels,
                        )
                    ]
                    if wanted.quantization not in CHECKPOINTS
                    else []
                ),
                *by_calls(worker, is_online=is_online),
            )

    def close(self) -> None:
        """Stop the engine and everything it started."""
        self._inventory, self.strategies, self.worker = Inventory(slots=()), (), None
        shut_down(self)

    def _reload_checkpoint(self, policy: Mapping[str, Tensor]) -> None:
        layout = EngineLayout.of(self._inventory, engine="vllm", versions={}, device="")
        self._reload(eager_checkpoint(layout, policy))

    def _reload_kernels(self, policy: Mapping[str, Tensor]) -> None:
        self._reload(self._kernel_tensors(policy), is_checkpoint_format=False)

    def _kernel_tensors(self, policy: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter as a new tensor, module by module. Parts of a fused parameter are quantized one by one."""
        modules: dict[str, list[Any]] = {}
        for slot in self._inventory.slots:
            modules.setdefault(slot.module, []).append(slot)
        for slots in modules.values():
            made: dict[int, Tensor] = {}
            for slot in slots:
                source = policy[slot.name]
                if slot.scale is None or slot.format is None:
                    _place(made, slot.weight).copy_(source)
                    continue
                codes, scale = eager_quantize(source, slot.format)
                _place(made, slot.weight).view(torch.uint8).copy_(codes.view(torch.uint8))
                _place(made, slot.scale).copy_(scale)
            for address, tensor in made.items():
                yield self._names[address], tensor

    def _reload(self, tensors: Iterator[tuple[str, Tensor]], **options: Any) -> None:
        with torch.no_grad():
            self.candidate.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors, **options})
        if not self.candidate.reset_prefix_cache():
            raise AssertionError("vLLM kept its prefix cache; no request runs in a benchmark")


def shut_down(owner: Any) -> None:
    """Stop the LLM that `owner` holds as `candidate`, and free its memory."""
    owner.candidate.llm_engine.engine_core.shutdown()
    del owner.candidate
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _place(made: dict[int, Tensor], live: Tensor) -> Tensor:
    """Return the view of a new parameter that corresponds to `live`, which is a view of the live one."""
    parameter = live._base if live._base is not None else live
    while parameter._base is not None:
        parameter = parameter._base
    if parameter.data_ptr() not in made:
        made[parameter.data_ptr()] = torch.zeros_like(parameter)
    offset = live.storage_offset() - parameter.storage_offset()
    return made[parameter.data_ptr()].as_strided(live.shape, live.stride(), offset)


def _serve(wanted: RefitBoot) -> BenchServer:
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")  # it compiles kernels while requests run
    os.environ.setdefault("VLLM_PLUGINS", "fp8refit")  # vLLM adds only the routes of plugins named there
    settings: dict[str, object] = {
        "model": str(wanted.model),
        "served-model-name": _SERVED,
        "load-format": "dummy",
        "tensor-parallel-size": wanted.tp,
        "max-model-len": 512,
        "max-num-seqs": 32,
        "skip-tokenizer-init": True,
    }
    if wanted.is_online:
        settings["quantization"] = wanted.quantization
    else:
        settings["hf-overrides"] = json.dumps({"quantization_config": wanted.checkpoint})
    if torch.cuda.is_available():
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        settings |= {"gpu-memory-utilization": 0.35, "compilation-config": json.dumps(graphs)}
    else:
        settings |= {"enforce-eager": True, "dtype": "bfloat16", "num-gpu-blocks-override": 64}
    return BenchServer("vllm.entrypoints.openai.api_server", settings, _complete)


def _complete(post: Callable[[str, object], Any], prompt: Sequence[int], num_tokens: int) -> bool:
    asked = {"model": _SERVED, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = post("/v1/completions", asked | {"return_token_ids": True})
    return len(answer["choices"][0]["token_ids"]) == num_tokens


def boot(wanted: RefitBoot) -> VllmBench | BenchServer:
    """Boot an engine with random weights.

    Raises:
        UnsupportedEngineError: vLLM is not installed, or several ranks shall be in this process.
    """
    if wanted.place is Place.INSIDE and wanted.tp > 1:
        raise UnsupportedEngineError("vLLM runs several ranks in other processes; leave out --place or --tp")
    with VERSIONS.importing():
        return _serve(wanted) if wanted.place is Place.SERVER else VllmBench(wanted)
