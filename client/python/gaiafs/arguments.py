"""The package's arguments: files, devices, streams and shapes."""

from __future__ import annotations

import errno
import operator
import os
import sys
from typing import Any, NamedTuple, Protocol, SupportsIndex, Union

from . import _core
from .errors import Error

PathLike = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Device(NamedTuple):
    """A device as the C library takes it."""

    number: int
    kind: int  # ANY if only a number was given


def device_of(device: Any) -> Device:
    """Returns the device in 0, "0", "cuda:0", "cuda", "emulated:0" or a torch.device.

    Without a number it is PyTorch's current device, or 0. A number alone is that of a GPU, or of an emulated device if
    the
    mount has no GPU.
    """
    if isinstance(device, bool):
        raise TypeError("a device is a number, 'cuda:N' or a torch.device, not a bool")
    name = str(device)
    if isinstance(device, SupportsIndex) or (name.isascii() and name.isdigit()):
        n, kind = int(name) if isinstance(device, str) else operator.index(device), _core.ANY
    else:
        word, colon, digits = name.partition(":")
        if word not in _KINDS or (colon and not (digits.isascii() and digits.isdigit())):
            raise ValueError(f"{device!r} is no device: use a number, 'cuda:N', 'emulated:N' or a torch.device")
        n, kind = int(digits) if colon else _current(word), _KINDS[word]
    if not 0 <= n < 1 << 31:
        raise Error(errno.ENODEV, f"there is no device {n}")
    return Device(n, kind)


_KINDS = {"cuda": _core.CUDA, "emulated": _core.EMULATED}


def _current(word: str) -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if word == "cuda" and torch is not None and torch.cuda.is_available() else 0


def stream_of(stream: Any) -> int:
    """Returns the handle of a CUDA stream: of a number, of an object of PyTorch or CuPy, or of one with
    __cuda_stream__. None stands for all streams.
    """
    if stream is None:
        return _core.ALL_STREAMS
    if isinstance(stream, SupportsIndex):
        n = operator.index(stream)
    elif hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__
        n = int((found() if callable(found) else found)[1])
    elif hasattr(stream, "cuda_stream"):
        n = int(stream.cuda_stream)
    elif hasattr(stream, "ptr"):
        n = int(stream.ptr)
    else:
        raise TypeError(f"{stream!r} is no CUDA stream")
    if n < 0:
        raise ValueError(f"{n} is no handle of a CUDA stream")
    return n


def sizes_of(shape: Any) -> tuple[int, ...]:
    """Returns the sizes in a shape. A shape may be a single number."""
    sizes = (operator.index(shape),) if isinstance(shape, SupportsIndex) else tuple(operator.index(n) for n in shape)
    if any(n < 0 for n in sizes):
        raise ValueError(f"the shape {list(sizes)} has a negative size")
    return sizes


def whole_pages(n: int) -> int:
    return -(-n // _core.PAGE) * _core.PAGE
