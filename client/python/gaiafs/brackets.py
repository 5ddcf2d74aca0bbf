"""Brackets: they keep the memory of movable mappings in place while a program uses it."""

from __future__ import annotations

import threading
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
    """Ranges whose memory is in place during a ``with`` block, from ``gaiafs.use`` or ``m.use``.

    A bracket belongs to the thread that entered the block. Once it has ended, it can be entered again.
    """

    def __init__(self, parts: Sequence[tuple[Window, int, int]], stream: Any, timeout: float | None) -> None:
        self._windows = [w for w, _, _ in parts]
        self._ranges = [(w.ptr + offset, n) for w, offset, n in parts]
        self._stream = stream_of(stream)
        self._patience = 0 if timeout is None else max(int(timeout * 1000), 1)
        self._leases: list[Lease] = []  # a window with a lease cannot be closed
        self._asked = _core.Use()
        self._thread = 0

    def __enter__(self) -> Bracket:
        if self._asked.open:
            raise ValueError("the bracket is open: make another one")
        self._thread = threading.get_ident()
        try:
            self._leases = [w.lease() for w in self._windows]
            self._asked = _core.Use()
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
            raise RuntimeError("the bracket belongs to another thread: end it in the thread that entered it")
        self._end()

    def _end(self) -> None:
        self._asked.end()  # an interrupt may come before: then the bracket ends with the object
        self._leases = []


def use(
    ranges: Sequence[Memory | tuple[Memory, int, int]], *, stream: Any = None, timeout: float | None = None
) -> Bracket:
    """Keeps the memory of movable mappings in place: of whole mappings, or of ranges ``(mapping, offset, length)``.

    ::

        with gaiafs.use([(weights, 0, n), (out, at, n)], stream=s):
            kernel[grid, block, s](...)

    The block begins once all ranges have their memory, with their bytes. The memory is the device's or, if that is
    full, pinned host memory, which is slower. ``use`` gets memory for all ranges or for none, so put everything that a
    launch uses into one bracket. With a stream, the memory may move again after the work that was begun in the stream,
    and the end of the block does not wait for it. Without a stream, the end of the block waits for the work of the
    whole device. ``use`` does not bring memory that the device already has up to date: ``acquire`` does that, and
    ``release`` publishes stores.

    Blocks nest, and each thread has its own. All mappings must be of one mount and device. Mappings that do not move
    are allowed and need no bracket. A mapping cannot be closed while a bracket uses it.

    ``use`` waits only while other programs use the memory: at most timeout seconds, by default a minute. Raises Error:
    ETIMEDOUT, which names the holders; EDEADLK if it would have to wait inside another block of the thread (put all
    ranges into one bracket); ENOMEM if the ranges can never fit; and those of ``acquire``.
    """
    parts = []
    for r in ranges:
        memory, offset, length = r if isinstance(r, tuple) else (r, 0, None)
        parts.append((memory._window, *memory._range(offset, length)))
    if not parts:
        raise ValueError("a bracket uses at least one range")
    return Bracket(parts, stream, timeout)


def explain_faults() -> None:
    """Makes this process explain faults: when a CPU load or store into a mapping ends it, it prints the reason on
    stderr.

    The line names the byte, the file and the reason: no bracket uses the byte of a movable mapping, or the mapping is
    read-only. The process still ends. Use it in tests and during development. It covers emulated devices. A GPU reports
    such an access as an error of a later call ("an illegal memory access"); the package adds an explanation to that
    message. Call this after ``faulthandler.enable()``, so that its traceback follows the line.
    """
    _core.explain_faults()
