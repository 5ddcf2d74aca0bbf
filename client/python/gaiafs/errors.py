"""What calls fail with."""

from __future__ import annotations

import os


class Error(OSError):
    """A call failed: ``errno`` says why as the C library would, ``strerror`` in words, the daemon's own where it failed there."""

    def __init__(self, errno: int, text: str = "", filename: str | None = None) -> None:
        if filename is None:
            super().__init__(errno, text or os.strerror(errno))
        else:
            super().__init__(errno, text or os.strerror(errno), filename)


class FormatError(ValueError):
    """A file is not what its name says it is."""
