"""What mappings and views have in common."""

from __future__ import annotations

import math
import operator
import warnings
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from . import _core
from .arguments import sizes_of, stream_of, whole_pages
from .array import ALIGNMENT, Array, buffer, is_misaligned
from .brackets import Bracket
from .dtypes import dtype_of
from .errors import ReadOnlyWarning
from .filelike import FileLike
from .window import Window

ADVICE = {"normal": 0, "random": 1, "sequential": 2, "willneed": 3, "dontneed": 4}
_M = TypeVar("_M", bound="Memory")


class Acquired:
    """A range that an acquire brought up to date. As a context manager it releases the range at the end.

    Where an exception ended the block and the release fails too, the exception is what comes out, with a note on the
    release.
    """

    def __init__(self, mapping: Memory, offset: int, length: int, stream: Any, pages: int) -> None:
        self._mapping, self._offset, self._length, self._stream = mapping, offset, length, stream
        self.pages = pages  #: how many pages were not up to date

    def __enter__(self) -> Memory:
        return self._mapping

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._mapping.release(self._offset, self._length, stream=self._stream)
        except Exception as e:
            if value is None:
                raise
            if hasattr(value, "add_note"):
                value.add_note(f"The release at the end of the block failed, too: {e}")
            elif value.__context__ is None:  # Python 3.10
                value.__context__ = e


class Memory(FileLike):
    """Device memory that ``gaiafs.mmap`` or ``gaiafs.view`` mapped: what both have.

    Methods may be called from any thread, and block until the daemon has answered. Offsets count bytes from the start
    of the memory. ``close``, the end of the last object that uses the memory, and the end of the process give it back.
    A forked child cannot use what its parent mapped (Error ECHILD).

    An interrupted call (KeyboardInterrupt) ends at once, and the memory can be used and closed as before. Whether an
    interrupted acquire or release was carried out is not known: call it again. An interrupted close leaves the memory
    mapped, or closed as ``closed`` then says: what it has is given back without the caller, at the latest with the last
    reference to it. A signal's handler must not call the package itself, since the call that it interrupted would wait
    for it: let it raise.
    """

    def __init__(self, window: Window) -> None:
        self._window = window

    def __len__(self) -> int:
        return self._window.length

    @property
    def nbytes(self) -> int:
        """The length that the mapping was made with."""
        return self._window.length

    @property
    def closed(self) -> bool:
        return self._window.closed

    @property
    def kind(self) -> str:
        """The kind of memory: "cuda", or "emulated" where the addresses are of the host."""
        self._window.check()
        return "emulated" if self._window.ordinal is None else "cuda"

    @property
    def device(self) -> int:
        """The device's number: of CUDA as this process counts, or of the mount's emulated devices."""
        self._window.check()
        return self._window.device

    @property
    def ptr(self) -> int:
        """The address of the first byte. It is valid as long as the mapping or something made of it exists."""
        self._window.check()
        return self._window.ptr

    def __enter__(self: _M) -> _M:
        self._window.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None:
            self.close()
            return
        try:
            self.close()
        except BufferError:
            pass  # the frames of the exception may hold arrays; the first failure is the one to report

    def close(self) -> None:
        """Releases the whole mapping and takes it away, after the calls that run. A second time it does nothing.

        BufferError while arrays or tensors of its memory exist. It is closed even where Error is raised: the daemon
        could not be told, or failed to release it.
        """
        self._window.close()

    def _range(self, offset: int, length: int | None) -> tuple[int, int]:
        self._window.check()
        offset = operator.index(offset)
        size = whole_pages(self._window.length)
        n = self._window.length - offset if length is None else operator.index(length)
        if offset < 0 or n <= 0 or offset + n > size:
            raise ValueError(f"{n} bytes at {offset} are not within the mapping's {self._window.length}")
        return offset, n

    @overload
    def acquire(
        self, offset: int = 0, length: int | None = None, *, stream: Any = None, wait: Literal[True] = True
    ) -> Acquired: ...

    @overload
    def acquire(
        self, offset: int = 0, length: int | None = None, *, stream: Any = None, wait: Literal[False]
    ) -> Future[Acquired]: ...

    def acquire(
        self, offset: int = 0, length: int | None = None, *, stream: Any = None, wait: bool = True
    ) -> Acquired | Future[Acquired]:
        """Brings a range up to date, when it returns: every release and every write before is seen.

        On a GPU it first waits for the work that was begun, of stream or of the whole device, as ``release`` does:
        bytes change under nobody. Bytes stored here and not yet released stay. ``with m.acquire():`` releases the range
        at the end, with the same stream.

        With wait=False it returns a ``concurrent.futures.Future`` at once, and a thread of its own, which ends with the
        request, does the rest. ``close`` waits for it.
        """
        offset, n = self._range(offset, length)
        handle = stream_of(stream)

        def work() -> Acquired:
            pages = self._window.request(_core.ACQUIRE, offset, n, stream=handle)
            return Acquired(self, offset, n, stream, pages)

        return work() if wait else self._window.begin(work)

    @overload
    def release(
        self, offset: int = 0, length: int | None = None, *, stream: Any = None, wait: Literal[True] = True
    ) -> int: ...

    @overload
    def release(
        self, offset: int = 0, length: int | None = None, *, stream: Any = None, wait: Literal[False]
    ) -> Future[int]: ...

    def release(
        self, offset: int = 0, length: int | None = None, *, stream: Any = None, wait: bool = True
    ) -> int | Future[int]:
        """Makes what was stored into a range visible to everyone, and returns how many pages that were.

        On a GPU it first waits for the work that was begun: of stream, a number or an object of PyTorch or CuPy, or of
        the whole device. With mode "r" it does nothing. wait is that of ``acquire``.
        """
        offset, n = self._range(offset, length)
        handle = stream_of(stream)

        def work() -> int:
            return self._window.request(_core.RELEASE, offset, n, stream=handle)

        return work() if wait else self._window.begin(work)

    def use(
        self, offset: int = 0, length: int | None = None, *, stream: Any = None, timeout: float | None = None
    ) -> Bracket:
        """Has a range of a mapping that moves be there for a ``with`` block. See ``gaiafs.use``, also for several."""
        return Bracket([(self._window, *self._range(offset, length))], stream, timeout)

    def advise(self, advice: str | int, offset: int = 0, length: int | None = None) -> None:
        """Gives a hint: "normal", "random", "sequential", "willneed" (begin to fetch) or "dontneed"."""
        number = ADVICE.get(advice, -1) if isinstance(advice, str) else operator.index(advice)
        if number not in ADVICE.values():
            raise ValueError(f"{advice!r} is no advice; there are {', '.join(ADVICE)}")
        offset, n = self._range(offset, length)
        self._window.request(_core.ADVISE, offset, n, number)

    def _part(self, offset: int, length: int | None) -> tuple[int, int]:
        self._window.check()
        offset = operator.index(offset)
        n = self._window.length - offset if length is None else operator.index(length)
        if offset < 0 or n < 0 or offset + n > self._window.length:
            raise ValueError(f"{n} bytes at {offset} are not within the mapping's {self._window.length}")
        return offset, n

    def _array(self, dtype: Any, shape: Any, offset: int, left: int, misaligned: bool) -> Array:
        t = dtype_of(dtype)
        if shape is None:
            together = 8 // math.gcd(8, t.bits)  # elements that end with a byte
            sizes: tuple[int, ...] = (left * 8 // t.bits // together * together,)
        else:
            sizes = sizes_of(shape)
        bits = math.prod(sizes) * t.bits
        if bits % 8:
            raise ValueError(f"{t} elements of shape {list(sizes)} end within a byte")
        if bits > 8 * left:
            raise ValueError(f"{bits // 8} bytes at {offset} are not within the {left} that there are")
        if t.itemsize and (self._window.ptr + offset) % t.itemsize:
            raise ValueError(f"offset {offset} is not a multiple of the {t.itemsize} bytes of {t}")
        if not misaligned and is_misaligned(self._window.ptr + offset, bits // 8):
            raise ValueError(
                f"offset {offset} is not a multiple of {ALIGNMENT} bytes, which kernels take for granted: some return wrong "
                f"values with less. Choose another offset, copy the bytes, or pass misaligned=True"
            )
        return Array(self._window.lease(), self._window.ptr + offset, t, sizes, not self._window.writable)

    def _numpy(self, dtype: Any, shape: Any, offset: int, left: int) -> Any:
        import numpy

        try:
            t = numpy.dtype(dtype)
        except TypeError:
            return self._array(dtype, shape, offset, left, misaligned=True).numpy()
        if t.hasobject:
            raise TypeError("Python objects cannot be shared with other processes")
        if not t.itemsize:
            raise ValueError(f"elements of {t!r} have no size")
        sizes = (left // t.itemsize,) if shape is None else sizes_of(shape)
        if (n := math.prod(sizes) * t.itemsize) > left:
            raise ValueError(f"{n} bytes at {offset} are not within the {left} that there are")
        memory = buffer(self._array("uint8", (n,), offset, left, misaligned=True))
        if not n:
            return numpy.empty(sizes, t)
        # Not of the memoryview itself: NumPy looks through it, and would let the array be made writable.
        return numpy.ndarray(sizes, t, numpy.frombuffer(memory, numpy.uint8))

    def _tensor(self, a: Array) -> Any:
        if a.readonly:
            warnings.warn(
                "PyTorch has no read-only tensors: a store into this one, of memory that is only read, ends the process or, on "
                "a GPU, its CUDA context. Map with gaiafs.mmap and mode 'r+' to store into it, or filter gaiafs.ReadOnlyWarning",
                ReadOnlyWarning,
                stacklevel=3,
            )
        return a.torch()
