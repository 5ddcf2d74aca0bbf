"""Model weights in the memory of a device, in one copy that all processes share."""

from __future__ import annotations

import errno
import fnmatch
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import _core, dlpack
from .arguments import Device, PathLike, device_of, stream_of
from .array import Array
from .copies import Copies
from .errors import Error, FormatError
from .files import check_file, named, open_file
from .frameworks import framework_of, tensor_of
from .groups import acquire_windows
from .safetensors import Header, Tensor, about, read_header, shards_of, shown
from .shards import Part, ShardPlan, whole
from .views import MAX_ROWS, MAX_SEGMENTS, Plan, plan
from .window import Lease, Window

Private = bool | str | Iterable[str]
Divide = Callable[[Iterable[Tensor]], dict[str, Part]]


class Weights(dict[str, Any]):
    """The tensors of safetensors files by name, from ``gaiafs.load_safetensors``."""

    def __init__(self, framework: str, shared: dict[str, Array], windows: list[Window]) -> None:
        self.version: int | None = None
        """The version that the tensors have since the last acquire: see there. None before."""
        super().__init__({name: tensor_of(a, framework) for name, a in shared.items()})
        self._framework, self._shared, self._windows = framework, shared, windows

    def acquire(self, *, stream: Any = None, at_least: int = 0, timeout: float | None = None) -> int:
        """Brings the shared tensors up to date, and returns how many pages of them had changed.

        Only what changed in the files is copied, to where it was: tensors and their addresses stay. On a GPU it first
        waits for the work that was begun, of stream or of the whole device. Files that were replaced (renamed over)
        are not followed.

        Of each group that a writer released (``gaiafs.atomic``) the tensors have everything then, or nothing; ``version`` is
        that of the newest. With at_least it waits for that version or a later one: see ``gaiafs.acquire``.
        """
        handle = stream_of(stream)
        pages = sum(w.request(_core.ACQUIRE, 0, w.length, stream=handle) for w in self._windows)
        if not self._windows:  # all tensors are private
            return 0
        try:
            self.version = acquire_windows([(w, 0, w.length) for w in self._windows], at_least, timeout)
        except Error as e:
            if at_least or e.errno != errno.ENOTSUP:  # a daemon that has no groups
                raise
        return pages

    def private(self, *patterns: str) -> dict[str, Any]:
        """Puts copies of this process alone in the place of tensors, and returns them. They may be stored into.

        In patterns, ``*`` stands for anything; without patterns it is all tensors. ValueError for a pattern that no
        name matches. The copies take device memory of their own, and no acquire changes them. Tensors that the caller
        has already, also those that a model was given, stay the shared ones.
        """
        names: dict[str, None] = {}
        for pattern in patterns or ("*",):
            found = fnmatch.filter(self, pattern) if pattern != "*" else list(self)
            if not found and patterns:
                raise ValueError(f"no tensor is called {pattern!r}")
            names.update(dict.fromkeys(found))
        groups: dict[Window, list[str]] = {}
        for name in names:
            if name in self._shared:
                groups.setdefault(window_of(self._shared[name]), []).append(name)
        made = {
            name: tensor_of(a, self._framework)
            for w, group in groups.items()
            for name, a in self._copies(w, group).items()
        }
        self.update(made)
        for name in made:
            del self._shared[name]
        used = set(map(window_of, self._shared.values()))
        self._windows = [w for w in self._windows if w in used]
        return {name: self[name] for name in names}

    def _copies(self, window: Window, names: list[str]) -> dict[str, Array]:
        arrays = {name: self._shared[name] for name in names}
        full = [a for a in arrays.values() if a.nbytes]
        if not full:
            return arrays
        copies = Copies(window, [[(a.ptr, a.nbytes)] for a in full])
        at = iter(copies.at)
        return {
            n: Array(copies, next(at) if a.nbytes else a.ptr, a.dtype, a.shape, readonly=False)
            for n, a in arrays.items()
        }


def window_of(a: Array) -> Window:
    assert isinstance(a._lease, Lease)
    return a._lease.window


class _Batch(NamedTuple):
    """A view, and what it has of a file."""

    parts: list[Part]
    plan: Plan
    offsets: list[int]
    size: int


class _File:
    """A file that is being loaded."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.parts: list[Part] = []  # what is wanted of it
        self.batches: list[_Batch] = []

    def open(self, names: list[str] | None, fds: list[int]) -> list[Tensor]:
        """Opens it, and returns the tensors that are wanted of it."""
        open_file(self.path, False, fds)
        self.fd = fds[-1]
        try:
            check_file(self.fd, writable=False)
        except Error as e:
            raise named(e, self.path) from None
        try:
            self.header: Header = read_header(self.fd)
            if names is None:
                return list(self.header.tensors.values())
            for name in names:
                if name not in self.header.tensors:
                    raise FormatError(f"the index places tensor {shown(name)} here, and it is not")
            return [self.header.tensors[name] for name in names]
        except FormatError as e:
            raise about(self.path, e) from None

    def map(self, fds: list[int], device: Device, flags: int) -> list[Window]:
        """Makes the views. For _core.apart: an interrupted caller may have closed the descriptor."""
        try:
            fds.remove(self.fd)
        except ValueError:
            raise Error(errno.EINTR) from None  # which nobody hears of
        windows: list[Window] = []
        try:
            for b in self.batches:
                make = functools.partial(
                    _core.map_view, [self.fd], b.plan.segments, b.plan.files, b.plan.align, device, flags
                )
                windows.append(Window(make, self.path, 0, b.size, False))
            if (size := os.fstat(self.fd).st_size) < self.header.size:
                raise FormatError(
                    f"{self.path}: the file shrank from {self.header.size} to {size} bytes while it was loaded"
                )
            return windows
        except BaseException as e:
            _close(windows)
            if isinstance(e, Error):
                raise named(e, self.path) from None
            raise
        finally:
            os.close(self.fd)


def _close(windows: list[Window]) -> None:
    """Gives views back, where something else is to be reported."""
    for w in windows:
        try:
            w.close()
        except Error:
            pass


def _batches(parts: Iterable[Part]) -> list[_Batch]:
    """Divides what is wanted of a file into as many views as it takes, in the order of the file. Mostly that is one."""
    groups: list[list[Part]] = []
    rows = 0
    for p in sorted((p for p in parts if p.length), key=lambda p: (p.offset, p.tensor.end)):
        rows += p.rows
        if not groups or len(groups[-1]) == MAX_SEGMENTS or rows > MAX_ROWS:
            groups.append([])
            rows = p.rows
        groups[-1].append(p)
    made = []
    for group in groups or [[]]:
        # A file without a byte of tensors is mapped, too: what is wrong with the device or the mount is to be known.
        of = plan([(p.offset, p.length, p.stride, p.rows) for p in group] or [(0, 8)], 1)
        made.append(_Batch(group, of, *_core.layout(of.segments, of.align)))
    return made


def load_safetensors(
    path: PathLike,
    device: Any = 0,
    *,
    framework: str | None = None,
    shard: ShardPlan | None = None,
    rank: int | None = None,
    world: int | None = None,
    private: Private = False,
) -> Weights:
    """Returns the tensors of safetensors files, in the one copy that all processes of the machine share on the device.

    path is a file, a directory with files, or an ``*.safetensors.index.json``, whose files are loaded side by side.
    framework is "torch", "numpy" (on emulated devices) or "array" (gaiafs.Array); without it, it is "torch" where
    PyTorch is installed.

    Every tensor begins at a multiple of 256 bytes, wherever it is in the file: the device's memory is a view
    (``gaiafs.view``). Processes of a user that load the same file, or the same part of it, share the view.

    The tensors keep the memory, and so does the dict; with the last of them it goes. A store into one ends the
    process or, on a GPU, its CUDA context. Tensors that are to be stored into are made private, which costs a copy
    for this process alone: private is True for all, or the names or patterns (``"*.scale"``) of some. See
    ``Weights.private`` and ``Weights.acquire``.

    With shard the tensors are the parts that the plan gives to rank, one of world (see ``ShardPlan``).

    It blocks until all is on the device. Raises FormatError for a file that is not what the format demands,
    ImportError where the library is not installed, TypeError where it has no such elements, ValueError for a plan
    that does not fit, and what ``gaiafs.mmap`` raises.
    """
    if (rank is None or world is None) if shard is not None else (rank is not None or world is not None):
        raise ValueError("shard, rank and world are passed together, or none of them")
    chosen = framework_of(framework)
    divide = None if shard is None else functools.partial(shard.parts, rank=rank or 0, world=world or 0)
    weights = load(shards_of(path), device, chosen, divide)
    if private:
        weights.private(*(() if private is True else [private] if isinstance(private, str) else private))
    return weights


def load_file(path: PathLike, device: Any = 0, *, framework: str | None = None) -> Weights:
    """Returns the tensors of one safetensors file, as ``load_safetensors`` does: ``safetensors.torch.load_file``."""
    return load({os.fsdecode(path): None}, device, framework_of(framework), None)


class Mapped(NamedTuple):
    """Tensors in the memory of a device, and the views that they are in."""

    arrays: dict[str, Array]
    windows: list[Window]
    headers: list[Header]


def map_weights(
    names: dict[str, list[str] | None], device: Any, divide: Divide | None = None, flags: int = 0
) -> Mapped:
    """Maps tensors of files (see shards_of), or the parts of them that divide says. Files are opened side by side."""
    on = device_of(device)
    files = [_File(path) for path in names]
    fds: list[int] = []
    closing = map(os.close, iter(fds.pop, None))
    try:
        tensors: dict[str, Tensor] = {}
        holders: dict[str, _File] = {}
        for f in files:
            for t in f.open(names[f.path], fds):
                if t.name in tensors:
                    raise FormatError(f"{f.path}: tensor {shown(t.name)} is in another file, too")
                tensors[t.name], holders[t.name] = t, f
        parts = {n: whole(t) for n, t in tensors.items()} if divide is None else divide(tensors.values())
        for name, part in parts.items():
            holders[name].parts.append(part)
        for f in files:
            f.batches = _batches(f.parts)
        dlpack.sweep()
        made = _core.apart_together([functools.partial(f.map, fds, on, flags) for f in files], _close)
    finally:
        try:
            any(closing)
        except IndexError:
            pass  # all that were left
    arrays: dict[str, Array] = {}
    for f, windows in zip(files, made, strict=True):
        for b, window in zip(f.batches, windows, strict=True):
            lease = window.lease()
            for p, at in zip(b.parts, b.offsets, strict=False):
                arrays[p.tensor.name] = Array(lease, window.ptr + at, p.tensor.dtype, p.shape, readonly=True)
        for p in f.parts:
            if not p.length:
                arrays[p.tensor.name] = Array(lease, lease.window.ptr, p.tensor.dtype, p.shape, readonly=True)
    return Mapped(
        {name: arrays[name] for name in parts}, [w for windows in made for w in windows], [f.header for f in files]
    )


def load(names: dict[str, list[str] | None], device: Any, framework: str, divide: Divide | None = None) -> Weights:
    arrays, windows, _ = map_weights(names, device, divide)
    check_kind(framework, windows)
    return Weights(framework, arrays, windows)


def check_kind(framework: str, windows: list[Window]) -> None:
    if framework == "numpy" and windows[0].ordinal is not None:
        raise ValueError(
            "NumPy cannot use memory of a GPU: install PyTorch, or use framework='array' and its __dlpack__"
        )
