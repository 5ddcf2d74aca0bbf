"""Mappings on a mount: what they show, what they keep, and what they refuse."""

import ctypes
import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import gaiafs
from gaiafs import dlpack, shelter

from conftest import KIND

PAGE = 4096
CONTENT = bytes(range(256)) * 16 * 1280  # 5 MiB: three extents


@pytest.fixture
def path(make):
    return make(CONTENT)


def stored(address, n):
    """Reads memory as a program does. The test's device pointers are host addresses."""
    return ctypes.string_at(address, n)


@pytest.mark.parametrize("offset, length", [(0, None), (PAGE, 100), (2 << 20, 1 << 20), (3 * PAGE, 4 << 20), (4 << 20, None)])
def test_mapping_has_the_files_bytes(path, offset, length):
    with gaiafs.mmap(path, device=1, offset=offset, length=length) as m:
        assert m.kind == KIND and m.device == 1 and m.mode == "r" and m.offset == offset
        n = length or len(CONTENT) - offset
        assert len(m) == m.nbytes == n
        assert stored(m.ptr, n) == m[:] == CONTENT[offset : offset + n]


@pytest.mark.parametrize("how", ["path", "str", "file", "descriptor"])
def test_what_can_be_mapped(path, how):
    with open(path, "rb") as f:
        m = gaiafs.mmap({"path": path, "str": str(path), "file": f, "descriptor": f.fileno()}[how], f"{KIND}:0", length=8)
    assert m[:] == CONTENT[:8]  # the file is closed
    m.close()


@pytest.mark.kind("emulated")
@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_gpus_on_a_mount_without(path, device, monkeypatch):
    for call in gaiafs.mmap, lambda p, d: gaiafs.view(p, [(0, 8)], d), lambda p, d: gaiafs.pack([p], d, framework="array"):
        with pytest.raises(gaiafs.Error, match="the mount has no GPUs, only.*emulated:0.*GAIAFS_EMULATED=1") as e:
            call(path, device)
        assert e.value.errno == errno.ENODEV
    monkeypatch.setenv("GAIAFS_EMULATED", "1")
    with gaiafs.mmap(path, device) as m:
        assert m.kind == "emulated" and m[:] == CONTENT
    with gaiafs.view(path, [(0, 8)], device) as v:
        assert v[:] == CONTENT[:8]


@pytest.mark.kind("cuda")
def test_emulated_on_a_mount_of_gpus(path):
    with pytest.raises(gaiafs.Error, match="no devices of kind 1, only GPUs"):
        gaiafs.mmap(path, "emulated:0")


def test_stores_are_seen_after_release(path):
    with gaiafs.mmap(path, mode="r+") as m:
        with m.acquire() as same:
            assert same is m
            ctypes.memmove(m.ptr + PAGE + 7, b"from the device", 15)
            assert path.read_bytes() == CONTENT
        want = CONTENT[: PAGE + 7] + b"from the device" + CONTENT[PAGE + 22 :]
        assert path.read_bytes() == want
        m.write(b"!", 0)
        assert m.release(PAGE, PAGE) == 0
        assert m.release(0, 1) == 1
        assert path.read_bytes() == b"!" + want[1:]


def test_writes_are_seen_after_acquire(path):
    with gaiafs.mmap(path) as m, gaiafs.mmap(path, device=1, mode="r+") as other:
        with open(path, "r+b") as f:
            f.write(b"from the CPU")
        assert m.acquire().pages == 1
        assert m.read(12, offset=0) == b"from the CPU"
        other.acquire()
        other.write(b"from a device", 2 << 20)
        other.release()
        assert m.acquire(2 << 20, 100).pages == 1
        assert m.read(13, offset=2 << 20) == b"from a device"
        assert m.acquire().pages == 0
        assert m.release() == 0


def test_release_at_the_end_also_after_an_exception(path):
    with gaiafs.mmap(path, mode="r+") as m:
        with pytest.raises(KeyError), m.acquire():
            m.write(b"kept", 0)
            raise KeyError
        assert path.read_bytes()[:4] == b"kept"


def test_release_that_fails_leaves_the_exception(path):
    m = gaiafs.mmap(path, mode="r+")
    with pytest.raises(KeyError) as e, m.acquire():
        m.close()
        raise KeyError("the program's own")
    said = getattr(e.value, "__notes__", [str(e.value.__context__)])
    assert "is closed" in said[0]
    n = gaiafs.mmap(path, mode="r+")
    with pytest.raises(ValueError, match="closed"), n.acquire():
        n.close()


def test_close_is_a_release(path):
    m = gaiafs.mmap(path, mode="r+")
    m.write(b"closed", 0)
    m.close()
    m.close()
    assert path.read_bytes()[:6] == b"closed"
    n = gaiafs.mmap(path, mode="r+")
    n.write(b"gone..", 0)
    n.sync(durable=False)
    del n
    gc.collect()
    assert path.read_bytes()[:6] == b"gone.."


def test_sync_reaches_the_backing_file(path, source, mount):
    with gaiafs.mmap(path, mode="r+") as m:
        m.write(b"synced", PAGE)
        m.sync()
        assert (source / path.relative_to(mount)).read_bytes()[PAGE : PAGE + 6] == b"synced"
        m.write(b"again.", PAGE)
        m.sync(durable=False, offset=PAGE, length=PAGE)
        assert (source / path.relative_to(mount)).read_bytes()[PAGE : PAGE + 6] == b"again."


def test_lazy_and_advice(path):
    with gaiafs.mmap(path, lazy=True) as m:
        for advice in ("sequential", "willneed", "dontneed", "random", "normal", 3):
            m.advise(advice)
        m.acquire(PAGE, PAGE)
        assert m.read(PAGE, offset=PAGE) == CONTENT[PAGE : 2 * PAGE]
        with pytest.raises(ValueError, match="no advice"):
            m.advise("often")


def test_past_the_end_are_zeros(make):
    path = make(b"short")
    with gaiafs.mmap(path, length=PAGE * 3) as m:
        assert m[:] == b"short" + bytes(PAGE * 3 - 5)
    with gaiafs.mmap(path, offset=PAGE * 8, length=10) as m:
        assert m[:] == bytes(10)


def test_file_that_shrinks(path):
    with gaiafs.mmap(path) as m:
        os.truncate(path, 10)
        m.acquire()
        assert m[:] == CONTENT[:10] + bytes(len(CONTENT) - 10)


def test_threads(path):
    with gaiafs.mmap(path, mode="r+") as m:
        failures = []

        def work(i):
            try:
                for k in range(20):
                    at = (i * 20 + k) * PAGE
                    m.acquire(at, PAGE)
                    m.write(bytes([i]) * PAGE, at)
                    m.release(at, PAGE)
            except Exception as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failures
    assert path.read_bytes()[: 160 * PAGE] == b"".join(bytes([i]) * PAGE for i in range(8) for _ in range(20))


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"device": 7}, gaiafs.Error, "7|lists its devices"),
        ({"device": -1}, gaiafs.Error, "no device -1"),
        ({"device": "gpu"}, ValueError, "no device"),
        ({"device": "1.0"}, ValueError, "no device"),
        ({"device": True}, TypeError, "not a bool"),
        ({"mode": "w"}, ValueError, "mode is"),
        ({"offset": 1}, ValueError, "multiple of 4096"),
        ({"offset": -PAGE}, ValueError, "negative"),
        ({"offset": 1 << 40}, ValueError, "pass a length"),
        ({"length": 0}, ValueError, "not positive"),
        ({"length": 1 << 63}, gaiafs.Error, "largest file"),
        ({"length": 1 << 40, "movable": False}, gaiafs.Error, "room|budget|memory"),
    ],
)
def test_bad_arguments(path, options, error, words):
    with pytest.raises(error, match=words):
        gaiafs.mmap(path, **options)


def test_bad_files(path, directory, tmp_path, make):
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.mmap(directory / "none")
    assert e.value.errno == errno.ENOENT and e.value.filename == str(directory / "none")
    elsewhere = tmp_path / "file"
    elsewhere.write_bytes(b"x")
    with pytest.raises(gaiafs.Error, match="not on a gaiafs mount"):
        gaiafs.mmap(elsewhere)
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.mmap(directory)
    assert e.value.errno == errno.EISDIR
    with pytest.raises(ValueError, match="0 bytes"):
        gaiafs.mmap(make(b"", "empty"))
    with open(path, "rb") as f, pytest.raises(gaiafs.Error, match="not open for writing"):
        gaiafs.mmap(f, mode="r+")
    with open(path, "ab") as f, pytest.raises(gaiafs.Error, match="not open for reading"):
        gaiafs.mmap(f)
    r, w = os.pipe()
    with pytest.raises(gaiafs.Error, match="regular"):
        gaiafs.mmap(r)
    os.close(r), os.close(w)
    with pytest.raises(gaiafs.Error, match="descriptor") as e:
        gaiafs.mmap(r)
    assert e.value.errno == errno.EBADF
    for bad in (1.5, None, True, object()):
        with pytest.raises(TypeError, match="a path, an open file or a descriptor"):
            gaiafs.mmap(bad)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(gaiafs.Error, match="regular"):
        gaiafs.mmap(tmp_path / "fifo")  # does not wait for a writer


def test_errors_can_be_sent_between_processes(directory):
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.mmap(directory / "none")
    again = pickle.loads(pickle.dumps(e.value))
    assert type(again) is type(e.value) and str(again) == str(e.value) and again.filename == e.value.filename


def test_write_takes_bytes(path):
    with gaiafs.mmap(path, mode="r+") as m:
        for data in (b"abc", bytearray(b"abc"), memoryview(b"a-b-c")[::2], np.frombuffer(b"abc", "u1")):
            m.write(b"---", 0)
            m.write(data, 0)
            assert m.read(4, offset=0) == b"abc\3"
        m.write(np.array([1, 2], "<u2"))
        assert m.read(4, offset=0) == b"\1\0\2\0"
        for data in (3, "abc", None):
            with pytest.raises(TypeError):
                m.write(data)
        assert m.read(4, offset=0) == b"\1\0\2\0"


def test_bad_ranges(path):
    with gaiafs.mmap(path, mode="r+", length=100) as m:
        for call in (m.acquire, m.release, lambda o, n: m.sync(True, o, n), lambda o, n: m.advise("normal", o, n)):
            for offset, n in [(-1, 5), (0, 0), (0, PAGE + 1), (PAGE, 1), (5, -1)]:
                with pytest.raises(ValueError, match="not within"):
                    call(offset, n)
        m.acquire(0, PAGE)  # the mapping has the whole page
        with pytest.raises(ValueError, match="not within"):
            m.write(b"xx", 99)
    with gaiafs.mmap(path) as m, pytest.raises(TypeError, match="read-only"):
        m.write(b"x", 0)


def test_use_after_close(path):
    m = gaiafs.mmap(path)
    m.close()
    assert m.closed and "closed" in repr(m)
    for use in (
        m.acquire, m.release, m.sync, m.read, m.array, m.tensor, m.numpy, m.buffer, m.__enter__,
        lambda: m.ptr, lambda: m.kind, lambda: m.device, lambda: m.advise("normal"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_streams_are_looked_at_at_once(path, mode):
    with gaiafs.mmap(path, mode=mode) as m:
        for use in (m.acquire, m.release):
            with pytest.raises(TypeError, match="no CUDA stream"):
                use(stream="x")
            with pytest.raises(ValueError, match="no handle"):
                use(stream=-1)


def test_close_refuses_while_arrays_live(path):
    m = gaiafs.mmap(path)
    a = m.array("uint16", (4,), 16)
    with pytest.raises(BufferError, match="arrays or tensors"):
        m.close()
    assert a.tobytes() == CONTENT[16:24]
    del a
    m.close()


def test_arrays_keep_the_memory(path):
    a = gaiafs.mmap(path, offset=PAGE).array("float32", (2, 2))
    gc.collect()
    assert a.tobytes() == stored(a.ptr, 16) == CONTENT[:16]
    assert a.shape == (2, 2) and a.nbytes == 16 and a.size == 4 and a.readonly and str(a.dtype) == "float32"


def test_array_arguments(path):
    with gaiafs.mmap(path, length=101) as m:
        for of, name in [
            ("F32", "float32"),
            (np.int16, "int16"),
            (np.dtype("u8"), "uint64"),
            ("<f2", "float16"),
            ("BF16", "bfloat16"),
            (None, "uint8"),
            (bool, "bool"),
            ("f4", "float32"),
            ("=i8", "int64"),
            ("|u1", "uint8"),
            ("torch.bfloat16", "bfloat16"),
            ("torch.float4_e2m1fn_x2", "float4_e2m1fn"),
        ]:
            assert str(m.array(of).dtype) == name
        assert m.array("float32").shape == (25,)
        assert m.array("uint8", 5).shape == (5,)
        assert m.array("F6_E2M3").shape == (132,)  # in 99 bytes
        assert m.array("F6_E3M2", None, 99).shape == (0,)
        assert m.array("F4", None, 16).shape == (170,)
        assert m.array("F4", (3, 4)).nbytes == 6
        for arguments, words in [
            (("float32", (26,)), "not within"),
            (("float32", (-1,)), "negative"),
            (("float32", (1 << 62, 8)), "not within"),
            (("float32", (1,), 2), "multiple of the 4 bytes"),
            (("F4", (3,)), "within a byte"),
            (("uint8", None, 102), "not within"),
        ]:
            with pytest.raises(ValueError, match=words):
                m.array(*arguments)
        for of in ("float31", float, np.dtype("M8[s]"), np.dtype("f4,f4"), 7):
            with pytest.raises(TypeError, match="no type of elements"):
                m.array(of)
        for of in (np.dtype(">f4"), ">f4"):
            with pytest.raises(TypeError, match="other order"):
                m.array(of)
        for of in ("float", "int", float, "torch.float"):  # NumPy and PyTorch give them different sizes
            with pytest.raises(TypeError, match="float32, float64"):
                m.array(of)


def test_child_cannot_use_the_parents_mapping(path):
    m = gaiafs.mmap(path)
    a = m.array()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            m.acquire()
        except gaiafs.Error as e:
            code = 0 if e.errno == errno.ECHILD else 2
        try:
            a.tobytes()
            code = 3
        except gaiafs.Error:
            pass
        try:
            m.close()
            code = 6
        except BufferError:
            code = code or (0 if KIND == "cuda" or stored(a.ptr, 9) == CONTENT[:9] else 7)
        del a
        m.close()
        try:
            n = gaiafs.mmap(path)  # makes its own connection; with CUDA it fails in a child
            code = code or (0 if KIND == "emulated" and n.read(256, offset=0) == CONTENT[:256] else 4)
        except gaiafs.Error as e:
            code = code or (0 if KIND == "cuda" and "spawn" in str(e) else 5)
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert m.read(9, offset=0) == CONTENT[:9]  # the parent's mapping still works
    del a
    m.close()


def test_child_of_a_process_whose_threads_hold_locks(path):
    """A lock that another thread held when the process forked is held for good in the child, and a call that ran does
    not end.
    """
    m = gaiafs.mmap(path)
    held, done = threading.Event(), threading.Event()

    def hold():
        m._window.using(lambda: held.set() or done.wait())

    t = threading.Thread(target=hold)
    t.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 0
        for use in (m.acquire, m.read, m.array):
            try:
                use()
                code = 1
            except gaiafs.Error as e:
                code = code or (0 if e.errno == errno.ECHILD else 2)
        m.close()
        try:
            gaiafs.mmap(path).close()
        except gaiafs.Error:
            code = code or (3 if KIND == "emulated" else 0)
        os._exit(code)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        t.join()
    m.close()


def test_close_that_is_interrupted(path, interrupting):
    m = gaiafs.mmap(path)
    running, go = threading.Event(), threading.Event()
    t = threading.Thread(target=m._window.using, args=(lambda: running.set() or go.wait(),))
    t.start()
    running.wait()
    with pytest.raises(KeyboardInterrupt), interrupting(0.01):
        m.close()  # waits
    go.set()
    t.join()
    assert not m.closed and m.read(9, offset=0) == CONTENT[:9]
    m.close()
    assert m.closed


def test_mapping_that_is_interrupted(path, mount, interrupting):
    """Ctrl-C while a file is mapped does not affect the process's other mappings, and leaves nothing behind."""
    m = gaiafs.mmap(path, mode="r+")
    for delay in (0.0005, 0.001, 0.002, 0.005):
        with pytest.raises(KeyboardInterrupt), interrupting(delay):
            while True:
                gaiafs.mmap(path).close()  # not left to a finalizer, where Python loses an interrupt
    m.write(b"still")
    m.release()
    assert path.read_bytes()[:5] == b"still"

    def mappings():
        gc.collect()  # interrupted work ends in another thread
        return next(f["mappings"] for f in gaiafs.status(mount)["files"] if f["name"] == str(path.relative_to(mount)))

    while mappings() > 1:
        os.sched_yield()
    m.close()


def run(python, script, *arguments, **environment):
    env = {k: v for k, v in {**os.environ, **environment}.items() if v}
    return subprocess.run(
        [*python, "-c", script, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=60
    )


def test_interpreter_exit_with_everything_open(path, python):
    script = """
import sys, numpy, gaiafs
m = gaiafs.mmap(sys.argv[1], mode="r+")
a = m.array()
if m.kind == "emulated":
    n, d = m.numpy(), numpy.from_dlpack(a)
else:
    d = a.__dlpack__(max_version=(1, 0))
class Cycle: pass
c = Cycle(); c.self = c; c.keep = (m, a, d)
m.write(b"exit")
"""
    done = run(python, script, path, FAKECUDA_LEAKS="")
    assert (done.returncode, done.stderr) == (0, "")
    until = time.monotonic() + 60
    while path.read_bytes()[:4] != b"exit":  # the daemon notices the end of a process by itself
        assert time.monotonic() < until
        time.sleep(0.01)


OBJECT = """
import sys, gaiafs
class Owner:
    def __init__(self): self.m = gaiafs.mmap(sys.argv[1], mode="r+")
    def __del__(self): self.m.write(b"exit"); self.m.close(); print("closed")
owner = Owner()
"""
GENERATOR = """
import sys, gaiafs
def mapped():
    with gaiafs.mmap(sys.argv[1], mode="r+") as m:
        yield m
    print("not closed")
def closed():
    try:
        yield from mapped()
    finally:
        print("closed")
g = closed()
next(g).write(b"exit")
"""


@pytest.mark.parametrize("script", [OBJECT, GENERATOR], ids=["object", "generator"])
def test_close_while_the_interpreter_finalizes(path, python, script):
    done = run(python, script, path, FAKECUDA_LEAKS="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
    assert path.read_bytes()[:4] == b"exit"


@pytest.mark.kind("emulated")  # CUDA has threads of its own
def test_no_thread_is_left_for_a_fork(path, python):
    script = """
import os, sys, time, gaiafs
def threads(): return len(os.listdir("/proc/self/task"))
def fork(when):
    end = time.monotonic() + 10  # a thread that was joined is there for a moment longer
    while threads() > 1 and time.monotonic() < end: time.sleep(0.001)
    assert threads() == 1, when
    child = os.fork()  # warns of other threads from Python 3.12 on
    if not child: os._exit(0)
    os.waitpid(child, 0)
for i in range(50):
    m = gaiafs.mmap(sys.argv[1])
    fork("after mmap")
    m.close()
    fork("after close")
"""
    done = run(python, script, path)
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupt_of_the_wait_for_a_thread_undoes_the_work(monkeypatch):
    def interrupt(job):
        raise KeyboardInterrupt

    class Thing:
        pass

    ended = []

    def make():
        thing = Thing()
        shelter.at_end(thing, map(ended.append, ["ended"]))
        return thing

    monkeypatch.setattr(shelter._Job, "wait_for_thread", interrupt)
    with pytest.raises(KeyboardInterrupt) as e:  # the exception still has its frames
        shelter.run(make)
    assert ended == ["ended"] and e.tb


@pytest.mark.parametrize("cycle", [False, True])
def test_ends_come_once(cycle):
    class Thing:
        pass

    ended, thing, taken = [], Thing(), Thing()
    thing.self = thing if cycle else None
    shelter.at_end(thing, map(ended.append, ["ended", "again"]))
    steps = map(ended.append, ["taken"])
    shelter.at_end(taken, steps)
    next(steps)
    kept = len(shelter._ends)
    del thing, taken
    gc.collect()
    assert ended == ["taken", "ended"] and len(shelter._ends) == kept - 2


def test_work_that_goes_on_without_its_caller(monkeypatch):
    """An interrupted wait ends at once; what the work then makes is given back."""
    go_on, ended, done = threading.Event(), [], threading.Event()

    class Thing:
        pass

    def work():
        assert go_on.wait(20)
        thing = Thing()
        shelter.at_end(thing, map(lambda _: (ended.append("ended"), done.set()), [None]))
        return thing

    def interrupt(*ignored):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        with pytest.raises(KeyboardInterrupt) as e:
            shelter.run(work)
    finally:
        signal.signal(signal.SIGALRM, old)
    go_on.set()
    assert done.wait(20) and ended == ["ended"] and e.tb


def test_libraries_that_are_not_installed(path, monkeypatch):
    with gaiafs.mmap(path) as m:
        for name, use in (("torch", m.tensor), ("torch", lambda: m.array().torch()), ("numpy", m.numpy)):
            monkeypatch.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=f"{name} is not installed: pip install {name}, or use array()"):
                use()
            monkeypatch.undo()


def test_death_is_a_release(path, python):
    script = "import os, sys, gaiafs; gaiafs.mmap(sys.argv[1], mode='r+').write(b'dead'); os.kill(os.getpid(), 9)"
    done = run(python, script, path)
    assert done.returncode == -signal.SIGKILL
    with gaiafs.mmap(path, device=1) as m:  # an answer comes after the daemon noticed, or it tells nothing
        for _ in range(500):
            m.acquire()
            if m.read(4, offset=0) == b"dead":
                break
        assert m.read(4, offset=0) in (b"dead", CONTENT[:4])


def test_status_and_info(path, mount):
    with gaiafs.mmap(path) as m:
        s = gaiafs.status(mount)
        assert s["version"] == 1 and len(s["devices"]) == 2
        i = gaiafs.info(path)
        assert i["mountpoint"] == str(mount)
        assert i["files"][0]["size_bytes"] == len(CONTENT)
        assert i["files"][0]["holders"][0]["resident_pages"] == len(CONTENT) // PAGE
        del m
    with pytest.raises(gaiafs.Error):
        gaiafs.status("/")
    with pytest.raises(gaiafs.Error):
        gaiafs.info("/proc/self/status")


def test_info_is_of_the_file_that_has_the_name_now(path, mount):
    with gaiafs.mmap(path):
        os.replace(path, path.with_name("old"))
        path.write_bytes(CONTENT)
        assert gaiafs.info(path)["files"][0]["holders"] == []
        assert gaiafs.info(path.with_name("old"))["files"][0]["holders"] != []
    path.with_name("old").unlink()


def test_warm(path, mount):
    seen = []
    assert gaiafs.warm(path, device=1, progress=lambda *a: seen.append(a)) == len(CONTENT)
    assert seen == [(str(path), len(CONTENT), len(CONTENT))]
    f = next(f for f in gaiafs.status(mount)["files"] if f["name"] == str(path.relative_to(mount)))
    assert f["mappings"] == 0
    assert f["holders"][0]["device"] == 1 and f["holders"][0]["resident_pages"] == len(CONTENT) // PAGE
    with gaiafs.mmap(path, device=1) as m:
        assert m[:] == CONTENT


# Emulated devices: host memory.

host = pytest.mark.kind("emulated")


@host
def test_numpy(path):
    m = gaiafs.mmap(path, mode="r+")
    a = m.numpy("<u4", (2, 3), PAGE)
    assert a.tobytes() == CONTENT[PAGE : PAGE + 24] and a.shape == (2, 3)
    assert a.__array_interface__["data"][0] == m.ptr + PAGE
    a += 1
    m.release()
    assert path.read_bytes()[PAGE : PAGE + 24] == a.tobytes()
    record = np.dtype([("a", "<u2"), ("b", "<f8")])
    assert m.numpy(record)[1]["a"] == 0x0B0A
    assert m.numpy().shape == (len(CONTENT),)
    assert m.numpy("bfloat16", (3,)).nbytes == 6
    with pytest.raises(TypeError, match="objects"):
        m.numpy(object)
    assert m.numpy(">u2", 2).tolist() == [1, 0x203]
    assert m.numpy("f4", (0, 3)).shape == (0, 3) and m.numpy("f4", ()).shape == ()
    assert m.numpy("f4", None, len(CONTENT)).shape == (0,)
    for dtype, shape, words in [("f4", (-1,), "negative"), ("f4", len(CONTENT), "not within"), ("S0", None, "no size")]:
        with pytest.raises(ValueError, match=words):
            m.numpy(dtype, shape)
    del a
    m.close()


@host
def test_read_only_arrays(path):
    with gaiafs.mmap(path) as m:
        a = m.numpy()
        with pytest.raises(ValueError, match="read-only"):
            a[0] = 1
        view = m.buffer(0, 10)
        assert view.readonly and bytes(view) == CONTENT[:10]
        for b in (a, np.asarray(m.array()), np.from_dlpack(m.array()), np.asarray(m.array("bfloat16"))):
            assert not b.flags.writeable
            with pytest.raises(ValueError):
                b.flags.writeable = True
        del a, b, view


@host
def test_dlpack_and_array_interface(path):
    m = gaiafs.mmap(path, mode="r+")
    a = m.array("int32", (3, 4, 5), 16)
    want = np.frombuffer(CONTENT, "<i4", 60, 16).reshape(3, 4, 5)
    for shape in ((), (0, 3), (1,), (2, 1, 2)):
        for b in (np.from_dlpack(m.array("float64", shape)), np.asarray(m.array("float64", shape))):
            assert b.shape == shape and b.tobytes() == CONTENT[: b.nbytes]
    ml_dtypes = pytest.importorskip("ml_dtypes")
    b = np.asarray(m.array("bfloat16", (3,)))
    assert b.dtype == ml_dtypes.bfloat16 and b.ctypes.data == m.ptr
    assert np.asarray(m.array("bfloat16", (3,)), "float32").dtype == np.float32
    assert not hasattr(a, "__cuda_array_interface__")
    for b in (np.from_dlpack(a), np.asarray(a)):
        assert b.dtype == want.dtype and b.flags.writeable
        assert (b == want).all() and b.ctypes.data == m.ptr + 16
    del a
    with pytest.raises(BufferError):
        m.close()
    del b
    m.close()  # notices the end of from_dlpack's export


@host
def test_dlpack_deleter_runs_during_exceptions(path):
    m = gaiafs.mmap(path)
    for _ in range(100):
        with pytest.raises(ZeroDivisionError):
            kept = np.from_dlpack(m.array())
            del kept
            (lambda kept: 1 / 0)(np.from_dlpack(m.array()))
    gc.collect()
    m.close()
    assert not dlpack._exports


@host
def test_dlpack_in_memory_order_after_collection(path):
    b = np.from_dlpack(gaiafs.mmap(path).array())
    assert b.tobytes() == CONTENT
    del b
    gc.collect()  # notices, without a call of the package
    assert not dlpack._exports


def test_dlpack_refuses(path):
    m = gaiafs.mmap(path)
    a = m.array("float32", (4,))
    for options in ({"copy": True}, {"dl_device": (13, 0)}):
        with pytest.raises(BufferError):
            a.__dlpack__(**options)
    with pytest.raises(BufferError, match="bits"):
        m.array("F4", (4,)).__dlpack__()
    with pytest.raises(BufferError if KIND == "emulated" else ValueError):
        a.__dlpack__(stream=0)
    for options in ({}, {"max_version": (0, 8)}):
        with pytest.raises(BufferError, match=r"read-only.*'r\+'"):
            a.__dlpack__(**options)
    w = gaiafs.mmap(path, mode="r+")
    c = w.array().__dlpack__()
    assert '"dltensor"' in repr(c)
    del c
    w.close()
    c, v = (
        a.__dlpack__(max_version=(1, 3)),
        a.__dlpack__(max_version=(2, 0), copy=False, dl_device=a.__dlpack_device__()),
    )
    assert '"dltensor_versioned"' in repr(c) and '"dltensor_versioned"' in repr(v)
    del a
    with pytest.raises(BufferError):
        m.close()
    del c, v  # no consumer took them
    m.close()


@host
def test_tensor(path):
    torch = pytest.importorskip("torch")
    m = gaiafs.mmap(path, mode="r+")
    t = m.tensor(torch.float32, (2, 3), PAGE)
    assert t.data_ptr() == m.ptr + PAGE and t.shape == (2, 3) and t.dtype is torch.float32
    for dtype in ("bfloat16", "float8_e4m3fn", "bool", "complex64", "uint16"):
        assert m.tensor(dtype, (3,), 16).dtype is getattr(torch, dtype)
    assert m.tensor("int8", (0, 3)).shape == (0, 3) and m.tensor("int8", ()).shape == ()
    t.fill_(2)
    m.release()
    assert path.read_bytes()[PAGE : PAGE + 24] == b"\0\0\0\x40" * 6
    f = torch.from_dlpack(m.array("int16", (4,)))
    assert f.data_ptr() == m.ptr
    with pytest.raises(BufferError):
        m.close()
    del t, f
    m.close()
    with pytest.warns(gaiafs.ReadOnlyWarning, match=r"'r\+'"):
        t = gaiafs.mmap(path, device=1).tensor()
    gc.collect()
    assert t[PAGE + 3] == 0x40


# Devices that are disguised as GPUs.

gpu = pytest.mark.kind("cuda")


@gpu
def test_cuda_array_interface(path):
    with gaiafs.mmap(path, device=1, mode="r+") as m:
        a = m.array("float64", (3,), 16)
        assert a.device == "cuda:1" and a.__dlpack_device__() == (2, 1)
        assert a.__cuda_array_interface__ == {
            "shape": (3,), "typestr": "<f8", "data": (m.ptr + 16, False), "version": 3, "strides": None, "stream": None,
        }  # fmt: skip
        assert not hasattr(a, "__array_interface__") and not hasattr(m.array("BF16"), "__cuda_array_interface__")
        for stream in (None, 1, 2, -1, 1 << 40):
            assert "dltensor" in repr(a.__dlpack__(stream=stream))
        assert m.array("float64", (0, 3), 16).__cuda_array_interface__["data"] == (0, False)
        with pytest.raises(BufferError, match="GPU"):
            np.asarray(m.array("BF16"))
        with pytest.raises(ValueError, match="no handle"):
            m.release(stream=-1)
        for use in (m.numpy, m.buffer):
            with pytest.raises(BufferError, match="GPU"):
                use()
        del a


@gpu
def test_no_libcuda(path, python):
    script = """
import errno, sys, gaiafs
try:
    gaiafs.mmap(sys.argv[1])
except gaiafs.Error as e:
    assert e.errno == errno.ENODEV and "libcuda.so.1" in str(e), e
else:
    sys.exit(1)
"""
    done = run(python, script, path, LD_LIBRARY_PATH="")
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(gaiafs.Error, match="no CUDA device 2: .*CUDA_VISIBLE_DEVICES") as e:
        gaiafs.mmap(path, device=2)
    assert e.value.errno == errno.ENODEV
    # This process sees the device, but the mount does not use it.
    script = script.replace("sys.argv[1]", "sys.argv[1], 2").replace("libcuda.so.1", "--gpus")
    done = run(python, script, path, FAKECUDA_DEVICES="3")
    assert (done.returncode, done.stderr) == (0, "")
    # If the variable hides every GPU, cuInit fails.
    script = script.replace("--gpus", "CUDA_VISIBLE_DEVICES is '-1'")
    done = run(python, script, path, FAKECUDA_FAIL="cuInit:100", CUDA_VISIBLE_DEVICES="-1")
    assert (done.returncode, done.stderr) == (0, "")


@gpu
@pytest.mark.parametrize(
    "call", ["cuInit", "cuDeviceGetUuid_v2", "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemMap:2:1",
             "cuMemSetAccess", "cuMemRelease", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxGetCurrent"]
)  # fmt: skip
def test_driver_that_fails(path, python, call):
    script = """
import errno, os, sys, gaiafs
def fails():
    try:
        gaiafs.mmap(sys.argv[1])
    except gaiafs.Error as e:
        print(e)
    else:
        sys.exit(1)
fails()  # the connection stays
before = len(os.listdir("/proc/self/fd"))
fails()
assert len(os.listdir("/proc/self/fd")) == before or "cuMemRelease" in os.environ["FAKECUDA_FAIL"]
"""
    fail = call if ":" in call else call + ":2"
    done = run(python, script, path, FAKECUDA_FAIL=fail, FAKECUDA_LEAKS="" if call == "cuMemRelease" else "1")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "CUDA_ERROR_OUT_OF_MEMORY" in done.stdout


@gpu
def test_context_stack_is_left_as_it_was(path):
    lib = ctypes.CDLL("libcuda.so.1")
    lib.cuInit(0)
    current = ctypes.c_void_p()

    def stack():
        lib.cuCtxGetCurrent(ctypes.byref(current))
        return current.value

    for own in (None, 0, 1):
        context = ctypes.c_void_p()
        if own is not None:
            lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), own)
            lib.cuCtxPushCurrent_v2(context)
        before = stack()
        with gaiafs.mmap(path, device=0, mode="r+") as m:
            assert stack() == before
            m.write(b"x", 0)
            m.release()
            m.release(stream=0 if own == 0 else None)
            assert stack() == before
        assert stack() == before
        if own is not None:
            lib.cuCtxPopCurrent_v2(ctypes.byref(context))
            lib.cuDevicePrimaryCtxRelease_v2(own)


@gpu
def test_release_waits_for_the_stream(path):
    lib = ctypes.CDLL("libcuda.so.1")
    m = gaiafs.mmap(path, mode="r+")
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    lib.cuCtxPushCurrent_v2(context)
    try:
        assert lib.cuStreamCreate(ctypes.byref(stream), 0) == 0
        begun = threading.Event()

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def slowly(argument):
            begun.wait()
            ctypes.memmove(m.ptr, b"late", 4)

        class Stream:
            cuda_stream = stream.value

        for handle in (stream.value, Stream()):
            begun.clear()
            m.write(b"----", 0)
            assert lib.cuLaunchHostFunc(stream, slowly, None) == 0
            begun.set()
            m.release(stream=handle)
            assert path.read_bytes()[:4] == b"late"
        with pytest.raises(TypeError, match="no CUDA stream"):
            m.release(stream="fast")
        lib.cuStreamDestroy_v2(stream)
    finally:
        lib.cuCtxPopCurrent_v2(ctypes.byref(context))
        lib.cuDevicePrimaryCtxRelease_v2(0)
    m.close()


@pytest.fixture
def lib():
    """Returns the driver, with a context of device 0 current."""
    lib = ctypes.CDLL("libcuda.so.1")
    lib.cuInit(0)
    context = ctypes.c_void_p()
    lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    lib.cuCtxPushCurrent_v2(context)
    yield lib
    lib.cuCtxPopCurrent_v2(ctypes.byref(context))
    lib.cuDevicePrimaryCtxRelease_v2(0)


@pytest.fixture
def stream(lib):
    stream = ctypes.c_void_p()
    assert lib.cuStreamCreate(ctypes.byref(stream), 1) == 0
    yield stream
    lib.cuStreamDestroy_v2(stream)


@gpu
def test_written_bytes_are_there(path, lib, stream):
    """The driver returns from a copy out of ordinary memory before the bytes are there."""
    with gaiafs.mmap(path, mode="r+") as m:
        m.write(b"there", 0)
        assert stored(m.ptr, 5) == b"there"
        m.write(b"again", 0)
        m.release(stream=stream.value)
        assert path.read_bytes()[:5] == b"again"


@gpu
@pytest.mark.parametrize("whole_device", [False, True])
def test_acquire_waits_for_the_work_that_was_begun(path, lib, stream, whole_device):
    seen, go = [], threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def kernel(argument):
        go.wait()
        seen.append(stored(m.ptr, 3))

    with gaiafs.mmap(path) as m:
        assert lib.cuLaunchHostFunc(stream, kernel, None) == 0
        with open(path, "r+b") as f:
            f.write(b"new")
        go.set()
        m.acquire(stream=None if whole_device else stream.value)
        assert seen == [CONTENT[:3]] and m.read(3, offset=0) == b"new"
        with pytest.raises(TypeError, match="no CUDA stream"):
            m.acquire(stream="fast")


@gpu
def test_memory_that_goes_disturbs_no_capture(path, lib, stream):
    """Any thread's garbage collection may collect it, during any call."""
    header = b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}'
    weights = path.with_name("crooked")
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"123456789")

    def capture(work):
        graph = ctypes.c_void_p()
        assert lib.cuStreamBeginCapture_v2(stream, 0) == 0
        t = threading.Thread(target=work)
        t.start()
        t.join()
        work()
        ended = lib.cuStreamEndCapture(stream, ctypes.byref(graph))
        lib.cuGraphDestroy(graph)
        return ended

    kept = []
    for _ in range(2):
        m = gaiafs.mmap(path, mode="r+")
        kept.append(m.array())
        kept.append([gaiafs.load_safetensors(weights, framework="array", private=p)["a"] for p in (False, True)])
        m.self = m
        del m

    def drop():
        del kept[:2]
        gc.collect()

    def use():
        with gaiafs.mmap(path, mode="r+") as m:
            m.write(b"captured", 0)
            assert m.read(8, offset=0) == b"captured"
            m.release(stream=0)

    assert capture(drop) == 0 and not kept
    assert capture(use) == 0
    assert capture(lambda: lib.cuCtxSynchronize()) == 901  # the tests' driver enforces what is forbidden
    mode = ctypes.c_int(0)
    lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0  # unchanged


@gpu
def test_memory_goes_after_the_work_that_uses_it(path, lib, stream):
    """A store into unmapped memory would end the test's process."""
    for how in ("close", "collected"):
        m = gaiafs.mmap(path, mode="r+")
        ptr, go, done = m.ptr, threading.Event(), []

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def kernel(argument, go=go, ptr=ptr, done=done):
            go.wait()
            for _ in range(5000):  # runs for a while
                os.sched_yield()
            ctypes.memmove(ptr, b"late", 4)
            done.append(True)

        assert lib.cuLaunchHostFunc(stream, kernel, None) == 0
        go.set()
        if how == "close":
            m.close()
        del m
        assert done and path.read_bytes()[:4] == b"late"


def test_unmapped_at_the_end(path, python):
    """No mapping, reservation or descriptor is left behind, however a mapping ended."""
    script = """
import gc, os, pathlib, sys, time, gaiafs
def descriptors():
    return sorted(os.readlink(f"/proc/self/fd/{d}") for d in os.listdir("/proc/self/fd") if
    os.path.exists(f"/proc/self/fd/{d}"))
def maps():
    return pathlib.Path("/proc/self/maps").read_text().count("memfd")
def wait(done):
    end = time.monotonic() + 10
    while not done() and time.monotonic() < end: time.sleep(0.01)
first = len(descriptors())
gaiafs.mmap(sys.argv[1]).close()
wait(lambda: len(descriptors()) == first + int(sys.argv[2]))  # a thread opens the service connection
before, mapped = descriptors(), maps()
for _ in range(5):
    m = gaiafs.mmap(sys.argv[1], mode="r+"); m.close()
    m = gaiafs.mmap(sys.argv[1]); a = m.array(); del m; c = a.__dlpack__(max_version=(1, 0)); del a; del c; gc.collect()
    m = gaiafs.mmap(sys.argv[1]); m.self = m; del m; gc.collect()
wait(lambda: descriptors() == before)  # what other threads close may be there for a moment
assert descriptors() == before, (descriptors(), before)
assert maps() == mapped, (maps(), mapped)
"""
    done = run(python, script, path, 1 if KIND == "emulated" else 2, FAKECUDA_LEAKS="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_stores_past_the_end(directory):
    path = directory / "short"
    path.write_bytes(b"x" * 100)
    with gaiafs.mmap(path, length=8192, mode="r+") as m:
        m.write(b"lost", offset=4096)
        with pytest.warns(gaiafs.PastEndWarning, match="pages: 1"):
            m.release()
        m.write(b"kept", offset=0)
        m.release()  # does not warn again
        m.write(b"lost", offset=4096)
        with pytest.warns(gaiafs.PastEndWarning):
            m.close()
    assert path.read_bytes() == b"kept" + b"x" * 96
