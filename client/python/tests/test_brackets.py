"""Memory that moves: files larger than the device, on a mount whose devices have few bytes, which python_test.go
makes.
"""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import re
import subprocess
import sys
import textwrap
import threading

import pytest

import gaiafs

from conftest import KIND

PART = 2 << 20  # an extent
BUDGET = int(os.environ.get("GAIAFS_TEST_BUDGET", "0"))
PARTS = 3 * BUDGET // PART

pytestmark = pytest.mark.skipif(not BUDGET, reason="for a mount of small devices: run the tests with go test ./client/python")
emulated = pytest.mark.kind("emulated")


def content(part: int) -> bytes:
    return random.Random(part).randbytes(4096) + bytes(PART - 4096)


@pytest.fixture
def path(directory):
    """A file of three times the device's memory."""
    name = directory / "large"
    with open(name, "wb") as f:
        for i in range(PARTS):
            f.write(content(i))
    return name


def test_random_brackets(path):
    rng = random.Random(7)
    expected = [bytearray(content(i)) for i in range(PARTS)]
    with gaiafs.mmap(path, mode="r+", movable=True) as m:
        assert m.movable and len(m) == PARTS * PART
        for _ in range(60):
            i, n = rng.randrange(PARTS), rng.randrange(1, 64)
            at = rng.randrange(4096 - n)
            with m.use(i * PART + at, n) as b:
                assert isinstance(b, gaiafs.Bracket)
                new = rng.randbytes(n)
                if KIND == "emulated":
                    view = m.buffer(i * PART + at, n)
                    assert view == expected[i][at : at + n]
                    view[:] = new
                    del view
                else:
                    assert m.read(n, offset=i * PART + at) == expected[i][at : at + n]
                    m.write(new, i * PART + at)
                expected[i][at : at + n] = new
            if rng.random() < 0.2:
                m.release(i * PART, PART)
        # Reads, slices and writes need no bracket.
        assert m[: 2 * PART] == expected[0] + expected[1]
        m[5:8] = b"abc"
        into = bytearray(3)
        assert m.readinto(into, offset=5) == 3 and into == b"abc"
        expected[0][5:8] = b"abc"
    assert path.read_bytes() == b"".join(expected)


def test_what_is_larger_than_the_device_moves(path):
    with (
        gaiafs.mmap(path) as m,
        gaiafs.mmap(path, length=PART) as small,
        gaiafs.mmap(path, length=PART, offset=PART, movable=True) as n,
    ):
        assert m.movable and not small.movable and n.movable
        with m.use(PARTS // 2 * PART, PART), small.use():
            assert m.read(8, offset=PARTS // 2 * PART) == content(PARTS // 2)[:8]
        for again in copy.copy(n), pickle.loads(pickle.dumps(n)):
            assert again.movable and again[:8] == content(1)[:8]
            again.close()
    with pytest.raises(gaiafs.Error, match="budget") as e:
        gaiafs.mmap(path, movable=False)
    assert e.value.errno == errno.ENOMEM


def test_several_mappings_nested_and_in_threads(path, make):
    other = make(bytes(PART))
    failures = []
    with gaiafs.mmap(path, movable=True) as m, gaiafs.mmap(other, mode="r+", movable=True) as n:

        def work(i: int) -> None:
            try:
                for k in range(8):
                    part = (i + 3 * k) % PARTS
                    with gaiafs.use([(m, part * PART, PART), n]):
                        assert m.read(16, offset=part * PART) == content(part)[:16]
                        with m.use(part * PART, 1), n.use(i, 1):
                            assert n[i] == k
                            n.write(bytes([k + 1]), i)
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failures
        assert n[:3] == b"\x08\x08\x08"


def test_out_of_order(path):
    with gaiafs.mmap(path) as m:
        a, b = m.use(0, 1), m.use(PART, 1)
        a.__enter__()
        b.__enter__()
        a.__exit__(None, None, None)  # b is still open
        assert m[PART] == content(1)[0]
        with pytest.raises(ValueError, match="is open"):
            b.__enter__()
        with pytest.raises(BufferError, match="brackets"):
            m.close()
        b.__exit__(None, None, None)
        b.__exit__(None, None, None)  # does nothing
        with a:
            assert m[0] == content(0)[0]
        with a, pytest.raises(RuntimeError, match="another thread"):
            caught = []
            t = threading.Thread(
                target=lambda: caught.append(pytest.raises(RuntimeError, a.__exit__, None, None, None))
            )
            t.start()
            t.join()
            raise caught[0].value


def test_errors(path):
    with gaiafs.mmap(path) as m:
        with pytest.raises(gaiafs.Error, match="budget") as e:
            m.use().__enter__()
        assert e.value.errno == errno.ENOMEM and e.value.filename == str(path)
        with pytest.raises(ValueError, match="not within"):
            m.use(PARTS * PART, 1)
        with pytest.raises(ValueError, match="at least one"):
            gaiafs.use([])
        with m.use(0, BUDGET), m.use(0, PART):
            with pytest.raises(gaiafs.Error) as e:
                m.use(BUDGET, BUDGET).__enter__()
            assert e.value.errno == errno.EDEADLK
        with m.use(BUDGET, BUDGET):  # works, because nothing was left behind
            pass
        with m.use(0, BUDGET):
            caught = []

            def wait() -> None:
                with pytest.raises(gaiafs.Error) as e:
                    m.use(BUDGET, BUDGET, timeout=0.05).__enter__()
                caught.append(e.value.errno)

            t = threading.Thread(target=wait)
            t.start()
            t.join()
            assert caught == [errno.ETIMEDOUT]
        used = m.use(0, 1)
    with pytest.raises(ValueError, match="closed"):
        used.__enter__()


def test_interrupts(path, interrupting):
    with gaiafs.mmap(path) as m:
        for i in range(40):
            try:
                with interrupting(0.0005 + i * 0.0001):
                    while True:
                        with m.use(i % PARTS * PART, PART):
                            m.read(8, offset=i % PARTS * PART)
            except KeyboardInterrupt:
                pass
        # A thread waits for the whole device, and gets it once the interrupted ones hold nothing.
        done = []

        def all_of_it() -> None:
            with m.use(0, BUDGET):
                done.append(True)

        t = threading.Thread(target=all_of_it)
        t.start()
        t.join()
        assert done
        # A wait ends at once.
        ready, over = threading.Event(), threading.Event()

        def hold() -> None:
            with m.use(0, BUDGET):
                ready.set()
                over.wait(60)

        t = threading.Thread(target=hold)
        t.start()
        ready.wait(60)
        with pytest.raises(KeyboardInterrupt), interrupting(0.05):
            with m.use(BUDGET, BUDGET):
                pass
        over.set()
        t.join()


def test_no_python_runs_for_an_ended_bracket(path):
    """If it does, an interrupt may come there, and is lost: Python ignores what such code raises."""
    ran = []
    with gaiafs.mmap(path) as m:
        used = m.use(0, PART)
        with used:
            pass
        sys.setprofile(lambda frame, event, argument: ran.append(frame.f_code.co_name) if event == "call" else None)
        try:
            del used
        finally:
            sys.setprofile(None)
    assert ran == []


@emulated
@pytest.mark.parametrize(
    "access, words",
    [
        ("m.numpy()[n + 5]", "byte {} of a mapping of .*/large on device 0, whose memory moves, and no bracket uses it"),
        ("b.__enter__(); a = m.numpy(); ctypes.memset(m.ptr + n, 1, 1)", "which is only read, by a store"),
    ],
)
def test_faults_are_explained(path, access, words):
    program = f"""
        import ctypes, sys, gaiafs
        gaiafs.explain_faults()
        m = gaiafs.mmap(sys.argv[1], movable=True)
        n = {PART}
        b = m.use(n, 1)
        print("alive", flush=True)
        {access}
        print("never")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -11 and done.stdout == "alive\n", done.stderr
    assert re.fullmatch(f"gaiafs: fault at .*{words.format(PART + 5)}.*\n", done.stderr), done.stderr
