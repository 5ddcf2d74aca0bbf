"""Brackets: the memory of mappings that move is there while one uses it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _core
from .arguments import stream_of
from .errors import Error
from .files import named

if TYPE_CHECKING:
    from .memory import Memory
    from .window import Lease, Window


class Bracket:
    """Ranges whose memory is there from the beginning of a ``with`` block to its end, from ``gaiafs.use`` or ``m.use``.

    It is the thread's that entered the block. It can be entered again, once it has ended.
    """

    def __init__(self, parts: Sequence[tuple[Window, int, int]], stream: Any, timeout: float | None) -> None:
        self._windows = [w for w, _, _ in parts]
        self._ranges = [(w.ptr + offset, n) for w, offset, n in parts]
        self._stream = stream_of(stream)
        self._patience = 0 if timeout is None else max(int(timeout * 1000), 1)
        self._leases: list[Lease] = []  # a window with one is not closed
        self._asked = _core.Use()
        self._thread = 0
        self._left_open: weakref.finalize[[_core.Use, int], Bracket] | None = None

    def __enter__(self) -> Bracket:
        if self._asked.open:
            raise ValueError("the bracket is open: make another one")
        self._thread = threading.get_ident()
        try:
            self._leases = [w.lease() for w in self._windows]
            self._asked = _core.Use()
            # Not __del__, which would also run after the block, with interrupts that nobody hears of.
            self._left_open = weakref.finalize(self, _end_left_open, self._asked, self._thread)
            self._left_open.atexit = False
            self._asked.begin(self._ranges, self._stream, self._patience)
            return self
        except BaseException as e:
            self._end()
            if isinstance(e, Error):
                raise named(e, self._windows[0].name) from None
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread != threading.get_ident():
            raise RuntimeError("the bracket is another thread's: it ends where it began")
        self._end()

    def _end(self) -> None:
        self._asked.end()
        if self._left_open is not None:
            self._left_open.detach()
        self._leases = []


def _end_left_open(asked: _core.Use, thread: int) -> None:
    """Ends a bracket that nobody has any more. An interrupt may have ended its __exit__ before it did anything."""
    if thread == threading.get_ident():
        try:
            asked.end()
        except Error:
            pass  # there is nobody to be told


def use(
    ranges: Sequence[Memory | tuple[Memory, int, int]], *, stream: Any = None, timeout: float | None = None
) -> Bracket:
    """Has the memory of mappings that move be there: of whole ones, or of ranges ``(mapping, offset, length)`` of them.

    ::

        with gaiafs.use([(weights, 0, n), (out, at, n)], stream=s):
            kernel[grid, block, s](...)

    The block is entered once all ranges have their memory, with their bytes: the device's or, where that is full,
    pinned memory of the host, which is slower. It is all or nothing, so what a launch uses belongs into one bracket. At
    the end of the block the memory may move again, after the work that was begun in stream, without waiting for it; or,
    without a stream, after the work of the whole device, for which the end waits. What the device has is not brought up
    to date: ``acquire`` does that, and ``release`` publishes stores.

    Blocks nest, and each thread has its own. The mappings are of one mount and device; those that do not move need no
    bracket, and do no harm. A mapping is not closed while a bracket uses it.

    It waits only while other programs use the memory, at most timeout seconds, or a minute. Raises Error ETIMEDOUT,
    which says who holds what; EDEADLK where it would have to wait within another block of the thread: use all in one;
    ENOMEM where the ranges can never fit; and those of ``acquire``.
    """
    parts = []
    for r in ranges:
        memory, offset, length = r if isinstance(r, tuple) else (r, 0, None)
        parts.append((memory._window, *memory._range(offset, length)))
    if not parts:
        raise ValueError("a bracket uses at least one range")
    return Bracket(parts, stream, timeout)


def explain_faults() -> None:
    """Has this process say why a load or store of the CPU into a mapping ended it, in one line on stderr.

    It names the byte, the file and the reason: a byte of a movable mapping that no bracket uses, or a store into what
    is only read. The process ends all the same. It is for tests and for programs under development, and about emulated
    devices: a GPU reports such an access as an error of a later call ("an illegal memory access"), to whose words those
    of this package add. Call it after ``faulthandler.enable()``, whose traceback then follows.
    """
    _core.explain_faults()
