"""Writing safetensors files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import secrets
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from . import shelter
from .arguments import PathLike
from .array import Array
from .dtypes import SAFETENSORS, DType, dtype_of
from .errors import Error, plain
from .mapping import Mapping as Mapped
from .mapping import mmap
from .safetensors import MAX_HEADER

_WORDS = {dtype: word for word, dtype in SAFETENSORS.items()}
# The order in which safetensors sorts types. The first type's tensors come last.
_ORDER = (
    "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"
).split()
STEP = 64 << 20  # bytes that are mapped, or read into host memory, at a time
_ON_THEIR_WAY = 2  # pieces that are being synced while the next one is copied
_ADVICE = {
    errno.ENOSPC: "free some space, and save again",
    errno.EDQUOT: "free some space of the quota, and save again",
    errno.ENOMEM: "free memory of the device, or copy the tensors to the CPU before",
    errno.ENOTTY: "tensors of a GPU are saved on a mount: choose a path there, or copy them to the CPU before",
    errno.EROFS: "the mount is read-only: save elsewhere",
}


class _Source(NamedTuple):
    """A tensor to be written."""

    name: str
    word: str
    shape: tuple[int, ...]
    nbytes: int
    device: Any  # None: part() returns host bytes; otherwise a torch.device, and part() returns a tensor on that GPU
    part: Callable[[int, int], Any]  # returns bytes [from, to)


class _Piece(NamedTuple):
    source: _Source
    begin: int  # in the tensor
    end: int
    at: int  # in the file


@plain
def save_file(tensors: Mapping[str, Any], path: PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors into a safetensors file, byte for byte as ``safetensors.torch.save_file`` does.

    tensors are PyTorch's, NumPy's, or gaiafs.Array, by name. Tensors of a GPU do not go through the host: the file is
    mapped into the memory of that GPU, and they are copied there. So the path must be on a mount. Other tensors may be
    saved anywhere.

    The file appears whole or not at all. It is written under another name in the same directory, brought to stable
    storage, and then renamed. Until then, a file with that name stays as it is. Entries of metadata are sorted by name.

    Raises ValueError for tensors that are not contiguous, TypeError for element types that the format lacks, and Error
    or OSError if the file cannot be written.
    """
    save(path, tensors, metadata)


@plain
def save(
    path: PathLike, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None, *, device: Any = None
) -> None:
    """Writes a checkpoint: ``save_file`` with the order of arguments that is usual for checkpoints.

    While a piece of 64 MiB of a GPU's tensors is copied into the mapped file, earlier pieces go to stable storage. With
    device, tensors of the CPU also go through the memory of that device. Programs that load the file there then find it
    in that memory.

    When it returns, the file has its name and is on stable storage. When it raises, a file with that name is as it was,
    and nothing else is left; an Error says what to do. Tensors must not change during the call.
    """
    sources = sorted((_source(name, t) for name, t in tensors.items()), key=lambda s: s.name)
    sources.sort(key=lambda s: -_ORDER.index(s.word))
    header, name = _header(sources, metadata), os.fsdecode(path)
    try:
        with _Unfinished(name) as unfinished:
            unfinished.make(len(header) + sum(s.nbytes for s in sources))
            _fill(unfinished.fd, header, sources, device)
            os.fsync(unfinished.fd)
            unfinished.finish()
    except OSError as e:
        words = e.strerror or ""
        if e.errno in _ADVICE:
            before = "; the file is as it was" if os.path.lexists(name) else ""
            words = f"{words}: {_ADVICE[e.errno]}{before}"
        raise Error(e.errno or 0, words, name) from None


class _Unfinished:
    """A file that is being written under another name in the same directory. What is left of it goes with the object,
    or at the end of the block."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._temporary = os.path.join(os.path.dirname(name), f".{os.path.basename(name)[:200]}.{secrets.token_hex(8)}")
        self._fds: list[int] = []
        self._left = [os.fsencode(self._temporary)]
        # Both ends in one step. Unlinking fails, and does nothing, after the rename.
        ends = itertools.chain(map(shelter.close, self._fds), map(shelter.unlink, self._left))
        shelter.at_end(self, map(deque, (ends,), (0,)))

    @shelter.sheltered
    def make(self, size: int) -> None:
        self._fds.append(os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        os.ftruncate(self.fd, size)

    @property
    def fd(self) -> int:
        return self._fds[0]

    def finish(self) -> None:
        """Gives the file its name, on stable storage, too."""
        os.rename(self._temporary, self._name)
        self._sync_name()

    @shelter.sheltered
    def _sync_name(self) -> None:
        directory = os.open(os.path.dirname(self._name) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            shelter.close(directory)

    def __enter__(self) -> _Unfinished:
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self._discard()

    @shelter.sheltered
    def _discard(self) -> None:
        shelter.close_all(self._fds)
        for name in self._left:
            shelter.unlink(name)


def _fill(fd: int, header: bytes, sources: list[_Source], device: Any) -> None:
    _write(fd, header, 0)
    pieces = list(_pieces(sources, len(header)))
    for p in pieces:
        if p.source.device is None and device is None:
            _write(fd, p.source.part(p.begin, p.end), p.at)
    stored = [p for p in pieces if p.source.device is not None or device is not None]
    with _Syncing() as syncing:
        for (on, _), run in itertools.groupby(stored, _together()):
            _store(fd, device if on is None else on, list(run), syncing)


def _header(sources: list[_Source], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in metadata.items()):
            raise TypeError("metadata is made of strings")
        entries["__metadata__"] = dict(sorted(metadata.items()))
    at = 0
    for s in sources:
        if s.name == "__metadata__":
            raise ValueError("no tensor can be called __metadata__")
        entries[s.name] = {"dtype": s.word, "shape": list(s.shape), "data_offsets": [at, at + s.nbytes]}
        at += s.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header has {len(text)} bytes, more than the {MAX_HEADER} that the format allows")
    return struct.pack("<Q", len(text)) + text


def _source(name: Any, t: Any) -> _Source:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is a str, not {name!r}")
    if isinstance(t, Array):
        return _of_array(name, t)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(t, torch.Tensor):
        return _of_torch(name, t, torch)
    import numpy

    if not isinstance(t, (numpy.ndarray, numpy.generic)):
        raise TypeError(f"{name!r} is a tensor of PyTorch or NumPy, or a gaiafs.Array, and not {type(t)}")
    t = numpy.asarray(t)
    if not t.dtype.isnative:
        t = t.astype(t.dtype.newbyteorder("="))
    flat = numpy.ascontiguousarray(t).reshape(-1).view(numpy.uint8)
    return _Source(name, _word(name, dtype_of(t.dtype)), t.shape, t.nbytes, None, lambda a, b: flat[a:b].data)


def _of_array(name: str, a: Array) -> _Source:
    if a._lease.ordinal is not None and "torch" in sys.modules:
        return _of_torch(name, a.torch(), sys.modules["torch"], a)
    return _Source(name, _word(name, a.dtype), a.shape, a.nbytes, None, lambda i, j: a._lease.read(a.ptr + i, j - i))


def _of_torch(name: str, t: Any, torch: Any, of: Array | None = None) -> _Source:
    if t.layout != torch.strided:
        raise ValueError(f"tensor {name!r} is sparse, which the format has no word for: call to_dense() before")
    if not t.is_contiguous():
        raise ValueError(f"tensor {name!r} is not contiguous: call contiguous() before")
    if t.device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensor {name!r} is on {t.device}, and has no bytes to write")
    dtype = of.dtype if of is not None else dtype_of(t.dtype)
    shape = of.shape if of is not None else tuple(t.shape)
    if of is None and dtype.bits == 4:  # an element of PyTorch is a pair
        shape = (*shape[:-1], 2 * shape[-1])
    flat = t.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    n = math.prod(shape) * dtype.bits // 8
    if t.device.type == "cuda":
        return _Source(name, _word(name, dtype), shape, n, t.device, lambda a, b: flat[a:b])
    return _Source(name, _word(name, dtype), shape, n, None, lambda a, b: flat[a:b].numpy().data)


def _word(name: str, dtype: DType) -> str:
    word = _WORDS.get(dtype)
    if word is None:
        raise TypeError(f"tensor {name!r} has elements of {dtype}, which the format has no word for")
    return word


def _pieces(sources: list[_Source], at: int) -> Iterator[_Piece]:
    for s in sources:
        for begin in range(0, s.nbytes, STEP):
            end = min(begin + STEP, s.nbytes)
            yield _Piece(s, begin, end, at + begin)
        at += s.nbytes


def _together() -> Callable[[_Piece], tuple[Any, int]]:
    """Returns a key for groupby. It groups neighbouring pieces on the same device, up to STEP bytes."""
    number, start, end, last = 0, 0, 0, None

    def key(p: _Piece) -> tuple[Any, int]:
        nonlocal number, start, end, last
        if p.source.device != last or p.at != end or p.at - start + p.end - p.begin > STEP:
            number, start, last = number + 1, p.at, p.source.device
        end = p.at + p.end - p.begin
        return last, number

    return key


class _Syncing:
    """Mapped pieces that are being synced, a few at a time."""

    def __init__(self) -> None:
        self._begun: deque[tuple[Mapped, Future[None]]] = deque()

    def __enter__(self) -> _Syncing:
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            while self._begun and value is None:
                self._end()
        finally:
            for m, _ in self._begun:
                with contextlib.suppress(OSError):  # another failure is to be reported
                    m.close()

    def add(self, m: Mapped) -> None:
        self._begun.append((m, m.sync(wait=False)))
        while len(self._begun) > _ON_THEIR_WAY:
            self._end()

    def _end(self) -> None:
        m, future = self._begun[0]
        future.result()
        m.close()
        self._begun.popleft()


def _store(fd: int, device: Any, run: list[_Piece], syncing: _Syncing) -> None:
    """Copies pieces into the file, mapped on a device: the GPU that has them or, for host tensors, the given device."""
    begin = run[0].at // 4096 * 4096
    m = mmap(fd, device, "r+", begin, run[-1].at + run[-1].end - run[-1].begin - begin, movable=False)
    try:
        for p in run:
            part = p.source.part(p.begin, p.end)
            if p.source.device is None:
                m.write(part, p.at - begin)
            else:
                m.tensor("uint8", (p.end - p.begin,), p.at - begin, misaligned=True).copy_(part)
            del part
    except BaseException:
        with contextlib.suppress(OSError, BufferError):
            m.close()
        raise
    syncing.add(m)


def _write(fd: int, data: Any, at: int) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n
