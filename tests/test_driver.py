"""What the launcher hands to CUDA's driver. A library with the same functions, built here, takes notes in its place."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayssm.backends.cuda import driver
from replayssm.backends.cuda.build import BuildError

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")

DRIVER = r"""
#include <string.h>
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    unsigned num_attributes;
} config;
config last;
unsigned char arguments[64];
void *kernel;
int refusals, refused_with, launches, contexts, shared_limit = 1 << 18;

int cuDeviceGet(int *device, int index) { *device = 100 + index; return 0; }
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    *library = (void *)0x1000;
    return strcmp(code, "machine code") ? 218 : 0;
}
int cuLibraryGetKernel(void **found, void *library, const char *name) {
    *found = (char *)library + strlen(name);
    return 0;
}
int cuKernelSetAttribute(int what, int value, void *k, int device) {
    return what == 8 && device == 103 && value <= shared_limit ? 0 : 1;
}
int cuDeviceGetAttribute(int *value, int what, int device) { *value = what * 1000 + device; return 0; }
int cuLaunchKernelEx(const config *given, void *k, void **pointers, void **extra) {
    if (refusals-- > 0) return refused_with;
    last = *given;
    kernel = k;
    memcpy(arguments, pointers[0], sizeof arguments);
    ++launches;
    return extra != 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long)device; return 0; }
int cuCtxSetCurrent(void *context) { contexts = (int)(long)context; return 0; }
int cuGetErrorName(int error, const char **name) { *name = "OUT_OF_ORDER"; return 0; }
"""


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", folder / "driver.c", "-o", folder / "driver.so"], check=True)
    return folder / "driver.so"


@pytest.fixture
def library(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ctypes.CDLL]:
    copy = shutil.copy(built, tmp_path / "driver.so")  # with notes of its own
    library = ctypes.CDLL(str(copy))
    caches = (driver._driver, driver._device, driver._context)
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    for cache in caches:
        cache.cache_clear()
    yield library
    for cache in caches:
        cache.cache_clear()


def number(library: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(library, name).value


def load() -> driver.Launch:
    return driver.load(b"machine code", "replayssm_decode", 3, threads=128, shared_bytes=70_000)


def test_a_launch_hands_over_grid_block_memory_stream_and_arguments(library: ctypes.CDLL) -> None:
    launch, arguments = load(), driver.Arguments()
    for blocks, stream in ((8, 0), (8, 2**40 + 16), (2**31 - 1, 0), (8, 0)):
        arguments.bytes[:2] = bytes((blocks % 256, stream % 256))
        launch(blocks, stream, arguments)
        last = Config.in_dll(library, "last")
        assert (list(last.grid), list(last.block), last.shared_bytes) == ([blocks, 1, 1], [128, 1, 1], 70_000)
        assert (last.stream or 0, last.attributes, last.num_attributes) == (stream, None, 0)
        held = (ctypes.c_ubyte * 2).in_dll(library, "arguments")
        assert list(held) == [blocks % 256, stream % 256]
    assert ctypes.c_void_p.in_dll(library, "kernel").value == 0x1000 + len("replayssm_decode")
    assert number(library, "launches") == 4


def test_a_thread_without_a_context_gets_the_devices(library: ctypes.CDLL) -> None:
    launch = load()
    ctypes.c_int.in_dll(library, "refusals").value = 1
    ctypes.c_int.in_dll(library, "refused_with").value = 201
    launch(1, 0, driver.Arguments())
    assert (number(library, "contexts"), number(library, "launches")) == (103, 1)


def test_a_launch_that_is_refused_says_so(library: ctypes.CDLL) -> None:
    launch = load()
    ctypes.c_int.in_dll(library, "refusals").value = 2
    ctypes.c_int.in_dll(library, "refused_with").value = 719
    with pytest.raises(RuntimeError, match="the driver can't start replayssm_decode: OUT_OF_ORDER"):
        launch(1, 0, driver.Arguments())


def test_what_cannot_be_loaded_is_a_build_error(library: ctypes.CDLL) -> None:
    with pytest.raises(BuildError, match="the driver refuses cuLibraryLoadData: OUT_OF_ORDER"):
        driver.load(b"no machine code", "replayssm_decode", 3, 128, 1024)
    with pytest.raises(BuildError, match="the driver refuses 300000 bytes of shared memory"):
        driver.load(b"machine code", "replayssm_decode", 3, 128, 300_000)
    assert driver.most_shared_bytes(3) == 97_103
