"""A platform for verl on hosts without an accelerator, by the way that verl has for others' (`VERL_USE_EXTERNAL_MODULES`)."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: Any, **__: Any) -> None: ...


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Nothing to wait for, and no IPC: buckets go through shared memory."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(synchronize=_nothing, empty_cache=_nothing, ipc_collect=_nothing)

    is_available = is_platform_available = lambda *_, **__: True
    is_ipc_supported = lambda _: False  # noqa: E731
    current_device = lambda _: 0  # noqa: E731
    device_count = lambda _: 1  # noqa: E731
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    get_device_capability = lambda *_: (None, None)  # noqa: E731
    communication_backend_name = lambda _: "gloo"  # noqa: E731
    visible_devices_envvar = lambda _: "CUDA_VISIBLE_DEVICES"  # noqa: E731
    nvtx_range = lambda *_: nullcontext()  # noqa: E731
    ray_resource_name = lambda _: "GPU"  # noqa: E731 - of which a test tells Ray how many there are
    ray_noset_envvars = lambda _: []  # noqa: E731
