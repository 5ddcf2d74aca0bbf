"""Interrupts calls of the package before every single byte code, and looks whether anything is left. test_interrupts.py
runs it.

    python steps.py DIRECTORY INTERRUPTS SEED WHAT

The directory is on a mount, and empty. WHAT is a key of WORK. If the package's part of the call has more byte codes
than INTERRUPTS, it takes that many of them at random.
"""

import _thread
import faulthandler
import gc
import os
import pathlib
import pickle
import random
import sys
import time

import numpy as np
import safetensors.numpy

import gaiafs
from gaiafs import dlpack

PACKAGE = os.path.dirname(gaiafs.__file__) + os.sep
directory = pathlib.Path(sys.argv[1])
rng = random.Random(int(sys.argv[3]))
path, model, saved = directory / "file", directory / "model", directory / "saved.safetensors"


class Interrupt(BaseException):
    pass


class Steps:
    """Counts the byte codes of the package, and raises Interrupt before one of them."""

    def __init__(self, at):
        self.at, self.seen, self.raised = at, 0, False

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame, event, argument):
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at and not self.raised:
                self.raised = True
                raise Interrupt
        return self.step


def run(work, at):
    steps = Steps(at)
    sys.settrace(steps.trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return steps


def maps():
    with gaiafs.mmap(path, mode="r+", length=8192) as m:
        m.write(b"x", 0)
        a = m.array()
        del a


def empties():
    gaiafs.mmap(directory / "new", mode="w+", length=4096).close()


def acquires():
    with m.acquire(0, 4096) as n:
        n.read(4, offset=0)
    m.sync(durable=False)
    m.acquire(wait=False).result()


def uses():
    with gaiafs.use([(movable, 0, 4096), (m, 0, 4096)]):
        movable.read(4, offset=0)


def groups():
    with gaiafs.atomic(m) as group:
        m.write(b"y" * 100, 0)
    assert gaiafs.acquire(m) >= group.version
    group = gaiafs.atomic((m, 4096, 4096))
    group.abort()


def views():
    v = gaiafs.view([path, path], [(0, 10), (5, 10, 20, 3)])
    v.array(1)
    pickle.loads(pickle.dumps(v)).close()
    p = gaiafs.pack([path, model / "config.json"], framework="array")
    p.acquire()
    p.close()
    gaiafs.Dataset.rows(path, "uint8", (4,), framework="array")[1]


def loads():
    weights = gaiafs.load_safetensors(model, framework="array", private=["b"])
    weights.acquire()


def opens():
    with gaiafs.safe_open(model / "model-1.safetensors", "array") as f:
        f.metadata()
        f.get_tensor("a")
        f.get_slice("a")[1:3, 2:3]
        f.get_tensors()


def exports():
    n = gaiafs.mmap(path, length=4096)
    if n.kind == "cuda":  # NumPy takes no memory of a GPU
        n.array().__dlpack__(max_version=(1, 0))
    else:
        np.from_dlpack(n.array())
        n.numpy()
    n.close()


def saves():
    try:
        gaiafs.save(saved, {"a": np.ones(300), "b": np.zeros(3, "u1")}, {"a": "b"}, device=0)
    except Interrupt:
        # All or nothing, whenever it comes.
        assert not saved.exists() or len(safetensors.numpy.load_file(saved)["a"]) == 300
        raise


def looks():
    gaiafs.status(mountpoint)
    gaiafs.info(model)
    gaiafs.warm(model)
    gaiafs.warm(path)


WORK = {f.__name__: f for f in (maps, empties, acquires, uses, groups, views, loads, opens, exports, saves, looks)}


def settle():
    """Waits for what goes on after an interrupt in other threads. Python counts a thread only once it has begun."""
    while len(os.listdir("/proc/self/task")) > threads:
        time.sleep(0.0001)
    dlpack.sweep()  # as the next call of the package does


def left():
    fds = sorted(filter(None, map(target, os.listdir("/proc/self/fd"))))
    with open("/proc/self/maps") as f:
        return fds, f.read().count("memfd"), sorted(os.listdir(directory))


def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the directory that was listed
        return ""


lost = []
sys.unraisablehook = lambda u: lost.append(f"{u.exc_value!r} in {u.object!r}")
path.write_bytes(b"x" * 16384)
model.mkdir()
(model / "config.json").write_text("{}")
tensors = {"a": np.arange(12.0).reshape(3, 4), "b": np.ones(5, "u1")}
safetensors.numpy.save_file(tensors, model / "model-1.safetensors", {"x": "y"})
safetensors.numpy.save_file({"c": np.ones((7, 3), "f2")}, model / "model-2.safetensors")
mountpoint = gaiafs.info(path)["mountpoint"]
m = gaiafs.mmap(path, mode="r+")
movable = gaiafs.mmap(path, mode="r+", movable=True)
work = WORK[sys.argv[4]]
faulthandler.dump_traceback_later(60, exit=True)  # in a thread
threads = 1000
for _ in range(3):  # for what is opened, imported and kept
    work()
count = max(run(work, 0).seen for _ in range(2))
while _thread._count():
    time.sleep(0.0001)
threads = len(os.listdir("/proc/self/task"))
gc.collect()
gc.disable()  # its callbacks would be interrupted, which Python ignores
before, interrupts = left(), 0
points = range(1, count + 1)
limit = int(sys.argv[2])
for at in points if count <= limit else sorted(rng.sample(points, limit)):
    faulthandler.dump_traceback_later(60, exit=True)
    caught = raised = False
    try:
        raised = run(work, at).raised
    except Interrupt:
        interrupts += 1
        caught = True
    assert caught or not raised, f"byte code {at} of {count}: the interrupt was lost"
    settle()
    assert left() == before, f"byte code {at} of {count}: {left()} instead of {before}"
    assert not m._window._running and not movable._window._running, at
assert not lost, lost
gc.enable()
work()


def mappings():
    files = gaiafs.status(mountpoint)["files"]
    return sum(f["mappings"] + sum(v["mappings"] for v in f.get("views", ())) for f in files if f["name"].startswith(below))


below = os.path.relpath(directory, mountpoint)
end = time.monotonic() + 60
while mappings() > 2 and time.monotonic() < end:  # the daemon may still be ending those that were given back
    time.sleep(0.001)
assert mappings() == 2, gaiafs.status(mountpoint)["files"]
movable.close()
m.close()
print(f"{interrupts} interrupts at {count} byte codes")
