"""What SGLang's plugin mechanism loads in every process of a test's engine: the CPU products, and a way to look at a rank.

`conftest.py` makes the entry point.
"""

import time


def register() -> None:
    import cpu_drafts
    import cpu_experts
    import cpu_linear
    import cpu_lora
    import torch
    from fp8refit_sglang import kv_cache
    from observer import observe
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor import model_runner

    torch.compiler.set_stance(
        "force_eager"
    )  # compiling takes ten seconds a boot, and would be other code without a GPU
    torch.set_num_threads(1)  # tiny layers, few cores
    cpu_linear.register()
    cpu_experts.register()
    cpu_drafts.register()
    cpu_lora.register()
    model_runner.adjust_config_with_unaligned_cpu_tp = _as_padded(model_runner.adjust_config_with_unaligned_cpu_tp)
    kv_cache.is_cache_fp8 = lambda: True  # what no cache is on a CPU: so every family has KV scales
    Scheduler.fp8refit_test_observe = observe
    # Data-parallel attention asks for it; SGLang's other backends return the same.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    if hasattr(Scheduler, "maybe_sleep_on_idle"):
        # Who waits for a request leaves the core to who makes it: SGLang looks for the next one without a pause.
        Scheduler.maybe_sleep_on_idle = lambda _: time.sleep(5e-4)


def _as_padded(adjust):
    """SGLang's padding of heads and widths on a CPU, which fails for models without heads, or with a width per layer."""

    def adjust_or_leave(config, *arguments):
        try:
            return adjust(config, *arguments)
        except TypeError:
            return config

    return adjust_or_leave
