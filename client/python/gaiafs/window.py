"""Windows: memory that the C library mapped, and the objects that keep it alive."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import functools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from . import _core, dlpack, shelter
from .arguments import Device, HasFileno, PathLike, device_of
from .errors import Error
from .files import check_file, named, open_file, room_for
from .places import Place, place_of

_T = TypeVar("_T")
_ASIDE = 0.1  # seconds after which a wait looks again, in case an interrupt came between


class Lease:
    """Keeps a window's memory alive for an export."""

    __slots__ = ("window", "__weakref__")

    def __init__(self, window: Window) -> None:
        self.window = window

    @property
    def ordinal(self) -> int | None:
        return self.window.ordinal

    def read(self, at: int, n: int) -> bytes:
        return self.window.read(at, n)


class Window:
    """A mapping's memory, its number at the daemon and its descriptor. It ends with the last object that uses it.

    Its calls hold no lock, so an interrupt leaves nothing behind. Each call first puts itself into ``_running`` and
    then checks that the window is open. close first takes the window out of ``_open`` and then looks at ``_running``.
    """

    def __init__(
        self,
        make: Callable[[], int],
        name: str | None,
        offset: int,
        length: int,
        writable: bool,
        places: Sequence[Place] = (),
        lazy: bool = False,
    ) -> None:
        """Maps with make, which returns the address. Interrupts must not reach it: see shelter.py.

        places are those of the files, so that another process can map them again.
        """
        self._pid = os.getpid()
        self._open: list[None] = [None]  # who takes the element closes the window, or puts it back
        self._running: set[object] = set()  # the calls that use the memory
        self._closers: tuple[SimpleQueue[None], ...] = ()  # told when a call ends
        self._leases: set[weakref.ref[Lease]] = set()
        self.offset, self.length, self.writable, self.name = offset, length, writable, name
        self.places, self.lazy = tuple(places), lazy
        self.ptr = make()
        self._mapped = _core.owned(self, self.ptr, length)
        made = _core.info(self.ptr)
        self.device: int = made.device
        self.file_size: int = made.size
        self.ordinal = self.device if made.kind == _core.CUDA else None
        self.movable = bool(made.flags & _core.MOVABLE)

    def check(self) -> None:
        """Raises if the window cannot be used."""
        if not self._open:
            raise ValueError("the mapping is closed")
        if self._pid != os.getpid():
            raise Error(
                errno.ECHILD,
                "the mapping belongs to the process that this one was forked from: map the file here, as copy.copy does",
            )

    @property
    def closed(self) -> bool:
        return not self._open

    def lease(self) -> Lease:
        lease = Lease(self)
        # The callback is a C function, so no interrupt can end it before it has done its work.
        self._leases.add(weakref.ref(lease, self._leases.discard))
        self.check()
        return lease

    def using(self, work: Callable[[], _T]) -> _T:
        """Does work with the window, and keeps the window open until the work ends."""
        this = object()
        try:
            try:
                self._running.add(this)
                self.check()
                return work()
            finally:  # not in a function, because an interrupt could end that before its first line
                self._running.discard(this)
        finally:  # again, because an interrupt may end the first one before its call
            self._running.discard(this)
            for closer in self._closers:
                closer.put(None)

    def request(self, what: int, offset: int, length: int, argument: int = 0, stream: int = _core.NO_STREAM) -> int:
        """Sends a request about a range, after the work of the stream, and returns the number of pages in the
        answer."""

        def work() -> int:
            try:
                return _core.request(what, self.ptr + offset, length, argument, stream)
            except Error as e:
                raise named(e, self.name) from None

        return self.using(work)

    def begin(self, work: Callable[[], _T]) -> Future[_T]:
        """Starts a thread that does work with the window, and keeps the window open until the work ends."""
        begun, future = threading.Event(), Future[_T]()
        there = _core.there(lambda: self.using(announced))
        future.set_running_or_notify_cancel()

        def announced() -> _T:
            begun.set()  # from now on, close waits
            return work()

        def run() -> None:
            try:
                result = shelter.run(there)
            except BaseException as e:
                future.set_exception(e.with_traceback(None))  # frames of a traceback would keep the window alive
            else:
                future.set_result(result)
            begun.set()

        self.check()
        _thread.start_new_thread(run, ())
        while not begun.wait(_ASIDE):
            pass
        return future

    def read(self, at: int, n: int) -> bytes:
        if self.ordinal is None and not self.movable:
            return self.using(lambda: ctypes.string_at(at, n))
        return self.using(lambda: _core.read(at, n) if n else b"")

    def read_into(self, at: int, buffer: memoryview) -> None:
        n = len(buffer)
        if n:
            into = ctypes.addressof((ctypes.c_char * n).from_buffer(buffer))
            if self.ordinal is None and not self.movable:
                self.using(lambda: ctypes.memmove(into, at, n))
            else:
                self.using(lambda: _core.read_into(at, into, n))

    def write(self, at: int, data: bytes) -> None:
        self.using(lambda: _core.write(at, data) if data else None)

    def close(self) -> None:
        """Gives everything back, after the running calls have ended. If it is interrupted while it waits for them, the
        window stays open.
        """
        dlpack.sweep()
        self._check_unused()  # before other threads see the window closed
        taken: list[None] = []
        ended: SimpleQueue[None] = SimpleQueue()
        try:
            taken.extend(map(list.pop, (self._open,)))
            self._check_unused()
            if self._pid == os.getpid():  # no call runs in a forked child
                self._closers = (ended,)
                while self._running:
                    with contextlib.suppress(Empty):
                        ended.get(timeout=_ASIDE)
            taken.clear()
        except IndexError:
            return  # another call closes it
        finally:
            self._open.extend(taken)
        if self._pid == os.getpid():
            _core.apart(self._give_back)
        else:
            _core.drop(self._mapped)

    def _give_back(self) -> None:
        for address, length in self._mapped:
            try:
                _core.unmap(address, length)
            except Error as e:
                raise named(e, self.name) from None

    def _check_unused(self) -> None:
        if n := len(self._leases):
            raise BufferError(
                f"the mapping cannot be closed: arrays or tensors of its memory, or brackets, exist ({n}). Delete or end them "
                "before, or do not close it: it goes with the last of them"
            )


def open_window(
    file: PathLike | HasFileno | int,
    device: Any,
    writable: bool,
    offset: int,
    length: int | None,
    flags: int,
) -> Window:
    """Maps a file, with flags of gaia_map."""
    on = device_of(device)
    offset = operator.index(offset)
    return _core.apart(functools.partial(_window, file, on, writable, offset, length, flags))


def _window(
    file: PathLike | HasFileno | int, on: Device, writable: bool, offset: int, length: int | None, flags: int
) -> Window:
    fds: list[int] = []
    name = None
    room = contextlib.ExitStack()
    try:
        room.enter_context(room_for(2))
        name = open_file(file, writable, fds)
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
        make = functools.partial(_core.map_file, fds[0], offset, length, writable, on, flags)
        return Window(make, name, offset, length, writable, [place_of(fds[0])], bool(flags & _core.LAZY))
    except Error as e:
        raise named(e, name) from None
    except OSError as e:
        raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
    finally:
        shelter.close_all(fds)  # the library has a duplicate
        room.close()
