"""Device memory of this process alone, with copies from a mapping."""

from __future__ import annotations

import ctypes

from . import _core
from .window import Window

SLOT = 256  # each copy begins at a multiple of this, like the memory of CUDA's allocators


class Copies:
    """Copies of some ranges of a window's memory, in one allocation on the same device. The memory goes with the last
    array of it.
    """

    def __init__(self, window: Window, pieces: list[list[tuple[int, int]]]) -> None:
        """Copies pieces. Each consists of ranges, pairs of an address and a number of bytes, one after the other.

        ``at`` has the addresses of the copies.
        """
        moves, starts, size = [], [], 0
        for ranges in pieces:
            size = -(-size // SLOT) * SLOT
            starts.append(size)
            for ptr, n in ranges:
                moves.append((size, ptr, n))
                size += n
        self.ordinal, self.size = window.ordinal, size

        def make() -> None:
            window.check()  # this function also keeps the window alive while it runs; no interrupt ends it
            base = _core.copies(window.ptr, size, moves)
            _core.owned(self, base, size)
            self.at = [base + start for start in starts]

        _core.apart(make)

    def read(self, at: int, n: int) -> bytes:
        if not n:
            return b""
        return ctypes.string_at(at, n) if self.ordinal is None else _core.read(at, n)
