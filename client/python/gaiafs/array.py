"""Arrays in device memory, for every library that supports DLPack or an array interface."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from . import dlpack
from .dtypes import DType, library, numpy_dtype, torch_dtype

if TYPE_CHECKING:
    from .copies import Copies
    from .window import Lease

# The alignment that kernels take for granted: they load 16 bytes at once. With less, PyTorch's attention on an H200
# silently returned wrong values, other kernels failed with "misaligned address", and matrix products were half as fast.
ALIGNMENT = 16


def is_misaligned(ptr: int, nbytes: int) -> bool:
    return nbytes > 0 and ptr % ALIGNMENT != 0


class Array:
    """Contiguous elements in a mapping's memory.

    An array keeps the mapping's memory alive, and so does everything made from it. The memory is shared: it changes
    when a program on the same device stores into it, and with the mapping's next acquire. It begins at a multiple of 16
    bytes, unless the caller passed misaligned=True.

    Other libraries get the memory without a copy: through ``__dlpack__``, and through ``__cuda_array_interface__``
    (version 3) for a GPU's memory or ``__array_interface__`` for other memory. A mapping with mode "r" exports
    read-only. If the protocol has no read-only flag (DLPack before 1.0), the export fails. PyTorch ignores the flag.
    But the memory itself is protected: a store into such a tensor ends the process or, on a GPU, its context.
    """

    __slots__ = ("_lease", "ptr", "dtype", "shape", "readonly", "__weakref__")

    def __init__(self, lease: Lease | Copies, ptr: int, dtype: DType, shape: tuple[int, ...], readonly: bool) -> None:
        self._lease = lease
        self.ptr = ptr  #: address of the first element; for a GPU's memory a device pointer
        self.dtype = dtype  #: str() returns its name
        self.shape = shape
        self.readonly = readonly

    def __repr__(self) -> str:
        return f"<gaiafs.Array {self.dtype} {list(self.shape)} on {self.device}>"

    @property
    def device(self) -> str:
        """ "cuda:N", or "cpu" for memory of an emulated device."""
        ordinal = self._lease.ordinal
        return "cpu" if ordinal is None else f"cuda:{ordinal}"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.bits // 8

    def tobytes(self) -> bytes:
        """Copies the elements, also from a GPU."""
        return self._lease.read(self.ptr, self.nbytes)

    def __dlpack_device__(self) -> tuple[int, int]:
        ordinal = self._lease.ordinal
        return (dlpack.CPU, 0) if ordinal is None else (dlpack.CUDA, ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Exports the array. No stream has to wait, because an acquire is complete when it returns.

        This does not know of the process's own work in streams. Whoever passes an array from one stream to another must
        order them.

        Raises BufferError if the array cannot be exported as asked: to another device, as a copy, read-only before
        DLPack 1.0 (max_version), or with elements smaller than a byte.
        """
        device = self.__dlpack_device__()
        if device[0] == dlpack.CPU and stream is not None:
            raise BufferError("memory of the host has no streams: stream must be None")
        if device[0] == dlpack.CUDA and stream == 0:
            raise ValueError("stream 0 is ambiguous for DLPack: 1 is the legacy default stream, 2 the per-thread one")
        if dl_device is not None and tuple(int(x) for x in dl_device) != device:
            raise BufferError(f"the array is on device {device}: copy it to {tuple(dl_device)} yourself")
        if copy:
            raise BufferError("an array of gaiafs shares its memory: copy it yourself")
        if self.dtype.bits < 8:
            raise BufferError(f"elements of {self.dtype.bits} bits ({self.dtype}) have no exchange format: use a view of uint8")
        versioned = max_version is not None and max_version[0] >= 1
        if self.readonly and not versioned:
            raise BufferError(
                "the array is read-only, and the library speaks DLPack before 1.0, which has no word for that: map with mode "
                "'r+', or use Mapping.tensor() for PyTorch"
            )
        return dlpack.export(self._lease, self.ptr, device, self.dtype, self.shape, self.readonly, versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._lease.ordinal is None:
            raise AttributeError("memory of the host has no __cuda_array_interface__")
        found = {**self._interface(), "strides": None, "stream": None}
        # In version 3 an empty array's address must be 0.
        return found if self.size else {**found, "data": (0, self.readonly)}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self._lease.ordinal is not None:
            raise AttributeError("memory of a GPU has no __array_interface__")
        return self._interface()

    def _interface(self) -> dict[str, Any]:
        if self.dtype.typestr is None:
            raise AttributeError(f"array interfaces have no word for {self.dtype}: use DLPack or a view of uint8")
        return {"shape": self.shape, "typestr": self.dtype.typestr, "data": (self.ptr, self.readonly), "version": 3}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Called by NumPy when ``__array_interface__`` cannot describe the elements. Raises BufferError for a GPU's
        memory.
        """
        a = self.numpy()
        if dtype is not None and a.dtype != dtype:
            if copy is False:
                raise ValueError(f"{self.dtype} becomes {dtype} in a copy only")
            return a.astype(dtype)
        return a.copy() if copy else a

    def numpy(self) -> Any:
        """Returns a NumPy array of the same memory."""
        numpy = library("numpy")

        dtype = numpy_dtype(self.dtype)
        if not self.nbytes:
            return numpy.empty(self.shape, dtype)
        return numpy.frombuffer(buffer(self), numpy.uint8).view(dtype).reshape(self.shape)

    def torch(self) -> Any:
        """Returns a tensor of the same memory."""
        torch = library("torch")

        dtype = torch_dtype(self.dtype)
        shape = self.shape
        if self.dtype.bits == 4:
            if not shape or shape[-1] % 2:
                raise TypeError(f"PyTorch has {self.dtype} in pairs only, and the shape {list(shape)} ends in half of one")
            shape = (*shape[:-1], shape[-1] // 2)
        nbytes = self.nbytes
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=self.device)
        # These two ways into PyTorch keep a Python object alive, so the memory goes as soon as the last tensor does.
        # Neither has a read-only flag, and the first would warn about it.
        if self._lease.ordinal is None:
            flat = torch.frombuffer(_bytes(self), dtype=torch.uint8)
        else:
            flat = torch.as_tensor(_Exported(self._lease, self.ptr, nbytes), device=self.device)
        return flat.view(dtype).view(shape)


class _Exported:
    """Bytes of a GPU's memory for PyTorch, which looks at the interface several times."""

    def __init__(self, lease: Lease | Copies, ptr: int, n: int) -> None:
        self._lease = lease
        self.__cuda_array_interface__ = {"shape": (n,), "typestr": "|u1", "data": (ptr, False), "version": 3}


def _bytes(a: Array) -> Any:
    """Returns a writable object with a buffer of the array's bytes. It keeps the memory alive."""
    if a._lease.ordinal is not None:
        raise BufferError("memory of a GPU cannot be touched by the CPU: use tensor() or array()")
    block: Any = (ctypes.c_uint8 * a.nbytes).from_address(a.ptr)
    block.lease = a._lease
    return block


def buffer(a: Array) -> memoryview:
    view = memoryview(_bytes(a)).cast("B")
    return view.toreadonly() if a.readonly else view
