"""Mappings of files into the memory of devices."""

from __future__ import annotations

import errno
import operator
import os
from concurrent.futures import Future
from typing import Any, Literal, SupportsIndex, overload

from . import _core, shelter
from .arguments import HasFileno, PathLike, device_of
from .array import Array, buffer
from .errors import Error, plain
from .memory import Memory
from .places import Place
from .window import open_window


@plain
def mmap(
    file: PathLike | HasFileno | int,
    device: Any = 0,
    mode: str = "r",
    offset: int = 0,
    length: int | None = None,
    lazy: bool = False,
    *,
    movable: bool | None = None,
) -> Mapping:
    """Maps a file of a gaiafs mount into the memory of a device.

    file is a path, an open file or a descriptor; the mapping keeps a duplicate. device is a number as this process
    counts devices, "cuda:N", a torch.device, or "emulated:N". A number alone is that of a GPU, or of an emulated device
    if the mount has no GPUs.

    mode is "r", "r+" to store into the mapping too, or "w+". "w+" creates the file at the path, or empties it, and
    makes it offset + length zero bytes long. offset is a multiple of 4096. Without a length the mapping goes to the end
    of the file. Past the end of the file it reads as zero, and stores are not kept. With lazy, nothing is fetched
    before the first acquire. Otherwise everything is fetched when this returns.

    With movable, the mapping has addresses, but memory only while a bracket uses it: see ``gaiafs.use``. So it may be
    larger than the device, and programs that together need more than the device has can share it. A mapping that is
    larger than its device's budget (--gpu-memory) is movable by default, because it would fail otherwise; with
    movable=False it does fail. All other mappings never move.

    Raises Error: ENODEV if there is no such device (or no libcuda.so.1), ENOMEM if the device has no room, ENOTTY if
    the file is not on a mount, EACCES if the file's permissions or open mode forbid it, ECONNREFUSED if the daemon is
    gone. Raises ValueError for wrong arguments.
    """
    if mode not in ("r", "r+", "w+"):
        raise ValueError(f"mode is 'r', 'r+' or 'w+', not {mode!r}")
    if mode == "w+":
        _make(file, device, operator.index(offset), length)
    flags = (_core.LAZY if lazy else 0) | {None: 0, False: _core.STAYS, True: _core.MOVABLE}[movable]
    return Mapping(open_window(file, device, mode != "r", offset, length, flags))


def _make(file: PathLike | HasFileno | int, device: Any, offset: int, length: int | None) -> None:
    """Creates or empties the file for mode "w+", as long as the end of the mapping."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        raise ValueError("mode 'w+' makes a file: pass its path")
    if length is None or operator.index(length) <= 0 or offset < 0 or offset % _core.PAGE:
        raise ValueError(f"mode 'w+' needs a length, and an offset that is a multiple of {_core.PAGE}")
    device_of(device)  # raises before the file is emptied
    _empty(os.fsdecode(file), offset + operator.index(length))


@shelter.sheltered
def _empty(name: str, length: int) -> None:
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            os.ftruncate(fd, length)
        finally:
            shelter.close(fd)
    except OSError as e:
        raise Error(e.errno or errno.EIO, e.strerror or "", name) from None


@shelter.sheltered
def _again(
    place: Place, device: int, mode: str, offset: int, length: int, lazy: bool, movable: bool = False
) -> Mapping:
    """Maps a file again in another process: what pickle calls."""
    fds: list[int] = []
    try:
        place.open(mode != "r", fds)
        mapping = mmap(fds[0], device, mode, offset, length, lazy, movable=movable)
        mapping._window.name = place.path
        return mapping
    finally:
        shelter.close_all(fds)


class Mapping(Memory):
    """A part of a file in a device's memory, from ``gaiafs.mmap``.

    All processes that map the file on that device share the same memory. After ``release``, everyone sees what this
    process stored, including CPU programs that use plain reads. After ``acquire``, this process sees what others
    released or wrote. Closing a mapping releases it.

    A mapping can be pickled: unpickling maps the file again. So workers can be given mappings, and they store into the
    same memory. device then keeps its number in this process. Unpickling raises Error ESTALE if the path names another
    file by then, and ENOENT if it names none.
    """

    def __repr__(self) -> str:
        w = self._window
        if w.closed:
            return "<gaiafs.Mapping, closed>"
        return f"<gaiafs.Mapping of {w.name or 'a file'}, {w.length} bytes at {w.offset}, {self.kind} device {self.device}>"

    @property
    def offset(self) -> int:
        """The mapping's position in the file."""
        return self._window.offset

    @property
    def movable(self) -> bool:
        """Whether the memory moves, so that it is there in brackets only."""
        return self._window.movable

    @property
    def mode(self) -> str:
        return "r+" if self._window.writable else "r"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        w = self._window
        if w.closed:
            raise ValueError("the mapping is closed")
        return _again, (w.places[0], w.device, self.mode, w.offset, w.length, w.lazy, w.movable)

    @overload
    def sync(
        self, durable: bool = True, offset: int = 0, length: int | None = None, *, wait: Literal[True] = True
    ) -> None: ...

    @overload
    def sync(
        self, durable: bool = True, offset: int = 0, length: int | None = None, *, wait: Literal[False]
    ) -> Future[None]: ...

    def sync(
        self, durable: bool = True, offset: int = 0, length: int | None = None, *, wait: bool = True
    ) -> Future[None] | None:
        """Releases, and waits until the bytes are in the backing file and, with durable, on stable storage.

        wait is as for ``acquire``.
        """
        offset, n = self._range(offset, length)

        def work() -> None:
            self._window.request(_core.SYNC, offset, n, int(bool(durable)), _core.ALL_STREAMS)

        if not wait:
            return self._window.begin(work)
        work()
        return None

    def write(self, data: Any, offset: SupportsIndex | None = None) -> int:
        """Copies the bytes of an object with a buffer (bytes, a NumPy array, ...) into the memory, also to a GPU.

        It writes at offset or, without one, at the position, which it moves past the bytes. It returns the number of
        bytes. When it returns, they are in the memory; others see them after ``release``. On a GPU the copy comes after
        the work queued in the default stream. Raises ValueError if the bytes do not fit.
        """
        if not isinstance(data, bytes):
            data = memoryview(data).tobytes()  # not bytes(data), which makes a number into that many zeros
        at = self._position if offset is None else operator.index(offset)
        self._store(at, data)
        self._move(at + len(data), offset)
        return len(data)

    def __setitem__(self, index: slice | SupportsIndex, data: Any) -> None:
        """Stores bytes into a slice of the same length, or a number into one byte."""
        at, n = self._place(index)
        data = memoryview(data).tobytes() if isinstance(index, slice) else bytes((operator.index(data),))
        if len(data) != n:
            raise ValueError(f"the slice has {n} bytes and the data {len(data)}: a mapping keeps its size")
        self._store(at, data)

    def _store(self, at: int, data: bytes) -> None:
        if not self._window.writable:
            raise TypeError("the mapping is read-only: map with mode 'r+'")
        at, n = self._part(at, len(data))
        self._window.write(self._window.ptr + at, data)

    def array(self, dtype: Any = None, shape: Any = None, offset: int = 0, *, misaligned: bool = False) -> Array:
        """Returns the memory as an array, for every library that supports DLPack or an array interface.

        dtype is a dtype of NumPy or PyTorch, or a name: theirs ("float32", "bfloat16", "torch.float32"), NumPy's short
        ones ("f4", "<f4") or those of safetensors ("BF16"). Note that "U8" has 8 bits in safetensors, but "u8" has 8
        bytes in NumPy. The default is uint8. "float" and "int" are refused, because NumPy and PyTorch give them
        different sizes. Without a shape the array has one dimension and goes to the end of the mapping, as far as whole
        elements and whole bytes fit. offset is in bytes.

        Raises ValueError if offset is not a multiple of 16 bytes. Kernels take that alignment for granted; with less,
        some silently return wrong values. With misaligned, any multiple of the elements' size is accepted.
        """
        return self._array(dtype, shape, *self._part(offset, None), misaligned)

    def buffer(self, offset: int = 0, length: int | None = None) -> memoryview:
        """Returns the memory of an emulated device as bytes. Raises BufferError for a GPU."""
        offset, n = self._part(offset, length)
        return buffer(self.array("uint8", (n,), offset, misaligned=True))

    def numpy(self, dtype: Any = "uint8", shape: Any = None, offset: int = 0) -> Any:
        """Returns a NumPy array of the memory of an emulated device. Raises BufferError for a GPU.

        dtype is anything that NumPy takes, including structured types. NumPy's own code works at any offset.
        """
        return self._numpy(dtype, shape, *self._part(offset, None))

    def tensor(self, dtype: Any = None, shape: Any = None, offset: int = 0, *, misaligned: bool = False) -> Any:
        """Returns a PyTorch tensor of the memory, on the mapping's GPU, or on the CPU for an emulated device.

        The arguments are those of ``array``, which also explains why offset is a multiple of 16 bytes.

        PyTorch has no read-only tensors. With mode "r" the memory is protected, so a store into the tensor ends the
        process or, on a GPU, its CUDA context. A ReadOnlyWarning says so. Use mode "r+" for tensors that you store
        into.
        """
        return self._tensor(self.array(dtype, shape, offset, misaligned=misaligned))
