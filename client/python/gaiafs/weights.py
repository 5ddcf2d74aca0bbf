"""Model weights in the memory of a device, in one copy that all processes share."""

from __future__ import annotations

import errno
import fnmatch
import functools
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from . import _core, dlpack, shelter
from .arguments import Device, PathLike, device_of, stream_of
from .array import Array
from .copies import Copies
from .errors import Error, FormatError, plain
from .files import check_file, named, open_file, room_for
from .frameworks import framework_of, tensor_of, tensors_of
from .fusing import Fuse, Groups, Run, alignment, grouping, runs_of
from .groups import acquire_windows
from .safetensors import Header, Tensor, about, read_header, shards_of, shown
from .shards import Part, ShardPlan, whole
from .views import ALIGN, MAX_ROWS, MAX_SEGMENTS
from .window import Lease, Window

Private = bool | str | Iterable[str]
Group = Callable[[dict[str, Part]], Groups]


class Weights(dict[str, Any]):
    """The tensors of safetensors files by name, from ``gaiafs.load_safetensors``."""

    def __init__(
        self, framework: str, tensors: dict[str, Any], shared: dict[str, Array], windows: list[Window]
    ) -> None:
        self.version: int | None = None
        """The version that the tensors have since the last acquire: see there. None before the first one."""
        super().__init__(tensors)
        self._framework, self._shared, self._windows = framework, shared, windows

    def acquire(self, *, stream: Any = None, at_least: int = 0, timeout: float | None = None) -> int:
        """Brings the shared tensors up to date, and returns how many of their pages had changed.

        Only the bytes that changed in the files are copied, into the same memory: tensors and their addresses stay. On
        a GPU it first waits for the work that was begun, in stream or in the whole device. It does not follow files
        that were replaced (renamed over).

        The tensors then show all of each group that a writer released (``gaiafs.atomic``), or nothing of it.
        ``version`` is the version of the newest group. With at_least it waits for that version or a later one: see
        ``gaiafs.acquire``.
        """
        handle = stream_of(stream)
        pages = sum(w.request(_core.ACQUIRE, 0, w.length, stream=handle) for w in self._windows)
        if not self._windows:  # all tensors are private copies
            return 0
        try:
            self.version = acquire_windows([(w, 0, w.length) for w in self._windows], at_least, timeout)
        except Error as e:
            if at_least or e.errno != errno.ENOTSUP:  # the daemon has no groups
                raise
        return pages

    def private(self, *patterns: str) -> dict[str, Any]:
        """Replaces tensors by copies of this process alone, and returns the copies. They may be stored into.

        In patterns, ``*`` stands for anything. Without patterns it copies all tensors. Raises ValueError for a pattern
        that matches no name. The copies take their own device memory, and no acquire changes them. Tensors that the
        caller has taken already, including those that a model was given, stay the shared ones.
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
    """A view, and the runs that it has."""

    runs: list[Run]
    segments: array[int]  # four numbers each
    files: array[int]  # one number for each segment
    align: int
    offsets: list[int]  # of the runs, in the view
    size: int


class _File:
    """A file that is being loaded."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.makers: list[_Maker] = []  # those that have not made their views

    def open(self, names: list[str] | None, holders: dict[str, _File], fds: list[int]) -> list[Tensor]:
        """Opens the file, notes in holders that it has the wanted tensors, and returns them."""
        open_file(self.path, False, fds)
        self.fd = fds[-1]
        try:
            check_file(self.fd, writable=False)
            self.header: Header = read_header(self.fd)
            for name in self.header.tensors if names is None else names:
                if name not in self.header.tensors:
                    raise FormatError(f"the index places tensor {shown(name)} in this file, which does not have it")
                if holders.setdefault(name, self) is not self:
                    raise FormatError(f"tensor {shown(name)} is in another file, too")
            return list(self.header.tensors.values()) if names is None else [self.header.tensors[n] for n in names]
        except FormatError as e:
            raise about(self.path, e) from None
        except Error as e:
            raise named(e, self.path) from None
        except OSError as e:
            raise Error(e.errno or errno.EIO, e.strerror or "", self.path) from None


    def done(self, maker: _Maker, fds: list[int]) -> None:
        """Closes the file if no other maker needs it. Any thread may call it."""
        self.makers.remove(maker)
        if not self.makers:
            try:
                fds.remove(self.fd)
            except ValueError:
                return  # another maker closes it at this moment
            shelter.close(self.fd)


class _Made(NamedTuple):
    """What a maker made. The tensors are those of a framework, in the memory of the arrays."""

    windows: list[Window]
    arrays: dict[str, Array]
    tensors: dict[str, Any]

    def undo(self) -> None:
        self.tensors.clear()
        self.arrays.clear()
        _close(self.windows)


class _Maker:
    """Makes the views of one file, and its tensors. For tensors that are made of parts of several files, it makes the
    views of those files.
    """

    def __init__(self, files: list[_File], runs: list[Run], places: dict[str, int], fds: list[int]) -> None:
        """places says in which of the files a tensor is. fds has the descriptors of open files."""
        self.files, self.runs, self.fds = files, runs, fds
        self.batches = _batches(runs, places)
        for f in files:
            f.makers.append(self)

    def make(self, device: Device, flags: int, framework: str) -> _Made:
        """For _core.apart."""
        windows = self._map(device, flags)
        check_kind(framework, windows)
        arrays: dict[str, Array] = {}
        for b, window in zip(self.batches, windows, strict=True):
            lease = window.lease()
            for run, at in zip(b.runs, b.offsets, strict=True):
                arrays[run.name] = Array(lease, window.ptr + at, run.dtype, run.shape, readonly=True)
        for run in self.runs:
            if not run.length:
                arrays[run.name] = Array(lease, lease.window.ptr, run.dtype, run.shape, readonly=True)
        return _Made(windows, arrays, tensors_of(arrays, framework, windows[0].ordinal))

    def _map(self, device: Device, flags: int) -> list[Window]:
        windows: list[Window] = []
        name = self.files[0].path if len(self.files) == 1 else None
        fds = [f.fd for f in self.files]
        try:
            for b in self.batches:
                make = functools.partial(_core.map_view, fds, b.segments, b.files, b.align, device, flags)
                windows.append(Window(make, name, 0, b.size, False))
            for f in self.files:
                if (size := os.fstat(f.fd).st_size) < f.header.size:
                    raise FormatError(
                        f"{f.path}: the file shrank from {f.header.size} to {size} bytes while it was loaded"
                    )
            return windows
        except BaseException as e:
            _close(windows)
            if isinstance(e, Error):
                raise named(e, name or self.files[0].path) from None
            raise
        finally:
            for f in self.files:
                f.done(self, self.fds)


def _close(windows: list[Window]) -> None:
    """Gives views back while another failure is being reported."""
    for w in windows:
        try:
            w.close()
        except Error:
            pass


def _batches(runs: Iterable[Run], places: dict[str, int]) -> list[_Batch]:
    """Divides the runs into as few views as they fit into, in the order of the files. Mostly that is one."""

    def order(run: Run) -> tuple[int, int, int]:
        return min((places[p.tensor.name], p.offset, p.tensor.end) for p in run.parts)

    full = sorted((run for run in runs if run.length), key=order)
    gaps = int(alignment(full, ALIGN) < ALIGN)  # gaps take segments, too
    groups: list[list[Run]] = []
    rows = segments = 0
    for run in full:
        pieces, its_rows = gaps + len(run.parts), gaps + sum(p.rows for p in run.parts)
        segments, rows = segments + pieces, rows + its_rows
        if not groups or segments > MAX_SEGMENTS or rows > MAX_ROWS:
            groups.append([])
            segments, rows = pieces, its_rows
        groups[-1].append(run)
    # Map files without tensor bytes, too, so that problems of the device or the mount are reported.
    return [_batch(group, places) for group in groups or [[]]]


def _batch(runs: list[Run], places: dict[str, int]) -> _Batch:
    """Plans a view in which each run begins at a multiple of ALIGN. The parts of a run have no gaps between them."""
    align = alignment(runs, ALIGN)
    segments, files = array("Q"), array("I")
    first: list[int] = []
    at = 0
    for run in runs:
        if gap := -at % align:
            at += gap
        if gap := -at % ALIGN:
            segments.extend((0, gap, 0, 1))  # a gap with arbitrary bytes
            files.append(0)
            at += gap
        first.append(len(files))
        for p in run.parts:
            if p.length:
                segments.extend((p.offset, p.length, p.stride, p.rows))
                files.append(places[p.tensor.name])
        at += run.length
    if not files:
        segments.extend((0, 8, 0, 1))
        files.append(0)
    offsets, size = _core.layout(segments, align)
    return _Batch(runs, segments, files, align, [offsets[i] for i in first], size)


@plain
def load_safetensors(
    path: PathLike,
    device: Any = 0,
    *,
    framework: str | None = None,
    shard: ShardPlan | None = None,
    rank: int | None = None,
    world: int | None = None,
    fuse: Fuse | None = None,
    private: Private = False,
) -> Weights:
    """Returns the tensors of safetensors files, in the one copy that all processes of the machine share on the device.

    path is a file, a directory with files, or an ``*.safetensors.index.json``; its files are loaded concurrently.
    framework is "torch", "numpy" (on emulated devices) or "array" (gaiafs.Array). The default is "torch" if PyTorch is
    installed, otherwise "numpy".

    Every tensor begins at a multiple of 256 bytes, wherever it is in the file, because the device's memory is a view
    (``gaiafs.view``). Processes of a user that load the same file, or the same part of it, share the view.

    The tensors and the dict keep the memory alive; it goes with the last of them. A store into a tensor ends the
    process or, on a GPU, its CUDA context. private makes tensors that may be stored into, which costs a copy for this
    process alone. It is True for all tensors, or the names or patterns (``"*.scale"``) of some. See ``Weights.private``
    and ``Weights.acquire``.

    With shard, the tensors are the parts that the plan gives to rank, one of world ranks (see ``ShardPlan``).

    With fuse, some tensors replace the tensors that they are made of. It maps the name of each to the names of its
    pieces, which are concatenated along dimension 0::

        fuse = {
            "layers.*.qkv.weight": ["layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"],
            "layers.*.experts.gate_up": ["layers.*.experts.#.gate.weight", "layers.*.experts.#.up.weight"],
        }

    ``*`` stands for anything without a dot, the same in all names of a rule. ``#`` stands for a number; the results for
    all numbers are stacked along a new first dimension. Shards are divided before tensors are fused: plans have rules
    for the names in the files, and a rank gets tensors made of its parts. Processes share a fused tensor if they fuse
    it the same way.

    It blocks until everything is on the device. If a file cannot be loaded, it gives back the files that were loaded
    before, and waits for those that are being loaded. Raises FormatError for a file that violates the format,
    ImportError if the library is not installed, TypeError if the library lacks the elements' type, ValueError for a
    plan or a rule that does not fit, and what ``gaiafs.mmap`` raises.
    """
    if (rank is None or world is None) if shard is not None else (rank is not None or world is not None):
        raise ValueError("shard, rank and world are passed together, or none of them")
    chosen = framework_of(framework)
    part = None if shard is None else _Shard(shard, rank or 0, world or 0)
    weights = load(shards_of(path), device, chosen, part, None if fuse is None else grouping(fuse))
    make_private(weights, private)
    return weights


def make_private(weights: Weights, which: Private) -> None:
    if which:
        weights.private(*(() if which is True else [which] if isinstance(which, str) else which))


@plain
def load_file(path: PathLike, device: Any = 0, *, framework: str | None = None) -> Weights:
    """Returns the tensors of one file as ``load_safetensors`` does. It takes the place of
    ``safetensors.torch.load_file``."""
    return load({os.fsdecode(path): None}, device, framework_of(framework))


class _Shard(NamedTuple):
    """A rank's part of weights."""

    plan: ShardPlan
    rank: int
    world: int

    def parts(self, tensors: Iterable[Tensor]) -> dict[str, Part]:
        return self.plan.parts(tensors, self.rank, self.world)


class Mapped(NamedTuple):
    """Tensors in device memory, and the views that contain them."""

    arrays: dict[str, Array]
    tensors: dict[str, Any]  # the same, of the framework
    windows: list[Window]
    headers: list[Header]


def map_weights(
    names: dict[str, list[str] | None],
    device: Any,
    shard: _Shard | None = None,
    flags: int = 0,
    group: Group | None = None,
    framework: str = "array",
) -> Mapped:
    """Maps tensors of files (see shards_of). With shard it maps a rank's parts, and with group each group as one
    tensor.

    Files are mapped concurrently. They are opened one after the other, and mapping a file begins before the next one is
    opened, unless the plan needs the tensors of all files.
    """
    on = device_of(device)
    files = [_File(path) for path in names]
    by_file = group is None and (shard is None or shard.plan.by_tensor)
    rounds = [[f] for f in files] if by_file else [files]
    order: list[str] = []

    def works(fds: list[int]) -> Iterator[tuple[Callable[[], _Made], bool]]:
        holders: dict[str, _File] = {}
        for some in rounds:
            tensors = [t for f in some for t in f.open(names[f.path], holders, fds)]
            parts = {t.name: whole(t) for t in tensors} if shard is None else shard.parts(tensors)
            runs = runs_of(parts, group(parts) if group is not None else {})
            order.extend(run.name for run in runs)
            makers = _makers(some, runs, holders, fds)
            for m in makers:
                more = some is not rounds[-1] or m is not makers[-1]
                yield functools.partial(m.make, on, flags, framework), more

    dlpack.sweep()
    made = _core.apart_together(works, _Made.undo, room_for(2 * len(names)))  # views have descriptors, too
    arrays: dict[str, Any] = dict.fromkeys(order)
    tensors: dict[str, Any] = dict.fromkeys(order)
    for m in made:
        arrays.update(m.arrays)
        tensors.update(m.tensors)
    return Mapped(arrays, tensors, [w for m in made for w in m.windows], [f.header for f in files])


def _makers(files: list[_File], runs: list[Run], holders: dict[str, _File], fds: list[int]) -> list[_Maker]:
    """Divides runs among makers: one for each file, and one for the runs with parts of several files."""
    of_one: dict[_File, list[Run]] = {f: [] for f in files}
    of_several: list[Run] = []
    for run in runs:
        f, *others = {holders[p.tensor.name] for p in run.parts}
        (of_several if others else of_one[f]).append(run)
    together = [f for f in files if any(holders[p.tensor.name] is f for run in of_several for p in run.parts)]
    makers = []
    for f, its in of_one.items():
        if its or f not in together:
            makers.append(_Maker([f], its, {p.tensor.name: 0 for run in its for p in run.parts}, fds))
    if together:
        places = {p.tensor.name: together.index(holders[p.tensor.name]) for run in of_several for p in run.parts}
        makers.append(_Maker(together, of_several, places, fds))
    return makers


def load(
    names: dict[str, list[str] | None],
    device: Any,
    framework: str,
    shard: _Shard | None = None,
    group: Group | None = None,
) -> Weights:
    arrays, tensors, windows, _ = map_weights(names, device, shard, group=group, framework=framework)
    return Weights(framework, tensors, arrays, windows)


def check_kind(framework: str, windows: list[Window]) -> None:
    if framework == "numpy" and windows[0].ordinal is not None:
        raise ValueError(
            "NumPy cannot use memory of a GPU: install PyTorch, or use framework='array' and its __dlpack__"
        )
