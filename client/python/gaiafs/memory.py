"""The common base of mappings and views."""

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
from .dtypes import dtype_of, library
from .errors import ReadOnlyWarning
from .filelike import FileLike
from .window import Window

ADVICE = {"normal": 0, "random": 1, "sequential": 2, "willneed": 3, "dontneed": 4}
_M = TypeVar("_M", bound="Memory")


class Acquired:
    """A range that an acquire brought up to date. As a context manager it releases the range at the end.

    If an exception ended the block and the release also fails, that exception is raised, with a note about the release.
    """

    def __init__(self, mapping: Memory, offset: int, length: int, stream: Any, pages: int) -> None:
        self._mapping, self._offset, self._length, self._stream = mapping, offset, length, stream
        self.pages = pages  #: number of pages that were not up to date

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
    """Device memory that ``gaiafs.mmap`` or ``gaiafs.view`` mapped.

    Methods may be called from any thread, and block until the daemon has answered. Offsets are in bytes from the start
    of the memory. ``close``, the end of the last object that uses the memory, or the end of the process gives the
    memory back. A forked child cannot use its parent's mappings (Error ECHILD).

    An interrupted call (KeyboardInterrupt) ends at once, and the memory can be used and closed as before. It is not
    known whether an interrupted acquire or release was carried out: call it again. After an interrupted close,
    ``closed`` says whether the memory is still mapped. If it is closed, its resources are given back in the background,
    at the latest with the last reference to it. A signal handler must not call the package itself, because the
    interrupted call would wait for it. Let the handler raise.
    """

    def __init__(self, window: Window) -> None:
        self._window = window

    def __len__(self) -> int:
        return self._window.length

    @property
    def nbytes(self) -> int:
        """The length in bytes that the mapping was made with."""
        return self._window.length

    @property
    def closed(self) -> bool:
        return self._window.closed

    @property
    def kind(self) -> str:
        """The kind of memory: "cuda", or "emulated" for host memory of an emulated device."""
        self._window.check()
        return "emulated" if self._window.ordinal is None else "cuda"

    @property
    def device(self) -> int:
        """The device's number: CUDA's as this process counts, or that of an emulated device."""
        self._window.check()
        return self._window.device

    @property
    def ptr(self) -> int:
        """The address of the first byte. It is valid as long as the mapping, or something made from it, exists."""
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
            pass  # frames of the exception may hold arrays; it is the failure to report

    def close(self) -> None:
        """Releases and ends the whole mapping, after the running calls have ended. A second call does nothing.

        Raises BufferError while arrays or tensors of its memory exist. If it raises Error, the mapping is closed all
        the same: the daemon could not be told, or could not release it.
        """
        self._window.close()

    def _range(self, offset: int, length: int | None) -> tuple[int, int]:
        self._window.check()
        offset = operator.index(offset)
        size = whole_pages(self._window.length)
        n = self._window.length - offset if length is None else operator.index(length)
        if offset < 0 or n <= 0 or offset + n > size:
            what = f"byte {offset} is" if length is None else f"{n} bytes at {offset} are"
            raise ValueError(f"{what} not within the mapping's {self._window.length}")
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
        """Brings a range up to date: when it returns, the range shows every earlier release and every earlier write.

        On a GPU it first waits for the work that was begun, in stream or in the whole device, as ``release`` does. So
        no bytes change while that work runs. Bytes that were stored here and not yet released stay. ``with
        m.acquire():`` releases the range at the end, with the same stream.

        With wait=False it returns a ``concurrent.futures.Future`` at once. A thread that ends with the request does the
        rest. ``close`` waits for it.
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
        """Makes what was stored into a range visible to everyone, and returns the number of pages.

        On a GPU it first waits for the work that was begun, in stream or in the whole device. stream is a number or an
        object of PyTorch or CuPy. With mode "r" it does nothing. wait is as for ``acquire``.
        """
        offset, n = self._range(offset, length)
        handle = stream_of(stream)

        def work() -> int:
            return self._window.request(_core.RELEASE, offset, n, stream=handle)

        return work() if wait else self._window.begin(work)

    def use(
        self, offset: int = 0, length: int | None = None, *, stream: Any = None, timeout: float | None = None
    ) -> Bracket:
        """Keeps a range of a movable mapping in place for a ``with`` block. ``gaiafs.use`` does it for several
        mappings."""
        return Bracket([(self._window, *self._range(offset, length))], stream, timeout)

    def advise(self, advice: str | int, offset: int = 0, length: int | None = None) -> None:
        """Gives a hint: "normal", "random", "sequential", "willneed" (start fetching) or "dontneed"."""
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
            what = f"byte {offset} is" if length is None else f"{n} bytes at {offset} are"
            raise ValueError(f"{what} not within the mapping's {self._window.length}")
        return offset, n

    def _array(self, dtype: Any, shape: Any, offset: int, left: int, misaligned: bool) -> Array:
        t = dtype_of(dtype)
        if shape is None:
            together = 8 // math.gcd(8, t.bits)  # this many elements end with a byte
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
        numpy = library("numpy")
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
        # Not from the memoryview itself: NumPy looks through it, and the array could be made writable.
        return numpy.ndarray(sizes, t, numpy.frombuffer(memory, numpy.uint8))

    def _tensor(self, a: Array) -> Any:
        library("torch")  # fails before the warning
        if a.readonly:
            warnings.warn(
                "PyTorch has no read-only tensors: a store into this one, of memory that is only read, ends the process or, on "
                "a GPU, its CUDA context. Map with gaiafs.mmap and mode 'r+' to store into it, or filter gaiafs.ReadOnlyWarning",
                ReadOnlyWarning,
                stacklevel=3,
            )
        return a.torch()
