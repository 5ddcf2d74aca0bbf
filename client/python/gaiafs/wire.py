"""The wire format of docs/dev/protocol.md, version 1, from the client's side.

The frames in control/testdata/frames.txt are what this module and the daemon are tested against. Nothing here does I/O.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

VERSION = 1
MAX_FRAME = 64 << 10
MAX_EXTENTS = 128
PAGE = 4096

MORE = 1

HELLO, MAP, ACQUIRE, RELEASE, SYNC, ADVISE, UNMAP, STATUS, PING = range(1, 10)
WELCOME, MAPPED, EXTENTS, RESULT, DOCUMENT, ERROR = range(0x8001, 0x8007)

READ, WRITE = 1, 2
MAP_LAZY, MAP_LAUNDER = 1, 2
ACQUIRE_LAUNDER = 1
SYNC_DURABLE = 1

EMULATED, CUDA = 1, 2
NO_UUID = bytes(16)

# The ioctl by which the mount answers with a grant: _IOR('G', 0x01, 128 bytes).
GRANT_REQUEST = 0x80804701
GRANT_SIZE = 128
GRANT_MAGIC = 0x61696167
GRANT_STATUS = 1

_HEADER = struct.Struct("<IHHQ")
HEADER_SIZE = _HEADER.size
_HELLO = struct.Struct("<IHH")
_MAP = struct.Struct("<16sIIIIQQ16s")
_RANGE = struct.Struct("<QQQII")
_WELCOME = struct.Struct("<HHIIIII")
_MAPPED = struct.Struct("<QIIqII16s")
_EXTENTS = struct.Struct("<II")
_EXTENT = struct.Struct("<qq")
_RESULT = struct.Struct("<IIQ")
_GRANT = struct.Struct("<IHH16s104s")


class Malformed(Exception):
    """What the daemon sent is not of the protocol."""


class Header(NamedTuple):
    type: int
    flags: int
    id: int


class Welcome(NamedTuple):
    version: int
    max_requests: int
    max_request: int
    max_extents: int
    kinds: int

    def has(self, kind: int) -> bool:
        return bool(self.kinds >> (kind - 1) & 1)


class Mapped(NamedTuple):
    mapping: int
    kind: int
    device: int
    size: int
    extents: int
    uuid: bytes


class Extent(NamedTuple):
    offset: int
    size: int


class Extents(NamedTuple):
    first: int
    places: list[Extent]


class Result(NamedTuple):
    errno: int
    pages: int
    text: str


class Grant(NamedTuple):
    status: bool
    token: bytes
    socket: str


def frame(type: int, id: int, body: bytes = b"") -> bytes:
    """Builds a request."""
    return _HEADER.pack(_HEADER.size + len(body), type, 0, id) + body


def hello(lowest: int = VERSION, highest: int = VERSION) -> bytes:
    return _HELLO.pack(0x41494147, lowest, highest)


def map(token: bytes, device: int, prot: int, flags: int, offset: int, length: int, uuid: bytes = NO_UUID) -> bytes:
    return _MAP.pack(token, device, prot, flags, 0, offset, length, uuid)


def range_of(mapping: int, offset: int, length: int, argument: int = 0) -> bytes:
    return _RANGE.pack(mapping, offset, length, argument, 0)


def unmap(mapping: int) -> bytes:
    return struct.pack("<Q", mapping)


def peek_header(head: bytes) -> Header:
    """Decodes the header alone, of a record of which no more is there."""
    if len(head) < _HEADER.size:
        raise Malformed(f"a frame of {len(head)} bytes is shorter than its header")
    return Header(*_HEADER.unpack_from(head)[1:])


def decode_header(record: bytes) -> tuple[Header, bytes]:
    """Splits a record into header and body."""
    if len(record) < _HEADER.size:
        raise Malformed(f"a frame of {len(record)} bytes is shorter than its header")
    n, type, flags, id = _HEADER.unpack_from(record)
    if n != len(record):
        raise Malformed(f"a frame says {n} bytes and has {len(record)}")
    return Header(type, flags, id), record[_HEADER.size :]


def _check_size(what: str, body: bytes, n: int) -> None:
    if len(body) != n:
        raise Malformed(f"{what} has a body of {len(body)} bytes, not {n}")


def decode_welcome(body: bytes) -> Welcome:
    _check_size("WELCOME", body, _WELCOME.size)
    version, _, max_requests, max_request, max_extents, kinds, _ = _WELCOME.unpack(body)
    if version != VERSION or max_requests == 0:
        raise Malformed(f"WELCOME chose version {version} and {max_requests} requests")
    return Welcome(version, max_requests, max_request, max_extents, kinds)


def decode_mapped(body: bytes) -> Mapped:
    _check_size("MAPPED", body, _MAPPED.size)
    mapping, kind, device, size, extents, _, uuid = _MAPPED.unpack(body)
    return Mapped(mapping, kind, device, size, extents, uuid)


def decode_extents(body: bytes) -> Extents:
    if len(body) < _EXTENTS.size:
        raise Malformed(f"EXTENTS has a body of {len(body)} bytes")
    first, n = _EXTENTS.unpack_from(body)
    if n > MAX_EXTENTS:
        raise Malformed(f"EXTENTS has {n} extents")
    _check_size("EXTENTS", body, _EXTENTS.size + n * _EXTENT.size)
    return Extents(first, [Extent(*x) for x in _EXTENT.iter_unpack(body[_EXTENTS.size :])])


def decode_result(body: bytes) -> Result:
    """Decodes the body of a RESULT or an ERROR."""
    if len(body) < _RESULT.size:
        raise Malformed(f"RESULT has a body of {len(body)} bytes")
    errno, n, pages = _RESULT.unpack_from(body)
    text = body[_RESULT.size :]
    if n != len(text):
        raise Malformed(f"RESULT says {n} bytes of text and has {len(text)}")
    return Result(errno, pages, text.decode("utf-8", "replace"))


def decode_grant(answer: bytes) -> Grant:
    """Decodes what the ioctl filled in."""
    _check_size("the ioctl's answer", answer, _GRANT.size)
    magic, version, flags, token, path = _GRANT.unpack(answer)
    if magic != GRANT_MAGIC:
        raise Malformed("the ioctl was answered by something that is not gaiafs")
    if version != 1:
        raise Malformed(f"the mount grants in version {version}, this package knows 1")
    path, end, _ = path.partition(b"\0")
    if not end or not path:
        raise Malformed("the grant names no socket")
    return Grant(bool(flags & GRANT_STATUS), token, path.decode("utf-8", "surrogateescape"))
