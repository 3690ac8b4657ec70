"""Tensors that another process reads where they lie: on the same GPU, on another one, freed, moved, or without a handle.

    python -m pytest tests/gpu/test_transport.py

Trainer and rank are processes of their own (`run_transport.py`). Writes down what was measured, and what the driver does where
its documentation leaves it open.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import write_result
from tests.transport.other_process import OtherProcess

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

BIG = "big"


@pytest.fixture(scope="module")
def results():
    results = {}
    yield results
    found = {
        "what": "CUDA IPC between a trainer's process and a rank's: what was measured, and what the driver does",
        "command": "python -m pytest tests/gpu/test_transport.py",
        "gpu": torch.cuda.get_device_name(),
        "num_gpus": torch.cuda.device_count(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        **results,
    }
    write_result("transport", found, ("transport",))


@pytest.fixture
def start():
    """Start processes that end with the test."""
    processes = []

    def start(**environ):
        processes.append(OtherProcess(Path(__file__).with_name("run_transport.py"), **environ))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


@pytest.fixture
def trainer(start):
    return start()


@pytest.fixture
def rank(start):
    return start()


def visible(*indices):
    """CUDA_VISIBLE_DEVICES for those of the GPUs that are visible here."""
    here = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = here.split(",") if here else [str(index) for index in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in indices)}


def ask(process, *order):
    """The answer, or a note that the process died of the order."""
    try:
        return process.ask(*order)
    except (AssertionError, BrokenPipeError) as error:
        return {"error": f"{error}"}


def test_a_rank_on_the_same_gpu_reads_the_same_bytes(trainer, rank, results):
    held = trainer.ask("trainer.make", 0, 1)
    export = trainer.ask("trainer.export")
    assert export["leftover"] == [name for name in held if "empty" in name]
    opened = rank.ask("rank.open", export, 0, False)
    assert opened["devices"] == ["cuda:0"]
    read = {name: held[name] for name in held if "empty" not in name}
    assert rank.ask("rank.holds") == read
    results["imported_mapping"] = rank.ask("rank.probe_opened")
    results["same_gpu_copy"] = rank.ask("rank.read_by_copy")
    for how in ("tensor", "address"):
        results[f"same_gpu_kernel_{how}"] = by_kernel = rank.ask("rank.read_by_kernel", how)
        assert by_kernel["holds"] == held[BIG]
    changed = trainer.ask("trainer.add", 1.0)
    again = trainer.ask("trainer.export")
    assert again == export
    rank.ask("rank.open", again, 0, False)
    assert rank.ask("rank.holds") == {name: changed[name] for name in read}
    assert changed[BIG] != held[BIG]


def test_memory_that_was_freed_and_allocated_again_is_another_segment(trainer, rank, results):
    trainer.ask("trainer.make", 0, 1)
    first, addresses = trainer.ask("trainer.export"), trainer.ask("trainer.addresses")
    rank.ask("rank.open", first, 0, False)
    rank.ask("rank.let_go")
    results["freed_bytes_when_unmapped"] = trainer.ask("trainer.free")
    assert results["freed_bytes_when_unmapped"] >= 256 << 20
    held = trainer.ask("trainer.make", 0, 2)
    second = trainer.ask("trainer.export")
    results["reallocated_in_place"] = addresses[BIG] == trainer.ask("trainer.addresses")[BIG]
    assert not {each["id"] for each in first["segments"]} & {each["id"] for each in second["segments"]}
    rank.ask("rank.open", second, 0, False)
    assert rank.ask("rank.holds")[BIG] == held[BIG]
    # A trainer that frees what ranks still have mapped, which CUDA leaves undefined.
    results["freed_bytes_while_mapped"] = trainer.ask("trainer.free")
    held = trainer.ask("trainer.make", 0, 3)
    third = trainer.ask("trainer.export")
    rank.ask("rank.open", third, 0, False)
    rank.ask("rank.keep_only", third)
    holds = rank.ask("rank.holds")
    assert holds == {name: held[name] for name in holds}
    results["stale_handle"] = ask(rank, "rank.open", first, 0, False)


@pytest.mark.parametrize("device", [0, None], ids=["gpu_bucket", "host_bucket"])
def test_expandable_segments_go_through_a_bucket(start, rank, device):
    trainer = start(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    held = trainer.ask("trainer.make", 0, 1)
    export = trainer.ask("trainer.export")
    assert export["leftover"] == list(held)
    assert export["refs"] == export["segments"] == []
    rank.ask("rank.open", trainer.ask("trainer.put", device), 0, False)
    assert rank.ask("rank.holds") == held
    rank.ask("rank.let_go")
    freed = trainer.ask("trainer.close_bucket")
    assert device is None or freed >= 512 << 20


def test_a_trainer_that_is_gone_is_named(trainer, rank, results):
    held = trainer.ask("trainer.make", 0, 1)
    export = trainer.ask("trainer.export")
    rank.ask("rank.open", {**export, "refs": [ref for ref in export["refs"] if ref["name"] == BIG]}, 0, False)
    trainer.process.kill()
    trainer.process.wait()
    answer = rank.ask("rank.open", export, 0, False)
    results["exporter_gone"] = answer["error"]
    assert "is gone: start the trainer again" in answer["error"]
    results["mapping_outlives_exporter"] = ask(rank, "rank.read_by_copy").get("holds") == held[BIG]


def test_a_process_opens_its_own_export(trainer):
    trainer.ask("trainer.make", 0, 1)
    is_in_place = trainer.ask("trainer.open_own")
    assert BIG in is_in_place
    assert all(is_in_place.values()), is_in_place


def test_a_host_bucket_is_read_by_a_rank_with_a_gpu(trainer, rank):
    held = trainer.ask("trainer.make", 0, 1)
    opened = rank.ask("rank.open", trainer.ask("trainer.put", None), 0, False)
    assert opened["devices"] == ["cpu"]
    assert rank.ask("rank.holds") == held


@two_gpus
def test_memory_of_another_gpu_is_copied_from(trainer, rank, results):
    held = trainer.ask("trainer.make", 0, 1)
    export = trainer.ask("trainer.export")
    assert rank.ask("rank.open", export, 1, False)["devices"] == ["cuda:0"]
    results["peer_copy"] = rank.ask("rank.read_by_copy")
    assert results["peer_copy"]["holds"] == held[BIG]
    holds = rank.ask("rank.holds")
    assert holds == {name: held[name] for name in holds}
    for how in ("tensor", "address"):
        results[f"peer_kernel_{how}_after_copy"] = ask(rank, "rank.read_by_kernel", how)


@two_gpus
@pytest.mark.parametrize("how", ["tensor", "address"])
def test_what_a_kernel_does_with_memory_of_another_gpu(trainer, rank, results, how):
    held = trainer.ask("trainer.make", 0, 1)
    rank.ask("rank.open", trainer.ask("trainer.export"), 1, False)
    answer = ask(rank, "rank.read_by_kernel", how)
    results[f"peer_kernel_{how}"] = answer | {"is_right": answer.get("holds") == held[BIG]}


@two_gpus
def test_memory_of_another_gpu_is_read_in_place(trainer, rank, results):
    held = trainer.ask("trainer.make", 0, 1)
    opened = rank.ask("rank.open", trainer.ask("trainer.export"), 1, True)
    assert opened["devices"] == ["cuda:1"]
    results["direct_mapping"] = rank.ask("rank.probe_opened")
    results["direct_copy"] = rank.ask("rank.read_by_copy")
    assert results["direct_copy"]["holds"] == held[BIG]
    for how in ("address", "tensor"):
        answer = ask(rank, "rank.read_by_kernel", how)
        results[f"direct_kernel_{how}"] = answer | {"is_right": answer.get("holds") == held[BIG]}


@two_gpus
def test_gpus_are_found_by_uuid_and_not_by_number(start, results):
    trainer, rank = start(**visible(1)), start(**visible(0, 1))
    held = trainer.ask("trainer.make", 0, 1)
    assert rank.ask("rank.open", trainer.ask("trainer.export"), 0, False)["devices"] == ["cuda:1"]
    assert rank.ask("rank.read_by_copy")["holds"] == held[BIG]


@two_gpus
def test_a_gpu_that_is_not_visible_is_named(start, results):
    trainer, rank = start(**visible(0)), start(**visible(1))
    held = trainer.ask("trainer.make", 0, 1)
    export = trainer.ask("trainer.export")
    assert "is not visible here" in rank.ask("rank.open", export, 0, False)["error"]
    answer = ask(rank, "rank.open", export, 0, True)
    results["invisible_gpu_open"] = answer
    if "error" not in answer:
        results["invisible_gpu_mapping"] = ask(rank, "rank.probe_opened")
        results["invisible_gpu_copy"] = ask(rank, "rank.read_by_copy")
        results["invisible_gpu_is_right"] = results["invisible_gpu_copy"].get("holds") == held[BIG]
        results["invisible_gpu_kernel"] = ask(rank, "rank.read_by_kernel", "address")


def test_which_plain_addresses_are_mapped(trainer, results):
    results["probe_plain"] = said = trainer.ask("probe_plain")
    mapped = {name: each["is_mapped"] for name, each in said.items()}
    assert mapped == {"tensor": True, "inside": True, "malloc": True, "freed": False, "host": False, "none": False}


def test_virtual_memory_is_mapped_while_memory_is_behind_it(trainer, results):
    results["probe_virtual"] = said = trainer.ask("probe_virtual")
    mapped = {name for name, each in said.items() if each["is_mapped"]}
    assert mapped == {"mapped", "mapped_again"}
    assert not said["mapped"]["has_ipc_handle"]


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_weights_that_sleep_are_not_mapped(trainer, results):
    results["probe_sleep"] = said = trainer.ask("probe_sleep")
    assert "error" not in said, said
    assert said["holds"]
    assert [said[state]["is_mapped"] for state in ("awake", "asleep", "awake_again")] == [True, False, True]


@pytest.mark.parametrize(("num_large", "num_small"), [(300, 100), (0, 18_000)], ids=["400", "18000"])
def test_what_handles_cost(trainer, rank, results, num_large, num_small):
    trainer.ask("trainer.make_many", num_large, num_small, 64 << 10)
    cost = trainer.ask("trainer.time_export")
    export = trainer.ask("trainer.export")
    milliseconds = [rank.ask("rank.open", export, 0, False)["ms"] for _ in range(3)]
    cost |= {"open_first_ms": milliseconds[0], "open_repeated_ms": min(milliseconds[1:])}
    results[f"cost_{num_large + num_small}"] = cost
    assert cost["num_segments"] >= num_large
    assert cost["repeated_us_a_tensor"] < 5
