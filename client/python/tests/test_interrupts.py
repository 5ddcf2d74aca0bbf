"""Ctrl-C at any moment: the call ends with KeyboardInterrupt only, and everything still works."""

import os
import pathlib
import random
import subprocess
import sys

import pytest

INTERRUPTS = {"acquire_and_release": 1500, "with_acquire": 1000, "map_and_close": 700, "look": 300, "all_of_it": 1000}


@pytest.mark.parametrize("work", INTERRUPTS)
def test_interrupts(make, work):
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    script = pathlib.Path(__file__).with_name("interrupts.py")
    command = [sys.executable, "-W", "error", script, make(bytes(16384)), str(INTERRUPTS[work]), str(seed), work]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    print(done.stdout)
