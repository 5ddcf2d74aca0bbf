"""Opening and checking the files that are mapped."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import threading
from collections.abc import Iterator

from .arguments import HasFileno, PathLike
from .errors import Error

_FEW = 64  # descriptors that calls in progress have besides those of their files
_SELECTED = 1024  # FD_SETSIZE


def named(e: Error, name: str | None) -> Error:
    """Returns the error with the file's name."""
    if e.filename is not None or name is None:
        return e
    return Error(e.errno or errno.EIO, e.strerror or "", name)


def open_file(file: PathLike | HasFileno | int, writable: bool, fds: list[int]) -> str | None:
    """Puts a descriptor into fds, which the caller closes, and returns the file's name if it is known. Interrupts must
    not reach it: see shelter.py."""
    if isinstance(file, (str, bytes, os.PathLike)):
        name = os.fsdecode(file)
        try:
            # Without O_NONBLOCK, opening a pipe would wait. For regular files it has no effect.
            flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
            fds.append(os.open(file, flags))
        except OSError as e:
            raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
        return name
    if isinstance(file, bool) or not (isinstance(file, int) or hasattr(file, "fileno")):
        raise TypeError(f"a file is a path, an open file or a descriptor, not {file!r}")
    flush = getattr(file, "flush", None)
    if flush is not None and writable:
        flush()  # otherwise buffered writes would come later, over the device's stores
    fd = file if isinstance(file, int) else file.fileno()
    known = getattr(file, "name", None)
    try:
        fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
    except OSError as e:
        raise Error(e.errno or errno.EIO, f"descriptor {fd}: {e.strerror}") from None
    return known if isinstance(known, str) else None


def check_file(fd: int, writable: bool) -> int:
    """Refuses files that cannot be mapped, and returns the file's size."""
    st = os.fstat(fd)
    if stat.S_ISDIR(st.st_mode):
        raise Error(errno.EISDIR, "a directory cannot be mapped")
    if not stat.S_ISREG(st.st_mode):
        raise Error(errno.EINVAL, "it is not a regular file")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    mode = flags & os.O_ACCMODE
    if flags & os.O_PATH:
        raise Error(errno.EBADF, "the descriptor was opened with O_PATH")
    if mode == os.O_WRONLY:
        raise Error(errno.EACCES, "the file is not open for reading")
    if mode == os.O_RDONLY and writable:
        raise Error(errno.EACCES, "the file is not open for writing, which mode 'r+' needs")
    return st.st_size


class _Limit:
    """The process's limit of open files, while it is raised for calls that are in progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files = 0  # that calls in progress open
        self._before = self._now = 0  # the soft limit before it was raised, and as it was raised last

    def change(self, files: int) -> int:
        """Makes room for more files, as far as the hard limit allows, or takes it back. Returns the limit."""
        with self._lock:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            self._files += files
            if not self._files:
                if soft == self._now:  # otherwise the program itself has changed it
                    resource.setrlimit(resource.RLIMIT_NOFILE, (self._before, hard))
                self._now = 0
            elif files > 0 and soft != resource.RLIM_INFINITY and soft != hard:
                highest = max(map(int, os.listdir("/proc/self/fd")))
                # The C library keeps descriptors above those that select(2) takes: the low ones are the program's.
                wanted = max(highest + 1, _SELECTED) + self._files + _FEW
                most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                if soft < most:
                    if soft != self._now:
                        self._before = soft
                    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                    soft = self._now = most
            return soft


_limit = _Limit()


@contextlib.contextmanager
def room_for(files: int) -> Iterator[None]:
    """Raises the process's limit of open files for a while, if it can, so that it can open this many more. Interrupts
    must not reach it: see shelter.py."""
    most = _limit.change(files)
    try:
        yield
    except OSError as e:
        if e.errno != errno.EMFILE:
            raise
        words = (
            f"{files} files must be open at once. The process may have {most} open, and the daemon may have a lower "
            "limit: raise the limit of either (ulimit -Hn)"
        )
        raise Error(errno.EMFILE, words) from None
    finally:
        _limit.change(-files)
