"""Mappings of files into the memory of devices."""

from __future__ import annotations

from typing import Any

from . import _core
from .arguments import HasFileno, PathLike
from .array import Array, buffer
from .memory import Memory
from .window import open_window


def mmap(
    file: PathLike | HasFileno | int,
    device: Any = 0,
    mode: str = "r",
    offset: int = 0,
    length: int | None = None,
    lazy: bool = False,
) -> Mapping:
    """Maps a file of a gaiafs mount into the memory of a device.

    file is a path, an open file or a descriptor; the mapping keeps a duplicate. device is a number as this process counts
    them, "cuda:N" or a torch.device. mode is "r", or "r+" to store into it too. offset is a multiple of 4096. Without a
    length the mapping goes to the end of the file; past it, it reads as zero and stores are not kept. With lazy nothing is
    fetched before the first acquire; otherwise everything is when this returns.

    Raises Error: ENODEV where there is no such device (or no libcuda.so.1), ENOMEM where it has no room, ENOTTY where the
    file is not on a mount, EACCES where it may not be used so, ECONNREFUSED where the daemon is gone; and ValueError.
    """
    if mode not in ("r", "r+"):
        raise ValueError(f"mode is 'r' or 'r+', not {mode!r}")
    return Mapping(open_window(file, device, mode == "r+", offset, length, lazy))


class Mapping(Memory):
    """A window on a file in a device's memory, from ``gaiafs.mmap``.

    All processes that map the file on that device share the same memory. What this one stores is seen by everyone else, CPU
    programs with plain reads included, after ``release``; what others released or wrote is seen here after ``acquire``. Closing
    it is an implicit release.
    """

    def __repr__(self) -> str:
        w = self._window
        if w.closed:
            return "<gaiafs.Mapping, closed>"
        return f"<gaiafs.Mapping of {w.name or 'a file'}, {w.length} bytes at {w.offset}, {self.kind} device {self.device}>"

    @property
    def offset(self) -> int:
        """Where in the file it begins."""
        return self._window.offset

    @property
    def mode(self) -> str:
        return "r+" if self._window.writable else "r"

    def sync(self, durable: bool = True, offset: int = 0, length: int | None = None) -> None:
        """Releases, and waits until the bytes are in the backing file and, with durable, on stable storage."""
        offset, n = self._range(offset, length)
        self._window.request(_core.SYNC, offset, n, int(bool(durable)), _core.ALL_STREAMS)

    def write(self, data: Any, offset: int = 0) -> None:
        """Copies the bytes of an object with a buffer (bytes, a NumPy array, ...) into the memory, also to a GPU.

        They are there when it returns. On a GPU the copy comes after what is queued in the default stream.
        """
        if not self._window.writable:
            raise TypeError("the mapping is read-only: map with mode 'r+'")
        if not isinstance(data, bytes):
            data = memoryview(data).tobytes()  # not bytes(data), which makes zeros of a number
        offset, n = self._part(offset, len(data))
        self._window.write(self._window.ptr + offset, data)

    def array(self, dtype: Any = None, shape: Any = None, offset: int = 0, *, misaligned: bool = False) -> Array:
        """Returns elements of the memory, for every library that speaks DLPack or an array interface.

        dtype is a dtype of NumPy or PyTorch, or a name: of either ("float32", "bfloat16", "torch.float32"), NumPy's short one
        ("f4", "<f4") or that of safetensors ("BF16"; mind that "U8" has 8 bits there, and "u8" 8 bytes in NumPy). Without one it
        is uint8. "float" and "int" are refused: they are not the same to NumPy and to PyTorch. Without a shape the array has
        one dimension and goes to the end of the mapping, as far as whole elements and whole bytes do. offset is in bytes.

        ValueError where offset is not a multiple of 16 bytes, which kernels take for granted: with less some of them return
        wrong values without a word. With misaligned any multiple of the elements' size is accepted.
        """
        return self._array(dtype, shape, *self._part(offset, None), misaligned)

    def buffer(self, offset: int = 0, length: int | None = None) -> memoryview:
        """Returns the memory of an emulated device as bytes; BufferError for a GPU's."""
        offset, n = self._part(offset, length)
        return buffer(self.array("uint8", (n,), offset, misaligned=True))

    def numpy(self, dtype: Any = "uint8", shape: Any = None, offset: int = 0) -> Any:
        """Returns a NumPy array of the memory of an emulated device; BufferError for a GPU's.

        dtype is anything that NumPy takes, structured types included. NumPy's own code accepts any offset.
        """
        return self._numpy(dtype, shape, *self._part(offset, None))

    def tensor(self, dtype: Any = None, shape: Any = None, offset: int = 0, *, misaligned: bool = False) -> Any:
        """Returns a PyTorch tensor of the memory, on the mapping's GPU, or on the CPU for an emulated device.

        The arguments are those of ``array``, which also says why offset is a multiple of 16 bytes.

        PyTorch has no read-only tensors: with mode "r" the memory is protected, and a store into it ends the process or, on
        a GPU, its CUDA context. A ReadOnlyWarning says so. Use mode "r+" for tensors that are stored into.
        """
        return self._tensor(self.array(dtype, shape, offset, misaligned=misaligned))
