"""Tensors that go to other processes: through host memory for real, through GPU memory with a driver that is none."""

import ctypes
import gc
import os
from itertools import count
from pathlib import Path

import pytest
import torch

from fp8refit import StagingMemoryError, TransportError
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.cuda_driver import CudaDriver, CudaDriverError, is_mapped
from fp8refit.transport.memory.exporter import Exporter
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.memory.process import Process
from tests.transport.other_process import OtherProcess, fingerprint, tensors

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def other():
    process = OtherProcess()
    yield process
    process.end()


@pytest.fixture
def importer():
    importer = Importer(CPU)
    yield importer
    importer.close()


@pytest.fixture
def bucket():
    bucket = Bucket(1 << 16)
    yield bucket
    bucket.close()


def num_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def is_mapped_here(segment):
    return segment.id in Path("/proc/self/maps").read_text()


# Host memory


def test_another_process_reads_the_same_bytes(other, bucket):
    refs = [bucket.put(name, tensor) for name, tensor in tensors().items()]
    assert other.open([bucket.segment], refs) == {name: fingerprint(tensor) for name, tensor in tensors().items()}


def test_tensors_of_another_process_are_read_here(other, importer):
    segment, refs = other.export(1 << 16)
    opened = importer.open([segment], refs)
    assert segment.pid == other.process.pid
    assert {name: fingerprint(tensor) for name, tensor in opened.items()} == {
        name: fingerprint(tensor) for name, tensor in tensors().items()
    }
    assert all(tensor.is_contiguous() for tensor in opened.values())


@pytest.mark.parametrize("other", [torch.full((2, 4), 7.0), torch.full((8,), 7.0).bfloat16(), torch.full((3,), 7.0)])
def test_another_tensor_of_the_same_name_is_told_as_it_is(other, bucket):
    importer = Importer(torch.device("cpu"))
    for tensor in (torch.ones(8), torch.full((8,), 2.0), other, torch.ones(8), other):
        bucket.clear()
        ref = bucket.put("w", tensor)
        found = importer.open([bucket.segment], [ref])["w"]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_a_cleared_bucket_shows_new_bytes_under_the_old_mapping(other, bucket):
    first = bucket.put("w", torch.ones(8))
    assert other.open([bucket.segment], [first])["w"] == fingerprint(torch.ones(8))
    bucket.clear()
    second = bucket.put("w", torch.full((8,), 2.0))
    assert second == first
    assert other.open([bucket.segment], [second])["w"] == fingerprint(torch.full((8,), 2.0))


def test_strides_and_offsets_come_out_as_they_went_in(bucket, importer):
    ref = bucket.put("w", torch.arange(24, dtype=torch.float32))
    view = ref.model_copy(update={"name": "v", "offset_bytes": 8, "shape": (3, 2), "stride": (1, 6)})
    repeated = ref.model_copy(update={"name": "r", "shape": (4, 24), "stride": (0, 1)})
    opened = importer.open([bucket.segment], [ref, view, repeated])
    assert opened["v"].tolist() == [[2.0, 8.0], [3.0, 9.0], [4.0, 10.0]]
    assert torch.equal(opened["r"], torch.arange(24.0).expand(4, 24))
    assert opened["v"].data_ptr() == opened["w"].data_ptr() + 8


def test_tensors_lie_aligned_and_fill_the_bucket(importer):
    bucket = Bucket(512)
    first, second = bucket.put("a", torch.zeros(3, dtype=torch.int8)), bucket.put("b", torch.ones(64))
    assert (first.offset_bytes, second.offset_bytes) == (0, 256)
    assert torch.equal(importer.open([bucket.segment], [second])["b"], torch.ones(64))
    assert not bucket.has_room(torch.zeros(1))
    with pytest.raises(ValueError, match="c: the bucket is full; clear"):
        bucket.put("c", torch.zeros(1))
    with pytest.raises(ValueError, match="d: has 516 bytes, but the bucket 512; make a larger one"):
        bucket.put("d", torch.zeros(129))
    bucket.clear()
    assert bucket.has_room(torch.zeros(128))
    bucket.put("c", torch.zeros(128))
    with pytest.raises(ValueError, match="e: is complex32, which cannot be sent"):
        bucket.put("e", torch.zeros(1, dtype=torch.complex32))
    bucket.close()
    bucket.close()


def test_a_gradient_is_no_obstacle(bucket, importer):
    ref = bucket.put("w", torch.nn.Parameter(torch.ones(3)))
    assert torch.equal(importer.open([bucket.segment], [ref])["w"], torch.ones(3))


def test_it_is_no_file_and_leaves_no_descriptor(other):
    before = num_descriptors()
    for _ in range(3):
        bucket, importer = Bucket(1 << 16), Importer(CPU)
        ref = bucket.put("w", torch.ones(4))
        assert os.stat(bucket.segment.handle).st_nlink == 0
        segment, refs = other.export(1 << 16)
        tensor = importer.open([bucket.segment, segment], [ref, *refs[1:]])["w"]
        with pytest.raises(TransportError):
            importer.open([segment.model_copy(update={"id": "x"})], [refs[0].model_copy(update={"segment": "x"})])
        importer.close()
        bucket.close()
        assert torch.equal(tensor, torch.ones(4)), "a tensor keeps host memory mapped"
        assert is_mapped_here(bucket.segment)
        assert not is_mapped_here(segment)
        del tensor
        assert not is_mapped_here(bucket.segment)
    assert num_descriptors() <= before


def test_only_what_is_kept_stays_mapped(other, importer):
    (first, refs), (second, more), (unused, _) = (other.export(1 << 14) for _ in range(3))
    importer.open([first, second, unused], [refs[0], more[1]])
    assert [is_mapped_here(each) for each in (first, second, unused)] == [True, True, False]
    importer.keep_only({second.id, "unknown"})
    assert [is_mapped_here(each) for each in (first, second)] == [False, True]
    importer.open([first], refs[:1])
    importer.close()
    assert not any(map(is_mapped_here, (first, second)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset_bytes": 4096 - 60}, "w: ends at byte 4100 of a segment of 4096"),
        ({"shape": (4, 5), "stride": (400, 1)}, "w: ends at byte 4820 of a segment of 4096"),
        ({"shape": (1 << 40,), "stride": (1,)}, "w: ends at byte 4398046511104 of a segment of 4096"),
        ({"offset_bytes": -4}, "w: has offset -4, .* not all in range"),
        ({"shape": (-1, 4)}, "w: has .*shape .-1, 4.* not all in range"),
        ({"stride": (-4, 1)}, "w: has .*strides .-4, 1.* not all in range"),
        ({"shape": (0, 4), "stride": (1 << 70, 1)}, "w: .*not all in range"),
        ({"shape": (1 << 40, 1 << 40), "stride": (0, 0)}, "w: .*not all in range"),
        ({"stride": (1,)}, "w: has 2 dimensions and 1 strides"),
        ({"offset_bytes": 2}, "w: begins at byte 2, which is not a multiple of the 4 bytes of float32"),
        ({"dtype": "float3"}, "w: is float3, which no checkpoint holds"),
        ({"dtype": "Tensor"}, "w: is Tensor, which no checkpoint holds"),
        ({"segment": "gone"}, "w: lies in segment gone, which was not sent"),
    ],
)
def test_references_are_checked_before_anything_is_mapped(importer, change, message):
    bucket = Bucket(4096)
    ref = bucket.put("w", torch.zeros(4, 4))
    bucket.close()
    with pytest.raises(TransportError, match=message):
        importer.open([bucket.segment], [ref, ref.model_copy(update=change)][1:])


def test_all_problems_are_told_at_once(bucket, importer):
    ref = bucket.put("w", torch.zeros(4))
    other = ref.model_copy(update={"name": "v", "dtype": "?"})
    with pytest.raises(TransportError, match=r"2 reference.*\n  - w: is given twice\n  - v: is \?"):
        importer.open([bucket.segment], [ref, ref, other])


def test_a_process_that_is_gone_is_named(importer):
    process = OtherProcess()
    (mapped, refs), (unmapped, more) = process.export(1 << 14), process.export(1 << 14)
    opened = importer.open([mapped], refs[:1])
    process.process.kill()
    os.waitid(os.P_PID, process.process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in /proc
    with pytest.raises(TransportError, match=f"process {unmapped.pid}, .* is gone: start the trainer again"):
        importer.open([unmapped], more)
    process.process.wait()
    with pytest.raises(TransportError, match=f"process {unmapped.pid}, .* is gone: start the trainer again"):
        importer.open([unmapped], more)
    name = refs[0].name
    assert fingerprint(opened[name]) == fingerprint(tensors()[name]), "what was mapped outlives its process"
    process.process.stdin.close()
    process.process.stdout.close()


def test_a_closed_bucket_is_told_from_a_dead_process(importer):
    bucket = Bucket(4096)
    ref = bucket.put("w", torch.zeros(4))
    bucket.close()
    with pytest.raises(TransportError, match=f"has freed segment {bucket.segment.id}.*export the tensors again"):
        importer.open([bucket.segment], [ref])
    with open(os.devnull) as file:
        reused = bucket.segment.model_copy(update={"handle": f"/proc/{os.getpid()}/fd/{file.fileno()}"})
        with pytest.raises(TransportError, match="has freed segment"):
            importer.open([reused], [ref])


@pytest.mark.parametrize("handle", ["/etc/passwd", "/proc/1/fd/3", "/proc/self/fd/3", ""])
def test_a_handle_names_nothing_but_memory_of_its_process(bucket, importer, handle):
    ref = bucket.put("w", torch.zeros(4))
    with pytest.raises(TransportError, match="which is not memory of its process"):
        importer.open([bucket.segment.model_copy(update={"handle": handle})], [ref])


def test_a_segment_is_as_long_as_it_says(bucket, importer):
    ref = bucket.put("w", torch.zeros(4))
    longer = bucket.segment.model_copy(update={"num_bytes": 1 << 20})
    with pytest.raises(TransportError, match="has 65536 bytes, but should have 1048576"):
        importer.open([longer], [ref])
    with pytest.raises(OSError):
        os.truncate(bucket.segment.handle, 0)


def test_a_segment_stays_what_it_was(bucket, importer):
    ref = bucket.put("w", torch.zeros(4))
    importer.open([bucket.segment], [ref])
    with pytest.raises(TransportError, match="has changed since it was mapped"):
        importer.open([bucket.segment.model_copy(update={"num_bytes": 4096})], [ref])


def test_another_container_is_named(bucket, importer):
    ref = bucket.put("w", torch.zeros(4))
    bucket.close()
    elsewhere = bucket.segment.process.model_copy(update={"pid_namespace": "pid:[1]"})
    with pytest.raises(TransportError, match="another container or on another host: run trainer and engine in one"):
        importer.open([bucket.segment.model_copy(update={"process": elsewhere})], [ref])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_named(bucket):
    ref = bucket.put("w", torch.zeros(4))
    process = OtherProcess()
    process.ask("setuid", 65534)
    answer = process.open([bucket.segment], [ref])
    process.end()
    assert "does not let other users read its memory: run trainer and engine as the same user" in answer["error"]


def test_a_bucket_has_a_size():
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        Bucket(0)


def test_a_process_is_told_from_a_later_one_of_the_same_pid():
    process = Process.current()
    assert process.is_reachable and process.is_alive
    assert not process.model_copy(update={"started": process.started + 1}).is_alive
    assert not process.model_copy(update={"pid": 1 << 22}).is_alive


# GPU memory, with a driver that takes host memory for it


class FakeDriver:
    """One GPU, whose memory is host memory. Records what is asked of it."""

    uuid = "1234"

    def __init__(self):
        self.events = []
        self.buffers = {}
        self.unshared = set()
        self.numbers = count(1)
        self.visible = True
        self.peers = True
        self.opened_on = []
        self.fails = None

    def segment(self, num_bytes, *, shared=True):
        """Allocate, and give the bytes."""
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.reallocate(memory)
        if not shared:
            self.unshared.add(memory.data_ptr())
        return memory

    def reallocate(self, memory):
        """Free `memory` and allocate as much at the same address."""
        self.buffers[memory.data_ptr()] = (memory, next(self.numbers))

    def device_uuid(self, device):
        return self.uuid if device.type == "cpu" else None

    def find_device(self, uuid):
        return CPU if self.visible and uuid == self.uuid else None

    def allocation_of(self, address):
        self.events.append("allocation_of")
        for base, (memory, _) in self.buffers.items():
            if base <= address < base + memory.numel():
                return base, memory.numel()
        raise CudaDriverError("cuMemGetAddressRange", "CUDA_ERROR_NOT_FOUND")

    def buffer_id(self, address):
        self.events.append("buffer_id")
        return self.buffers[address][1] if address in self.buffers else None

    def ipc_handle(self, base):
        self.events.append("ipc_handle")
        return None if base in self.unshared else base.to_bytes(64, "big")

    def open_ipc(self, handle, device):
        self.events.append("open_ipc")
        self.opened_on.append(device)
        if self.fails:
            raise CudaDriverError("cuIpcOpenMemHandle", self.fails)
        if not self.peers and device != CPU:
            raise CudaDriverError("cuIpcOpenMemHandle", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        return int.from_bytes(handle, "big")

    def close_ipc(self, address, device):
        self.events.append(f"close_ipc {self.buffers[address][1]}")

    def device_malloc(self, num_bytes, device):
        if self.fails:
            raise CudaDriverError("cuMemAlloc", self.fails)
        return self.segment(num_bytes).data_ptr()

    def device_free(self, address, device):
        self.events.append("device_free")
        del self.buffers[address]

    def tensor_at(self, address, num_bytes, device):
        return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def driver():
    return FakeDriver()


def elsewhere(export):
    """The segments of `export` as if another process had made them."""
    process = Process.current().model_copy(update={"started": 1})
    return [segment.model_copy(update={"process": process}) for segment in export.segments]


def test_tensors_of_one_segment_share_one_handle(driver):
    memory, other = driver.segment(4096), driver.segment(1024)
    tensors = {
        "a": memory[:1024].view(torch.float32).view(16, 16),
        "b": memory[1024:1536].view(torch.bfloat16).view(16, 16).t(),
        "c": other[512:].view(torch.float8_e4m3fn),
        "d": memory[4092:].view(torch.float32),
    }
    export = Exporter(driver=driver).export(tensors)
    assert driver.events.count("ipc_handle") == 2
    assert [segment.num_bytes for segment in export.segments] == [4096, 1024]
    assert [ref.offset_bytes for ref in export.refs] == [0, 1024, 512, 4092]
    assert export.refs[1].stride == (1, 16) and export.refs[2].dtype == "float8_e4m3fn"
    assert export.leftover == ()


def test_an_unchanged_state_dict_costs_one_question_a_segment(driver):
    memory = driver.segment(4096)
    tensors = {f"w{i}": memory[64 * i : 64 * i + 64].view(torch.bfloat16) for i in range(64)}
    exporter = Exporter(driver=driver)
    first = exporter.export(tensors)
    driver.events.clear()
    again = {name: tensor.view(torch.uint8).view(torch.bfloat16) for name, tensor in tensors.items()}
    assert exporter.export(again) is first
    assert driver.events == ["buffer_id"]
    assert Exporter(driver=driver).export(tensors).digest == first.digest


def test_what_was_exported_is_recognised_by_the_names_it_was_sent_by(driver):
    memory, other = driver.segment(1024), driver.segment(1024)
    exporter = Exporter(driver=driver)
    first = exporter.export({"a": memory[:64], "b": other}, ["module.a", "module.b"])
    assert exporter.again(["module.a", "module.b"], [memory[:64], other]) is first
    for names, sent in (
        (["a", "b"], [memory[:64], other]),
        (["module.b", "module.a"], [memory[:64], other]),
        (["module.a", "module.b"], [memory[64:128], other]),
        (["module.a", "module.b"], [memory[:64].view(8, 8), other]),
        (["module.a", "module.b"], [memory[:64].view(torch.int8), other]),
    ):
        assert exporter.again(names, sent) is None
    driver.reallocate(other)
    assert exporter.again(["module.a", "module.b"], [memory[:64], other]) is None
    exporter.close()
    assert exporter.again([], []) is None


def test_every_change_is_seen(driver):
    memory = driver.segment(4096)
    base = {"a": memory[:64].view(8, 8), "b": memory[64:128].view(8, 8)}
    exporter = Exporter(driver=driver)
    digests = {exporter.export(base).digest}
    changes = [
        base | {"b": memory[128:192].view(8, 8)},
        base | {"b": base["b"].t()},
        base | {"b": base["b"].view(64)},
        base | {"b": base["b"].view(torch.int8)},
        {"b": base["b"], "a": base["a"]},
        {"a": base["a"]},
        base | {"c": memory[64:128].view(8, 8)},
    ]
    for number, changed in enumerate(changes):
        digests.add(exporter.export(changed).digest)
        assert len(digests) == number + 2
    assert exporter.export(base).digest in digests
    assert driver.events.count("ipc_handle") == 1, "the segment is the same all along"


def test_a_segment_that_was_reallocated_in_place_is_another(driver):
    memory, kept = driver.segment(1024), driver.segment(1024)
    tensors = {"a": memory, "b": kept}
    exporter = Exporter(driver=driver)
    before = exporter.export(tensors)
    driver.reallocate(memory)
    after = exporter.export(tensors)
    assert after.segments[0].id != before.segments[0].id
    assert after.segments[1] is before.segments[1]
    assert after.refs[0] != before.refs[0] and after.digest != before.digest
    assert driver.events.count("ipc_handle") == 3


def test_what_has_no_handle_is_left_over(driver):
    shared, unshared, small = driver.segment(1024), driver.segment(1024, shared=False), driver.segment(64)
    driver.buffers[small.data_ptr()] = (small[:32], 99)
    tensors = {
        "shared": shared,
        "unshared": unshared,
        "empty": shared[:0],
        "beyond": small[16:48],
        "meta": torch.empty(4, device="meta"),
        "short": torch.zeros(1, dtype=torch.complex32),
    }
    exporter = Exporter(driver=driver)
    export = exporter.export(tensors)
    assert export.leftover == ("unshared", "empty", "beyond", "meta", "short")
    assert [ref.name for ref in export.refs] == ["shared"]
    assert driver.events.count("ipc_handle") == 3
    tensors["shared"] = shared[:512]
    assert exporter.export(tensors).leftover == export.leftover
    assert driver.events.count("ipc_handle") == 3, "a refusal is remembered"
    driver.reallocate(unshared)
    driver.unshared.clear()
    assert "unshared" not in exporter.export(tensors).leftover


def test_memory_that_the_driver_does_not_number_is_left_over(driver, monkeypatch):
    memory = driver.segment(64)
    monkeypatch.setattr(driver, "buffer_id", lambda address: None)
    assert Exporter(driver=driver).export({"a": memory}).leftover == ("a",)


def test_a_failed_export_is_not_taken_for_the_last(driver):
    memory = driver.segment(64)
    exporter = Exporter(driver=driver)
    first = exporter.export({"a": memory})
    with pytest.raises(CudaDriverError, match="CUDA_ERROR_NOT_FOUND"):
        exporter.export({"a": memory, "b": torch.zeros(4)})
    driver.reallocate(memory)
    assert exporter.export({"a": memory}).segments[0].id != first.segments[0].id


def test_a_closed_exporter_begins_anew(driver):
    memory = driver.segment(64)
    exporter = Exporter(driver=driver)
    first = exporter.export({"a": memory})
    exporter.close()
    again = exporter.export({"a": memory})
    assert again is not first and again == first
    assert driver.events.count("ipc_handle") == 2


def test_cpu_tensors_need_no_driver():
    export = Exporter().export({"a": torch.ones(4), "b": torch.ones(2)})
    assert export.leftover == ("a", "b") and not export.refs and not export.segments
    with pytest.raises(ValueError, match="not on meta"):
        Bucket(64, torch.device("meta"))


def test_segments_are_mapped_once(driver):
    memory, other = driver.segment(1024), driver.segment(1024)
    memory.copy_(torch.arange(1024) % 251)
    export = Exporter(driver=driver).export({"a": memory[256:].view(torch.float32), "b": memory[:16], "c": other})
    driver.events.clear()
    importer = Importer(CPU, driver=driver)
    for _ in range(3):
        opened = importer.open(elsewhere(export), export.refs)
        assert torch.equal(opened["a"].view(torch.uint8), memory[256:]) and torch.equal(opened["b"], memory[:16])
    assert driver.events == ["open_ipc", "open_ipc"]
    importer.keep_only([export.segments[1].id])
    importer.close()
    importer.close()
    assert driver.events == ["open_ipc", "open_ipc", "close_ipc 1", "close_ipc 2"]


def test_the_same_process_needs_no_handle(driver):
    memory = driver.segment(1024)
    export = Exporter(driver=driver).export({"a": memory})
    driver.events.clear()
    importer = Importer(CPU, driver=driver)
    assert importer.open(export.segments, export.refs)["a"].data_ptr() == memory.data_ptr()
    importer.close()
    assert driver.events == ["buffer_id"]
    driver.reallocate(memory)
    with pytest.raises(TransportError, match="was freed; export its tensors again"):
        importer.open(export.segments, export.refs)


def test_why_a_handle_cannot_be_opened(driver, other):
    export = Exporter(driver=driver).export({"a": driver.segment(64)})
    there, _ = other.export(1 << 14)
    driver.fails = "CUDA_ERROR_INVALID_VALUE"

    def error(**process):
        owner = there.process.model_copy(update=process)
        segment = export.segments[0].model_copy(update={"process": owner})
        with pytest.raises(TransportError) as caught:
            Importer(CPU, driver=driver).open([segment], export.refs)
        return str(caught.value)

    assert "has freed segment" in error() and "CUDA_ERROR_INVALID_VALUE" in error()
    assert "is gone: start the trainer again" in error(started=1)
    assert "another container or on another host" in error(pid_namespace="pid:[1]")


@pytest.mark.parametrize(
    ("options", "place"), [({}, "meta"), ({"reads_peers": True}, "meta"), ({"reads_peers": False}, "cpu")]
)
def test_memory_of_another_gpu_is_mapped_on_the_rank_s_own_unless_told_otherwise(options, place, driver):
    memory = driver.segment(64)
    exported = {"a": memory[:32].view(torch.float32).fill_(3.0)}
    export = Exporter(driver=driver).export(exported)
    importer = Importer(torch.device("meta"), driver=driver, **options)
    for _ in range(2):
        opened = importer.open(elsewhere(export), export.refs)
        assert torch.equal(opened["a"], exported["a"])
    assert driver.opened_on == [torch.device(place)]


def test_the_driver_of_an_exporter_and_an_importer_is_the_gpu_s(monkeypatch):
    made = []
    for module in ("exporter", "importer"):
        monkeypatch.setattr(
            f"fp8refit.transport.memory.{module}.CudaDriver", lambda: made.append(FakeDriver()) or made[-1]
        )
    exporter, importer = Exporter(), Importer(CPU)
    memory = made[0].segment(64)
    made[1].buffers = made[0].buffers
    export = exporter.export({"a": memory})
    assert export.leftover == ()
    assert torch.equal(importer.open(elsewhere(export), export.refs)["a"], memory)
    assert made[1].opened_on == [CPU]


def test_memory_of_a_gpu_without_peer_access_is_mapped_where_it_is(driver):
    export = Exporter(driver=driver).export({"a": driver.segment(64)})
    driver.peers = False
    opened = Importer(torch.device("meta"), driver=driver).open(elsewhere(export), export.refs)
    assert opened.keys() == {"a"}
    assert driver.opened_on == [torch.device("meta"), CPU]
    driver.visible = False
    with pytest.raises(TransportError, match=r"GPU 1234 of process .* is not visible here"):
        Importer(torch.device("meta"), driver=driver).open(elsewhere(export), export.refs)


def test_a_gpu_that_is_not_visible_is_named(driver):
    export = Exporter(driver=driver).export({"a": driver.segment(64)})
    driver.visible = False
    with pytest.raises(TransportError, match=r"GPU 1234 of process .* is not visible here.*CUDA_VISIBLE_DEVICES"):
        Importer(CPU, reads_peers=False, driver=driver).open(elsewhere(export), export.refs)
    reading_peers = Importer(CPU, driver=driver)
    assert reading_peers.open(elsewhere(export), export.refs).keys() == {"a"}


@pytest.mark.parametrize("handle", ["", "zz", "00" * 63])
def test_a_handle_is_64_bytes(driver, handle):
    export = Exporter(driver=driver).export({"a": driver.segment(64)})
    segments = [segment.model_copy(update={"handle": handle}) for segment in elsewhere(export)]
    with pytest.raises(TransportError, match="which is not a CUDA IPC handle"):
        Importer(CPU, driver=driver).open(segments, export.refs)


def test_a_gpu_bucket_is_allocated_beside_torch(driver):
    bucket = Bucket(1024, CPU, driver=driver)
    ref = bucket.put("w", torch.arange(8.0))
    assert (bucket.segment.kind, bucket.segment.device) == ("cuda_ipc", "1234")
    opened = Importer(CPU, driver=driver).open([bucket.segment], [ref])
    assert torch.equal(opened["w"], torch.arange(8.0))
    bucket.close()
    bucket.close()
    assert driver.events.count("device_free") == 1


def test_a_gpu_without_room_or_without_handles_gives_no_bucket(driver, monkeypatch):
    driver.fails = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(StagingMemoryError, match=r"no room for a bucket of 2 MiB .*empty_cache"):
        Bucket(2 << 20, CPU, driver=driver)
    driver.fails = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(CudaDriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        Bucket(2 << 20, CPU, driver=driver)
    driver.fails = None
    monkeypatch.setattr(driver, "ipc_handle", lambda base: None)
    with pytest.raises(TransportError, match="cannot share memory between processes"):
        Bucket(1024, CPU, driver=driver)
    assert driver.events[-1] == "device_free"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_only_questions_about_one_fail():
    assert CudaDriver().device_uuid(CPU) is None
    assert CudaDriver().find_device("1234") is None
    with pytest.raises(TransportError, match="there is no NVIDIA driver on this machine"):
        is_mapped(4096)
