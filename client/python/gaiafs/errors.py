"""What calls fail with."""

from __future__ import annotations

import errno
import os
from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)


class Error(OSError):
    """A call failed: ``errno`` says why as the C library would, ``strerror`` in words: the daemon's if it failed there.

    It is also a FileNotFoundError, PermissionError, IsADirectoryError or TimeoutError where errno is that of one.
    """

    def __new__(cls, errno: int, text: str = "", filename: str | None = None) -> Error:
        kind = _kinds.get(errno, cls) if cls is Error else cls
        named = () if filename is None else (filename,)
        return super().__new__(kind, errno, text or os.strerror(errno), *named)

    def __init__(self, errno: int, text: str = "", filename: str | None = None) -> None:
        pass  # OSError has it all when it is made


class NotFoundError(Error, FileNotFoundError):
    """An Error with ENOENT."""


class NotPermittedError(Error, PermissionError):
    """An Error with EPERM or EACCES."""


class DirectoryError(Error, IsADirectoryError):
    """An Error with EISDIR."""


class LateError(Error, TimeoutError):
    """An Error with ETIMEDOUT."""


_kinds: dict[int, type[Error]] = {
    errno.ENOENT: NotFoundError,
    errno.EPERM: NotPermittedError,
    errno.EACCES: NotPermittedError,
    errno.EISDIR: DirectoryError,
    errno.ETIMEDOUT: LateError,
}


class ReadOnlyWarning(UserWarning):
    """A library was given memory that must not be stored into, and does not know it."""


class CopiedWarning(UserWarning):
    """Weights take memory of this process alone."""


class PastEndWarning(UserWarning):
    """A program stored past the end of a file: these stores are not kept."""


class FormatError(ValueError):
    """A file is not what its name says it is."""


def raise_first(failures: list[_E]) -> None:
    """Raises the first of some failures, if there is one, and forgets them.

    An error that is still in a variable of a frame that its traceback has would keep everything in these frames,
    mappings included, until garbage is collected.
    """
    if failures:
        first = failures[0]
        failures.clear()
        try:
            raise first
        finally:
            del first
