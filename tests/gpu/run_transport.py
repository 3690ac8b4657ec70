"""Another process with a GPU: a trainer or an engine rank that does what the lines on its standard input say.

`test_transport.py` starts it, two at a time, and compares what each says the tensors hold. What may end in a fault of the
GPU is done here, where it ends this process alone. See `main` for the orders.
"""

import ctypes
import gc
import time

import torch
import triton
import triton.language as tl

from fp8refit import RefitError
from fp8refit.bench.clock import device_seconds
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.cuda_driver import CudaDriver, is_mapped
from fp8refit.transport.memory.exporter import Exporter
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.memory.segment import Segment, TensorRef
from tests.transport.other_process import answer_orders, fingerprint, tensors

BIG = "big"
BIG_BYTES = 256 << 20


class Trainer:
    """Holds tensors and gives them away."""

    def __init__(self):
        self.exporter, self.tensors, self.bucket = Exporter(), {}, None

    def make(self, device, seed):
        """Make the tensors, `big` among them; gives what they hold."""
        self.tensors = tensors(torch.device("cuda", device), seed)
        generator = torch.Generator(f"cuda:{device}").manual_seed(seed)
        big = torch.empty(BIG_BYTES // 2, dtype=torch.bfloat16, device=f"cuda:{device}")
        self.tensors[BIG] = big.normal_(generator=generator)
        return self.holds()

    def make_many(self, num_large, num_small, small_bytes):
        """Make tensors that lie in a segment each, and some that share segments."""
        self.tensors = {f"large.{i}": torch.empty(12 << 20, dtype=torch.int8, device="cuda") for i in range(num_large)}
        self.tensors |= {
            f"small.{i}": torch.empty(small_bytes, dtype=torch.int8, device="cuda") for i in range(num_small)
        }

    def add(self, value):
        """Change every tensor where it is; gives what they hold."""
        for tensor in self.tensors.values():
            tensor.copy_(tensor.float().add_(value))
        return self.holds()

    def holds(self):
        return {name: fingerprint(tensor) for name, tensor in self.tensors.items()}

    def addresses(self):
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    def free(self):
        """Give the memory back to the GPU; gives how many bytes became free."""
        before = free_bytes()
        self.tensors = {}
        gc.collect()
        torch.cuda.empty_cache()
        return free_bytes() - before

    def export(self):
        torch.cuda.synchronize()
        export = self.exporter.export(self.tensors)
        assert self.exporter.export(dict(self.tensors)) is export
        return {
            "segments": [segment.model_dump() for segment in export.segments],
            "refs": [ref.model_dump() for ref in export.refs],
            "leftover": list(export.leftover),
            "digest": export.digest,
        }

    def put(self, device):
        """Put every tensor into a bucket."""
        self.bucket = Bucket(2 * BIG_BYTES, None if device is None else torch.device("cuda", device))
        refs = [self.bucket.put(name, tensor).model_dump() for name, tensor in self.tensors.items()]
        torch.cuda.synchronize()
        return {"segments": [self.bucket.segment.model_dump()], "refs": refs}

    def close_bucket(self):
        before = free_bytes()
        self.bucket.close()
        return free_bytes() - before

    def time_export(self):
        """Export for the first time, then four times more: microseconds per tensor, and how many segments there are."""
        exporter, seconds = Exporter(), []
        for _ in range(5):
            start = time.perf_counter()
            export = exporter.export(self.tensors)
            seconds.append(time.perf_counter() - start)
        count = len(self.tensors)
        return {
            "num_tensors": count,
            "num_segments": len(export.segments),
            "first_us_a_tensor": 1e6 * seconds[0] / count,
            "repeated_us_a_tensor": 1e6 * min(seconds[1:]) / count,
        }

    def open_own(self):
        """Open an export in the process that made it: whether each tensor is where it was."""
        export, importer = self.exporter.export(self.tensors), Importer(torch.device("cuda", 0))
        opened = importer.open(export.segments, export.refs)
        return {name: tensor.data_ptr() == self.tensors[name].data_ptr() for name, tensor in opened.items()}


class Rank:
    """Opens tensors of a trainer."""

    def __init__(self):
        self.importers, self.opened, self.device = {}, {}, None

    def open(self, export, device, reads_peers):
        """Map the segments; gives the devices of the tensors and how many milliseconds it took."""
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        key = (device, reads_peers)
        if key not in self.importers:
            self.importers[key] = Importer(self.device, reads_peers=reads_peers)
        segments = [Segment.model_validate(segment) for segment in export["segments"]]
        refs = [TensorRef.model_validate(ref) for ref in export["refs"]]
        start = time.perf_counter()
        self.opened = self.importers[key].open(segments, refs)
        milliseconds = 1e3 * (time.perf_counter() - start)
        return {"ms": milliseconds, "devices": sorted({str(tensor.device) for tensor in self.opened.values()})}

    def holds(self):
        """What the tensors hold, read by the GPU of this rank."""
        return {name: fingerprint(tensor.to(self.device)) for name, tensor in self.opened.items()}

    def read_by_kernel(self, how):
        """What `big` holds as a Triton kernel on this rank's GPU reads it: from a tensor, or from its bare address."""
        out = torch.zeros(BIG_BYTES, dtype=torch.uint8, device=self.device)
        source = self.opened[BIG].view(torch.uint8)
        kernel, argument = copy_from_tensor, source
        if how == "address":
            kernel, argument = copy_from_address, torch.tensor([source.data_ptr()], device=self.device)
        rate = bytes_a_second(lambda: kernel[(BIG_BYTES // 4096,)](argument, out, BLOCK=4096))
        return {"holds": fingerprint(out.view(torch.bfloat16)), "gb_per_s": rate / 1e9}

    def read_by_copy(self):
        """What `big` holds as torch copies it to this rank's GPU."""
        out = torch.zeros(BIG_BYTES // 2, dtype=torch.bfloat16, device=self.device)
        rate = bytes_a_second(lambda: out.copy_(self.opened[BIG]))
        return {"holds": fingerprint(out), "gb_per_s": rate / 1e9}

    def let_go(self):
        """Unmap everything."""
        torch.cuda.synchronize()
        self.opened = {}
        for importer in self.importers.values():
            importer.close()

    def keep_only(self, export):
        """Unmap what is not in `export`."""
        torch.cuda.synchronize()
        for importer in self.importers.values():
            importer.keep_only(segment["id"] for segment in export["segments"])

    def probe_opened(self):
        """What the driver says of the mapping in which `big` lies."""
        return probe(self.opened[BIG].data_ptr(), self.opened[BIG].device.index)


@triton.jit
def copy_from_tensor(source, out, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(source + offset))


@triton.jit
def copy_from_address(addresses, out, BLOCK: tl.constexpr):
    source = tl.load(addresses).to(tl.pointer_type(tl.uint8))
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(source + offset))


def bytes_a_second(launch):
    """Run it until it is warm, then time eight runs together."""
    for _ in range(2):
        launch()
    return 8 * BIG_BYTES / device_seconds(lambda: [launch() for _ in range(8)], torch.device("cuda"))


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


# What the driver says of addresses


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


DEVICE, PINNED, READ_WRITE = 1, 1, 3
ATTRIBUTES = {
    "memory_type": 2,
    "buffer_id": 7,
    "device_ordinal": 9,
    "legacy_ipc": 10,
    "mapped": 13,
    "access_flags": 16,
    "memory_block_id": 20,
}


def check(code):
    assert code == 0, f"{code=}"


def probe(address, device=0):
    """What each question that might tell mapped memory says: [error code, value]."""
    cuda, said = ctypes.CDLL("libcuda.so.1"), {}
    for name, attribute in ATTRIBUTES.items():
        value = ctypes.c_uint64()
        code = cuda.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address))
        said[name] = [code, value.value]
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    said["address_range"] = [code, size.value]
    flags, location = ctypes.c_uint64(), Location(DEVICE, device)
    code = cuda.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(location), ctypes.c_uint64(address))
    said["get_access"] = [code, flags.value]
    handle = ctypes.c_uint64()
    code = cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address))
    said["retain_handle"] = [code, None]
    if code == 0:
        check(cuda.cuMemRelease(handle))
    return said | {"is_mapped": is_mapped(address)}


def probe_plain():
    """A torch tensor, host memory, an address that is none, and freed memory."""
    tensor, host, driver = torch.ones(1 << 24, device="cuda"), torch.ones(16), CudaDriver()
    device = torch.device("cuda", 0)
    address = driver.device_malloc(4 << 20, device)
    said = {"tensor": probe(tensor.data_ptr()), "inside": probe(tensor.data_ptr() + 12345), "malloc": probe(address)}
    driver.device_free(address, device)
    return said | {"freed": probe(address), "host": probe(host.data_ptr()), "none": probe(0x1000)}


def probe_virtual():
    """Virtual memory: reserved, mapped, unmapped, mapped again, and its address given back."""
    torch.ones(1, device="cuda")
    cuda, size, said = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(32 << 20), {}
    properties = AllocationProperties(type=PINNED, location=Location(DEVICE, 0))
    access = AccessDescription(Location(DEVICE, 0), READ_WRITE)
    none = ctypes.c_uint64(0)
    address = ctypes.c_uint64()
    check(cuda.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), none, none))
    said["reserved"] = probe(address.value)
    for state in ("mapped", "mapped_again"):
        handle = ctypes.c_uint64()
        check(cuda.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(properties), none))
        check(cuda.cuMemMap(address, size, ctypes.c_size_t(0), handle, none))
        check(cuda.cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1)))
        handles = CudaDriver().ipc_handle(address.value)
        said[state] = probe(address.value + 4096) | {"has_ipc_handle": handles is not None}
        check(cuda.cuMemUnmap(address, size))
        check(cuda.cuMemRelease(handle))
        said[f"un{state}"] = probe(address.value + 4096)
    check(cuda.cuMemAddressFree(address, size))
    return said | {"given_back": probe(address.value)}


def probe_sleep():
    """A tensor of vLLM's sleep mode: awake, asleep, and awake again."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        tensor = torch.ones(1 << 24, device="cuda")
    address = tensor.data_ptr()
    said = {"awake": probe(address)}
    allocator.sleep(offload_tags="weights")
    said["asleep"] = probe(address)
    allocator.wake_up()
    return said | {"awake_again": probe(address), "holds": float(tensor.sum()) == 1 << 24}


def main():
    trainer, rank = Trainer(), Rank()
    answer_orders(
        {
            **{f"trainer.{name}": getattr(trainer, name) for name in dir(trainer) if not name.startswith("_")},
            **{f"rank.{name}": getattr(rank, name) for name in dir(rank) if not name.startswith("_")},
            "probe_plain": probe_plain,
            "probe_virtual": probe_virtual,
            "probe_sleep": probe_sleep,
        },
        errors=(RefitError, RuntimeError, ValueError, ImportError),
    )


if __name__ == "__main__":
    main()
