"""The places of mapped files, so that another process, or a forked child, can map them again."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from .errors import Error
from .files import open_file


class Place(NamedTuple):
    """A file: its path, and the identity of the file that is meant."""

    path: str
    device: int
    inode: int

    def open(self, writable: bool, fds: list[int]) -> None:
        """Puts a descriptor of the file into fds, which the caller closes. Raises Error ESTALE if the path names
        another
        file now.
        """
        open_file(self.path, writable, fds)
        st = os.fstat(fds[-1])
        if (st.st_dev, st.st_ino) != (self.device, self.inode):
            raise Error(errno.ESTALE, "the path names another file now: map that one instead", self.path)


def place_of(fd: int) -> Place:
    """Returns the place of an open file."""
    st = os.fstat(fd)
    return Place(os.readlink(f"/proc/self/fd/{fd}"), st.st_dev, st.st_ino)
