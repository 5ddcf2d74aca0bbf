"""Updates in place that are seen whole: groups of stores, and acquires at a version."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from types import TracebackType

from . import _core
from .errors import Error
from .mapping import Mapping
from .memory import Memory
from .window import Window

Range = tuple[Memory, int, int]  # bytes of a mapping: offset and length
Part = tuple[Window, int, int]


def _parts(of: Sequence[Memory | Range]) -> list[Part]:
    parts = []
    for r in of:
        memory, offset, length = r if isinstance(r, tuple) else (r, 0, None)
        parts.append((memory._window, *memory._range(offset, length)))
    return parts


def _addresses(parts: list[Part]) -> list[tuple[int, int]]:
    return [(w.ptr + offset, n) for w, offset, n in parts]


class Group:
    """Stores into several ranges that are released at once, from ``gaiafs.atomic``."""

    def __init__(self, parts: list[Part]) -> None:
        self.version: int | None = None
        """The version that the files have since the release; None before."""
        self._parts = parts
        addresses = _addresses(parts)
        # Whoever takes it ends the group.
        self._open = [_core.apart(lambda: _core.group_begin(addresses), _core.group_abort)]

    def release(self) -> int:
        """Releases the group, and returns its version. ValueError where it has ended.

        Error ECANCELED: one of the mappings was closed, and nothing of the group is released.
        """
        if not self._open:
            raise ValueError("the group was released or aborted before")
        for w, _, _ in self._parts:
            if w.closed:
                self.abort()
                raise Error(errno.ECANCELED, "a mapping of the group was closed, which aborted it")
        opened = self._open

        def work() -> int:
            version = _core.group_release(opened[0])
            opened.clear()
            return version

        self.version = _core.apart(work)
        return self.version

    def abort(self) -> None:
        """Takes back what was stored into the group, if it is open."""
        opened = self._open

        def work() -> None:
            while opened:
                _core.group_abort(opened.pop())

        _core.apart(work)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        try:
            if value is None:
                self.release()
        finally:
            self.abort()


def atomic(*ranges: Mapping | Range) -> Group:
    """Opens a group of mappings, or of ranges ``(mapping, offset, length)`` of them, of one mount.

    ::

        with gaiafs.atomic(weights, biases) as group:
            weights.tensor("float32").add_(step)
            biases.tensor("float32").zero_()
        group.version                      # what readers get from gaiafs.acquire

    Whoever acquires sees all of a group or nothing of it. The end of the block releases it, ``group.release()`` does so
    before; an exception takes everything back that was stored into the ranges, and so does the end of the process or of
    a mapping. Store only within the block. Programs that map a file on the same device share the memory and see stores
    at once; they read through a view.

    Raises Error: EACCES for a mapping that is only read, EBUSY where another open group on the device has a page of it,
    EXDEV for several mounts, ENOTSUP where the daemon is older than the package.
    """
    return Group(_parts(ranges))


def acquire_windows(parts: list[Part], at_least: int, timeout: float | None) -> int:
    for w, _, _ in parts:
        w.check()
    return _core.acquire_all(_addresses(parts), at_least, timeout)


def acquire(*ranges: Memory | Range, at_least: int = 0, timeout: float | None = None) -> int:
    """Brings mappings and views, or ranges ``(mapping, offset, length)`` of them, up to date at one version, and
    returns it.

    What it brings has all of every group up to that version and nothing of later ones; it is that of the newest group
    of the files, 0 if there was none. With at_least it first waits for that version or a later one, for timeout
    seconds, or as long as it takes: Error ETIMEDOUT; EPIPE where the last program ended that began groups of the files.
    On a GPU wait for the work that uses the memory before.
    """
    return acquire_windows(_parts(ranges), at_least, timeout)
