"""Tests run on a mount that python_test.go makes: of emulated devices, or of ones that say they are GPUs, with a
libcuda for tests. Its address is in the environment; without it only tests run that need no mount."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

import gaiafs

KIND = os.environ.get("GAIAFS_TEST_KIND", "")
_numbers = itertools.count()


@pytest.fixture(scope="session")
def mount() -> pathlib.Path:
    if "GAIAFS_TEST_MOUNT" not in os.environ:
        pytest.skip("there is no mount: run the tests with go test ./client/python")
    directory = pathlib.Path(os.environ["GAIAFS_TEST_MOUNT"])
    if KIND not in ("", "emulated"):
        open_connections(directory)
    return directory


def sockets() -> int:
    """How many descriptors are sockets. Other threads may close descriptors meanwhile."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def open_connections(directory: pathlib.Path) -> None:
    """Opens both of the process's connections to a mount with GPUs, for tests that count descriptors: a thread opens
    the second one a moment after the first mapping."""
    path = directory / f"connections-{os.getpid()}"
    path.write_bytes(b"x")
    before, end = sockets(), time.monotonic() + 20
    gaiafs.mmap(path).close()
    while sockets() < before + 2:
        assert time.monotonic() < end, "there is no service connection"
        time.sleep(0.001)
    path.unlink()


@pytest.fixture(scope="session")
def source() -> pathlib.Path:
    if "GAIAFS_TEST_SOURCE" not in os.environ:
        pytest.skip("there is no mount: run the tests with go test ./client/python")
    return pathlib.Path(os.environ["GAIAFS_TEST_SOURCE"])


@pytest.fixture
def directory(mount: pathlib.Path) -> pathlib.Path:
    d = mount / f"{os.getpid()}-{next(_numbers)}"
    d.mkdir()
    return d


@pytest.fixture
def make(directory: pathlib.Path) -> Callable[[bytes], pathlib.Path]:
    """Makes a file on the mount."""

    def make(content: bytes, name: str = "file") -> pathlib.Path:
        path = directory / name
        path.write_bytes(content)
        return path

    return make


def mapped() -> int:
    """How much memory of devices is mapped, in pieces."""
    return pathlib.Path("/proc/self/maps").read_text().count("memfd")


@pytest.fixture(autouse=True)
def no_mapping_is_left() -> Iterator[None]:
    before = mapped()
    yield
    if mapped() != before:  # collecting takes a good part of a short test's time
        gc.collect()
    assert mapped() == before


@pytest.fixture
def interrupting() -> Iterator[Callable[[float], contextlib.AbstractContextManager[None]]]:
    """A KeyboardInterrupt of the main thread after some seconds, at whatever line that is then.

    No garbage is collected meanwhile: callbacks that run then may be of other tests, and Python ignores what an
    interrupt raises in them.
    """

    def interrupt(*ignored: object) -> None:
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def interrupting(seconds: float) -> Iterator[None]:
        gc.disable()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.enable()

    old = signal.signal(signal.SIGALRM, interrupt)
    yield interrupting
    signal.signal(signal.SIGALRM, old)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("kind"):
            if KIND and marker.args[0] != KIND:
                item.add_marker(pytest.mark.skip(reason=f"for {marker.args[0]} devices"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kind(name): only on a mount with devices of that kind")


@pytest.fixture
def python() -> list[str]:
    """The command of a Python that fails on warnings."""
    return [sys.executable, "-W", "error", "-X", "dev"]
