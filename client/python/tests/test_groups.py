"""Groups: stores into several mappings that are released at once."""

import errno
import os
import signal
import subprocess
import threading

import pytest

import gaiafs

SIZE = 8192


@pytest.fixture
def files(make):
    return [make(b"\1" * SIZE, name) for name in "ab"]


def maps(files, mode="r+", device=0):
    return [gaiafs.mmap(f, device=device, mode=mode) for f in files]


def close(*mappings):
    for m in mappings:
        m.close()


def test_readers_see_all_of_a_group_or_nothing(files):
    a, b = maps(files)
    views = [gaiafs.view(f, [(0, SIZE)]) for f in files]
    with gaiafs.atomic(a, (b, 0, 4096)) as group:
        a.write(b"\2" * SIZE, offset=0)
        b.write(b"\2" * 4096, offset=0)
        assert group.version is None
        before = gaiafs.acquire(*views)
        assert [v.read(1, offset=0) for v in views] == [b"\1", b"\1"]
        with pytest.raises(gaiafs.Error) as e:
            a.release()
        assert e.value.errno == errno.EBUSY
    assert group.version > before
    assert gaiafs.acquire(*views, at_least=group.version, timeout=60) == group.version
    assert [v.read(1, offset=0) for v in views] == [b"\2", b"\2"]
    assert [f.read_bytes()[:4096] for f in files] == [b"\2" * 4096] * 2
    with pytest.raises(ValueError, match="before"):
        group.release()
    close(a, b, *views)


def test_an_exception_takes_a_group_back(files):
    a, b = maps(files)
    with pytest.raises(KeyError):
        with gaiafs.atomic(a, b) as group:
            a.write(b"\3" * SIZE, offset=0)
            raise KeyError
    assert group.version is None
    assert a.read(SIZE, offset=0) == b"\1" * SIZE
    assert files[0].read_bytes() == b"\1" * SIZE
    group = gaiafs.atomic(a, b)
    b.close()
    with pytest.raises(gaiafs.Error) as e:
        group.release()
    assert e.value.errno == errno.ECANCELED
    a.close()


def test_wrong_groups(files):
    (a, _), (reader, _) = opened = maps(files), maps(files, "r")
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.atomic(reader)
    assert e.value.errno == errno.EACCES
    for wrong in ([(a, 0, 0)], [(a, SIZE, 1)], [(a, -1, 2)], []):
        with pytest.raises(ValueError):
            gaiafs.atomic(*wrong)
    group = gaiafs.atomic(*[(a, i % SIZE, 1) for i in range(100_000)])
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.atomic(a)
    assert e.value.errno == errno.EBUSY
    group.abort()
    close(*opened[0], *opened[1])


def test_waiting_for_a_version(files, interrupting):
    a, b = maps(files)
    view = gaiafs.view(files[0], [(0, SIZE)])
    last = gaiafs.acquire(view)
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.acquire(view, at_least=2**63, timeout=0.01)
    assert e.value.errno == errno.ETIMEDOUT
    with pytest.raises(KeyboardInterrupt), interrupting(0.05):
        gaiafs.acquire(view, at_least=2**63)
    got = []
    waits = threading.Thread(target=lambda: got.append(gaiafs.acquire(view, at_least=last + 1, timeout=60)))
    waits.start()
    with gaiafs.atomic(a, b) as group:
        a.write(b"\5", offset=0)
    waits.join()
    assert got == [group.version] and view.read(1, offset=0) == b"\5"
    close(a, b, view)


def test_a_writer_is_killed_half_way(files, python):
    program = """
import sys, gaiafs
a, b = (gaiafs.mmap(f, mode="r+") for f in sys.argv[1:])
group = gaiafs.atomic(a, b)
a.write(b"half", offset=0)
print("stored", flush=True)
sys.stdin.read()
"""
    view = gaiafs.view(files[0], [(0, SIZE)])
    with subprocess.Popen(
        [*python, "-c", program, *map(str, files)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout.readline() == b"stored\n"
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    last = gaiafs.acquire(view)
    with pytest.raises(gaiafs.Error) as e:  # the writer's end comes before the wait, or ends it
        gaiafs.acquire(view, at_least=last + 1, timeout=0.5)
    assert e.value.errno in (errno.EPIPE, errno.ETIMEDOUT)
    assert view.read(4, offset=0) == b"\1" * 4 and files[0].read_bytes() == b"\1" * SIZE
    view.close()
