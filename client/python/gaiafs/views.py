"""Views: read-only device memory with chosen bytes of files, in a layout of its own."""

from __future__ import annotations

import errno
import functools
import operator
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex, Union

from . import _core, dlpack, shelter
from .arguments import Device, HasFileno, PathLike, device_of
from .array import Array, buffer
from .errors import Error, plain
from .files import check_file, named, open_file, room_for
from .memory import Memory
from .places import Place, place_of
from .window import Window

ALIGN = 256  # the alignment of CUDA's allocators, which suits every kernel
MAX_SEGMENTS = 1 << 19
MAX_ROWS = 1 << 23
MAX_FILES = 1 << 14

AnyFile = Union[PathLike, HasFileno, int]  # noqa: UP007 - PathLike has names of types in quotes


class Segment(NamedTuple):
    """count rows of length bytes of a file. The first row begins at offset, each further row stride bytes after the one
    before.
    """

    offset: int
    length: int
    stride: int = 0
    count: int = 1  # type: ignore[assignment]
    file: int = 0  #: an index into the view's files


class Plan(NamedTuple):
    """A view's segments and alignment, in the form that the C library takes."""

    segments: array[int]  # four numbers each
    files: array[int]
    sizes: list[int]
    align: int


def plan(segments: Iterable[Any], files: int, align: SupportsIndex = ALIGN) -> Plan:
    """Checks that all numbers are integers and fit into the C types. The C library checks the rest."""
    step = operator.index(align)
    if not 0 < step < 1 << 63:
        raise ValueError(f"the alignment {step} is not a power of two up to 2 MiB")
    flat, of, sizes = array("Q"), array("I"), []
    for i, segment in enumerate(segments):
        try:
            offset, length, stride, count, file = map(operator.index, Segment(*segment))
        except TypeError:
            raise TypeError(
                f"segment {i}, {segment!r}, is not (offset, length) or (offset, length, stride, count)"
            ) from None
        if not 0 <= file < files:
            raise ValueError(f"segment {i} is of file {file}, and there are {files}")
        if count < 1:
            raise ValueError(f"segment {i} has {count} rows")
        try:
            flat.extend((offset, length, stride, count))
        except OverflowError:
            raise ValueError(
                f"segment {i}, {segment!r}, has a number that is negative or larger than any file"
            ) from None
        of.append(file)
        sizes.append(length * count)
    return Plan(flat, of, sizes, step)


class View(Memory):
    """Chosen bytes of files in a device's memory, each segment at an aligned address, from ``gaiafs.view``.

    A view is read-only. All processes of a user that ask for the same segments of the same files on that device share
    it. After ``acquire`` it shows what others released or wrote; only changed bytes are copied again. Bytes past the
    end of a file and between segments are zeros. A view can be pickled; unpickling makes it again, as for a mapping.
    """

    def __init__(self, window: Window, offsets: list[int], made_of: Plan) -> None:
        super().__init__(window)
        self._plan = made_of
        self.offsets = tuple(offsets)  #: the position of each segment in the view
        self.sizes = tuple(made_of.sizes)  #: the size of each segment in bytes

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        w = self._window
        if w.closed:
            raise ValueError("the mapping is closed")
        return _again, (w.places, self._plan, w.device, _core.LAZY if w.lazy else 0)

    def __repr__(self) -> str:
        w = self._window
        if w.closed:
            return "<gaiafs.View, closed>"
        what = f"{len(self.offsets)} segments of {w.name or 'files'}, {w.length} bytes"
        return f"<gaiafs.View of {what}, {self.kind} device {self.device}>"

    def _segment(self, i: SupportsIndex) -> tuple[int, int]:
        self._window.check()
        n = operator.index(i)
        if not -len(self.offsets) <= n < len(self.offsets):
            raise IndexError(f"there is no segment {n}: the view has {len(self.offsets)}")
        return self.offsets[n], self.sizes[n]

    def array(self, i: SupportsIndex, dtype: Any = None, shape: Any = None, *, misaligned: bool = False) -> Array:
        """Returns a segment as an array, for every library that supports DLPack or an array interface.

        dtype, shape and misaligned are those of ``Mapping.array``. Without a shape the array is as long as the segment.
        """
        return self._array(dtype, shape, *self._segment(i), misaligned)

    def buffer(self, i: SupportsIndex) -> memoryview:
        """Returns a segment on an emulated device as bytes. Raises BufferError for a GPU."""
        return buffer(self.array(i, "uint8", misaligned=True))

    def numpy(self, i: SupportsIndex, dtype: Any = "uint8", shape: Any = None) -> Any:
        """Returns a segment on an emulated device as a NumPy array. Raises BufferError for a GPU. See
        ``Mapping.numpy``."""
        return self._numpy(dtype, shape, *self._segment(i))

    def tensor(self, i: SupportsIndex, dtype: Any = None, shape: Any = None, *, misaligned: bool = False) -> Any:
        """Returns a segment as a PyTorch tensor, on the view's GPU, or on the CPU for an emulated device.

        PyTorch has no read-only tensors. A store into this one ends the process or, on a GPU, its CUDA context. A
        ReadOnlyWarning says so.
        """
        return self._tensor(self.array(i, dtype, shape, misaligned=misaligned))


@plain
def view(
    files: AnyFile | Sequence[AnyFile],
    segments: Iterable[Any],
    device: Any = 0,
    *,
    align: SupportsIndex = ALIGN,
    lazy: bool = False,
) -> View:
    """Maps chosen bytes of one or more files of one mount, each segment at an aligned address.

    files is one file as ``gaiafs.mmap`` takes it, or a sequence of files. A segment is ``(offset, length)``, ``(offset,
    length, stride, count)`` or a ``gaiafs.Segment``, whose ``file`` is an index into files. Segments may overlap,
    repeat, come in any order and reach past the end of the file. align is a power of two up to 2 MiB. With lazy,
    nothing is fetched before the first acquire.

    Raises what ``gaiafs.mmap`` raises, and Error EINVAL or EOVERFLOW for invalid segments; the message names the
    segment.
    """
    single = isinstance(files, (str, bytes, os.PathLike, int)) or hasattr(files, "fileno")
    several: Sequence[AnyFile] = [files] if single else list(files)  # type: ignore[list-item, arg-type]
    p = plan(segments, len(several), align)

    def opened(fds: list[int]) -> tuple[str | None, Plan]:
        names = [open_sized(file, fds)[0] for file in several]
        return names[0] if len(names) == 1 else None, p

    return make_view(opened, len(several), device_of(device), _core.LAZY if lazy else 0)


def _again(places: Sequence[Place], p: Plan, device: int, flags: int) -> View:
    """Makes a view again in another process: what pickle calls."""

    def opened(fds: list[int]) -> tuple[str | None, Plan]:
        for place in places:
            place.open(False, fds)
        return places[0].path if len(places) == 1 else None, p

    return make_view(opened, len(places), Device(device, _core.ANY), flags)


def make_view(opened: Callable[[list[int]], tuple[str | None, Plan]], files: int, device: Device, flags: int) -> View:
    """Makes a view of a number of files. opened puts their descriptors into its list, and returns the view's name and
    plan.
    """
    return View(*_core.apart(functools.partial(_open_view, opened, files, device, flags)))


def _open_view(
    opened: Callable[[list[int]], tuple[str | None, Plan]], files: int, device: Device, flags: int
) -> tuple[Window, list[int], Plan]:
    fds: list[int] = []
    with room_for(files):
        try:
            name, p = opened(fds)
            offsets, size = _core.layout(p.segments, p.align)
            dlpack.sweep()
            make = functools.partial(_core.map_view, fds, p.segments, p.files, p.align, device, flags)
            try:
                window = Window(make, name, 0, size, False, list(map(place_of, fds)), bool(flags & _core.LAZY))
            except Error as e:
                raise named(e, name) from None
        finally:
            shelter.close_all(fds)
    return window, offsets, p


def open_sized(file: AnyFile, fds: list[int]) -> tuple[str | None, int]:
    """Opens a file for reading. Puts the descriptor into fds, which the caller closes, and returns the name and
    size."""
    name = open_file(file, False, fds)
    try:
        return name, check_file(fds[-1], writable=False)
    except Error as e:
        raise named(e, name) from None
    except OSError as e:
        raise Error(e.errno or errno.EIO, e.strerror or "", name) from None


@shelter.sheltered
def size_of(file: AnyFile) -> int:
    fds: list[int] = []
    try:
        return open_sized(file, fds)[1]
    finally:
        shelter.close_all(fds)
