"""Interrupts a program at random moments, and looks whether everything goes on. test_interrupts.py runs it.

    python interrupts.py FILE INTERRUPTS SEED WHAT

The file is on a mount. WHAT is a key of WORK.
"""

import _thread
import faulthandler
import gc
import os
import pathlib
import random
import signal
import sys
import threading
import time

import numpy as np
import safetensors.numpy

import gaiafs

from conftest import sockets


def interrupt(*ignored):
    raise KeyboardInterrupt


def maps():
    return pathlib.Path("/proc/self/maps").read_text().count("memfd")


def settled():
    """Waits for what goes on after an interrupt in other threads."""
    while _thread._count() > len(OTHERS):
        time.sleep(0.001)
    gc.collect()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def acquire_and_release():
    m.acquire()
    m.write(b"x", 5)
    m.release()


def with_acquire():
    with m.acquire(0, 4096):
        m.read(4, offset=0)
    m.advise("normal")
    m.sync(durable=False, offset=4096, length=4096)


def map_and_close():
    with gaiafs.mmap(path, mode="r+", length=8192) as n:
        n.write(b"y", 0)
        a = n.array()
        del a


def look():
    gaiafs.status(mountpoint)
    gaiafs.info(path)
    gaiafs.warm(path)


def groups():
    with gaiafs.atomic(m):
        m.write(b"z" * 100, 0)


def load_and_drop():
    gaiafs.load_safetensors(model, framework="array")
    gaiafs.safe_open(model, "array").get_tensor("a")


def save():
    gaiafs.save(model.with_name("saved"), {"a": np.ones(300)}, device=0)


def all_of_it():
    random.choice([acquire_and_release, with_acquire, map_and_close])()


WORK = {
    f.__name__: f
    for f in (acquire_and_release, with_acquire, map_and_close, look, groups, load_and_drop, save, all_of_it)
}

path, interrupts, seed, work = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), WORK[sys.argv[4]]
rng = random.Random(seed)
random.seed(seed)
signal.signal(signal.SIGALRM, interrupt)
connections = sockets()
mountpoint = gaiafs.info(path)["mountpoint"]
device = len(gaiafs.info(path)["devices"]) - 1
model = pathlib.Path(path).with_name("model.safetensors")
safetensors.numpy.save_file({"a": np.ones(300)}, model)
m = gaiafs.mmap(path, mode="r+")
OTHERS, progress, stop = [], [0, 0, 0], threading.Event()


def other(i):
    """Works on another mapping, or makes some."""
    try:
        n = gaiafs.mmap(path, device=device)
        while not stop.is_set():
            n.acquire()
            if i:
                gaiafs.mmap(path, length=4096).close()
            progress[i] += 1
        n.close()
    except BaseException as e:
        print(f"thread {i}: {e!r}", flush=True)
        os._exit(1)


if work is all_of_it:
    OTHERS = [threading.Thread(target=other, args=(i,)) for i in range(3)]
    for t in OTHERS:
        t.start()
m.acquire()
gaiafs.mmap(path, mode="r+", length=8192).close()  # once, for what is opened and kept
connections += 1 if m.kind == "emulated" else 2
while not OTHERS and sockets() < connections:  # a thread opens the service connection
    time.sleep(0.001)
lost = []
sys.unraisablehook = lambda u: lost.append(f"{u.exc_value!r} in {u.object!r}")
if not OTHERS:  # in a thread's start and end Python itself may lose an interrupt
    work()
settled()
before = None if OTHERS else (descriptors(), maps())
longest = 0.0
for i in range(interrupts):
    faulthandler.dump_traceback_later(20, exit=True)
    at, delay = time.monotonic(), rng.random() ** 2 * 0.002 + 1e-5
    seen = progress[:]
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        while True:
            work()
    except KeyboardInterrupt:
        pass
    longest = max(longest, time.monotonic() - at - delay)
    if i % 50 == 0:
        m.acquire()
        m.release()
        while OTHERS and any(new == old for new, old in zip(progress, seen, strict=True)):
            time.sleep(0.001)
faulthandler.dump_traceback_later(20, exit=True)
stop.set()
for t in OTHERS:
    t.join()
OTHERS = []
assert m.acquire().pages >= 0 and m.release() >= 0
settled()
assert before is None or (descriptors(), maps()) == before, (before, descriptors(), maps())
assert not m._window._running
assert not lost, lost
m.release()


def mappings():
    return next(f["mappings"] for f in gaiafs.status(mountpoint)["files"] if f["name"] == os.path.relpath(path, mountpoint))


while mappings() > 1:  # the daemon may still be ending those that were given back
    time.sleep(0.001)
assert mappings() == 1
m.close()
print(f"{interrupts} interrupts, the longest {longest * 1000:.1f} ms after the signal")
