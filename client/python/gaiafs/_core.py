"""Calls libgaiafs, the C library that talks to the daemon and maps memory, by ctypes.

Everything that the package knows of the library is here: its functions, as in gaiafs.h, and its failures as ``Error``.
This module adds two things for Python: no interrupt loses what a call has made, and signal handlers run while a call
waits.

ctypes releases the interpreter's lock during a call. Signal handlers run in the main thread, between two steps of
Python. So a call in the main thread must be short, or losing its result must not matter:

- requests about ranges are waited for in steps (``request``);
- what makes or ends something runs where no handlers run (``apart``), and gives it to an object that owns it
  (``owned``, ``Stores``).

To add another call that maps something: declare it in ``_FUNCTIONS``; write a function like ``map_file`` that calls it
with ``_again`` and returns the address; make ``window.Window`` call that function. The rest of a window, including
requests and ``read``, needs only the address, provided that gaia_info, gaia_munmap and gaia_drop take it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import operator
import os
import pathlib
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from . import shelter
from ._kinds import CUDA as CUDA
from ._kinds import EMULATED as EMULATED
from .errors import Error, PastEndWarning

PAGE = 4096
ANY = 0  # any kind of device
ACQUIRE, RELEASE, SYNC, ADVISE = 1, 2, 3, 4
LAZY, HOLD, NO_THREAD, MOVABLE, STAYS = 1 << 32, 1 << 34, 1 << 35, 1 << 36, 1 << 37
ALL_STREAMS, NO_STREAM = 2**64 - 1, 2**64 - 2

_NAME = "libgaiafs.so.0"
_VERSION = 101  # the lowest GAIA_VERSION that works
# Milliseconds that one wait lasts. A signal ends the wait at once, unless it arrives after the call has begun but
# before the wait in the kernel.
_PIECE = 100
_P = ParamSpec("_P")
_T = TypeVar("_T")

_int, _size, _pointer, _u64 = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64


class _Call(ctypes.Structure):
    """struct gaia_call."""

    _fields_ = [("running", _pointer), ("pages", _u64)]


class _MapArgs(ctypes.Structure):
    """struct gaia_map_args."""

    _fields_ = [
        *(("length", _u64), ("offset", _u64), ("address", _pointer), ("flags", _u64)),
        *(("fd", _int), ("prot", _int), ("device", _int), ("kind", _int)),
    ]


class _ViewArgs(ctypes.Structure):
    """struct gaia_view_args."""

    _fields_ = [
        *(("segments", _pointer), ("count", _u64), ("fds", _pointer), ("fd_count", _u64), ("files", _pointer)),
        *(("align", _u64), ("address", _pointer), ("flags", _u64), ("device", _int), ("kind", _int)),
    ]


class Info(ctypes.Structure):
    """struct gaia_info."""

    _fields_ = [
        *(("address", _pointer), ("length", _u64), ("offset", _u64), ("flags", _u64), ("serial", _u64)),
        *(("prot", _int), ("device", _int), ("kind", _int), ("reserved", _int), ("size", ctypes.c_int64)),
    ]


class _Copy(ctypes.Structure):
    """struct gaia_copy."""

    _fields_ = [("to", _u64), ("source", _pointer), ("length", _u64)]


class _Range(ctypes.Structure):
    """struct gaia_range."""

    _fields_ = [("address", _pointer), ("length", _u64)]


_to = ctypes.POINTER
_FUNCTIONS: dict[str, tuple[object, ...]] = {  # result type, then argument types
    "gaia_map": (_pointer, _to(_MapArgs), _size),
    "gaia_map_view": (_pointer, _to(_ViewArgs), _size),
    "gaia_view_layout": (_int, _pointer, _size, _size, _pointer, _to(_u64)),
    "gaia_info": (_int, _pointer, _to(Info), _size),
    "gaia_munmap": (_int, _pointer, _size),
    "gaia_drop": (None, _pointer, _size),
    "gaia_start": (_int, _to(_Call), _int, _pointer, _size, _int, _pointer),
    "gaia_start_use": (_int, _to(_Call), _to(_Range), _size, _pointer, ctypes.c_uint),
    "gaia_done_use": (_int, _u64),
    "gaia_explain_faults": (_int,),
    "gaia_wait": (_int, _to(_Call), _int),
    "gaia_cancel": (None, _to(_Call)),
    "gaia_read": (_int, _pointer, _pointer, _size),
    "gaia_write": (_int, _pointer, ctypes.c_char_p, _size),
    "gaia_copies": (_pointer, _pointer, _size, _to(_Copy), _size),
    "gaia_group_begin": (_pointer, _to(_Range), _size),
    "gaia_group_release": (_int, _pointer, _to(_u64)),
    "gaia_group_abort": (None, _pointer),
    "gaia_acquire_all": (_int, _to(_Range), _size, _u64, _int, _to(_u64)),
    "gaia_status": (_pointer, _int),
    "gaia_context": (_pointer,),
    "gaia_lend_context": (None, _pointer),
    "gaia_error": (ctypes.c_char_p,),
    "gaia_note": (ctypes.c_char_p,),
}
_FAILED = _pointer(-1).value  # MAP_FAILED


def _places() -> list[str]:
    """Returns the paths to try for the library, in order."""
    if named := os.environ.get("GAIAFS_LIBRARY"):
        return [named]
    here = pathlib.Path(__file__).resolve().parent
    wheel, top = here / _NAME, here.parents[2] if len(here.parents) > 2 else here
    checkout = [top / "build" / _NAME] if (top / "client" / "c" / "gaiafs.h").exists() else []
    return [str(path) for path in (wheel, *checkout) if path.exists()] or [_NAME]


def _load() -> ctypes.CDLL:
    why = ""
    for place in _places():
        try:
            library = ctypes.CDLL(place, use_errno=True)
            if library.gaia_version() < _VERSION:
                raise AttributeError(f"{place} has version {library.gaia_version()}, and {_VERSION} is needed")
            for name, (result, *arguments) in _FUNCTIONS.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
        except (OSError, AttributeError) as e:
            why = str(e)
    raise ImportError(
        f"gaiafs needs its C library, {_NAME}, and cannot load it ({why}). Install a wheel of the package, which contains it; "
        "or build it with make build in a checkout; or install it with make install; or set GAIAFS_LIBRARY to its path"
    )


_library = _load()
_start, _wait, _cancel = _library.gaia_start, _library.gaia_wait, _library.gaia_cancel
_libc_free = ctypes.CDLL(None).free
_libc_free.argtypes = (_pointer,)


def _failure() -> Error:
    """Returns the failure of this thread's last call."""
    return Error(ctypes.get_errno() or errno.EIO, (_library.gaia_error() or b"").decode("utf-8", "replace"))


def _warn() -> None:
    """Emits the warning of this thread's last call, if that succeeded with one."""
    if note := _library.gaia_note():
        warnings.warn(note.decode("utf-8", "replace"), PastEndWarning, stacklevel=5)


def _again(call: Callable[..., _T], failed: object, *arguments: object) -> _T:
    """Makes a call. Repeats it after a signal whose handler raised nothing."""
    while (result := call(*arguments)) == failed:
        if ctypes.get_errno() != errno.EINTR:
            raise _failure()
    return result


def apart(work: Callable[[], _T]) -> _T:
    """Runs work where no interrupt reaches it (see shelter.run), in the caller's CUDA context."""
    return shelter.run(there(work))


def apart_together(
    works: Callable[[list[int]], Iterable[tuple[Callable[[], _T], bool]]],
    undo: Callable[[_T], None],
    room: contextlib.AbstractContextManager[None],
) -> list[_T]:
    """Runs several works in the same way, concurrently, in the context of room: see shelter.together. If one fails,
    undo gets the results of the others.

    works is called with a list, and puts the descriptors there that it opens. Those that are still in the list when all
    works have ended are closed.
    """
    failures: list[BaseException] = []
    do = there(lambda work: work())

    def all_of_them() -> list[_T]:
        fds: list[int] = []
        with room:
            try:
                each = ((functools.partial(do, work), more) for work, more in works(fds))
                return shelter.together(each, undo, failures)
            finally:
                shelter.close_all(fds)

    try:
        return shelter.run(all_of_them)
    except BaseException:
        failures.append(Error(errno.EINTR))  # if this is an interrupt, no further work begins
        raise


def there(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns work for another thread. It uses this thread's CUDA context, if there is one."""
    context = _library.gaia_context()
    if not context:
        return work

    def lent(*arguments: _P.args, **options: _P.kwargs) -> _T:
        _library.gaia_lend_context(context)
        try:
            return work(*arguments, **options)
        finally:
            _library.gaia_lend_context(None)

    return lent


def map_file(fd: int, offset: int, length: int, writable: bool, device: tuple[int, int], flags: int) -> int:
    """Maps a part of a file on a device (number and kind), and returns the address. For apart."""
    arguments = _MapArgs(length, offset, None, flags | NO_THREAD, fd, 3 if writable else 1, *device)
    address: int = _again(_library.gaia_map, _FAILED, ctypes.byref(arguments), ctypes.sizeof(arguments))
    return address


def layout(segments: array[int], align: int) -> tuple[list[int], int]:
    """Returns the positions of a view's segments, and its size. A segment is four numbers: offset, length, stride and
    count.
    """
    n = len(segments) // 4
    offsets, size = array("Q", bytes(8 * n)), _u64()
    if _library.gaia_view_layout(segments.buffer_info()[0], n, align, offsets.buffer_info()[0], ctypes.byref(size)):
        raise _failure()
    return offsets.tolist(), size.value


def map_view(
    fds: list[int], segments: array[int], files: array[int], align: int, device: tuple[int, int], flags: int
) -> int:
    """Maps a view of segments, each of one of the files, and returns the address. For apart."""
    descriptors = array("i", fds)
    arguments = _ViewArgs(
        *(
            segments.buffer_info()[0],
            len(segments) // 4,
            descriptors.buffer_info()[0],
            len(fds),
            files.buffer_info()[0],
        ),
        *(align, None, flags | NO_THREAD, *device),
    )
    address: int = _again(_library.gaia_map_view, _FAILED, ctypes.byref(arguments), ctypes.sizeof(arguments))
    return address


def info(address: int) -> Info:
    found = Info()
    if _library.gaia_info(address, ctypes.byref(found), ctypes.sizeof(found)):
        raise _failure()
    return found


def unmap(address: int, length: int) -> None:
    """Ends a mapping after the kernels that may use it, and waits for the daemon. For apart."""
    _again(_library.gaia_munmap, -1, address, length)
    _warn()


def owned(owner: object, address: int, length: int) -> Iterator[tuple[int, int]]:
    """Makes owner's end the end of a mapping: see gaia_drop, which does not wait for the daemon. For apart.

    A caller who takes the address and length from the result ends the mapping instead.
    """
    mapped = iter([(address, length)])
    shelter.at_end(owner, itertools.starmap(_library.gaia_drop, mapped))
    return mapped


def drop(mapped: Iterator[tuple[int, int]]) -> None:
    """Ends a mapping that is owned, in one step."""
    any(itertools.starmap(_library.gaia_drop, mapped))


def request(what: int, address: int, length: int, argument: int, stream: int) -> int:
    """Sends a request about a range, after the work of the stream, and returns the number of pages in the answer.

    An interrupt ends it at once, and leaves nothing behind.
    """
    call = _Call()
    here = ctypes.byref(call)
    try:
        try:
            if _start(here, what, address, length, argument, stream):
                raise _failure()
            while _wait(here, _PIECE):
                if not call.running:
                    raise _failure()
            _warn()
            return int(call.pages)
        finally:
            _cancel(here)
    finally:  # twice, because an interrupt may end the first one before its call
        _cancel(here)


class Use:
    """A bracket that is requested, and then open in the thread that requested it. It ends with this object, in that
    thread.

    The library itself records in the call that the bracket is open, by its number. So no interrupt can come in between.
    """

    def __init__(self) -> None:
        self._call, self._ended = _Call(), list[int]()
        numbers = filter(None, map(operator.attrgetter("pages"), (self._call,)))
        shelter.at_end(self, map(_library.gaia_done_use, numbers))  # for another thread's bracket it does nothing

    @property
    def open(self) -> bool:
        return bool(self._call.pages) and 0 not in self._ended

    def begin(self, ranges: Sequence[tuple[int, int]], stream: int, patience: int) -> None:
        """Waits for the bracket, at most patience milliseconds; 0 means a minute. An interrupt gives it up."""
        here = ctypes.byref(self._call)
        try:
            try:
                _library.gaia_start_use(here, _ranges(ranges), len(ranges), stream, patience)
                while self._call.running:
                    _wait(here, _PIECE)
                if not self._call.pages:
                    raise _failure()
            finally:
                _cancel(here)
        finally:  # twice, because an interrupt may end the first one before its call
            _cancel(here)

    def end(self) -> None:
        """Ends the bracket, if it is open, after the work of its stream. After an error it stays open."""
        if self.open:
            self._ended.extend(map(_library.gaia_done_use, (self._call.pages,)))
            if self._ended[-1]:
                raise _failure()
            self._call.pages = 0


def explain_faults() -> None:
    if _library.gaia_explain_faults():
        raise _failure()


def _ranges(ranges: Sequence[tuple[int, int]]) -> ctypes.Array[_Range]:
    return (_Range * len(ranges))(*(_Range(*r) for r in ranges))


class Stores:
    """A group of stores, open until it is released or aborted. Its end aborts it. Its calls are for apart."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Opens the group of ranges (addresses and lengths)."""
        group = _library.gaia_group_begin(_ranges(ranges), len(ranges))
        if group is None:
            raise _failure()
        self._group = [int(group)]  # whoever takes the element ends the group, or puts it back
        self._turn = threading.Lock()  # a release and an abort, one after the other
        shelter.at_end(self, map(_library.gaia_group_abort, self._group))

    @property
    def open(self) -> bool:
        return bool(self._group)

    def release(self) -> int | None:
        """Releases the group, and returns its version. None: it has ended. After an error it is still open."""
        with self._turn:
            if not self._group:
                return None
            group, version = self._group.pop(), _u64()
            if _library.gaia_group_release(group, ctypes.byref(version)):
                failure = _failure()
                self._group.append(group)
                raise failure
            return int(version.value)

    def abort(self) -> None:
        with self._turn:
            if self._group:
                _library.gaia_group_abort(self._group.pop())


def acquire_all(ranges: Sequence[tuple[int, int]], least: int, timeout: float | None) -> int:
    """Acquires ranges at a version, and returns the version. It waits in steps, so that an interrupt ends it."""
    array, version = _ranges(ranges), _u64()
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _PIECE if end is None else max(int((end - time.monotonic()) * 1000), 0)
        if not _library.gaia_acquire_all(array, len(ranges), least, min(left, _PIECE), ctypes.byref(version)):
            return int(version.value)
        failed = ctypes.get_errno()
        if failed != errno.EINTR and (failed != errno.ETIMEDOUT or (end is not None and left <= _PIECE)):
            raise _failure()


def read(address: int, n: int) -> bytes:
    into = ctypes.create_string_buffer(n)
    read_into(address, ctypes.addressof(into), n)
    return into.raw


def read_into(address: int, into: int, n: int) -> None:
    _again(_library.gaia_read, -1, address, into, n)


def write(address: int, data: bytes) -> None:
    _again(_library.gaia_write, -1, address, data, len(data))


def copies(address: int, size: int, ranges: Sequence[tuple[int, int, int]]) -> int:
    """Allocates memory on a mapping's device and copies ranges into it. Returns the address. Each range is an offset in
    the new memory, an address and a size. For apart; see owned."""
    array = (_Copy * len(ranges))(*(_Copy(*r) for r in ranges))
    made: int = _again(_library.gaia_copies, _FAILED, address, size, array, len(ranges))
    return made


def status(fd: int) -> bytes:
    """Returns the status of an open mountpoint's daemon. For apart."""
    text = _again(_library.gaia_status, None, fd)
    try:
        return ctypes.string_at(text)
    finally:
        _libc_free(text)
