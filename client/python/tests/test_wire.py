"""Frames are those of docs/dev/protocol.md, by the examples that the daemon and the other clients are tested against."""

import os
import pathlib
import random

import pytest

from gaiafs import host, wire

FRAMES = pathlib.Path(__file__).parents[3] / "control" / "testdata" / "frames.txt"
TOKEN = bytes(range(16))
UUID = bytes(range(0x10, 0x20))


@pytest.fixture(scope="module")
def frames() -> dict[str, bytes]:
    found = {}
    for line in FRAMES.read_text().splitlines():
        name, _, digits = line.partition(" ")
        if digits and name != "#":
            found[name] = bytes.fromhex(digits)
    return found


def test_requests_are_encoded_as_documented(frames):
    for name, got in {
        "hello": wire.frame(wire.HELLO, 0, wire.hello()),
        "map": wire.frame(
            wire.MAP,
            1,
            wire.map(TOKEN, 3, wire.READ | wire.WRITE, wire.MAP_LAZY | wire.MAP_LAUNDER, 0x200000, 0x123456789, UUID),
        ),
        "map-read": wire.frame(wire.MAP, 2, wire.map(TOKEN, 0, wire.READ, 0, 0, 1)),
        "acquire": wire.frame(wire.ACQUIRE, 3, wire.range_of(7, 4096, 8192, wire.ACQUIRE_LAUNDER)),
        "release": wire.frame(wire.RELEASE, 4, wire.range_of(7, 0, 1)),
        "sync": wire.frame(wire.SYNC, 5, wire.range_of(7, 0, 0x123456789, wire.SYNC_DURABLE)),
        "advise-willneed": wire.frame(wire.ADVISE, 9, wire.range_of(7, 0, 4096, 3)),
        "unmap": wire.frame(wire.UNMAP, 11, wire.unmap(7)),
        "status": wire.frame(wire.STATUS, 12, TOKEN),
        "ping": wire.frame(wire.PING, 0xFEDCBA9876543210),
    }.items():
        assert got.hex() == frames[name].hex(), name


def test_replies_are_decoded_as_documented(frames):
    for name, decode, header, body in [
        ("welcome", wire.decode_welcome, (wire.WELCOME, 0, 0), (1, 128, 4096, 128, 3)),
        ("mapped", wire.decode_mapped, (wire.MAPPED, wire.MORE, 1), (7, wire.EMULATED, 3, 0x123456000, 2, wire.NO_UUID)),
        ("mapped-unknown-size", wire.decode_mapped, (wire.MAPPED, wire.MORE, 2), (8, wire.CUDA, 0, -1, 1, UUID)),
        (
            "extents",
            wire.decode_extents,
            (wire.EXTENTS, 0, 1),
            (0, [(0x200000, 0x200000), (0x400000, 0x200000)]),
        ),
        ("result", wire.decode_result, (wire.RESULT, 0, 3), (0, 0x1234567890, "")),
        ("result-enomem", wire.decode_result, (wire.RESULT, 0, 4), (12, 0, "no room: 1 GiB budget of device 3 is spent é")),
        ("error", wire.decode_result, (wire.ERROR, 0, 0), (110, 0, "no HELLO in time")),
    ]:
        h, b = wire.decode_header(frames[name])
        assert h == header, name
        assert decode(b) == body, name
    assert wire.decode_welcome(wire.decode_header(frames["welcome"])[1]).has(wire.CUDA)
    for name, status in ("ioctl-grant", False), ("ioctl-grant-status", True):
        assert wire.decode_grant(frames[name]) == (status, TOKEN, "/run/gaiafs/x.sock")


def test_decoders_refuse_whatever_is_malformed(frames):
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print("SEED", seed)
    rng = random.Random(seed)
    decoders = {
        wire.WELCOME: wire.decode_welcome,
        wire.MAPPED: wire.decode_mapped,
        wire.EXTENTS: wire.decode_extents,
        wire.RESULT: wire.decode_result,
        wire.ERROR: wire.decode_result,
    }
    refused = 0
    for _ in range(5000):
        record = bytearray(rng.choice(list(frames.values())))
        for _ in range(rng.randrange(4)):
            record[rng.randrange(len(record))] = rng.randrange(256)
        record = record[: rng.choice([len(record), rng.randrange(len(record) + 1)])]
        try:
            wire.decode_grant(bytes(record))
        except wire.Malformed:
            pass
        try:
            h, body = wire.decode_header(bytes(record))
            decoders.get(h.type, lambda b: None)(body)
        except wire.Malformed:
            refused += 1
    assert refused > 100


def test_release_at_least():
    for release, want in {
        "6.16.0": True,
        "6.18.3-x": True,
        "7.0": True,
        "6.15.9": False,
        "5.20.1": False,
        "6": False,
        "6.16rc1": True,
        "": False,
        "10.2-foo": True,
    }.items():
        assert host.release_at_least(release, 6, 16) == want, release
