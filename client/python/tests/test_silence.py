"""A daemon that is stopped: the package says for whom a program waits."""

import os
import subprocess
import threading
import time

import numpy as np
import pytest
import safetensors.numpy
from test_core import daemon  # noqa: F401

PROGRAM = """
import sys, gaiafs
m = gaiafs.mmap(sys.argv[1])
print("ready", flush=True)
input()
if sys.argv[2] == "load":
    gaiafs.load_safetensors(sys.argv[1], framework="array")
else:
    m.acquire()
    m.close()
"""


@pytest.mark.parametrize("what", ["load", "acquire"])
def test_it_is_said_who_is_stopped(make, daemon, python, what):  # noqa: F811
    path = make(b"", "model.safetensors")
    safetensors.numpy.save_file({"w": np.ones(3)}, path)
    with subprocess.Popen(
        [*python, "-c", PROGRAM, path, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as p:
        assert p.stdout.readline() == b"ready\n"
        daemon.stop()
        begin = time.monotonic()
        p.stdin.write(b"\n")
        p.stdin.flush()
        late = threading.Timer(60, daemon.go_on)
        late.start()
        said = p.stderr.readline().decode()
        late.cancel()
        daemon.go_on()
        rest = p.communicate(timeout=60)[1]
    assert time.monotonic() - begin > 4, "it was said at once"
    pid = os.environ["GAIAFS_TEST_DAEMON"]
    assert said.startswith("gaiafs: still waiting for the daemon") or "does not answer" in said
    assert f"process {pid} is stopped" in said and f"kill -CONT {pid}" in said, said
    assert (p.returncode, rest) == (0, b""), "it is said once"
