"""What a program sees after its daemon was killed. The mount is this test's own, and dead afterwards."""

import os
import pathlib
import signal

import pytest

import gaiafs


@pytest.mark.skipif("GAIAFS_TEST_DAEMON" not in os.environ, reason="needs a daemon of its own, which go test starts")
def test_daemon_gone(tmp_path):
    path = pathlib.Path(os.environ["GAIAFS_TEST_MOUNT"]) / "file"
    path.write_bytes(b"x" * 9000)
    m = gaiafs.mmap(path, mode="r+")
    a = m.array()
    with pytest.raises(KeyError), m.acquire():
        os.kill(int(os.environ["GAIAFS_TEST_DAEMON"]), signal.SIGKILL)
        with pytest.raises(gaiafs.Error):
            while True:
                m.release()
        raise KeyError("the program's own")
    assert a.tobytes() == b"x" * 9000  # the memory stays, but is no longer shared
    del a
    with pytest.raises(gaiafs.Error):
        m.close()
    assert m.closed
    with pytest.raises(gaiafs.Error):
        gaiafs.mmap(path)
