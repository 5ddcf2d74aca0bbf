"""Bringing files into device memory before they are needed, and looking at what is there."""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable
from typing import Any

from . import _core, safetensors
from .errors import Error, FormatError
from .mapping import PathLike, check_file, named, open_file, open_window

STEP = 256 << 20  # bytes between two words on the progress


def files_of(path: PathLike) -> list[str]:
    """Returns the file, or the safetensors files of a directory or an index."""
    return list(safetensors.shards_of(path))


def warm(path: PathLike, device: Any = 0, progress: Callable[[str, int, int], None] | None = None) -> int:
    """Loads a file, or the ``*.safetensors`` of a directory or an index, into a device's memory, and returns the bytes.

    Nothing stays mapped: the daemon keeps the bytes there until it needs the room for others, so that a mapping made later
    finds them. progress is called with a file's name, how many of its bytes are loaded, and its size.
    """
    total = 0
    for file in files_of(path):
        fds: list[int] = []
        try:
            open_file(file, False, fds)
            size = check_file(fds[0], writable=False)
            if size:
                _warm(fds[0], file, size, device, progress)
        except Error as e:
            raise named(e, file) from None
        finally:
            for fd in fds:
                os.close(fd)
        total += size
    return total


def _warm(fd: int, file: str, size: int, device: Any, progress: Callable[[str, int, int], None] | None) -> None:
    window = open_window(fd, device, False, 0, size, lazy=True, hold_only=True)
    try:
        for at in range(0, size, STEP):
            n = min(STEP, size - at)
            window.request(_core.ACQUIRE, at, n)
            if progress is not None:
                progress(file, at + n, size)
    finally:
        window.close()


def status(mountpoint: PathLike) -> dict[str, Any]:
    """Returns what the daemon of a mountpoint says about itself: the document of docs/status.md."""
    return _core.apart(functools.partial(_status, os.fsdecode(mountpoint)))


def _status(name: str) -> dict[str, Any]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
    try:
        document: dict[str, Any] = json.loads(_core.status(fd))
        return document
    except Error as e:
        raise named(e, name) from None
    finally:
        os.close(fd)


def mountpoint_of(path: PathLike) -> str:
    """Returns the mountpoint that a path is below. The path exists."""
    name = os.fsdecode(path)
    try:
        os.stat(name)
    except OSError as e:
        raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
    name = os.path.realpath(name)
    while not os.path.ismount(name):
        name = os.path.dirname(name)
    return name


def info(path: PathLike) -> dict[str, Any]:
    """Says what a path is, and what devices hold of it: its files, their tensors where they have any, and the devices."""
    mountpoint = mountpoint_of(path)
    try:
        document = status(mountpoint)
    except Error as e:  # about the path, since the caller may not know the mountpoint
        raise Error(e.errno or errno.EIO, e.strerror or "", os.fsdecode(path)) from None
    held = {f.get("inode", f["name"]): f for f in document.get("files") or []}
    found: dict[str, Any] = {"path": os.fsdecode(path), "mountpoint": mountpoint, "devices": document.get("devices") or []}
    whole = os.path.realpath(os.fsdecode(path)) == mountpoint
    found["files"] = [] if whole else [_file_info(file, mountpoint, held) for file in files_of(path)]
    if whole:
        found["files"] = list(held.values())
    return found


def _file_info(file: str, mountpoint: str, held: dict[Any, Any]) -> dict[str, Any]:
    fds: list[int] = []
    try:
        open_file(file, False, fds)
        fd = fds[0]
        size = check_file(fd, writable=False)
        below = os.path.relpath(os.path.realpath(file), mountpoint)
        # By its number: another file may have had the name before.
        holders = held.get(os.fstat(fd).st_ino, held.get(below, {})).get("holders", [])
        f: dict[str, Any] = {"name": below, "size_bytes": size, "holders": holders}
        if file.endswith(safetensors.SUFFIX):
            try:
                header = safetensors.read_header(fd)
            except FormatError as e:
                raise FormatError(f"{file}: {e}") from None
            f["metadata"] = header.metadata
            f["tensors"] = {
                t.name: {"dtype": t.dtype.name, "shape": list(t.shape), "bytes": t.end - t.begin}
                for t in header.tensors.values()
            }
        return f
    except Error as e:
        raise named(e, file) from None
    finally:
        for fd in fds:
            os.close(fd)
