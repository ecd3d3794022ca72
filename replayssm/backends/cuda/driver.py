"""The few functions of CUDA's driver that start a compiled kernel, called through ctypes.

All arguments of a kernel are one structure, packed in one step.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from replayssm.backends.cuda.build import BuildError

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MOST_SHARED_BYTES = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_INVALID_CONTEXT = 201
LARGEST_ARGUMENTS = 1024
_MOST_CONFIGS = 4096  # grids and streams of a kernel that are kept

Launch = Callable[[int, int, "Arguments"], None]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Arguments(threading.local):
    """Room for a kernel's arguments, one for each thread: the driver copies it during the launch."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(LARGEST_ARGUMENTS)
        self.bytes = memoryview(self.buffer).cast("B")
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))


def load(code: bytes, name: str, device: int, threads: int, shared_bytes: int) -> Launch:
    """Load one kernel for a device; gives ``launch(blocks, stream, arguments)``.

    Raises:
        BuildError: the driver refuses the machine code, or the device lacks the shared memory.
    """
    driver = _driver()
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    none = (None, None, 0, None, None, 0)
    _check(driver.cuLibraryLoadData(ctypes.byref(library), code, *none), "cuLibraryLoadData")
    _check(driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode()), "cuLibraryGetKernel")
    wanted = (_MAX_DYNAMIC_SHARED_BYTES, shared_bytes, kernel, _device(device))
    _check(driver.cuKernelSetAttribute(*wanted), f"{shared_bytes} bytes of shared memory")
    start, configs = driver.cuLaunchKernelEx, dict[tuple[int, int], Any]()

    def launch(blocks: int, stream: int, arguments: Arguments) -> None:
        # What goes to the driver each time is ready-made, which makes a call four times as fast.
        config = configs.get((blocks, stream))
        if config is None:
            if len(configs) >= _MOST_CONFIGS:
                configs.clear()
            made = _Config((blocks, 1, 1), (threads, 1, 1), shared_bytes, stream)
            config = configs[blocks, stream] = ctypes.byref(made)
        failure = start(config, kernel, arguments.pointers, None)
        if failure == _INVALID_CONTEXT:  # a thread that has made no call of its own to this device
            _check(driver.cuCtxSetCurrent(_context(device)), "cuCtxSetCurrent")
            failure = start(config, kernel, arguments.pointers, None)
        if failure:
            raise RuntimeError(f"the driver can't start {name}: {_name_of(failure)}")

    return launch


def most_shared_bytes(device: int) -> int:
    """Shared memory that one block may have."""
    found = ctypes.c_int()
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(found), _MOST_SHARED_BYTES, _device(device)), "a look at it")
    return found.value


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError(f"CUDA's driver can't be loaded: {error}") from error
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return driver


@cache
def _device(index: int) -> int:
    device = ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    return device.value


@cache
def _context(index: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), _device(index)), "cuDevicePrimaryCtxRetain")
    return context


def _check(failure: int, what: str) -> None:
    if failure:
        raise BuildError(f"the driver refuses {what}: {_name_of(failure)}")


def _name_of(failure: int) -> str:
    name = ctypes.c_char_p()
    if _driver().cuGetErrorName(failure, ctypes.byref(name)) or name.value is None:
        return f"error {failure}"
    return name.value.decode()
