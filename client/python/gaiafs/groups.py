"""Updates in place that readers see whole: groups of stores, and acquires at a version."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from types import TracebackType

from . import _core, shelter
from .errors import Error, plain
from .mapping import Mapping
from .memory import Memory
from .window import Window

Range = tuple[Memory, int, int]  # bytes of a mapping: offset and length
Part = tuple[Window, int, int]


def _parts(of: Sequence[Memory | Range]) -> list[Part]:
    parts = []
    for r in of:
        memory, offset, length = r if isinstance(r, tuple) else (r, 0, None)
        if not isinstance(memory, Memory):
            raise TypeError(f"{memory!r} is no mapping and no view")
        parts.append((memory._window, *memory._range(offset, length)))
    if not parts:
        raise ValueError("there is no mapping and no view")
    return parts


def _addresses(parts: list[Part]) -> list[tuple[int, int]]:
    return [(w.ptr + offset, n) for w, offset, n in parts]


class Group:
    """Stores into several ranges that are released at once, from ``gaiafs.atomic``."""

    def __init__(self, parts: list[Part]) -> None:
        self.version: int | None = None
        """The version that the files have since the release. None before the release."""
        self._parts = parts
        addresses = _addresses(parts)
        shelter.wait_for_abandoned()  # the end of an earlier group of the same pages may have been interrupted
        self._stores = _core.apart(lambda: _core.Stores(addresses))

    @plain
    def release(self) -> int:
        """Releases the group, and returns its version. Raises ValueError if the group has ended.

        Raises Error ECANCELED if one of the mappings was closed. Nothing of the group is released then.
        """
        _core.apart(self._release)
        if self.version is None:
            raise ValueError("the group was aborted before")
        return self.version

    def _release(self) -> None:
        if not self._stores.open:
            raise ValueError("the group was released or aborted before")
        if any(w.closed for w, _, _ in self._parts):
            self._stores.abort()
            raise Error(errno.ECANCELED, "a mapping of the group was closed, which aborted it")
        self.version = self._stores.release()

    @plain
    def abort(self) -> None:
        """Takes back what was stored into the group. If the group has ended, it does nothing."""
        _core.apart(self._stores.abort)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        def end() -> None:
            try:
                if value is None and self._stores.open:
                    self._release()
            finally:
                self._stores.abort()

        _core.apart(end)  # as a whole, because an interrupt ends the wait, not the work


@plain
def atomic(*ranges: Mapping | Range) -> Group:
    """Opens a group of mappings of one mount, or of ranges ``(mapping, offset, length)`` of them.

    ::

        with gaiafs.atomic(weights, biases) as group:
            weights.tensor("float32").add_(step)
            biases.tensor("float32").zero_()
        group.version                      # what readers get from gaiafs.acquire

    An acquire shows all of a group or nothing of it. The end of the block, or ``group.release()`` before it, releases
    the group. An exception takes everything back that was stored into the ranges. So does the end of the process, of a
    mapping, or of an open group: the last reference to it. After an interrupt at the end of the block, the group was
    released or taken back. Store only within the block. Programs that map a file on the same device share the memory
    and see stores at once; to read released bytes only, they use a view.

    Raises Error: EACCES for a read-only mapping, EBUSY if another open group on the device has one of its pages, EXDEV
    for mappings of several mounts, ENOTSUP if the daemon is older than the package.
    """
    return Group(_parts(ranges))


def acquire_windows(parts: list[Part], at_least: int, timeout: float | None) -> int:
    for w, _, _ in parts:
        w.check()
    return _core.acquire_all(_addresses(parts), at_least, timeout)


@plain
def acquire(*ranges: Memory | Range, at_least: int = 0, timeout: float | None = None) -> int:
    """Brings mappings and views, or ranges ``(mapping, offset, length)`` of them, up to date at one version, and
    returns the version.

    The ranges then show all of every group up to that version, and nothing of later groups. It is the version of the
    newest group of the files, or 0 if there was none. With at_least, the call first waits for that version or a later
    one, for at most timeout seconds, or without limit. Raises Error ETIMEDOUT, or EPIPE if the last program that began
    groups of the files ended. On a GPU, first wait for the work that uses the memory.
    """
    return acquire_windows(_parts(ranges), at_least, timeout)
