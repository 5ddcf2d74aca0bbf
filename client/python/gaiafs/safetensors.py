"""Model weights in safetensors files, in the memory of a device that all processes share.

The parser trusts nothing: whatever a file holds, the answer is its tensors or a FormatError that says what is wrong. It accepts
what the safetensors package (0.8.0) does, but for:

- a key that appears twice, also in metadata or an entry: the format forbids it, and readers differ on which of the two counts;
- a header that does not begin with "{", which the format forbids, too;
- shapes of more than 64 dimensions, which NumPy does not take, and sizes that overflow beside one that is zero: whoever
  computes the strides of such a tensor would be wrong.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import struct
import time
import warnings
from typing import Any, NamedTuple

from .array import ALIGNMENT, Array, is_misaligned
from .copies import SLOT, Copies
from .dtypes import SAFETENSORS, DType
from .errors import Error, FormatError, MisalignedWarning
from .mapping import PathLike, Window, check_file, named, open_file, open_window

MAX_HEADER = 100_000_000
MAX_INDEX = 100_000_000
MAX_DIMENSIONS = 64
INDEX = ".safetensors.index.json"
SUFFIX = ".safetensors"
STEP = 16 << 20  # bytes that align copies at a time


class Tensor(NamedTuple):
    """Where a tensor is: begin and end count bytes of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """What a file says about itself."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    size: int  # of the whole file


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise FormatError(f"the key {_shown(key)} appears twice")
        found[key] = value
    return found


def _integer_of(text: str) -> int:
    # JSON has it, and readers differ on what it is: an integer or not.
    return _no_number(text) if text == "-0" else int(text)


def _no_number(text: str) -> Any:
    raise FormatError(f"the number {text[:40]} is not an integer")


def _shown(text: object) -> str:
    """Quotes what a file holds, so that it can be printed: ASCII, and not much of it."""
    return ascii(text) if len(ascii(text)) < 100 else ascii(text)[:100] + "…"


def _parse(text: bytes) -> Any:
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer_of,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except FormatError:
        raise
    except UnicodeDecodeError as e:
        raise FormatError(f"it is not UTF-8 at byte {e.start}") from None
    except RecursionError:
        raise FormatError("it is nested too deeply") from None
    except ValueError as e:  # JSON's own, and integers with thousands of digits
        raise FormatError(f"it is not JSON: {e}") from None


def _check_name(name: str) -> None:
    if _torn(name):
        raise FormatError(f"the tensor name {_shown(name)} has half a character")


def _torn(text: str) -> bool:
    """Whether a text has half of a pair of UTF-16, which JSON can say and UTF-8 cannot."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def _integer(value: Any) -> bool:
    return type(value) is int


def parse_header(text: bytes, data: int) -> Header:
    """Parses a header. data is how many bytes follow it; offsets in what is returned count from the first byte of them."""
    if not text.startswith(b"{"):
        raise FormatError("the header does not begin with {")
    document = _parse(text)
    if not isinstance(document, dict):
        raise FormatError("the header is no JSON object")
    metadata = document.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError("__metadata__ is not an object of strings")
    if any(map(_torn, metadata)) or any(map(_torn, metadata.values())):
        raise FormatError("__metadata__ has half a character")
    tensors = [_tensor(name, entry, data) for name, entry in document.items()]
    # The bytes of the tensors, in order, are all the bytes there are.
    at = 0
    for t in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if t.begin != at:
            what = "overlaps the one before it" if t.begin < at else f"begins at {t.begin}, which leaves a hole after {at}"
            raise FormatError(f"tensor {_shown(t.name)} {what}")
        at = t.end
    if at != data:
        raise FormatError(f"the tensors end at {at} of {data} bytes")
    return Header({t.name: t for t in tensors}, metadata, data)


def _tensor(name: str, entry: Any, data: int) -> Tensor:
    _check_name(name)
    if not isinstance(entry, dict):
        raise FormatError(f"the entry of tensor {_shown(name)} is no JSON object")
    of = f"of tensor {_shown(name)}"
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise FormatError(f"the entry {of} has no {key}")
    word, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = SAFETENSORS.get(word) if isinstance(word, str) else None
    if dtype is None:
        raise FormatError(f"the dtype {_shown(word)} {of} is not known")
    if not isinstance(shape, list) or not all(_integer(n) and n >= 0 for n in shape):
        raise FormatError(f"the shape {of} is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"the shape {of} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    # With a size of 0 the others could be anything, and overflow whoever computes strides.
    if math.prod(n for n in shape if n) * dtype.bits >= 1 << 63:
        raise FormatError(f"the shape {of} is too large")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_integer(n) for n in offsets):
        raise FormatError(f"data_offsets {of} are not two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= data:
        raise FormatError(f"data_offsets {of} are not within the {data} bytes that there are")
    bits = math.prod(shape) * dtype.bits
    if bits != 8 * (end - begin):
        raise FormatError(f"data_offsets {of} have {end - begin} bytes, its shape and dtype {bits / 8:g}")
    return Tensor(name, dtype, tuple(shape), begin, end)


def read_header(fd: int) -> Header:
    """Reads the header of an open file. Offsets in what is returned count from the beginning of the file."""
    size = os.fstat(fd).st_size
    if size < 8:
        raise FormatError(f"the file has {size} bytes, and no room for the length of a header")
    (n,) = struct.unpack("<Q", _read(fd, 0, 8))
    if n > MAX_HEADER:
        raise FormatError(f"the header says that it has {n} bytes, more than the {MAX_HEADER} that the format allows")
    if n > size - 8:
        raise FormatError(f"the header says that it has {n} bytes, and the file has {size}")
    h = parse_header(_read(fd, 8, n), size - 8 - n)
    shift = 8 + n
    return Header({k: t._replace(begin=t.begin + shift, end=t.end + shift) for k, t in h.tensors.items()}, h.metadata, size)


def _read(fd: int, at: int, n: int) -> bytes:
    parts = []
    while n > 0:
        part = os.pread(fd, min(n, 1 << 20), at)
        if not part:
            raise FormatError("the file ends in the middle of its header")
        parts.append(part)
        at += len(part)
        n -= len(part)
    return b"".join(parts)


def _about(path: str, e: Exception) -> FormatError:
    return FormatError(f"{path}: {e}")


def shards_of(path: PathLike) -> dict[str, list[str] | None]:
    """Returns the files that a path stands for, each with the tensors to take from it; None stands for all of them."""
    name = os.fsdecode(path)
    if os.path.isdir(name):
        try:
            files = sorted(f for f in os.listdir(name) if not f.startswith("."))
        except OSError as e:
            raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
        indexes = [f for f in files if f.endswith(INDEX)]
        if len(indexes) > 1:
            if "model" + INDEX not in indexes:
                raise FormatError(f"{name}: it has several indexes, name one of {', '.join(indexes)}")
            indexes = ["model" + INDEX]
        if indexes:
            return _read_index(os.path.join(name, indexes[0]))
        shards = [f for f in files if f.endswith(SUFFIX)]
        if not shards:
            raise Error(errno.ENOENT, f"there is no *{SUFFIX} in the directory", name)
        return {os.path.join(name, f): None for f in shards}
    if name.endswith(".index.json"):
        return _read_index(name)
    return {name: None}


def _read_index(path: str) -> dict[str, list[str] | None]:
    try:
        with open(path, "rb") as f:
            text = f.read(MAX_INDEX + 1)
    except OSError as e:
        raise Error(e.errno or errno.EIO, e.strerror or "", path) from None
    try:
        if len(text) > MAX_INDEX:
            raise FormatError(f"the index has more than {MAX_INDEX} bytes")
        return {os.path.join(os.path.dirname(path), file): names for file, names in parse_index(text).items()}
    except FormatError as e:
        raise _about(path, e) from None


def parse_index(text: bytes) -> dict[str, list[str]]:
    """Parses an index: the tensors of each file. Files are below the index's own directory."""
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_object)  # its metadata may have any numbers
    except FormatError:
        raise
    except (RecursionError, ValueError) as e:
        raise FormatError(f"the index is not JSON in UTF-8: {e}") from None
    weights = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weights, dict):
        raise FormatError("the index has no object weight_map")
    files: dict[str, list[str]] = {}
    for name, file in weights.items():
        _check_name(name)
        if not isinstance(file, str) or not file or any(c < " " or "\ud800" <= c <= "\udfff" for c in file):
            raise FormatError(f"the index has no file name for tensor {_shown(name)}")
        if file.startswith("/") or not all(part not in ("", ".", "..") for part in file.split("/")):
            raise FormatError(f"the index places tensor {_shown(name)} into {_shown(file)}, outside of its directory")
        files.setdefault(file, []).append(name)
    return files


def framework_of(framework: str | None) -> str:
    """Chooses what the tensors are: PyTorch's where it is installed, else NumPy's. ImportError where it is not there."""
    if framework not in (None, "torch", "numpy", "array"):
        raise ValueError(f"framework is 'torch', 'numpy' or 'array', not {framework!r}")
    for name in ("torch", "numpy") if framework is None else (framework,):
        if name == "array" or _installed(name):
            return name
    what = "neither PyTorch nor NumPy is" if framework is None else f"{framework} is not"
    raise ImportError(f"{what} installed: install it, or use framework='array', which needs no library")


def _installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name != name:
            raise
        return False
    return True


def load_safetensors(
    path: PathLike, device: Any = 0, *, framework: str | None = None, misaligned: str = "copy"
) -> dict[str, Any]:
    """Returns the tensors of safetensors files, in the one copy that all processes of the machine share on the device.

    path is a file, a directory with files, or an ``*.safetensors.index.json``. framework is "torch", "numpy" (on emulated
    devices) or "array" (gaiafs.Array); without it, it is "torch" where PyTorch is installed. The tensors keep the memory; when
    the last is gone, so is the mapping. They are of a mapping with mode "r": a store into one ends the process or, on a GPU,
    its CUDA context; clone a tensor to change it.

    The format allows tensors to begin anywhere, and kernels take it for granted that they begin at a multiple of 16 bytes:
    with less some return wrong values without a word. misaligned says what becomes of tensors that do not begin so.

    - "copy": this process gets copies of them, in one allocation for each file, on the same device. A MisalignedWarning says how
      much memory that took. Copies show the file as it was when it was loaded: no acquire changes them. Tensors that begin at
      a multiple of 16 are shared.
    - "share": they are shared all the same, for programs that know what their kernels need. Tensors that are not even aligned to
      their elements are copied, since no library takes them.
    - "error": ValueError.

    ``gaiafs.align`` writes a file whose tensors are aligned.

    It blocks until all is on the device. Raises FormatError for a file that is not what the format demands, ImportError where
    the library is not installed, TypeError where it has no such elements, and what ``gaiafs.mmap`` raises; ENOMEM also where the
    device has no room for copies.
    """
    if misaligned not in ("copy", "share", "error"):
        raise ValueError(f"misaligned is 'copy', 'share' or 'error', not {misaligned!r}")
    chosen = framework_of(framework)
    tensors: dict[str, Any] = {}
    copied = _Copied()
    for file, names in shards_of(path).items():
        for name, tensor in _load(file, names, device, chosen, misaligned, copied).items():
            if name in tensors:
                raise FormatError(f"{file}: tensor {_shown(name)} is in another file, too")
            tensors[name] = tensor
    if copied.tensors:
        warnings.warn(copied.words(os.fsdecode(path), len(tensors)), MisalignedWarning, stacklevel=2)
    return tensors


class _Copied:
    """What copying took."""

    def __init__(self) -> None:
        self.tensors = self.memory = 0
        self.seconds = 0.0

    def words(self, path: str, of: int) -> str:
        return (
            f"{path}: {self.tensors} of {of} tensors do not begin at a multiple of {ALIGNMENT} bytes in their file, so this "
            f"process copied them: {self.memory} bytes of device memory that it shares with no other process, in "
            f"{1000 * self.seconds:.1f} ms. The copies do not follow changes of the file. To share the tensors, write an aligned "
            f"file with gaiafs.align or python -m gaiafs align; misaligned='share' shares them as they are"
        )


def _load(
    file: str, names: list[str] | None, device: Any, framework: str, misaligned: str, copied: _Copied
) -> dict[str, Any]:
    fds: list[int] = []
    try:
        open_file(file, False, fds)
        fd = fds[0]
        try:
            check_file(fd, writable=False)
        except Error as e:
            raise named(e, file) from None
        try:
            header = read_header(fd)
            wanted = list(header.tensors) if names is None else names
            for name in wanted:
                if name not in header.tensors:
                    raise FormatError(f"the index places tensor {_shown(name)} here, and it is not")
        except FormatError as e:
            raise _about(file, e) from None
        crooked = [t for t in map(header.tensors.__getitem__, wanted) if is_misaligned(t.begin, t.end - t.begin)]
        if misaligned == "error" and crooked:
            raise ValueError(
                f"{file}: tensor {_shown(crooked[0].name)}, one of {len(crooked)}, begins at byte {crooked[0].begin}, which is "
                f"not a multiple of {ALIGNMENT}: write the file anew with gaiafs.align, or choose another misaligned="
            )
        if misaligned == "share":
            crooked = [t for t in crooked if t.dtype.itemsize and t.begin % t.dtype.itemsize]
        try:
            window = open_window(fd, device, False, 0, header.size, lazy=False)
        except Error as e:
            raise named(e, file) from None
    finally:
        for fd in fds:
            os.close(fd)
    if 0 <= window.file_size < header.size:
        raise FormatError(f"{file}: the file shrank from {header.size} to {window.file_size} bytes while it was loaded")
    if framework == "numpy" and window.ordinal is not None:
        raise ValueError("NumPy cannot use memory of a GPU: install PyTorch, or use framework='array' and its __dlpack__")
    copies: dict[str, Array] = {}
    if crooked:
        try:
            copies = _copies(file, window, crooked, copied)
        except Error:
            window.close()  # not left to a finalizer, which may not wait for a full device
            raise
    lease = window.lease()
    found = {name: Array(lease, window.ptr + t.begin, t.dtype, t.shape, readonly=True)
             for name, t in header.tensors.items()}  # fmt: skip
    found.update(copies)
    return {name: _as(found[name], framework) for name in wanted}


def _copies(file: str, window: Window, crooked: list[Tensor], copied: _Copied) -> dict[str, Array]:
    begin = time.monotonic()
    try:
        copies = Copies(window, [(window.ptr + t.begin, t.end - t.begin) for t in crooked])
    except Error as e:
        text = f"{len(crooked)} tensors could not be copied to where they are aligned: {e.strerror}"
        raise Error(e.errno or errno.EIO, text, file) from None
    copied.seconds += time.monotonic() - begin
    copied.tensors += len(crooked)
    copied.memory += copies.size
    return {t.name: Array(copies, at, t.dtype, t.shape, readonly=True) for t, at in zip(crooked, copies.at, strict=True)}


def _as(a: Array, framework: str) -> Any:
    if framework == "torch":
        return a.torch()
    return a.numpy() if framework == "numpy" else a


def align(source: PathLike, target: PathLike) -> int:
    """Writes a safetensors file again with its tensors aligned, and returns how many of them still are not.

    The data begins at a multiple of 256 bytes. The format allows no holes, so tensors whose size is not a multiple of 16 bytes
    come last, and only the first of them is certain to be aligned. Names, types, shapes, bytes and metadata stay. The files
    need not be on a mount. FileExistsError where the target exists.
    """
    with open(source, "rb") as old:
        try:
            h = read_header(old.fileno())
        except FormatError as e:
            raise _about(os.fsdecode(source), e) from None
        order = sorted(h.tensors.values(), key=lambda t: ((t.end - t.begin) % ALIGNMENT != 0, t.begin, t.end))
        words = {d: word for word, d in SAFETENSORS.items()}
        entries: dict[str, Any] = {"__metadata__": h.metadata} if h.metadata else {}
        at = left = 0
        for t in order:
            n = t.end - t.begin
            left += is_misaligned(at, n)
            entries[t.name] = {"dtype": words[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + n]}
            at += n
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % SLOT)
        with open(target, "xb") as new:
            try:
                new.write(struct.pack("<Q", len(text)) + text)
                for t in order:
                    old.seek(t.begin)
                    for n in [STEP] * ((t.end - t.begin) // STEP) + [(t.end - t.begin) % STEP]:
                        if len(part := old.read(n)) != n:
                            raise FormatError(f"{os.fsdecode(source)}: the file shrank while it was read")
                        new.write(part)
            except BaseException:
                os.unlink(target)
                raise
    return left
