"""Exceptions and warnings of the package."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_E = TypeVar("_E", bound=BaseException)
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Error(OSError):
    """A call failed. ``errno`` is the C library's, and ``strerror`` explains the failure; the text may be the daemon's.

    It is also a FileNotFoundError, PermissionError, IsADirectoryError or TimeoutError if errno matches.
    """

    def __new__(cls, errno: int, text: str = "", filename: str | None = None) -> Error:
        kind = _kinds.get(errno, cls) if cls is Error else cls
        named = () if filename is None else (filename,)
        return super().__new__(kind, errno, text or os.strerror(errno), *named)

    def __init__(self, errno: int, text: str = "", filename: str | None = None) -> None:
        pass  # OSError.__new__ has set everything


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
    """A library without read-only tensors was given memory that must not be stored into."""


class CopiedWarning(UserWarning):
    """Weights are copies in this process's own memory, and not shared."""


class PastEndWarning(UserWarning):
    """A program stored past the end of a file. These stores are not kept."""


class FormatError(ValueError):
    """A file does not have the format that its name promises."""


def raise_first(failures: list[_E]) -> None:
    """Raises the first of some failures, if there is one, and empties the list.

    If a frame of the error's traceback still had a variable with the error, everything in these frames, including
    mappings, would stay alive until garbage collection.
    """
    if failures:
        first = failures[0]
        failures.clear()
        try:
            raise first
        finally:
            del first


def plain(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a public function that raises an Error or a FormatError without the frames inside the package. They name
    threads and helpers, and the text says everything that a caller needs."""

    @functools.wraps(call)
    def public(*arguments: _P.args, **options: _P.kwargs) -> _R:
        try:
            return call(*arguments, **options)
        except (Error, FormatError) as e:
            raise e.with_traceback(None) from None

    return public
