"""Safetensors files from which a program takes single tensors, or parts of them."""

from __future__ import annotations

import functools
import math
import operator
import os
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, SupportsIndex

from . import _core
from .arguments import PathLike
from .array import Array, is_misaligned
from .copies import Copies
from .dtypes import SAFETENSORS
from .errors import CopiedWarning, plain
from .frameworks import framework_of, tensor_of
from .memory import ADVICE
from .weights import check_kind, map_weights, window_of

try:
    from safetensors import SafetensorError
except ImportError:

    class SafetensorError(Exception):  # type: ignore[no-redef]
        """Stands in for the safetensors package's error if the package is not installed."""


_WORDS = {dtype: word for word, dtype in SAFETENSORS.items()}


class _Index(NamedTuple):
    """The part that is taken of a dimension."""

    begin: int
    end: int
    step: int
    stays: bool  # False: the index removes the dimension


class safe_open:
    """Opens a safetensors file, to take single tensors or parts of them: ``safetensors.safe_open``.

    framework is "pt", "np" or "array", or a name that ``load_safetensors`` takes. device is as everywhere in this
    package. The default is 0, because "cpu" names no device with memory. backend says how safetensors reads a file, and
    is ignored here.

    ::

        with gaiafs.safe_open(path, "pt", device=0) as f:
            w = f.get_tensor("w")                    # shared and read-only
            part = f.get_slice("w")[:, 10:20]        # shared if it is contiguous and aligned, otherwise a copy

    Tensors are those of ``load_safetensors``: aligned, and in the same memory for everyone who loads the file. Only the
    tensors that are asked for are brought to the device, as they are at that moment. But the device needs room for the
    whole file. What ``get_tensor`` and ``get_slice`` returned stays valid after the with statement.
    """

    _usual: functools.partial[Any] | None = None
    """Opens the file with safetensors, for ``gaiafs.patch``."""

    @plain
    def __init__(self, filename: PathLike, framework: str, device: Any = 0, *, backend: Any = None) -> None:
        self._framework = framework_of(framework)
        path = os.fsdecode(filename)
        arrays, _, windows, (header,) = map_weights({path: None}, device, flags=_core.LAZY)
        check_kind(self._framework, windows)
        self._header, self._path = header, path
        self._arrays: dict[str, Array] | None = arrays
        self._exits: list[Callable[..., object]] = []

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._arrays = None
        while self._exits:
            self._exits.pop()(kind, value, trace)

    def keys(self) -> list[str]:
        """Returns the names, sorted."""
        self._array(None)
        return sorted(self._header.tensors)

    def offset_keys(self) -> list[str]:
        """Returns the names in the order of the file."""
        self._array(None)
        return [t.name for t in sorted(self._header.tensors.values(), key=lambda t: (t.begin, t.end))]

    def metadata(self) -> dict[str, str] | None:
        self._array(None)
        return None if self._header.metadata is None else dict(self._header.metadata)

    @plain
    def get_tensor(self, name: str) -> Any:
        """Returns a tensor with its current bytes."""
        a = self._array(name)
        _fetch(a, 0, a.nbytes)
        return tensor_of(a, self._framework)

    @plain
    def get_tensors(self) -> dict[str, Any]:
        """Returns all tensors. It fetches everything in one request for each view."""
        names = self.offset_keys()
        arrays = {name: self._array(name) for name in names}
        for window in {window_of(a): None for a in arrays.values() if a.nbytes}:
            window.request(_core.ACQUIRE, 0, window.length)
        return {name: tensor_of(a, self._framework) for name, a in arrays.items()}

    @plain
    def prefetch(self, plan: Any = None) -> None:
        """Starts to bring all tensors to the device, and does not wait. Raises NotImplementedError for a plan, unless
        ``gaiafs.patch`` made this object: then safetensors carries the plan out."""
        if plan is not None:
            instead = self._instead("prefetch")
            if instead is None:
                raise NotImplementedError("gaiafs brings whole tensors: call prefetch without a plan, or use get_slice")
            instead.prefetch(plan)
            return
        for window in {window_of(self._array(name)): None for name in self.keys()}:
            window.request(_core.ADVISE, 0, window.length, ADVICE["willneed"])

    def __getattr__(self, name: str) -> Any:
        """Finds what the installed version of safetensors has and this class lacks, for programs that do not know
        gaiafs."""
        instead = None if name.startswith("_") else self._instead(name)
        if instead is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(instead, name)

    def _instead(self, name: str) -> Any:
        """Returns the file opened by safetensors, which then takes this object's place, if safetensors has that
        method."""
        if self._usual is None or not hasattr(self._usual.func, name):
            return None
        warnings.warn(
            f"{self._path} is loaded the usual way from now on, into memory of this process alone: gaiafs has no {name} as "
            "the installed safetensors has it",
            CopiedWarning,
            stacklevel=4,
        )
        instead = self._usual()
        self._usual = None
        self._exits.append(instead.__exit__)
        self.__dict__.update({n: getattr(instead, n) for n in dir(instead) if not n.startswith("_")})
        return instead

    def _let_go(self) -> None:
        """Frees the device's memory as soon as this program's tensors are gone, unless other programs use it."""
        for window in {window_of(self._array(name)): None for name in self.keys()}:
            window.request(_core.ADVISE, 0, window.length, ADVICE["dontneed"])

    def get_slice(self, name: str) -> Slice:
        """Returns an object to take parts of: ``f.get_slice("w")[:10]``."""
        return Slice(self._array(name), self._framework)

    def _array(self, name: str | None) -> Any:
        if self._arrays is None:
            raise SafetensorError("File is closed")
        if name is None:
            return None
        if name not in self._arrays:
            raise SafetensorError(f"File does not contain tensor {name}")
        return self._arrays[name]


def _fetch(a: Array, begin: int, end: int) -> None:
    """Brings bytes of a tensor up to date."""
    if end > begin:
        window = window_of(a)
        window.request(_core.ACQUIRE, a.ptr - window.ptr + begin, end - begin)


class Slice:
    """A tensor of a file from which parts can be taken."""

    def __init__(self, a: Array, framework: str) -> None:
        self._array, self._framework = a, framework

    def get_shape(self) -> list[int]:
        return list(self._array.shape)

    def get_dtype(self) -> str:
        """Returns the type's name in the format: "F32"."""
        return _WORDS[self._array.dtype]

    def __getitem__(self, index: Any) -> Any:
        """Returns a part of the tensor with its current bytes.

        With PyTorch, index is what its tensors take. Otherwise it is a number, a slice, or a tuple of them. As in
        safetensors, the step of a slice is ignored, and so are indexes of dimensions that the tensor lacks.
        """
        a = self._array
        if self._framework == "torch":
            return self._of_torch(index)
        wanted = _parse(index, a.shape)
        shape = tuple(len(range(*w[:3])) for w in wanted if w.stays) + a.shape[len(wanted) :]
        ranges = list(_ranges(a, wanted))
        if not ranges or not math.prod(shape):
            return tensor_of(Array(a._lease, a.ptr, a.dtype, shape, readonly=True), self._framework)
        _fetch(a, ranges[0][0], ranges[-1][0] + ranges[-1][1])
        (begin, n), *others = ranges
        if others or is_misaligned(a.ptr + begin, n):
            copies = Copies(window_of(a), [[(a.ptr + at, n) for at, n in ranges]])
            return tensor_of(Array(copies, copies.at[0], a.dtype, shape, readonly=False), self._framework)
        return tensor_of(Array(a._lease, a.ptr + begin, a.dtype, shape, readonly=True), self._framework)

    def _of_torch(self, index: Any) -> Any:
        import torch

        a = self._array
        whole = tensor_of(a, "torch")
        # Find the bytes that the index takes before fetching anything.
        part = whole[index]
        begin, end = 0, a.nbytes
        if part.numel() and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            begin = part.data_ptr() - whole.data_ptr()
            last = sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
            end = begin + (last + 1) * part.element_size()
            _fetch(a, begin, end)
        else:
            _fetch(a, begin, end)
            part = whole[index]
        if part.is_contiguous() and not is_misaligned(part.data_ptr(), part.numel()):
            return part
        return part.clone(memory_format=torch.contiguous_format)


def _parse(index: Any, shape: tuple[int, ...]) -> list[_Index]:
    """Returns what an index takes from each dimension, by the rules of safetensors."""
    if isinstance(index, list) and index:
        raise SafetensorError("Non empty lists are not implemented")
    items = [slice(0, 0)] if isinstance(index, list) else list(index) if isinstance(index, tuple) else [index]
    for i, item in enumerate(items):
        if item is not ... and not isinstance(item, (slice, SupportsIndex)):
            raise SafetensorError(f"Unsupported slice index at position {i}: expected slice, int, or ellipsis")
    if sum(item is ... for item in items) > 1:
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    for i, item in enumerate(items):
        if item is ...:
            items[i : i + 1] = [slice(None)] * max(len(shape) - len(items) + 1, 0)
            break
    wanted: list[_Index] = []
    words = []
    for i, item in enumerate(items):
        n = shape[i] if i < len(shape) else 0
        if isinstance(item, slice):
            begin, end = (None if x is None else _size(x) for x in (item.start, item.stop))
            step = 1 if item.step is None else operator.index(item.step)
            if step < 1:
                raise SafetensorError(f"Slice step must be a positive integer, got {step}")
            wanted.append(_Index(begin or 0, n if end is None else end, step, True))
            words.append(
                f"{'' if begin is None else begin}:{'' if end is None else end}{f':{step}' if step > 1 else ''}"
            )
        else:
            at = operator.index(item)
            if at < -n:
                raise SafetensorError(f"Invalid index {at} for dimension {i} of size {n}")
            at += n if at < 0 else 0
            wanted.append(_Index(at, at + 1, 1, False))
            words.append(f"{at}")
    about = f"Error during slicing [{', '.join(words)}] with shape {list(shape)}"
    if len(wanted) > len(shape):
        raise SafetensorError(f"{about}: more slicing indexes than dimensions in tensor")
    for i, w in reversed(list(enumerate(wanted))):
        if w.begin >= (n := shape[i]) or w.end > n or w.end < w.begin:
            asked = w.end - 1 if w.begin < n < w.end else w.begin
            raise SafetensorError(f"{about}: index {asked} out of bounds for tensor dimension #{i} of size {n}")
    return wanted


def _size(item: Any) -> int:
    if (n := operator.index(item)) < 0:
        raise OverflowError("can't convert negative int to unsigned")
    return n


def _ranges(a: Array, wanted: list[_Index]) -> Iterator[tuple[int, int]]:
    """Yields the wanted bytes in order, as few ranges as possible."""
    dims = list(zip(wanted, a.shape, strict=False))
    while dims and dims[-1][0][:3] == (0, dims[-1][1], 1):  # whole dimensions join the one before
        dims.pop()
    if not dims:
        yield 0, a.nbytes
        return
    bits = math.prod(a.shape[len(dims) :]) * a.dtype.bits
    spans = []
    for w, n in reversed(dims):
        if w.begin * bits % 8 or w.end * bits % 8 or (w.step > 1 and bits % 8):
            words = "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary"
            raise SafetensorError(f"{words}, this is invalid.")
        spans.append((w, bits))
        bits *= n
    spans.reverse()

    def inside(level: int, at: int) -> Iterator[tuple[int, int]]:
        w, bits = spans[level]
        if level == len(spans) - 1 and w.step == 1:
            if w.end > w.begin:
                yield at + w.begin * bits // 8, (w.end - w.begin) * bits // 8
            return
        for i in range(w.begin, w.end, w.step):
            if level < len(spans) - 1:
                yield from inside(level + 1, at + i * bits // 8)
            else:
                yield at + i * bits // 8, bits // 8

    yield from inside(0, 0)
