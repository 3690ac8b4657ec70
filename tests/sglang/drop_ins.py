"""An engine whose weights are loaded by SGLang's own calls. `test_drop_in_stubbed_kernels.py` says what must come of it.

Off, it is the control. `OBSERVATIONS` are done in the schedulers.
"""

import inspect
import os
import threading
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import sglang
from engines import PROMPTS, SAMPLING, booted_noise, look, make_policy, num_unfinished, state
from subject import refused
from torch import Tensor

from fp8refit import Refitter
from fp8refit.live import seams
from tests.updating import FAULTS, by_stages, in_fours

HAS_SESSIONS = hasattr(sglang.Engine, "begin_weight_update")
Engine = sglang.Engine
Buckets = list[list[tuple[str, Tensor]]]


def answer_of(result: Any) -> dict:
    """0.5.23 answers with a record for begin and end, and with pairs otherwise."""
    success, message = result[:2] if isinstance(result, tuple) else (result.success, result.message)
    return {"success": bool(success), "message": message}


def session(engine: Engine, call: Callable[[], list[Any]]) -> list[dict]:
    """What is answered to `call`, with begin and end around it where SGLang wants them."""
    answers = [answer_of(engine.begin_weight_update())] if HAS_SESSIONS else []
    answers += [answer_of(answer) for answer in call()]
    return answers + ([answer_of(engine.end_weight_update())] if HAS_SESSIONS else [])


def from_tensor(engine: Engine, buckets: Buckets, work: Path) -> list[dict]:
    return session(engine, lambda: [engine.update_weights_from_tensor(bucket, flush_cache=True) for bucket in buckets])


def one_by_one(engine: Engine, buckets: Buckets, work: Path) -> list[dict]:
    pairs = [[pair] for bucket in buckets for pair in bucket]
    return session(engine, lambda: [engine.update_weights_from_tensor(pair, flush_cache=True) for pair in pairs])


def stage_by_stage(engine: Engine, buckets: Buckets, work: Path) -> list[dict]:
    """slime's way, whose sources are pipeline stages; older versions know no sessions."""
    return from_tensor(engine, by_stages(buckets), work)


def from_distributed(engine: Engine, buckets: Buckets, work: Path) -> list[dict]:
    """A trainer in this process broadcasts each tensor."""
    import torch.distributed

    def update() -> list:
        answers = []
        for bucket in buckets:
            names, dtypes = [name for name, _ in bucket], ["float32"] * len(bucket)
            shapes = [list(tensor.shape) for _, tensor in bucket]

            def send(tensors=[tensor for _, tensor in bucket]) -> None:  # noqa: B006
                for tensor in tensors:
                    torch.distributed.broadcast(tensor.float(), src=0, group=GROUPS[id(engine)])

            sender = threading.Thread(target=send)
            sender.start()
            answers.append(engine.update_weights_from_distributed(names, dtypes, shapes, group_name="trainer"))
            sender.join()
        return answers

    if id(engine) not in GROUPS:
        GROUPS[id(engine)] = join(engine)
    return session(engine, update)


GROUPS: dict[int, Any] = {}


def join(engine: Engine) -> Any:
    """One group of this process and all ranks."""
    from sglang.srt.utils import init_custom_process_group

    from tests.serving import free_port

    port, size = free_port(), 1 + engine.server_args.tp_size
    found: list = []

    def meet() -> None:
        found.append(
            init_custom_process_group(
                backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=size, rank=0, group_name="trainer"
            )
        )

    thread = threading.Thread(target=meet)
    thread.start()
    answer = engine.init_weights_update_group("127.0.0.1", port, 1, size, "trainer", backend="gloo")
    thread.join()
    assert answer_of(answer)["success"], answer
    return found[0]


def from_disk(engine: Engine, buckets: Buckets, work: Path) -> list[dict]:
    from safetensors.torch import save_file

    folder = work / f"disk-{len(list(work.iterdir()))}"
    folder.mkdir()
    save_file({name: tensor.clone() for bucket in buckets for name, tensor in bucket}, folder / "model.safetensors")
    (folder / "config.json").write_text((next(work.glob("*-bf16-1")) / "config.json").read_text())
    return [answer_of(engine.update_weights_from_disk(str(folder), load_format="auto"))]


WAYS = {
    "from tensor": from_tensor,
    "tensor by tensor": one_by_one,
    "stages": stage_by_stage,
    "from distributed": from_distributed,
    "from disk": from_disk,
}
SILENT = ("raise", "raise inside")
"""Faults of a trainer, which SGLang does not hear of."""


def updater_class() -> type:
    """Whose methods handle weight updates in a scheduler."""
    from fp8refit_sglang.compat import in_updater

    return resolve_name(seams.found(in_updater("update_weights_from_disk")).rpartition(".")[0])


def traces(scheduler: Any) -> list[str]:
    """What there is of the drop-in in this process."""
    from fp8refit_sglang.drop_in import ANSWERED
    from sglang.srt.model_loader.loader import DefaultModelLoader

    network = scheduler.tp_worker.model_runner.model
    found = [f"network.{name}" for name in vars(network) if name == "load_weights" or "fp8refit_drop_in" in name]
    for name, value in vars(DefaultModelLoader).items():
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function) and function.__code__.co_filename.endswith("fp8refit/driver/installed.py"):
            found.append(f"loader.{name}")
    updates = vars(updater_class()).items()
    wrapped = [name for name, value in updates if hasattr(value, "__wrapped__") and name in ANSWERED]
    return sorted([*found, *(f"updates.{name}" for name in wrapped)])


def remove(scheduler: Any) -> None:
    from fp8refit_sglang import drop_in

    drop_in.remove(scheduler)


def last_report(scheduler: Any) -> dict:
    import fp8refit

    return fp8refit.last_report().model_dump(mode="json")


OBSERVATIONS = {"traces": traces, "remove drop-in": remove, "last report": last_report}


def run_drop_in(family: str, num_ranks: int, work: Path) -> dict:
    os.environ["FP8REFIT_DROP_IN"] = "1"
    with booted_noise(family, work, num_ranks) as engine:
        states = {}
        for seed in (1, 2):
            Refitter(engine).refit(make_policy(family, seed))
            states[seed] = state(engine)
        placed = look(engine, "places")
        found: dict = {"differ": states[1] != states[2], "traces": look(engine, "traces"), "ways": {}, "faults": {}}
        found["has_sessions"] = HAS_SESSIONS
        for index, (way, load) in enumerate(WAYS.items()):
            seed = 1 + index % 2
            loaded = load(engine, in_fours(make_policy(family, seed)), work)
            report = look(engine, "last report")
            found["ways"][way] = {"loaded": loaded, "same": state(engine) == states[seed], "reports": report}
        found["placed"] = look(engine, "places") == placed
        for way in ("from tensor", "from disk"):
            for fault in (f"{fault} {place}" for fault in FAULTS if fault not in SILENT for place in range(4)):
                found["faults"][f"{way}: {fault}"] = try_fault(engine, family, way, fault, work) | {
                    "same": state(engine) == states[1]
                }
        look(engine, "remove drop-in")
        found["removed"] = look(engine, "traces")
    return found


def try_fault(engine: Engine, family: str, way: str, fault: str, work: Path) -> dict:
    name, _, place = fault.rpartition(" ")
    buckets = in_fours(make_policy(family, 2))
    buckets[int(place)] = list(FAULTS[name](buckets[int(place)], 0))
    found = {"loaded": WAYS[way](engine, buckets, work), "dirty": look(engine, "dirty")}
    found["generate"] = refused(lambda: engine.generate(input_ids=PROMPTS[0], sampling_params=SAMPLING))
    found["num_unfinished"] = num_unfinished(engine)
    return found | {"healed": WAYS[way](engine, in_fours(make_policy(family, 1)), work)}


def run_drop_in_off(family: str, num_ranks: int, work: Path) -> dict:
    """The same calls with the drop-in off."""
    with booted_noise(family, work, num_ranks) as engine:
        found = {"traces": look(engine, "traces")}
        Refitter(engine).refit(make_policy(family, 1))
        refitted = look(engine, "live_bytes")
        found["loaded"] = from_tensor(engine, in_fours(make_policy(family, 1)), work)
        return found | {"same": look(engine, "live_bytes") == refitted}
