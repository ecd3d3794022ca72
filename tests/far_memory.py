"""Tensors that span more addresses than the machine has memory.

Addresses are reserved for all of a tensor. Memory is behind those places alone that a test names (GPU), or behind
those that it touches (CPU).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

FLOAT = 4
_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE: the kernel doesn't count the pages before they are touched


@contextmanager
def reserved(elements: int, used: Iterable[tuple[int, int]], device: str) -> Iterator[Tensor]:
    """A float32 tensor ``[elements]``, zero at first.

    Args:
        elements: length.
        used: start and length of each stretch that will be read or written.
        device: ``"cpu"`` or ``"cuda"``.
    """
    if device == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        yield torch.frombuffer(mmap.mmap(-1, elements * FLOAT, flags=flags), dtype=torch.float32)
        return
    with ExitStack() as cleanup:
        yield _reserved_on_gpu(elements, used, cleanup)
        torch.cuda.synchronize()


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Memory(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _View:
    """An address as torch.as_tensor takes it."""

    def __init__(self, address: int, elements: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (elements,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


def _reserved_on_gpu(elements: int, used: Iterable[tuple[int, int]], cleanup: ExitStack) -> Tensor:
    """CUDA's virtual memory: reserve addresses, create memory, map it where it is used."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: object) -> None:
        status = getattr(driver, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned {status}")

    torch.cuda.current_stream()  # makes the context
    torch.zeros(1, device="cuda")
    location = _Location(1, torch.cuda.current_device())  # 1: a GPU
    memory = _Memory(type=1, location=location)  # 1: pinned there
    granule = ctypes.c_size_t()
    call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(memory), 0)
    page = granule.value
    size = ctypes.c_size_t(-(-elements * FLOAT // page) * page)
    base = ctypes.c_uint64()
    call("cuMemAddressReserve", ctypes.byref(base), size, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
    cleanup.callback(call, "cuMemAddressFree", base, size)
    first = [(0, 1)]  # torch asks where the tensor begins
    pages = {
        at
        for start, length in [*first, *used]
        for at in range(start * FLOAT // page, ((start + length) * FLOAT - 1) // page + 1)
    }
    access = _Access(location, 3)  # 3: read and write
    for at in pages:
        where, handle, length = ctypes.c_uint64(base.value + at * page), ctypes.c_uint64(), ctypes.c_size_t(page)
        call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(memory), ctypes.c_uint64(0))
        cleanup.callback(call, "cuMemRelease", handle)
        call("cuMemMap", where, length, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        cleanup.callback(call, "cuMemUnmap", where, length)
        call("cuMemSetAccess", where, length, ctypes.byref(access), ctypes.c_size_t(1))
    tensor = torch.as_tensor(_View(base.value, elements), device="cuda")
    assert tensor.data_ptr() == base.value
    for start, length in used:
        tensor[start : start + length] = 0
    return tensor
