"""Memory of this process alone, for tensors that begin where kernels cannot use them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import Any

from . import cuda, shelter
from .mapping import Window

SLOT = 256  # each copy begins at a multiple of it, as the memory of allocators does


class Copies:
    """Copies of some ranges of a window's memory, in one allocation on the same device. It goes with the last array of it."""

    def __init__(self, window: Window, ranges: list[tuple[int, int]]) -> None:
        """Copies the ranges, pairs of an address and a number of bytes. ``at`` has the addresses of the copies."""
        offsets, self.size = [], 0
        for _, n in ranges:
            offsets.append(self.size)
            self.size += -(-n // SLOT) * SLOT
        self.ordinal = window.ordinal
        self._memory: Any
        if self.ordinal is None:
            self._memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            for (ptr, n), offset in zip(ranges, offsets, strict=True):
                ctypes.memmove(base + offset, ptr, n)
        else:
            moves = [(offset, ptr, n) for (ptr, n), offset in zip(ranges, offsets, strict=True)]
            ordinal, size = self.ordinal, self.size

            def make() -> cuda.PrivateMemory:
                window.check()  # and keeps the window for as long as this runs, which an interrupt does not end
                return cuda.PrivateMemory(ordinal, size, moves)

            self._memory = shelter.run(cuda.within(cuda.current(), make), cuda.PrivateMemory.drop)
            base = self._memory.base
            end = weakref.finalize(self, _collected, os.getpid(), self._memory)
            end.atexit = False
        self.at = [base + offset for offset in offsets]

    def read(self, at: int, n: int) -> bytes:
        if not n:
            return b""
        return ctypes.string_at(at, n) if self.ordinal is None else self._memory.read(at, n)


def _collected(pid: int, memory: cuda.PrivateMemory) -> None:
    if sys.is_finalizing() or pid != os.getpid():
        return  # the memory goes with the process that has it
    try:
        memory.drop()
    except Exception:
        pass  # nobody is there to be told
