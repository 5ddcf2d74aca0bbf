"""Mappings of files into the memory of devices."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import math
import operator
import os
import stat
import sys
import warnings
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NoReturn, Protocol, SupportsIndex, TypeVar, Union

from . import _core, dlpack
from .array import ALIGNMENT, Array, buffer, is_misaligned
from .dtypes import dtype_of
from .errors import Error, ReadOnlyWarning

ADVICE = {"normal": 0, "random": 1, "sequential": 2, "willneed": 3, "dontneed": 4}

PathLike = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
_T = TypeVar("_T")
_M = TypeVar("_M", bound="Memory")


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def ordinal_of(device: Any) -> int:
    """Returns the number in 0, "0", "cuda:0", "cuda" or a torch.device; without one it is PyTorch's current device, or 0."""
    if isinstance(device, bool):
        raise TypeError("a device is a number, 'cuda:N' or a torch.device, not a bool")
    if isinstance(device, SupportsIndex):
        n = operator.index(device)
    else:
        kind, colon, digits = str(device).partition(":")
        if not colon and kind.isascii() and kind.isdigit():
            kind, colon, digits = "cuda", ":", kind
        if kind not in ("cuda", "emulated") or (colon and not (digits.isascii() and digits.isdigit())):
            raise ValueError(f"{device!r} is no device: use a number, 'cuda:N' or a torch.device")
        if colon:
            n = int(digits)
        else:
            torch = sys.modules.get("torch")
            n = torch.cuda.current_device() if kind == "cuda" and torch is not None and torch.cuda.is_available() else 0
    if not 0 <= n < 1 << 31:
        raise Error(errno.ENODEV, f"there is no device {n}")
    return n


def stream_of(stream: Any) -> int:
    """Returns the handle of a CUDA stream: a number, or an object of PyTorch, CuPy or one with __cuda_stream__. None: of all."""
    if stream is None:
        return _core.ALL_STREAMS
    if isinstance(stream, SupportsIndex):
        n = operator.index(stream)
    elif hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__
        n = int((found() if callable(found) else found)[1])
    elif hasattr(stream, "cuda_stream"):
        n = int(stream.cuda_stream)
    elif hasattr(stream, "ptr"):
        n = int(stream.ptr)
    else:
        raise TypeError(f"{stream!r} is no CUDA stream")
    if n < 0:
        raise ValueError(f"{n} is no handle of a CUDA stream")
    return n


def sizes_of(shape: Any) -> tuple[int, ...]:
    """Returns the sizes in a shape, which may be a single number."""
    sizes = (operator.index(shape),) if isinstance(shape, SupportsIndex) else tuple(operator.index(n) for n in shape)
    if any(n < 0 for n in sizes):
        raise ValueError(f"the shape {list(sizes)} has a negative size")
    return sizes


def whole_pages(n: int) -> int:
    return -(-n // _core.PAGE) * _core.PAGE


class Lease:
    """Keeps a window's memory for an export."""

    __slots__ = ("window", "__weakref__")

    def __init__(self, window: Window) -> None:
        self.window = window

    @property
    def ordinal(self) -> int | None:
        return self.window.ordinal

    def read(self, at: int, n: int) -> bytes:
        return self.window.read(at, n)


class Window:
    """What a mapping has: memory, a number at the daemon, a descriptor. It goes with the last object that uses it.

    Its calls hold no lock, so that an interrupt of one leaves nothing behind: each puts itself into ``_running`` before it looks
    whether the window is open, and close takes the window out of ``_open`` before it looks who runs.
    """

    def __init__(self, make: Callable[[], int], name: str | None, offset: int, length: int, writable: bool) -> None:
        """Maps with make, which returns the address. Interrupts must not reach it: see shelter.py."""
        self._pid = os.getpid()
        self._open: list[None] = [None]  # whoever takes what is in it closes the window, or puts it back
        self._running: set[object] = set()  # the calls that use the memory
        self._closers: tuple[SimpleQueue[None], ...] = ()  # who is to be told when one ends
        self._leases: set[weakref.ref[Lease]] = set()
        self.offset, self.length, self.writable, self.name = offset, length, writable, name
        self.ptr = make()
        self._mapped = [(self.ptr, length)]  # whoever takes it gives it back
        # Not __del__, which would also run after close, with interrupts that nobody hears of.
        self._end = weakref.finalize(self, collected, self._mapped)
        self._end.atexit = False
        made = _core.info(self.ptr)
        self.device: int = made.device
        self.file_size: int = made.size
        self.ordinal = self.device if made.kind == _core.CUDA else None

    def check(self) -> None:
        """Raises where the window cannot be used."""
        if not self._open:
            raise ValueError("the mapping is closed")
        if self._pid != os.getpid():
            raise Error(errno.ECHILD, "the mapping belongs to the process that this one was forked from: map the file here")

    @property
    def closed(self) -> bool:
        return not self._open

    def lease(self) -> Lease:
        lease = Lease(self)
        # The callback is a function of C, which no interrupt ends before it did its work.
        self._leases.add(weakref.ref(lease, self._leases.discard))
        self.check()
        return lease

    def using(self, work: Callable[[], _T]) -> _T:
        """Does work with the window, which is not closed before it ends."""
        this = object()
        try:
            self._running.add(this)
            self.check()
            return work()
        finally:
            try:
                self._running.discard(this)
            finally:
                for closer in self._closers:
                    closer.put(None)

    def request(self, what: int, offset: int, length: int, argument: int = 0, stream: int = _core.NO_STREAM) -> int:
        """Asks for something about a range, after the work of the stream, and returns the pages in the answer."""

        def work() -> int:
            try:
                return _core.request(what, self.ptr + offset, length, argument, stream)
            except Error as e:
                raise named(e, self.name) from None

        return self.using(work)

    def read(self, at: int, n: int) -> bytes:
        if self.ordinal is None:
            return self.using(lambda: ctypes.string_at(at, n))
        return self.using(lambda: _core.read(at, n) if n else b"")

    def write(self, at: int, data: bytes) -> None:
        self.using(lambda: _core.write(at, data) if data else None)

    def close(self) -> None:
        """Gives everything back, after the calls that run. Interrupted while it waits for those, it leaves the window open."""
        dlpack.sweep()
        self._check_unused()  # before anybody finds the window closed
        taken: list[None] = []
        ended: SimpleQueue[None] = SimpleQueue()
        try:
            taken.extend(map(list.pop, (self._open,)))
            self._check_unused()
            if self._pid == os.getpid():  # in a forked child no call runs
                self._closers = (ended,)
                while self._running:
                    ended.get()
            taken.clear()
        except IndexError:
            return  # somebody else closes it
        finally:
            self._open.extend(taken)
        if self._pid == os.getpid():
            _core.apart(self._give_back)
        else:
            _core.drop(self._mapped)

    def _give_back(self) -> None:
        # It does not say who gives the mapping back: garbage collection forgets it before it runs the finalizers of a cycle.
        self._end.detach()
        for _ in self._mapped[:]:
            try:
                _core.unmap(*self._mapped.pop())
            except Error as e:
                raise named(e, self.name) from None

    def _check_unused(self) -> None:
        if n := len(self._leases):
            raise BufferError(
                f"the mapping cannot be closed: arrays or tensors of its memory exist ({n}). Delete them before, or do not "
                "close it: it goes with the last of them"
            )


def collected(mapped: list[tuple[int, int]]) -> None:
    """Gives back what a window had that nobody closed."""
    if not sys.is_finalizing():  # a process that ends loses everything by itself, and CUDA may be gone already
        _core.drop(mapped)


def named(e: Error, name: str | None) -> Error:
    """Returns the error with the file's name."""
    if e.filename is not None or name is None:
        return e
    return Error(e.errno or errno.EIO, e.strerror or "", name)


def open_file(file: PathLike | HasFileno | int, writable: bool, fds: list[int]) -> str | None:
    """Puts a descriptor into fds, which the caller closes, and returns the file's name where it is known."""
    if isinstance(file, (str, bytes, os.PathLike)):
        name = os.fsdecode(file)
        try:
            # Without O_NONBLOCK a pipe would be waited for; to files it means nothing.
            flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
            fds.extend(map(os.open, (file,), (flags,)))  # in one step, so that no interrupt loses it
        except OSError as e:
            raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
        return name
    if isinstance(file, bool) or not (isinstance(file, int) or hasattr(file, "fileno")):
        raise TypeError(f"a file is a path, an open file or a descriptor, not {file!r}")
    flush = getattr(file, "flush", None)
    if flush is not None and writable:
        flush()  # what a buffered file keeps would come later, over the device's stores
    fd = file if isinstance(file, int) else file.fileno()
    known = getattr(file, "name", None)
    try:
        fds.extend(map(fcntl.fcntl, (fd,), (fcntl.F_DUPFD_CLOEXEC,), (3,)))
    except OSError as e:
        raise Error(e.errno or errno.EIO, f"descriptor {fd}: {e.strerror}") from None
    return known if isinstance(known, str) else None


def check_file(fd: int, writable: bool) -> int:
    """Refuses what no mount grants anything for, and returns the file's size."""
    st = os.fstat(fd)
    if stat.S_ISDIR(st.st_mode):
        raise Error(errno.EISDIR, "a directory cannot be mapped")
    if not stat.S_ISREG(st.st_mode):
        raise Error(errno.EINVAL, "it is not a regular file")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    mode = flags & os.O_ACCMODE
    if flags & os.O_PATH:
        raise Error(errno.EBADF, "the descriptor was opened with O_PATH")
    if mode == os.O_WRONLY:
        raise Error(errno.EACCES, "the file is not open for reading")
    if mode == os.O_RDONLY and writable:
        raise Error(errno.EACCES, "the file is not open for writing, which mode 'r+' needs")
    return st.st_size


def open_window(
    file: PathLike | HasFileno | int,
    device: Any,
    writable: bool,
    offset: int,
    length: int | None,
    lazy: bool,
    hold_only: bool = False,
) -> Window:
    """Maps a file. With hold_only the memory is the daemon's, and not mapped here."""
    ordinal = ordinal_of(device)
    offset = operator.index(offset)
    fds: list[int] = []
    closing = map(os.close, map(list.pop, (fds,)))
    try:
        name = open_file(file, writable, fds)
        try:
            size = check_file(fds[0], writable)
            if offset < 0:
                raise ValueError(f"offset {offset} is negative")
            if offset % _core.PAGE:
                raise ValueError(f"offset {offset} is not a multiple of {_core.PAGE}")
            if length is None:
                length = size - offset
                if length <= 0:
                    raise ValueError(f"the file has {size} bytes, none at {offset}: pass a length to map past its end")
            length = operator.index(length)
            if length <= 0:
                raise ValueError(f"length {length} is not positive")
            if offset + length > (1 << 63) - 1 - _core.PAGE:
                raise Error(errno.EOVERFLOW, "offset and length end past the largest file")
            dlpack.sweep()
            flags = (_core.LAZY if lazy else 0) | (_core.HOLD if hold_only else 0)
            make = functools.partial(_window, fds, name, offset, length, writable, ordinal, flags)
            return _core.apart(make, Window.close)
        except Error as e:
            raise named(e, name) from None
        except OSError as e:
            raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
    finally:
        try:
            any(closing)
        except IndexError:
            pass  # the window has it


def _window(fds: list[int], name: str | None, offset: int, length: int, writable: bool, device: int, flags: int) -> Window:
    fd = fds.pop()
    try:
        return Window(lambda: _core.map_file(fd, offset, length, writable, device, flags), name, offset, length, writable)
    finally:
        os.close(fd)  # the library has a duplicate


def mmap(
    file: PathLike | HasFileno | int,
    device: Any = 0,
    mode: str = "r",
    offset: int = 0,
    length: int | None = None,
    lazy: bool = False,
) -> Mapping:
    """Maps a file of a gaiafs mount into the memory of a device.

    file is a path, an open file or a descriptor; the mapping keeps a duplicate. device is a number as this process counts
    them, "cuda:N" or a torch.device. mode is "r", or "r+" to store into it too. offset is a multiple of 4096. Without a
    length the mapping goes to the end of the file; past it, it reads as zero and stores are not kept. With lazy nothing is
    fetched before the first acquire; otherwise everything is when this returns.

    Raises Error: ENODEV where there is no such device (or no libcuda.so.1), ENOMEM where it has no room, ENOTTY where the
    file is not on a mount, EACCES where it may not be used so, ECONNREFUSED where the daemon is gone; and ValueError.
    """
    if mode not in ("r", "r+"):
        raise ValueError(f"mode is 'r' or 'r+', not {mode!r}")
    return Mapping(open_window(file, device, mode == "r+", offset, length, lazy))


class Acquired:
    """A range that an acquire brought up to date. As a context manager it releases the range at the end.

    Where an exception ended the block and the release fails too, the exception is what comes out, with a note on the release.
    """

    def __init__(self, mapping: Memory, offset: int, length: int, stream: Any, pages: int) -> None:
        self._mapping, self._offset, self._length, self._stream = mapping, offset, length, stream
        self.pages = pages  #: how many pages were not up to date

    def __enter__(self) -> Memory:
        return self._mapping

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._mapping.release(self._offset, self._length, stream=self._stream)
        except Exception as e:
            if value is None:
                raise
            if hasattr(value, "add_note"):
                value.add_note(f"The release at the end of the block failed, too: {e}")
            elif value.__context__ is None:  # Python 3.10
                value.__context__ = e


class Memory:
    """Device memory that ``gaiafs.mmap`` or ``gaiafs.view`` mapped: what both have.

    Methods may be called from any thread, and block until the daemon has answered. Offsets count bytes from the start of the
    memory. ``close``, the end of the last object that uses the memory, and the end of the process give it back. A forked child
    cannot use what its parent mapped (Error ECHILD).

    An interrupted call (KeyboardInterrupt) ends at once, and the memory can be used and closed as before. Whether an interrupted
    acquire or release was carried out is not known: call it again. An interrupted close leaves the memory mapped, or closed as
    ``closed`` then says: what it has is given back without the caller, at the latest with the last reference to it. A signal's
    handler must not call the package itself, since the call that it interrupted would wait for it: let it raise.
    """

    def __init__(self, window: Window) -> None:
        self._window = window

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # Of copy.copy, too: with two of them on one window, closing one would close the other.
        raise TypeError("a mapping cannot be copied or pickled: map the file again")

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

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if value is None:
            self.close()
            return
        try:
            self.close()
        except BufferError:
            pass  # the frames of the exception may hold arrays; the first failure is the one to report

    def close(self) -> None:
        """Releases the whole mapping and takes it away, after the calls that run. A second time it does nothing.

        BufferError while arrays or tensors of its memory exist. It is closed even where Error is raised: the daemon could
        not be told, or failed to release it.
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

    def acquire(self, offset: int = 0, length: int | None = None, *, stream: Any = None) -> Acquired:
        """Brings a range up to date, when it returns: every release and every write before is seen.

        On a GPU it first waits for the work that was begun, of stream or of the whole device, as ``release`` does: bytes
        change under nobody. Bytes stored here and not yet released stay. ``with m.acquire():`` releases the range at the end,
        with the same stream.
        """
        offset, n = self._range(offset, length)
        pages = self._window.request(_core.ACQUIRE, offset, n, stream=stream_of(stream))
        return Acquired(self, offset, n, stream, pages)

    def release(self, offset: int = 0, length: int | None = None, *, stream: Any = None) -> int:
        """Makes what was stored into a range visible to everyone, and returns how many pages that were.

        On a GPU it first waits for the work that was begun: of stream, a number or an object of PyTorch or CuPy, or of the
        whole device. With mode "r" it does nothing.
        """
        offset, n = self._range(offset, length)
        handle = stream_of(stream)
        return self._window.request(_core.RELEASE, offset, n, stream=handle)

    def advise(self, advice: str | int, offset: int = 0, length: int | None = None) -> None:
        """Gives a hint: "normal", "random", "sequential", "willneed" (begin to fetch) or "dontneed"."""
        number = ADVICE.get(advice, -1) if isinstance(advice, str) else operator.index(advice)
        if number not in ADVICE.values():
            raise ValueError(f"{advice!r} is no advice; there are {', '.join(ADVICE)}")
        offset, n = self._range(offset, length)
        self._window.request(_core.ADVISE, offset, n, number)

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Copies bytes out of the memory, also from a GPU."""
        offset, n = self._part(offset, length)
        return self._window.read(self._window.ptr + offset, n)

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


class Mapping(Memory):
    """A window on a file in a device's memory, from ``gaiafs.mmap``.

    All processes that map the file on that device share the same memory. What this one stores is seen by everyone else, CPU
    programs with plain reads included, after ``release``; what others released or wrote is seen here after ``acquire``. Closing
    it is an implicit release.
    """

    def __repr__(self) -> str:
        w = self._window
        if w.closed:
            return "<gaiafs.Mapping, closed>"
        return f"<gaiafs.Mapping of {w.name or 'a file'}, {w.length} bytes at {w.offset}, {self.kind} device {self.device}>"

    @property
    def offset(self) -> int:
        """Where in the file it begins."""
        return self._window.offset

    @property
    def mode(self) -> str:
        return "r+" if self._window.writable else "r"

    def sync(self, durable: bool = True, offset: int = 0, length: int | None = None) -> None:
        """Releases, and waits until the bytes are in the backing file and, with durable, on stable storage."""
        offset, n = self._range(offset, length)
        self._window.request(_core.SYNC, offset, n, int(bool(durable)), _core.ALL_STREAMS)

    def write(self, data: Any, offset: int = 0) -> None:
        """Copies the bytes of an object with a buffer (bytes, a NumPy array, ...) into the memory, also to a GPU.

        They are there when it returns. On a GPU the copy comes after what is queued in the default stream.
        """
        if not self._window.writable:
            raise TypeError("the mapping is read-only: map with mode 'r+'")
        if not isinstance(data, bytes):
            data = memoryview(data).tobytes()  # not bytes(data), which makes zeros of a number
        offset, n = self._part(offset, len(data))
        self._window.write(self._window.ptr + offset, data)

    def array(self, dtype: Any = None, shape: Any = None, offset: int = 0, *, misaligned: bool = False) -> Array:
        """Returns elements of the memory, for every library that speaks DLPack or an array interface.

        dtype is a dtype of NumPy or PyTorch, or a name: of either ("float32", "bfloat16", "torch.float32"), NumPy's short one
        ("f4", "<f4") or that of safetensors ("BF16"; mind that "U8" has 8 bits there, and "u8" 8 bytes in NumPy). Without one it
        is uint8. "float" and "int" are refused: they are not the same to NumPy and to PyTorch. Without a shape the array has
        one dimension and goes to the end of the mapping, as far as whole elements and whole bytes do. offset is in bytes.

        ValueError where offset is not a multiple of 16 bytes, which kernels take for granted: with less some of them return
        wrong values without a word. With misaligned any multiple of the elements' size is accepted.
        """
        return self._array(dtype, shape, *self._part(offset, None), misaligned)

    def buffer(self, offset: int = 0, length: int | None = None) -> memoryview:
        """Returns the memory of an emulated device as bytes; BufferError for a GPU's."""
        offset, n = self._part(offset, length)
        return buffer(self.array("uint8", (n,), offset, misaligned=True))

    def numpy(self, dtype: Any = "uint8", shape: Any = None, offset: int = 0) -> Any:
        """Returns a NumPy array of the memory of an emulated device; BufferError for a GPU's.

        dtype is anything that NumPy takes, structured types included. NumPy's own code accepts any offset.
        """
        return self._numpy(dtype, shape, *self._part(offset, None))

    def tensor(self, dtype: Any = None, shape: Any = None, offset: int = 0, *, misaligned: bool = False) -> Any:
        """Returns a PyTorch tensor of the memory, on the mapping's GPU, or on the CPU for an emulated device.

        The arguments are those of ``array``, which also says why offset is a multiple of 16 bytes.

        PyTorch has no read-only tensors: with mode "r" the memory is protected, and a store into it ends the process or, on
        a GPU, its CUDA context. A ReadOnlyWarning says so. Use mode "r+" for tensors that are stored into.
        """
        return self._tensor(self.array(dtype, shape, offset, misaligned=misaligned))
