"""What calls fail with."""

from __future__ import annotations

import os
from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)


class Error(OSError):
    """A call failed: ``errno`` says why as the C library would, ``strerror`` in words, the daemon's own where it failed there."""

    def __init__(self, errno: int, text: str = "", filename: str | None = None) -> None:
        if filename is None:
            super().__init__(errno, text or os.strerror(errno))
        else:
            super().__init__(errno, text or os.strerror(errno), filename)


class ReadOnlyWarning(UserWarning):
    """A library was given memory that must not be stored into, and does not know it."""


class CopiedWarning(UserWarning):
    """Weights take memory of this process alone."""


class FormatError(ValueError):
    """A file is not what its name says it is."""


def raise_first(failures: list[_E]) -> None:
    """Raises the first of some failures, if there is one, and forgets them.

    An error that is still in a variable of a frame that its traceback has would keep everything in these frames, mappings
    included, until garbage is collected.
    """
    if failures:
        first = failures[0]
        failures.clear()
        try:
            raise first
        finally:
            del first
