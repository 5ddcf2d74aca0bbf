"""Loading files into device memory before they are needed, and showing what is there."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Callable
from typing import Any

from . import _core, safetensors, shelter, weights
from .arguments import PathLike
from .errors import Error, FormatError, NotFoundError, plain
from .files import check_file, named, open_file
from .views import size_of
from .window import open_window

STEP = 256 << 20  # bytes between two progress reports


@shelter.sheltered
def files_of(path: PathLike) -> list[str]:
    """Returns the file, or the safetensors files of a directory or an index. If a directory has none itself, as that of
    a diffusion model, they are those of the directories below it."""
    try:
        return list(safetensors.shards_of(path))
    except NotFoundError:
        top = os.fsdecode(path)
        below = [os.path.join(d, n) for d, names, _ in os.walk(top) for n in sorted(names) if not n.startswith(".")]
        found: dict[str, None] = {}
        for directory in sorted(below):
            with contextlib.suppress(NotFoundError):
                found.update(dict.fromkeys(safetensors.shards_of(directory)))
        if not found:
            raise
        return list(found)


@plain
def warm(path: PathLike, device: Any = 0, progress: Callable[[str, int, int], None] | None = None) -> int:
    """Loads a file, or the ``*.safetensors`` of a directory or an index, into a device's memory, and returns the bytes.
    If a directory has none itself, they are those of the directories below it.

        Nothing stays mapped. The daemon keeps the bytes on the device until it needs the memory, so programs that map
        the file, or load it with ``load_safetensors``, find them there. progress is called with a file's name, the
        number of bytes that are loaded, and the number of bytes in all.
    """
    return sum(_warm(file, device, progress) for file in files_of(path))


def _warm(file: str, device: Any, progress: Callable[[str, int, int], None] | None) -> int:
    if file.endswith(safetensors.SUFFIX):
        windows = weights.map_weights({file: None}, device, flags=_core.LAZY | _core.HOLD).windows
    else:
        windows = [open_window(file, device, False, 0, None, _core.LAZY | _core.HOLD)] if size_of(file) else []
    size = sum(w.length for w in windows)
    done = 0
    for window in windows:
        try:
            for at in range(0, window.length, STEP):
                n = min(STEP, window.length - at)
                window.request(_core.ACQUIRE, at, n)
                done += n
                if progress is not None:
                    progress(file, done, size)
        finally:
            window.close()
    return size


@plain
def status(mountpoint: PathLike) -> dict[str, Any]:
    """Returns the status of a mountpoint's daemon: the document of docs/status.md."""
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
        shelter.close(fd)


@shelter.sheltered
def mountpoint_of(path: PathLike) -> str:
    """Returns the mountpoint that a path is below. The path must exist."""
    name = os.fsdecode(path)
    try:
        os.stat(name)
    except OSError as e:
        raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
    name = os.path.realpath(name)
    while not os.path.ismount(name):
        name = os.path.dirname(name)
    return name


@plain
def info(path: PathLike) -> dict[str, Any]:
    """Returns what a path is, and what devices hold of it: its files, their tensors if they have any, and the
    devices.
    """
    mountpoint = mountpoint_of(path)
    try:
        document = status(mountpoint)
    except Error as e:  # report the path, since the caller may not know the mountpoint
        raise Error(e.errno or errno.EIO, e.strerror or "", os.fsdecode(path)) from None
    held = {f.get("inode", f["name"]): f for f in document.get("files") or []}
    found: dict[str, Any] = {"path": os.fsdecode(path), "mountpoint": mountpoint, "devices": document.get("devices") or []}
    whole = os.path.realpath(os.fsdecode(path)) == mountpoint
    found["files"] = [] if whole else [_file_info(file, mountpoint, held) for file in files_of(path)]
    if whole:
        found["files"] = list(held.values())
    return found


@shelter.sheltered
def _file_info(file: str, mountpoint: str, held: dict[Any, Any]) -> dict[str, Any]:
    fds: list[int] = []
    try:
        open_file(file, False, fds)
        fd = fds[0]
        size = check_file(fd, writable=False)
        below = os.path.relpath(os.path.realpath(file), mountpoint)
        # By inode number, because another file may have had the name before.
        of = held.get(os.fstat(fd).st_ino, held.get(below, {}))
        f: dict[str, Any] = {"name": below, "size_bytes": size, "holders": of.get("holders", []), "views": of.get("views", [])}
        if file.endswith(safetensors.SUFFIX):
            try:
                header = safetensors.read_header(fd)
            except FormatError as e:
                raise FormatError(f"{file}: {e}") from None
            f["metadata"] = header.metadata or {}
            f["tensors"] = {
                t.name: {"dtype": t.dtype.name, "shape": list(t.shape), "bytes": t.end - t.begin}
                for t in header.tensors.values()
            }
        return f
    except Error as e:
        raise named(e, file) from None
    finally:
        shelter.close_all(fds)
