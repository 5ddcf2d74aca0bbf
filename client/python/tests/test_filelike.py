"""Mappings and views as files: positions, slices, "w+", futures and pickles."""

import asyncio
import concurrent.futures
import copy
import errno
import io
import os
import pickle
import subprocess
import threading

import numpy as np
import pytest

import gaiafs

from conftest import KIND

PAGE = 4096
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def path(make):
    return make(CONTENT)


@pytest.fixture(params=["mapping", "view"])
def memory(request, path):
    m = gaiafs.mmap(path) if request.param == "mapping" else gaiafs.view(path, [(0, len(CONTENT))])
    with m:
        yield m


def test_reads_as_a_file_does(memory):
    f = io.BytesIO(CONTENT)
    for call in (
        *(lambda f: f.read(10), lambda f: f.tell(), lambda f: f.read(0), lambda f: f.seek(-6, os.SEEK_END)),
        *(lambda f: f.read(100), lambda f: f.read(1), lambda f: f.read(), lambda f: f.tell()),
        *(lambda f: f.seek(5), lambda f: f.seek(3, os.SEEK_CUR), lambda f: f.read(-1), lambda f: f.seek(20_000)),
        *(lambda f: f.read(3), lambda f: f.tell(), lambda f: f.seek(0), lambda f: f.read(None)),
    ):
        assert call(memory) == call(f)
    assert memory.read(4, offset=256) == b"\0\1\2\3" and memory.tell() == len(CONTENT)


def test_readinto(memory):
    for into in (bytearray(300), np.zeros((3, 100), np.uint8), memoryview(bytearray(300))):
        memory.seek(7)
        assert memory.readinto(into) == 300 and memory.tell() == 307
        assert bytes(into) == CONTENT[7:307]
    into = bytearray(b"x" * 10)
    memory.seek(-4, os.SEEK_END)
    assert memory.readinto(into) == 4 and into == CONTENT[-4:] + b"x" * 6
    assert memory.readinto(into) == 0
    assert memory.readinto(into, offset=1) == 10 and into == CONTENT[1:11] and memory.tell() == len(CONTENT)
    assert memory.readinto(bytearray()) == 0
    with pytest.raises(TypeError, match="cannot be written into"):
        memory.readinto(b"bytes")


def test_slices(memory):
    for s in (slice(None), slice(3, 9), slice(-5, None), slice(9, 3), slice(20_000, None), slice(0, 1 << 70)):
        assert memory[s] == CONTENT[s]
    assert memory[5] == 5 and memory[-1] == 255 and memory[np.int64(256)] == 0
    for wrong in (len(CONTENT), -len(CONTENT) - 1):
        with pytest.raises(IndexError):
            memory[wrong]
    with pytest.raises(ValueError, match="step"):
        memory[::2]
    with pytest.raises(TypeError):
        iter(memory)
    for whence, offset in ((0, -1), (1, -1), (2, -len(CONTENT) - 1)):
        with pytest.raises(ValueError, match="negative"):
            memory.seek(offset, whence)
    with pytest.raises(ValueError, match="whence"):
        memory.seek(0, 3)
    with pytest.raises(ValueError, match="negative"):
        memory.read(1, offset=-1)


def test_writes_as_a_file_does(path):
    with gaiafs.mmap(path, mode="r+") as m:
        assert m.write(b"abc") == 3 and m.write(np.arange(2, dtype="u1")) == 2 and m.tell() == 5
        assert m.write(b"there", offset=100) == 5 and m.tell() == 5
        m[10:13] = b"xyz"
        m[-1] = 7
        m[13:13] = b""
        want = b"abc\0\1" + CONTENT[5:10] + b"xyz" + CONTENT[13:100] + b"there" + CONTENT[105:-1] + b"\7"
        assert m[:] == want
        m.release()
        assert path.read_bytes() == want
        for wrong in (lambda: m.__setitem__(slice(0, 3), b"ab"), lambda: m.__setitem__(0, 256)):
            with pytest.raises(ValueError):
                wrong()
        m.seek(0, os.SEEK_END)
        with pytest.raises(ValueError, match="not within"):
            m.write(b"no room")
        assert m.tell() == len(CONTENT)
    with gaiafs.mmap(path) as m, pytest.raises(TypeError, match="read-only"):
        m[0:1] = b"x"


def test_w_plus_makes_files(directory, path):
    for name in (directory / "new", path):
        with gaiafs.mmap(name, mode="w+", offset=PAGE, length=100) as m:
            assert m.mode == "r+" and not any(m[:])
            m.write(b"made")
        assert name.read_bytes() == bytes(PAGE) + b"made" + bytes(96)
    for arguments in ({}, {"length": 0}, {"length": 5, "offset": 7}, {"length": 5, "offset": -PAGE}):
        with pytest.raises(ValueError, match="w\\+"):
            gaiafs.mmap(path, mode="w+", **arguments)
    with open(path, "r+b") as f, pytest.raises(ValueError, match="pass its path"):
        gaiafs.mmap(f, mode="w+", length=4)
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.mmap(directory / "no" / "file", mode="w+", length=4)
    assert e.value.errno == errno.ENOENT
    with pytest.raises(ValueError):
        gaiafs.mmap(path, "tpu", mode="w+", length=4)
    assert path.stat().st_size == PAGE + 100  # the file is unchanged


def test_futures(path):
    with gaiafs.mmap(path, mode="r+") as m, gaiafs.mmap(path, device=1) as other:
        m.write(b"later")
        released = m.release(wait=False)
        assert isinstance(released, concurrent.futures.Future)
        assert released.result(60) == 1
        acquired = [other.acquire(wait=False), m.acquire(wait=False)]
        assert not concurrent.futures.wait(acquired, 60).not_done
        assert acquired[0].result().pages == 1 and other[:5] == b"later"
        m.write(b"block")
        with acquired[1].result() as same:  # releases at the end
            assert same is m
        assert path.read_bytes()[5:10] == b"block"
        assert m.sync(wait=False).result(60) is None

        async def wait():
            return await asyncio.wrap_future(other.acquire(wait=False))

        assert asyncio.run(wait()).pages == 1
        with pytest.raises(ValueError, match="not within"):
            m.acquire(0, 1 << 40, wait=False)
        last = other.acquire(wait=False)
        other.close()  # waits for it
        assert last.result(60).pages == 0
        with pytest.raises(ValueError, match="closed"):
            other.acquire(wait=False)
    del acquired, last, same
    assert [t for t in threading.enumerate() if t.name == "gaiafs" and t.join(60)] == []


@pytest.mark.kind("emulated")
def test_a_future_fails_as_the_call_does(path):
    m = gaiafs.mmap(path)
    try:
        m._window.ptr += 1 << 40  # an address in no mapping
        future = m.acquire(wait=False)
        with pytest.raises(gaiafs.Error):
            future.result(60)
    finally:
        m._window.ptr -= 1 << 40
    m.close()


def test_pickled_mappings_are_mapped_again(path, memory):
    again = pickle.loads(pickle.dumps(memory))
    with again, copy.copy(memory) as third:
        assert type(again) is type(memory) and again[:] == third[:] == CONTENT and again.device == memory.device
    assert memory[:3] == CONTENT[:3]  # they were not up to date before


def test_a_worker_stores_into_a_pickled_mapping(directory, path, python):
    worker = directory / "worker.py"
    worker.write_text("import pickle, sys; m = pickle.load(sys.stdin.buffer); m.write(b'worker'); m.release(); m.close()")
    os.chdir(directory)
    try:
        with gaiafs.mmap(path.name, 1, "r+", PAGE, PAGE, lazy=True) as m:
            os.chdir("/")  # the path need not be absolute
            subprocess.run([*python, worker], input=pickle.dumps(m), check=True, timeout=300)
            m.acquire()
            assert m.read(6) == b"worker"
        with gaiafs.mmap(path, mode="w+", length=3) as m:
            m.write(b"abc")
            with pickle.loads(pickle.dumps(m)) as n:
                assert n[:] == b"abc"  # the file was not emptied again
    finally:
        os.chdir("/")


def test_a_file_that_was_replaced_is_not_mapped_again(make, path):
    with gaiafs.mmap(path) as m:
        pickled = pickle.dumps(m)
        os.replace(make(CONTENT, "other"), path)
        with pytest.raises(gaiafs.Error, match="names another file now") as e:
            pickle.loads(pickled)
        assert e.value.errno == errno.ESTALE
        path.unlink()
        with pytest.raises(gaiafs.Error) as e:
            pickle.loads(pickled)
        assert e.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(m)


@pytest.mark.skipif(KIND == "cuda", reason="a forked child has no CUDA")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_maps_again(memory):
    if (pid := os.fork()) == 0:
        code = 1
        try:
            try:
                memory.acquire()
            except gaiafs.Error as e:
                assert e.errno == errno.ECHILD and "copy.copy" in str(e)
            with copy.copy(memory) as mine:
                assert mine[:] == CONTENT
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_errors_are_also_those_of_python(path):
    """A missing file and a directory raise the same classes as open(), and the errors can be pickled."""
    for name, kind in ((f"{path}.none", FileNotFoundError), (os.path.dirname(path), IsADirectoryError)):
        with pytest.raises(kind) as caught:
            gaiafs.mmap(name)
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, gaiafs.Error) and (again.errno, again.filename) == (caught.value.errno, name)
    assert type(gaiafs.Error(errno.EIO)) is gaiafs.Error
