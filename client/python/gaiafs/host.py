"""Memory of emulated devices: files in memory that are mapped side by side, and sync_file_range."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap as _mmap
import os

from . import wire
from .errors import Error

_libc = ctypes.CDLL(None, use_errno=True)
_mmap64 = _libc.mmap64 if hasattr(_libc, "mmap64") else _libc.mmap
_mmap64.restype = ctypes.c_void_p
_mmap64.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_sync_file_range = _libc.sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_FAILED = ctypes.c_void_p(-1).value


def flush_kernel(fd: int, offset: int, length: int) -> bool:
    """Brings the stores of CPU programs that mapped the file home.

    True says that the kernel cannot be made to wait for that, and that the daemon has to see to it.
    """
    while _sync_file_range(fd, offset, length, 1 | 2 | 4):  # wait before, write, wait after
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise Error(code, f"sync_file_range: {os.strerror(code)}")
    return not _kernel_waits()


def start_flush(fd: int, offset: int, length: int) -> None:
    """Has the kernel begin with that, many pages at a time.

    A release that has it drop these pages would write them one after another. Nothing waits for it, and no write error is
    used up that an fsync should report.
    """
    _sync_file_range(fd, offset, length, 2)  # write


@functools.cache
def _kernel_waits() -> bool:
    """Whether sync_file_range on a FUSE file returns only after the write was served: since Linux 6.16."""
    return release_at_least(os.uname().release, 6, 16)


def release_at_least(release: str, major: int, minor: int) -> bool:
    """Compares a kernel's release such as "6.1.0-13-amd64" with a version."""
    numbers = []
    for part in release.split(".")[:2]:
        digits = ""
        for c in part:
            if not "0" <= c <= "9":
                break
            digits += c
        numbers.append(int(digits or 0))
        if digits != part:
            break
    return tuple((numbers + [0, 0])[:2]) >= (major, minor)


class HostMemory:
    """An address range in which extents of an emulated device lie side by side, cut to the pages of a mapping."""

    def __init__(self, offset: int, size: int, writable: bool) -> None:
        self._offset, self._size = offset, size
        self._prot = _mmap.PROT_READ | (_mmap.PROT_WRITE if writable else 0)
        flags = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        # The range is this object's alone until drop; nothing in it can be touched before add.
        self._base = _map(None, size, _PROT_NONE, flags, -1, 0, f"no {size} bytes of address space")

    def add(self, place: wire.Extent, fd: int) -> None:
        """Maps the part of an extent that belongs to the mapping. It does not keep fd."""
        begin = max(place.offset, self._offset)
        end = min(place.offset + place.size, self._offset + self._size)
        if begin < end:
            at = self._base + begin - self._offset
            flags = _mmap.MAP_SHARED | _MAP_FIXED
            _map(at, end - begin, self._prot, flags, fd, begin - place.offset, "an extent could not be mapped")

    def finish(self) -> int:
        """Returns the address of the mapping's first byte."""
        return self._base

    def settle(self, stream: int | None) -> None:
        """Waits for stores that were begun: there are none that outlast the instruction."""

    def drop(self) -> None:
        """Gives the range back. Nobody may touch it any more."""
        base, self._base = self._base, 0
        if base:
            _munmap(base, self._size)

    # A forked child has the range too, and may give up its view of it.
    disown = drop

    def read(self, at: int, n: int) -> bytes:
        return ctypes.string_at(at, n)

    def write(self, at: int, data: bytes) -> None:
        ctypes.memmove(at, data, len(data))


def _map(at: int | None, size: int, prot: int, flags: int, fd: int, offset: int, failure: str) -> int:
    address = _mmap64(at, size, prot, flags, fd, offset)
    if address == _FAILED or address is None:
        code = ctypes.get_errno()
        raise Error(code, f"{failure}: {os.strerror(code)}")
    return int(address)
