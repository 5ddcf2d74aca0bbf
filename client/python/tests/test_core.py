"""The C library under the package: how it is found, and waits that a signal ends."""

import errno
import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import gaiafs
from gaiafs import _core

PACKAGE = pathlib.Path(gaiafs.__file__).parent


def importing(**environment):
    env = {k: v for k, v in {**os.environ, **environment}.items() if v}
    done = subprocess.run([sys.executable, "-c", "import gaiafs"], env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_library_that_is_missing(tmp_path):
    code, said = importing(GAIAFS_LIBRARY=str(tmp_path / "none.so"))
    assert code == 1 and "ImportError: gaiafs needs its C library, libgaiafs.so.0, and cannot load it" in said
    assert "none.so" in said and "make build" in said and "GAIAFS_LIBRARY" in said
    shutil.copytree(PACKAGE, tmp_path / "gaiafs", ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    code, said = importing(GAIAFS_LIBRARY="", LD_LIBRARY_PATH="", PYTHONPATH=str(tmp_path))
    assert (code, said) == (0, "") or "ImportError: gaiafs needs its C library" in said  # where one is installed it is found


def test_library_that_is_too_old(tmp_path):
    old = tmp_path / "old.so"
    for source, words in [
        ("int gaia_version(void) { return 100; }", "version 100, and 1"),
        ("int gaia_version(void) { return 1000; }", "gaia_map"),
        ("", "gaia_version"),
    ]:
        subprocess.run(["cc", "-x", "c", "-shared", "-fPIC", "-o", old, "-"], input=source, text=True, check=True)
        code, said = importing(GAIAFS_LIBRARY=str(old))
        assert code == 1 and "ImportError: gaiafs needs its C library" in said and words in said


def test_places(tmp_path, monkeypatch):
    monkeypatch.delenv("GAIAFS_LIBRARY", raising=False)
    package = tmp_path / "client" / "python" / "gaiafs"
    monkeypatch.setattr(_core, "__file__", str(package / "_core.py"))
    assert _core._places() == ["libgaiafs.so.0"]
    for file in (tmp_path / "build" / "libgaiafs.so.0", tmp_path / "client" / "c" / "gaiafs.h", package / "libgaiafs.so.0"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert _core._places() == [str(package / "libgaiafs.so.0"), str(tmp_path / "build" / "libgaiafs.so.0")]
    monkeypatch.setenv("GAIAFS_LIBRARY", "/elsewhere")
    assert _core._places() == ["/elsewhere"]


def test_threads_share_a_connection(make):
    path = make(bytes(8 * 4096))
    m = gaiafs.mmap(path, mode="r+")
    gaiafs.mmap(path).close()
    before = len(os.listdir("/proc/self/fd"))
    pages = []

    def work(i):
        for _ in range(50):
            m.acquire(i * 4096, 4096)
            m.write(b"%d" % i, i * 4096)
            pages.append(m.release(i * 4096, 4096))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(pages) == 400 and len(os.listdir("/proc/self/fd")) == before
    assert [path.read_bytes()[i * 4096 : i * 4096 + 1] for i in range(8)] == [b"%d" % i for i in range(8)]
    m.close()


def stopped(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def daemon():
    if "GAIAFS_TEST_DAEMON" not in os.environ:
        pytest.skip("needs a daemon of its own, which go test starts")
    pid = int(os.environ["GAIAFS_TEST_DAEMON"])

    class Daemon:
        def stop(self):
            os.kill(pid, signal.SIGSTOP)
            while not stopped(pid):
                os.sched_yield()

        def go_on(self):
            os.kill(pid, signal.SIGCONT)

    yield Daemon()
    os.kill(pid, signal.SIGCONT)


def test_daemon_that_does_not_answer(make, daemon, interrupting):
    """Every interrupted call ends at once, any number of times, and afterwards everything works."""
    path = make(bytes(4 * 4096))
    m = gaiafs.mmap(path, mode="r+")
    n = gaiafs.mmap(path)
    fd = os.open(path, os.O_RDWR)
    collected = gaiafs.mmap(path, lazy=True)
    collected.self = collected
    daemon.stop()
    before = time.monotonic()
    waiting = [
        *(lambda: m.advise("normal"), lambda: m.sync(durable=False), m.release),
        lambda: gaiafs.mmap(fd, lazy=True, length=4096),
        n.close,
    ]
    for i in range(300):  # more than a daemon takes at once
        with pytest.raises(KeyboardInterrupt), interrupting(0.001):
            waiting[i % 3]()
    for work in waiting[3:]:
        with pytest.raises(KeyboardInterrupt), interrupting(0.02):
            work()
    del collected  # a finalizer does not wait
    gc.collect()
    assert time.monotonic() - before < 30
    daemon.go_on()
    assert n.closed
    m.write(b"still")
    m.acquire()
    m.release()
    assert os.pread(fd, 5, 0) == b"still"
    os.close(fd)
    m.close()


def test_handler_that_raises_nothing_loses_nothing(make, daemon):
    """The call continues its wait, and returns the daemon's answer, once."""
    path = make(bytes(4 * 4096))
    m = gaiafs.mmap(path, mode="r+")
    m.write(b"x", 4096)
    m.write(b"x", 8192)
    ticks = []

    def tick(*ignored):
        ticks.append(None)
        if len(ticks) == 20:
            daemon.go_on()

    old = signal.signal(signal.SIGALRM, tick)
    daemon.stop()
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        assert m.release() == 2
        assert len(ticks) >= 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    m.close()


def test_requests_end_with_the_connection(make):
    """A forked child has its own connection; the parent's ends with the parent alone."""
    path = make(bytes(4096))
    m = gaiafs.mmap(path)
    child = os.fork()
    if child == 0:
        sockets = [p for p in pathlib.Path("/proc/self/fd").iterdir() if os.path.exists(p) and "socket" in os.readlink(p)]
        try:
            m.advise("normal")
        except gaiafs.Error as e:
            os._exit(len(sockets) if e.errno == errno.ECHILD else 100)
        os._exit(101)
    inherited = [p for p in pathlib.Path("/proc/self/fd").iterdir() if os.path.exists(p) and "socket" in os.readlink(p)]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code < 100 and code < len(inherited)
    m.close()
