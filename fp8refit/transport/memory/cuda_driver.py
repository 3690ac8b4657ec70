"""The few CUDA driver calls needed to share memory between processes, through ctypes.

The driver's library is loaded at the first call, so that machines without it can import this module. Addresses are in the
unified address space, so calls that only query one need no device. Calls that map or allocate use the device's primary
context, as torch does.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from fp8refit.errors import TransportError

_INVALID_VALUE = 1
_INVALID_CONTEXT = 201
_CANNOT_BE_EXPORTED = frozenset({_INVALID_VALUE, 205, 400, 800, 801})
"""Invalid value, map failed, invalid handle, not permitted, not supported."""

_MEMORY_TYPE = 2
_BUFFER_ID = 7
_DEVICE_ORDINAL = 9
_MAPPED = 13
"""Attributes of a pointer, `CU_POINTER_ATTRIBUTE_...` in cuda.h."""

_MEMORY_TYPE_DEVICE = 2
_LAZY_ENABLE_PEER_ACCESS = 1
_ALLOCATION_BYTES = 2 << 20
"""Smaller allocations share one mapping, and a handle exposes the whole mapping."""

_ARGUMENTS = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxGetCurrent": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64),
    "cuMemAlloc_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
}


class _IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`, passed by value."""

    _fields_ = (("data", ctypes.c_char * 64),)


class CudaDriverError(TransportError):
    """A CUDA driver call failed.

    Attributes:
        name: The error's name in cuda.h, such as `CUDA_ERROR_INVALID_VALUE`.
    """

    def __init__(self, call: str, name: str) -> None:
        self.name = name
        super().__init__(f"{call} failed with {name}")


class _DeviceBytes:
    """Device memory in the form that `torch.as_tensor` accepts."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def is_mapped(address: int) -> bool:
    """Whether a kernel may access `address`; see `CudaDriver.is_mapped`."""
    return CudaDriver().is_mapped(address)


class CudaDriver:
    """The NVIDIA driver, as used by this process.

    Every method raises `CudaDriverError` for errors it does not document, and `TransportError` if there is no driver.
    """

    def __init__(self) -> None:
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._uuids: dict[torch.device, str] = {}

    def device_uuid(self, device: torch.device) -> str | None:
        """The UUID of a GPU, equal in every process; None for other devices."""
        if device.type != "cuda":
            return None
        if device not in self._uuids:
            self._uuids[device] = str(torch.cuda.get_device_properties(device).uuid)
        return self._uuids[device]

    def find_device(self, uuid: str) -> torch.device | None:
        """This process's device for the GPU with this UUID; None if it is not visible here."""
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            if self.device_uuid(device) == uuid:
                return device
        return None

    def allocation_of(self, address: int) -> tuple[int, int]:
        """First address and size of the allocation (torch: the segment) that contains `address`."""
        self._ensure_context()
        base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), address)
        return base.value, num_bytes.value

    def buffer_id(self, address: int) -> int | None:
        """A number unique among all allocations of this process, past and future; None if nothing is allocated there."""
        value = ctypes.c_uint64()
        return value.value if self._attribute(value, _BUFFER_ID, address) else None

    def is_mapped(self, address: int) -> bool:
        """Whether a kernel may access `address`: False for freed memory, and for weights unmapped by sleep mode.

        The driver knows addresses in reserved ranges (`cuMemAddressReserve`) whether or not memory backs them. Only
        `CU_POINTER_ATTRIBUTE_MAPPED` tells the two apart.
        """
        kind, mapped = ctypes.c_uint64(), ctypes.c_uint64()  # zero, as the driver may write fewer bytes
        return (
            self._attribute(mapped, _MAPPED, address)
            and mapped.value != 0
            and self._attribute(kind, _MEMORY_TYPE, address)
            and kind.value == _MEMORY_TYPE_DEVICE
        )

    def ipc_handle(self, base: int) -> bytes | None:
        """Return the handle with which other processes can map the allocation at `base`.

        None for memory without one: expandable segments, pools of virtual memory such as sleep mode's, memory from
        another process.
        """
        ordinal, handle = ctypes.c_uint64(), _IpcHandle()
        if not self._attribute(ordinal, _DEVICE_ORDINAL, base):
            return None
        with self._on(torch.device("cuda", ordinal.value)):
            code = _library().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base))
        if code in _CANNOT_BE_EXPORTED:
            return None
        self._check("cuIpcGetMemHandle", code)
        return bytes(handle)

    def open_ipc(self, handle: bytes, device: torch.device) -> int:
        """Map another process's allocation into the address space of `device`, and return its first address.

        Enables peer access from `device` if the memory is on another GPU.
        """
        address = ctypes.c_uint64()
        with self._on(device):
            code = _library().cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            )
        self._check("cuIpcOpenMemHandle", code)
        return address.value

    def close_ipc(self, address: int, device: torch.device) -> None:
        """Unmap what `open_ipc` mapped. Nothing may be reading it."""
        with self._on(device):
            self._check("cuIpcCloseMemHandle", _library().cuIpcCloseMemHandle(ctypes.c_uint64(address)))

    def device_malloc(self, num_bytes: int, device: torch.device) -> int:
        """Allocate memory outside torch's allocator, in units of 2 MiB. It always has an IPC handle."""
        address = ctypes.c_uint64()
        with self._on(device):
            rounded = -(-num_bytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
            self._call("cuMemAlloc_v2", ctypes.byref(address), rounded)
        return address.value

    def device_free(self, address: int, device: torch.device) -> None:
        """Free memory from `device_malloc` once the device is done with it."""
        with self._on(device):
            self._call("cuMemFree_v2", address)

    def tensor_at(self, address: int, num_bytes: int, device: torch.device) -> Tensor:
        """View the bytes at an address as uint8, without copying or owning them.

        Raises:
            TransportError: torch does not accept the address as memory of `device`.
        """
        device = torch.device("cuda", _index_of(device))
        memory = torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)
        if memory.data_ptr() != address or memory.device != device:
            raise TransportError(f"torch does not accept {address:#x} as memory of {device} and made a copy of it")
        return memory

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name.removesuffix("_v2"), getattr(_library(), name)(*arguments))

    def _check(self, call: str, code: int) -> None:
        if code != 0:
            raise CudaDriverError(call, _error_name(_library(), code))

    def _attribute(self, value: ctypes.c_uint64, attribute: int, address: int) -> bool:
        """Query an attribute of an address; False if the driver does not know the address."""
        code: int = _library().cuPointerGetAttribute(ctypes.byref(value), attribute, address)
        if code == _INVALID_CONTEXT:
            self._ensure_context()
            code = _library().cuPointerGetAttribute(ctypes.byref(value), attribute, address)
        if code == _INVALID_VALUE:
            return False
        self._check("cuPointerGetAttribute", code)
        return True

    def _ensure_context(self) -> None:
        """Make a context current: queries need one, and a thread that has not used torch has none."""
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if not current.value:
            self._call("cuCtxSetCurrent", self._context(torch.cuda.current_device()))

    def _context(self, index: int) -> ctypes.c_void_p:
        """Return a GPU's primary context. It is never released, since torch's memory is in it."""
        if index not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context
        return self._contexts[index]

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        """Run the block in the primary context of `device`."""
        self._call("cuCtxPushCurrent_v2", self._context(_index_of(device)))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _library() -> ctypes.CDLL:
    """Return the driver's library. If torch uses a GPU, it has loaded the library already."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"there is no NVIDIA driver on this machine ({error})") from error
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    code = library.cuInit(0)
    if code != 0:
        raise CudaDriverError("cuInit", _error_name(library, code))
    return library


def _error_name(library: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value is not None else f"CUDA error {code}"
