"""Looks at one rank's live model inside its SGLang scheduler, as `live_model` says: a plugin that adds one method.

SGLang's RPC gives no values back, so every rank writes what it found to a file of its own.
"""

import json
import sys
import tempfile
from pathlib import Path

ENTRY_POINT = f"[sglang.srt.plugins]\nfp8refit_observer = {__name__}:register\n"
METHOD = "fp8refit_gpu_observe"
DERIVED = ("w_kc", "w_vc", "_weight_fp32")
"""What SGLang computes from weights and keeps beside them: attributes and buffers that no state dict has."""


def install(folder: Path) -> None:
    """Have the processes that this one spawns load the plugin; they take over its `sys.path`."""
    dist_info = folder / "fp8refit_observer-1.dist-info"
    dist_info.mkdir(parents=True, exist_ok=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8refit-observer\nVersion: 1\n")
    (dist_info / "entry_points.txt").write_text(ENTRY_POINT)
    for path in (str(Path(__file__).parent), str(folder)):
        if path not in sys.path:
            sys.path.insert(0, path)


def register() -> None:
    """What SGLang calls in each of its processes."""
    import live_model  # noqa: F401  # it counts the graphs from here on
    from sglang.srt.managers.scheduler import Scheduler

    setattr(Scheduler, METHOD, observe)


def observe(scheduler, what: str, path: str) -> None:
    """In a scheduler: write `what` to a file."""
    import live_model

    model = scheduler.tp_worker.model_runner.model
    own = {
        "kv_scales": lambda: kv_scales(model),
        "loader": lambda: look_at_loader(scheduler),
        "held": lambda: look_at_held(scheduler),
    }
    found = own[what]() if what in own else live_model.look(what, live_state(model))
    Path(path + str(scheduler.tp_group.rank_in_group)).write_text(json.dumps(found))


def look_at_loader(scheduler) -> dict:
    """What tracing it again costs."""
    from fp8refit_sglang.layout import SglangRules
    from fp8refit_sglang.live_scheduler import Scheduler
    from fp8refit_sglang.twin import twin_of
    from model_costs import cost_of_tracing

    from fp8refit.tracing.inventory import inventory_of

    held = Scheduler(scheduler)
    return cost_of_tracing(
        held.model,
        lambda: twin_of(held.model_config, held.load_config, num_ranks=held.num_ranks),
        lambda model, twin: inventory_of(model, SglangRules(model), twin),
    )


def look_at_held(scheduler) -> dict:
    """What its model holds beside parameters."""
    from contextlib import contextmanager

    from fp8refit_sglang.live_scheduler import Scheduler
    from fp8refit_sglang.twin import _built
    from model_costs import holdings

    from fp8refit.tracing.twin import EmptyOnMeta

    held = Scheduler(scheduler)

    @contextmanager
    def build():
        with _built(held.model_config, held.load_config, EmptyOnMeta()) as (model, _):
            yield model

    return holdings(held.model, build)


def live_state(model) -> dict:
    """Every parameter and persistent buffer, and what is derived from them, by the engine's own name."""
    derived = {f"{name}.{key}": getattr(module, key, None) for name, module in model.named_modules() for key in DERIVED}
    return model.state_dict() | {name: tensor for name, tensor in derived.items() if tensor is not None}


def kv_scales(model) -> dict[str, float]:
    """Both copies of every scale of a model's KV cache."""
    return {
        f"{name}.{key}": float(value)
        for name, module in model.named_modules()
        if hasattr(module, "k_scale_float")
        for key in ("k_scale", "v_scale", "k_scale_float", "v_scale_float")
        if (value := getattr(module, key)) is not None
    }


def ask(engine, what: str) -> list:
    """In the driver: what each rank finds."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rank-"
        engine.collective_rpc(METHOD, what=what, path=path)
        ranks = range(engine.server_args.tp_size)
        return [json.loads(Path(path + str(rank)).read_text()) for rank in ranks]
