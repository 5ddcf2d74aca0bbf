"""Views: chosen bytes of files, in their layout, and up to date."""

import ctypes
import errno
import gc
import os
import random
import subprocess

import numpy as np
import pytest

import gaiafs
from gaiafs import _core, shelter, views

from conftest import KIND, mapped

CONTENT = np.random.default_rng(1).integers(0, 256, 3 << 20, "u1").tobytes()


@pytest.fixture
def path(make):
    return make(CONTENT)


def wanted(segment, *contents):
    """Returns the bytes of a segment, by slices."""
    s = gaiafs.Segment(*segment)
    content = contents[s.file]
    rows = [
        content[at : at + s.length] for at in range(s.offset, s.offset + max(s.stride, 1) * s.count, max(s.stride, 1))
    ][: s.count]
    return b"".join(row.ljust(s.length, b"\0") for row in rows)


def check(v, segments, *contents):
    for i, segment in enumerate(segments):
        want = wanted(segment, *contents)
        assert v.array(i).tobytes() == v.read(v.sizes[i], offset=v.offsets[i]) == want, segment
        assert ctypes.string_at(v.ptr + v.offsets[i], v.sizes[i]) == want, segment


def test_segments(path):
    segments = [
        (3, 1000),
        (5000, 16, 40, 7),
        (len(CONTENT) - 5, 20),
        (0, 8192),
        (3, 1000),
        (4095, 2),
        (len(CONTENT) + 9999, 3),
    ]
    with gaiafs.view(path, segments, 1) as v:
        assert v.kind == KIND and v.device == 1 and not v.closed and v.sizes == (1000, 112, 20, 8192, 1000, 2, 3)
        assert all(at % 256 == 0 for at in v.offsets) and v.ptr % 256 == 0
        assert len(v) == v.nbytes == v.offsets[-1] + 3
        check(v, segments, CONTENT)
        assert not any(v.read(24, offset=1000))
    assert "closed" in repr(v)


@pytest.mark.parametrize("align", [1, 2, 64, 4096, 2 << 20])
def test_alignments(path, align):
    segments = [(1, 3), (2, 5), (7, 100)]
    with gaiafs.view(path, segments, align=align) as v:
        assert v.ptr % align == 0
        at = 0
        for offset, n in zip(v.offsets, v.sizes, strict=True):
            at = -(-at // align) * align
            assert offset == at
            at += n
        for i, segment in enumerate(segments):
            assert v.array(i, misaligned=True).tobytes() == wanted(segment, CONTENT)
        if align == 1:
            with pytest.raises(ValueError, match="not a multiple of 16"):
                v.array(1)


def test_random_views(make):
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    rng = random.Random(seed)
    contents = [bytearray(rng.randbytes(n)) for n in (50_000, 4096, 1)]
    paths = [make(bytes(c), str(i)) for i, c in enumerate(contents)]
    for _ in range(20):
        segments = []
        for _ in range(rng.choice([1, 3, 300])):
            length = rng.choice([1, 7, 256, 5000])
            rows = rng.choice([1, 1, 2, 9])
            file = rng.randrange(3)
            segments.append(
                (rng.randrange(len(contents[file]) + 10), length, length + rng.choice([0, 1, 4096]), rows, file)
            )
        v = gaiafs.view(paths, segments, rng.randrange(2), align=rng.choice([1, 16, 256]), lazy=rng.random() < 0.5)
        v.acquire()
        for _ in range(3):
            for i, s in enumerate(segments):
                assert v.read(v.sizes[i], offset=v.offsets[i]) == wanted(s, *contents), s
            file = rng.randrange(3)
            at, new = rng.randrange(len(contents[file])), rng.randbytes(1)
            contents[file][at : at + 1] = new
            if rng.random() < 0.5:
                with open(paths[file], "r+b") as f:
                    f.seek(at)
                    f.write(new)
            else:
                with gaiafs.mmap(paths[file], mode="r+") as m, m.acquire():
                    m.write(new, at)
            v.acquire()
        v.close()


def test_acquire_copies_what_changed(path, mount):
    def copied():
        return sum(
            f["counters"]["view_pages"]
            for f in gaiafs.status(mount)["files"]
            if f["name"] == str(path.relative_to(mount))
        )

    segments = [(i * 4096 + 1, 4000) for i in range(700)]
    with gaiafs.view(path, segments) as v:
        before = copied()
        assert v.acquire().pages == 0 and copied() == before
        with open(path, "r+b") as f:
            f.seek(100 * 4096 + 1)
            f.write(b"changed")
        with v.acquire() as same:
            assert same is v and v.read(7, offset=v.offsets[100]) == b"changed"
        assert 1 <= copied() - before <= 2
        with gaiafs.mmap(path, 1, "r+") as m:
            m.write(b"by another", 5 * 4096 + 1)
            m.release()
            v.acquire(v.offsets[5], v.sizes[5], stream=0)
        assert v.read(10, offset=v.offsets[5]) == b"by another"


def test_lazy(path):
    with gaiafs.view(path, [(5, 100), (10_000, 100)], lazy=True) as v:
        v.advise("willneed")
        v.acquire(v.offsets[1], 100)
        assert v.array(1).tobytes() == CONTENT[10_000:10_100]


def test_views_are_shared(path, mount):
    def used():
        return gaiafs.status(mount)["devices"][0]["used_bytes"]

    first = gaiafs.view(path, [(1, 1 << 20)])
    before = used()
    with open(path, "rb") as f:
        second, third = gaiafs.view(path, [(1, 1 << 20)]), gaiafs.view(f, [gaiafs.Segment(1, 1 << 20)])
    assert used() == before
    seen = gaiafs.info(path)["files"][0]["views"]
    assert [v["mappings"] for v in seen] == [3] and seen[0]["bytes"] == 1 << 20
    for v in (first, second, third):
        v.close()


def test_lifetime(path):
    v = gaiafs.view(path, [(1, 64)])
    a = v.array(0, "int32", (4, 4))
    with pytest.raises(BufferError):
        v.close()
    assert a.readonly and a.ptr == v.ptr
    del a
    v.close()
    v.close()
    for use in (v.acquire, v.read, lambda: v.array(0), lambda: v.ptr, lambda: v.tensor(0)):
        with pytest.raises(ValueError, match="closed"):
            use()
    a = gaiafs.view(path, [(1, 64)]).array(0)
    gc.collect()
    assert a.tobytes() == CONTENT[1:65]


def test_views_of_other_libraries(path):
    with gaiafs.view(path, [(1, 64), (3, 10)]) as v:
        a = v.array(0, "float32", (4, 4))
        if KIND == "cuda":
            found = a.__cuda_array_interface__
            assert found["data"] == (v.ptr, True) and found["shape"] == (4, 4)
        else:
            n = np.from_dlpack(a)
            assert n.tobytes() == CONTENT[1:65] and not n.flags.writeable and n.ctypes.data == v.ptr
            m = v.numpy(1, "<u2")
            assert m.tobytes() == CONTENT[3:13] and not m.flags.writeable
            assert bytes(v.buffer(-1)) == CONTENT[3:13] and v.buffer(1).readonly
            with pytest.raises(ValueError, match="not within the 10"):
                v.numpy(1, "u1", 11)
            del n, m
        with pytest.raises(ValueError, match="not within the 10"):
            v.array(1, "u1", 11)
        for i in (2, -3):
            with pytest.raises(IndexError, match="no segment"):
                v.array(i)
        del a
        gc.collect()


@pytest.mark.parametrize("segments, error, words", [
    ([], gaiafs.Error, "no segments"),
    ([(0, 1), (0, 0)], gaiafs.Error, "segment 1 has a length of 0"),
    ([(0, 2, 1, 2)], gaiafs.Error, "segment 0 .* stride"),
    ([(0, 1, 1 << 62, 4)], gaiafs.Error, "segment 0 ends past"),
    ([(1 << 63, 1)], gaiafs.Error, "segment 0 ends past"),
    ([(0, 1), (1 << 64, 1)], ValueError, "segment 1"),
    ([(0, -1)], ValueError, "segment 0"),
    ([(0, 1, 1, 0)], ValueError, "segment 0 has 0 rows"),
    ([(0, 1, 1, 1 << 40)], gaiafs.Error, "segment 0 has .* rows"),
    ([(0,)], TypeError, "segment 0"),
    ([(0, 1.5)], TypeError, "segment 0"),
    ([gaiafs.Segment(0, 1, file=1)], ValueError, "of file 1"),
    ([(0, 1)] * ((1 << 19) + 1), gaiafs.Error, "at most 524288"),
])  # fmt: skip
def test_segments_that_cannot_be(path, segments, error, words):
    with pytest.raises(error, match=words):
        gaiafs.view(path, segments)


def test_bad_arguments(path, tmp_path, directory):
    for align in (0, 3, 4 << 20, -256, 1 << 63):
        with pytest.raises((gaiafs.Error, ValueError), match="alignment"):
            gaiafs.view(path, [(0, 1)], align=align)
    other = tmp_path / "other"
    other.write_bytes(b"x")
    with pytest.raises(gaiafs.Error, match="other"):
        gaiafs.view(other, [(0, 1)])
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.view([path, other], [(0, 1), gaiafs.Segment(0, 1, file=1)])
    assert e.value.errno == errno.ENOTTY
    for file, code in [(directory / "none", errno.ENOENT), (directory, errno.EISDIR)]:
        with pytest.raises(gaiafs.Error) as e:
            gaiafs.view([path, file], [(0, 1)])
        assert e.value.errno == code and e.value.filename == str(file)
    with pytest.raises(ValueError, match="there are 0"):
        gaiafs.view([], [(0, 1)])
    with pytest.raises(gaiafs.Error, match="raise gpu-memory"):
        gaiafs.view(path, [(0, 1 << 40)])


def test_many_segments(path):
    segments = [(i % len(CONTENT), 5) for i in range(0, 1 << 22, 23)]
    with gaiafs.view(path, segments, align=8) as v:
        memory = v[:]
        assert all(
            memory[at : at + 5] == wanted(s, CONTENT) for at, s in zip(v.offsets[::97], segments[::97], strict=True)
        )


def test_files_that_change_under_a_view(path):
    with gaiafs.view(path, [(4000, 200), (1 << 20, 100)]) as v:
        os.truncate(path, 4100)
        v.acquire()
        assert v.array(0).tobytes() == CONTENT[4000:4100] + bytes(100) and not any(v.array(1).tobytes())
        path.write_bytes(b"\7" * (2 << 20))
        v.acquire()
        assert v.array(0).tobytes() == b"\7" * 200 and v.array(1).tobytes() == b"\7" * 100
        other = path.with_name("other")
        other.write_bytes(bytes(2 << 20))
        os.rename(other, path)  # the view stays with the old file
        v.acquire()
        assert v.array(0).tobytes() == b"\7" * 200
        gc.collect()


def test_no_descriptor_is_left(path, monkeypatch):
    def fail(*arguments):
        raise gaiafs.Error(errno.EIO, "planted")

    before, maps = len(os.listdir("/proc/self/fd")), mapped()
    monkeypatch.setattr(_core, "map_view", fail)
    with pytest.raises(gaiafs.Error, match="planted"):
        gaiafs.view([path] * 9, [(0, 1)])
    assert (len(os.listdir("/proc/self/fd")), mapped()) == (before, maps)


def test_a_descriptor_that_cannot_be_closed():
    """Closing a file of a dead mount may fail. The others are closed all the same."""
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    want = fds[:]
    os.close(fds[3])
    shelter.close_all(fds)
    assert fds == [] and all(not os.path.exists(f"/proc/self/fd/{fd}") for fd in want)


def test_no_descriptor_is_left_of_a_dead_mount(path, monkeypatch):
    """A failed call closes the files even if closing one of them fails."""
    before, opened = len(os.listdir("/proc/self/fd")), []

    def fail(fds, *arguments):
        opened.extend(fds)
        os.close(fds[1])
        raise gaiafs.Error(errno.ENOTCONN, "planted")

    monkeypatch.setattr(_core, "map_view", fail)
    with pytest.raises(gaiafs.Error, match="planted"):
        gaiafs.view([path] * 5, [(0, 1)])
    assert len(os.listdir("/proc/self/fd")) == before and len(opened) == 5


def test_a_file_that_cannot_be_looked_at(path, monkeypatch):
    def fail(fd, writable):
        raise OSError(errno.ENOTCONN, "planted")

    monkeypatch.setattr(views, "check_file", fail)
    with pytest.raises(gaiafs.Error, match="planted") as e:
        gaiafs.view([path, path], [(0, 1)])
    assert e.value.filename == str(path)


def test_child_cannot_use_the_parents_view(path):
    v = gaiafs.view(path, [(0, 10)])
    child = os.fork() if KIND == "emulated" else None
    if child == 0:
        try:
            v.acquire()
        except gaiafs.Error as e:
            os._exit(0 if e.errno == errno.ECHILD else 2)
        os._exit(1)
    assert child is None or os.waitpid(child, 0)[1] == 0
    v.close()


@pytest.mark.kind("emulated")
def test_a_store_ends_the_process(path, python):
    script = """
import ctypes, sys, gaiafs
v = gaiafs.view(sys.argv[1], [(0, 10)])
ctypes.memset(v.ptr, 0, 1)
"""
    done = subprocess.run([*python, "-c", script, str(path)], capture_output=True, timeout=60)
    assert done.returncode < 0
