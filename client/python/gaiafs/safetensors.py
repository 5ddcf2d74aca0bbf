"""The format of model weights: safetensors files, and indexes of several files.

The parser trusts nothing. Whatever a file contains, the result is its tensors or a FormatError that says what is wrong.
It accepts what the safetensors package (0.8.0) accepts, except for:

- a key that appears twice, also in the metadata or in an entry: the format forbids it, and readers disagree on which
one counts;
- a header that does not begin with "{": the format forbids that, too;
- shapes of more than 64 dimensions, because NumPy does not take them; and sizes whose product overflows in a shape that
also has a size of zero, because code that computes the strides of such a tensor would go wrong.
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
import struct
from typing import Any, NamedTuple

from . import shelter
from .arguments import PathLike
from .dtypes import SAFETENSORS, DType
from .errors import Error, FormatError
from .files import named, open_file

MAX_HEADER = 100_000_000
MAX_INDEX = 100_000_000
MAX_DIMENSIONS = 64
INDEX = ".safetensors.index.json"
SUFFIX = ".safetensors"


class Tensor(NamedTuple):
    """The place of a tensor: begin and end are byte offsets in the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The contents of a file's header."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None  # None: it has no __metadata__
    size: int  # of the whole file


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise FormatError(f"the key {shown(key)} appears twice")
        found[key] = value
    return found


def _integer_of(text: str) -> int:
    # JSON allows it, and readers disagree on whether it is an integer.
    return _no_number(text) if text == "-0" else int(text)


def _no_number(text: str) -> Any:
    raise FormatError(f"the number {text[:40]} is not an integer")


def shown(text: object) -> str:
    """Quotes text from a file for a message: as ASCII, and shortened."""
    return ascii(text) if len(ascii(text)) < 100 else ascii(text)[:100] + "…"


def _parse(text: bytes) -> Any:
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer_of if b"-0" in text else None,  # without a function it is faster
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except FormatError:
        raise
    except UnicodeDecodeError as e:
        raise FormatError(f"it is not UTF-8 at byte {e.start}") from None
    except RecursionError:
        raise FormatError("it is nested too deeply") from None
    except ValueError as e:  # from the JSON parser, and for integers with thousands of digits
        raise FormatError(f"it is not JSON: {e}") from None


def _check_name(name: str) -> None:
    if _torn(name):
        raise FormatError(f"the tensor name {shown(name)} has half a character")


def _torn(text: str) -> bool:
    """Whether a text has half of a surrogate pair, which JSON can express and UTF-8 cannot."""
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def parse_header(text: bytes, data: int, begin: int = 0) -> Header:
    """Parses a header. data is the number of bytes that follow it, and begin the offset of the first of them in the
    file.
    """
    if not text.startswith(b"{"):
        raise FormatError("the header does not begin with {")
    document = _parse(text)
    if not isinstance(document, dict):
        raise FormatError("the header is no JSON object")
    metadata = document.pop("__metadata__", None)
    if metadata is not None:
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise FormatError("__metadata__ is not an object of strings")
        if any(map(_torn, metadata)) or any(map(_torn, metadata.values())):
            raise FormatError("__metadata__ has half a character")
    tensors = {name: _tensor(name, entry, data, begin) for name, entry in document.items()}
    # The tensors, in order, must cover all the bytes.
    at = begin
    for t in sorted(tensors.values(), key=operator.attrgetter("begin", "end")):
        if t.begin != at:
            hole = f"begins at {t.begin - begin}, after a hole at {at - begin}"
            raise FormatError(f"tensor {shown(t.name)} {'overlaps the one before it' if t.begin < at else hole}")
        at = t.end
    if at != begin + data:
        raise FormatError(f"the tensors end at {at - begin} of {data} bytes")
    return Header(tensors, metadata, at)


def _tensor(name: str, entry: Any, data: int, shift: int) -> Tensor:
    _check_name(name)
    if not isinstance(entry, dict):
        raise FormatError(f"the entry of tensor {shown(name)} is no JSON object")
    try:
        word, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as e:
        raise FormatError(f"the entry of tensor {shown(name)} has no {e.args[0]}") from None
    dtype = SAFETENSORS.get(word) if isinstance(word, str) else None
    if dtype is None:
        raise FormatError(f"the dtype {shown(word)} of tensor {shown(name)} is not known")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise FormatError(f"the shape of tensor {shown(name)} is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"the shape of tensor {shown(name)} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    bits = math.prod(shape) * dtype.bits
    # If one size is 0, the others could be anything, and their product would overflow in code that computes strides.
    if (bits or math.prod(filter(None, shape)) * dtype.bits) >= 1 << 63:
        raise FormatError(f"the shape of tensor {shown(name)} is too large")
    if not isinstance(offsets, list) or list(map(type, offsets)) != [int, int]:
        raise FormatError(f"data_offsets of tensor {shown(name)} are not two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= data:
        raise FormatError(f"data_offsets of tensor {shown(name)} are not within the {data} bytes of data")
    if bits != 8 * (end - begin):
        size = f"{end - begin} bytes, its shape and dtype {bits / 8:g}"
        raise FormatError(f"data_offsets of tensor {shown(name)} have {size}")
    return Tensor(name, dtype, tuple(shape), shift + begin, shift + end)


def read_header(fd: int) -> Header:
    """Reads the header of an open file. Offsets in the result count from the beginning of the file."""
    size = os.fstat(fd).st_size
    if size < 8:
        raise FormatError(f"the file has {size} bytes, too few for the length of a header")
    (n,) = struct.unpack("<Q", _read(fd, 0, 8))
    if n > MAX_HEADER:
        raise FormatError(f"the header says that it has {n} bytes, more than the {MAX_HEADER} that the format allows")
    if n > size - 8:
        raise FormatError(f"the header says that it has {n} bytes, and the file has {size}")
    return parse_header(_read(fd, 8, n), size - 8 - n, 8 + n)


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


def about(path: str, e: Exception) -> FormatError:
    return FormatError(f"{path}: {e}")


@shelter.sheltered
def shards_of(path: PathLike) -> dict[str, list[str] | None]:
    """Returns the files that a path stands for, each with the tensors to take from it, or None for all of them."""
    name = os.fsdecode(path)
    if os.path.isdir(name):
        index = os.path.join(name, "model" + INDEX)
        if os.path.lexists(index):  # the usual name is faster to find than to list
            return _read_index(index)
        try:
            files = sorted(f for f in os.listdir(name) if not f.startswith("."))
        except OSError as e:
            raise Error(e.errno or errno.EIO, e.strerror or "", name) from None
        indexes = [f for f in files if f.endswith(INDEX)]
        if len(indexes) > 1:
            raise FormatError(f"{name}: it has several indexes; name one of {', '.join(indexes)}")
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
    fds: list[int] = []
    text = b""
    try:
        open_file(path, False, fds)
        while len(text) <= MAX_INDEX and (part := os.read(fds[0], 1 << 20)):
            text += part
    except OSError as e:
        raise named(e if isinstance(e, Error) else Error(e.errno or errno.EIO, e.strerror or ""), path) from None
    finally:
        shelter.close_all(fds)
    try:
        if len(text) > MAX_INDEX:
            raise FormatError(f"the index has more than {MAX_INDEX} bytes")
        return {os.path.join(os.path.dirname(path), file): names for file, names in parse_index(text).items()}
    except FormatError as e:
        raise about(path, e) from None


def parse_index(text: bytes) -> dict[str, list[str]]:
    """Parses an index: the tensors of each file. The files must be in the index's own directory or below it."""
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_object)  # numbers in its metadata are free
    except FormatError:
        raise
    except (RecursionError, ValueError) as e:
        raise FormatError(f"the index is not JSON in UTF-8: {e}") from None
    weights = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weights, dict):
        raise FormatError("the index has no object weight_map")
    files: dict[str, list[str]] = {}
    for name, value in weights.items():
        _check_name(name)
        file = value if isinstance(value, str) else ""  # "" is no file name either
        if file in files:
            files[file].append(name)
            continue
        if not file or any(c < " " or "\ud800" <= c <= "\udfff" for c in file):
            raise FormatError(f"the index has no file name for tensor {shown(name)}")
        if file.startswith("/") or not all(part not in ("", ".", "..") for part in file.split("/")):
            raise FormatError(f"the index places tensor {shown(name)} into {shown(file)}, outside of its directory")
        files[file] = [name]
    return files
