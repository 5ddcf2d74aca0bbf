"""Memory that is read like a file, from a position on, or by slices."""

from __future__ import annotations

import operator
import os
from typing import Any, SupportsIndex, overload

from .window import Window


class FileLike:
    """The file interface of mappings and views, as in ``mmap.mmap``.

    There is one position, as in a file, so threads that read from it disturb each other. Slices and ``offset=`` do not
    move it. Nothing here acquires: reads return what the memory has now.
    """

    _window: Window
    _position = 0
    # Without this, Python and NumPy would iterate over single bytes.
    __iter__ = None

    def tell(self) -> int:
        """Returns the position, in bytes from the start of the memory."""
        self._window.check()
        return self._position

    def seek(self, offset: SupportsIndex, whence: int = os.SEEK_SET) -> int:
        """Sets the position and returns it: offset counts from the start, the position (1) or the end (2).

        It may be past the end, where there is nothing to read. Raises ValueError for a position before the start.
        """
        self._window.check()
        if whence not in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
            raise ValueError(f"whence is 0, 1 or 2, not {whence!r}")
        at = operator.index(offset) + (0, self._position, self._window.length)[whence]
        if at < 0:
            raise ValueError(f"the position {at} is negative")
        self._position = at
        return at

    def read(self, size: SupportsIndex | None = -1, *, offset: SupportsIndex | None = None) -> bytes:
        """Copies at most size bytes out of the memory, also from a GPU, beginning at the position, which it moves.

        A negative size or None means all bytes to the end. At the end it returns b"". With offset it reads there, and
        the position stays.
        """
        at, n = self._next(-1 if size is None else operator.index(size), offset)
        data = self._window.read(self._window.ptr + at, n)
        self._move(at + n, offset)
        return data

    def readinto(self, into: Any, *, offset: SupportsIndex | None = None) -> int:
        """Copies bytes into an object with a writable buffer, as many as fit, and returns their number. Otherwise it is
        like ``read``.
        """
        with memoryview(into) as view, view.cast("B") as flat:
            if flat.readonly:
                raise TypeError(f"{type(into).__name__} cannot be written into")
            at, n = self._next(len(flat), offset)
            self._window.read_into(self._window.ptr + at, flat[:n])
        self._move(at + n, offset)
        return n

    @overload
    def __getitem__(self, index: slice) -> bytes: ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    def __getitem__(self, index: slice | SupportsIndex) -> bytes | int:
        """Returns the bytes of a slice, or one byte as a number, like ``bytes``."""
        at, n = self._place(index)
        data = self._window.read(self._window.ptr + at, n)
        return data if isinstance(index, slice) else data[0]

    def _place(self, index: slice | SupportsIndex) -> tuple[int, int]:
        """Returns the position and the number of the bytes of an index."""
        self._window.check()
        length = self._window.length
        if isinstance(index, slice):
            begin, end, step = index.indices(length)
            if step != 1:
                raise ValueError(f"the step of a slice is 1, not {step}")
            return begin, max(end - begin, 0)
        i = operator.index(index)
        if not -length <= i < length:
            raise IndexError(f"there is no byte {i}: there are {length}")
        return i % length, 1

    def _next(self, size: int, offset: SupportsIndex | None) -> tuple[int, int]:
        """Returns where to read, and how many bytes: size or, if it is negative, all, but no more than there are."""
        self._window.check()
        at = self._position if offset is None else operator.index(offset)
        if at < 0:
            raise ValueError(f"the offset {at} is negative")
        left = max(self._window.length - at, 0)
        return at, left if size < 0 else min(size, left)

    def _move(self, to: int, offset: SupportsIndex | None) -> None:
        if offset is None:
            self._position = to
