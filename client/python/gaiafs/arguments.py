"""What calls of the package take: files, devices, streams and shapes."""

from __future__ import annotations

import errno
import operator
import os
import sys
from typing import Any, Protocol, SupportsIndex, Union

from . import _core
from .errors import Error

PathLike = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def ordinal_of(device: Any) -> int:
    """Returns the number in 0, "0", "cuda:0", "cuda" or a torch.device; without one it is PyTorch's current device, or 0."""
    if isinstance(device, bool):
        raise TypeError("a device is a number, 'cuda:N' or a torch.device, not a bool")
    if isinstance(device, SupportsIndex):
        n = operator.index(device)
    else:
        kind, colon, digits = str(device).partition(":")
        if not colon and kind.isascii() and kind.isdigit():
            kind, colon, digits = "cuda", ":", kind
        if kind not in ("cuda", "emulated") or (colon and not (digits.isascii() and digits.isdigit())):
            raise ValueError(f"{device!r} is no device: use a number, 'cuda:N' or a torch.device")
        if colon:
            n = int(digits)
        else:
            torch = sys.modules.get("torch")
            n = torch.cuda.current_device() if kind == "cuda" and torch is not None and torch.cuda.is_available() else 0
    if not 0 <= n < 1 << 31:
        raise Error(errno.ENODEV, f"there is no device {n}")
    return n


def stream_of(stream: Any) -> int:
    """Returns the handle of a CUDA stream: a number, or an object of PyTorch, CuPy or one with __cuda_stream__. None: of all."""
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
    """Returns the sizes in a shape, which may be a single number."""
    sizes = (operator.index(shape),) if isinstance(shape, SupportsIndex) else tuple(operator.index(n) for n in shape)
    if any(n < 0 for n in sizes):
        raise ValueError(f"the shape {list(sizes)} has a negative size")
    return sizes


def whole_pages(n: int) -> int:
    return -(-n // _core.PAGE) * _core.PAGE
