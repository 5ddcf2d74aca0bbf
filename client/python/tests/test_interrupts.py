"""Ctrl-C at any moment: the call ends with KeyboardInterrupt only, nothing is left, and everything still works."""

import os
import pathlib
import random
import subprocess
import sys

import pytest

INTERRUPTS = {
    **{"acquire_and_release": 1500, "with_acquire": 1000, "map_and_close": 700, "look": 300, "all_of_it": 1000},
    **{"groups": 1000, "load_and_drop": 700, "save": 300},
}
STEPS = "maps empties acquires uses groups views loads opens exports saves looks".split()


@pytest.mark.parametrize("work", INTERRUPTS)
def test_interrupts(make, work):
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    run("interrupts.py", make(bytes(16384)), INTERRUPTS[work], seed, work)


@pytest.mark.parametrize("work", STEPS)
def test_an_interrupt_before_every_byte_code(directory, work):
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    run("steps.py", directory, int(os.environ.get("STEPS", 500)), seed, work)


def run(script, *arguments):
    command = [sys.executable, "-W", "error", pathlib.Path(__file__).with_name(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    print(done.stdout)
