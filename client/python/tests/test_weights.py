"""Weights: every tensor aligned, one copy for all processes, and only changes copied again."""

import _thread
import contextlib
import errno
import gc
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

import gaiafs
from gaiafs import _core, files, shelter
from gaiafs import safetensors as formats
from gaiafs import weights as module
from gaiafs.frameworks import tensors_of
from gaiafs.shards import whole

from conftest import KIND, mapped

FRAMEWORK = "numpy" if KIND == "emulated" else "array"
RNG = np.random.default_rng(5)
TENSORS = {f"layer.{i}.{n}": RNG.standard_normal((33, 7)).astype("f2") for i in range(4) for n in ("weight", "scale")}
TENSORS |= {
    "one": np.array(2.5),
    "empty": np.zeros((0, 3), "f4"),
    "large": RNG.standard_normal((300, 1000)).astype("f4"),
}


@pytest.fixture
def path(directory):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(TENSORS))
    return path


@pytest.fixture
def shards(directory):
    """A directory of five files with an index."""
    names, place = sorted(TENSORS), {}
    for i in range(5):
        file = f"model-{i + 1:05}-of-00005.safetensors"
        (directory / file).write_bytes(safetensors.numpy.save({k: TENSORS[k] for k in names[i::5]}))
        place.update({k: file for k in names[i::5]})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return directory


def settled(directory, fds):
    """Waits for work that goes on in threads after an interrupt."""
    until = time.monotonic() + 20
    while len(os.listdir("/proc/self/fd")) != fds or any(
        v["mappings"] for f in gaiafs.info(directory)["files"] for v in f["views"]
    ):
        gc.collect()
        assert time.monotonic() < until, [
            os.readlink(e.path) for e in os.scandir("/proc/self/fd") if os.path.lexists(e.path)
        ]


def same(got, tensors=None):
    tensors = TENSORS if tensors is None else tensors
    assert got.keys() == tensors.keys()
    for name, want in tensors.items():
        assert tuple(got[name].shape) == want.shape and got[name].tobytes() == want.tobytes(), name
    return True


def views(path):
    return gaiafs.info(path)["files"][0]["views"]


def test_one_view_for_each_file(path, shards):
    got = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    assert same(got) and list(got) == list(safetensors.numpy.load_file(path))
    assert [(v["segments"], v["mappings"]) for v in views(path)] == [(len(TENSORS) - 1, 1)]
    assert same(gaiafs.load_safetensors(shards, 1, framework=FRAMEWORK))
    assert all(len(f["views"]) == 1 for f in gaiafs.info(shards)["files"])
    assert same(gaiafs.load_file(os.fspath(path), 1, framework=FRAMEWORK))
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.load_file(shards)
    assert e.value.errno == errno.EISDIR


def test_more_files_than_a_process_has_open(shards, monkeypatch):
    monkeypatch.setattr(files, "_FEW", 8)  # five views that are made at the same moment have three descriptors each
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = len(os.listdir("/proc/self/fd")) + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        weights = gaiafs.load_safetensors(shards, framework="array")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (lowest, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(weights) == set(TENSORS)


@pytest.mark.kind("emulated")  # the libcuda for tests keeps descriptors of its own
def test_descriptors_below_the_limit_stay_the_programs(directory, path):
    """As in a server with 900 connections, whose soft limit is 1,024."""
    for i in range(12):
        safetensors.numpy.save_file({f"l.{i}": np.full(3, i)}, directory / f"{i:02}.safetensors")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip(f"the process may have {limits[1]} files open")
    os.rename(path, directory / "other")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    kept = []
    try:
        while len(kept) < 1024 and (fd := os.open("/dev/null", os.O_RDONLY)) < 1010:
            kept.append(fd)
        os.close(fd)
        weights = gaiafs.load_safetensors(directory, framework="array")
        one = [gaiafs.load_file(directory / f"{i:02}.safetensors", framework="array") for i in range(12)]
        mapped = [gaiafs.mmap(directory / "other") for _ in range(40)]
        assert len(weights) == 12 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        kept.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(10))
        del one, mapped
    finally:
        for fd in kept:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_second_process_copies_nothing(path, mount, python):
    def taken():
        s = gaiafs.status(mount)
        return [d["used_bytes"] for d in s["devices"]], sum(f["counters"]["view_pages"] for f in s["files"])

    first = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    before = taken()
    script = "import sys, gaiafs; w = gaiafs.load_safetensors(sys.argv[1], framework='array'); print(sum(w['large'].tobytes()))"
    done = subprocess.run([*python, "-c", script, path], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{sum(TENSORS['large'].tobytes())}\n", done.stderr
    assert taken() == before
    assert same(first)


def test_acquire_copies_changes(shards, mount):
    def copied():
        return sum(f["counters"]["view_pages"] for f in gaiafs.status(mount)["files"])

    got = gaiafs.load_safetensors(shards, framework=FRAMEWORK)
    assert got.acquire() == 0
    changed = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]["large"]
    with open(shards / changed, "r+b") as f:
        f.seek(-8, os.SEEK_END)
        f.write(b"changed!")
    before = copied()
    got.acquire(stream=0)
    assert 1 <= copied() - before <= 2
    last = max((n for n in got if got[n].tobytes().endswith(b"changed!")), default=None)
    assert last is not None
    with pytest.raises(TypeError, match="stream"):
        got.acquire(stream="x")


def test_the_last_tensor_takes_the_memory_along(path):
    before = mapped()
    got = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    assert mapped() > before or KIND == "cuda"
    large = got["large"]
    del got
    gc.collect()
    assert large.tobytes() == TENSORS["large"].tobytes() and views(path)[0]["mappings"] == 1
    del large
    gc.collect()
    while views(path)[0]["mappings"]:  # a finalizer does not wait for the daemon
        os.sched_yield()


def test_private_tensors(path):
    shared = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    got = gaiafs.load_safetensors(path, framework=FRAMEWORK, private=["*.scale", "empty"])
    assert same(got)
    if KIND == "emulated":
        for name in ("layer.1.scale", "layer.2.scale"):
            got[name][:] = 7
            assert got[name].ctypes.data % 256 == 0
        with pytest.raises(ValueError, match="read-only"):
            got["layer.1.weight"][:] = 7
    else:
        assert not got["layer.1.scale"].readonly and got["layer.1.weight"].readonly
    assert same(shared) and path.read_bytes() == safetensors.numpy.save(TENSORS)
    made = got.private("large")
    assert list(made) == ["large"] and made["large"] is got["large"]
    assert got.private("large") == made  # it is private already
    got.private()
    assert got.acquire() == 0 and not got._windows
    for pattern in ("none", "layer.9.*"):
        with pytest.raises(ValueError, match="no tensor is called"):
            got.private(pattern)
    assert same(gaiafs.load_safetensors(path, framework=FRAMEWORK, private=True))
    assert same(gaiafs.load_safetensors(path, framework=FRAMEWORK, private="large"))
    no_change = gaiafs.load_safetensors(path, framework=FRAMEWORK, private="large")
    with open(path, "r+b") as f:
        f.truncate(os.path.getsize(path) - 1000)
    no_change.acquire()
    assert no_change["large"].tobytes() == TENSORS["large"].tobytes()


def test_more_tensors_than_a_view_has(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_SEGMENTS", 3)
    got = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    assert same(got) and sorted(v["segments"] for v in views(path)) == [1, 3, 3, 3]
    got.acquire()


def test_files_without_bytes(directory):
    for name, tensors in [("none", {}), ("empty", {"a": np.zeros((3, 0), "f4"), "b": np.zeros(0, "u1")})]:
        (directory / name).write_bytes(safetensors.numpy.save(tensors))
        got = gaiafs.load_safetensors(directory / name, framework=FRAMEWORK)
        assert same(got, tensors) and got.acquire() == 0
        assert same(gaiafs.load_safetensors(directory / name, framework=FRAMEWORK, private=True), tensors)


def test_not_on_a_mount(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save(TENSORS))
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.load_safetensors(tmp_path, framework=FRAMEWORK)
    assert e.value.errno == errno.ENOTTY and e.value.filename == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("which", range(5))
def test_one_file_that_fails(shards, monkeypatch, which):
    """The other files' views are given back, and so are all descriptors."""
    real, calls, lock = _core.map_view, [], threading.Lock()

    def fail(*arguments):
        with lock:
            calls.append(arguments)
            n = len(calls)
        if n == which + 1:
            raise gaiafs.Error(errno.EIO, "planted")
        return real(*arguments)

    gaiafs.load_safetensors(shards, framework=FRAMEWORK)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(_core, "map_view", fail)
    with pytest.raises(gaiafs.Error, match="planted") as e:
        gaiafs.load_safetensors(shards, framework=FRAMEWORK)
    assert e.value.filename.startswith(str(shards))
    del e
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "fused, want", [([], [5, 4, 3, 2, 1]), (["layer.0.weight", "layer.1.weight"], [5, 5, 4, 3, 3, 2])]
)
def test_a_file_is_closed_when_its_views_exist(shards, monkeypatch, fused, want):
    """So a process with a low limit of descriptors can load many files. The first
    and the fourth file are also needed for the fused tensor, which is made last."""
    real, seen = _core.map_view, []

    def map_view(*arguments):
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        views = len(seen)  # each has a descriptor of its file
        seen.append(sum(link.startswith(f"{shards}/") for link in links) - views)
        return real(*arguments)

    monkeypatch.setattr(_core, "map_view", map_view)
    monkeypatch.setattr(shelter, "_SIDE_BY_SIDE", 1)
    weights = gaiafs.load_safetensors(shards, framework="array", fuse={"both": fused} if fused else None)
    assert seen == want and len(weights) == len(TENSORS) - len(fused) // 2


def test_a_header_that_cannot_be_read(shards, monkeypatch):
    """The error names the file, and the package raises no other kind of OSError."""
    real = formats.os.pread

    def pread(fd, n, at):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("model-00003-of-00005.safetensors"):
            raise OSError(errno.ENOTCONN, "planted")
        return real(fd, n, at)

    monkeypatch.setattr(formats.os, "pread", pread)
    with pytest.raises(gaiafs.Error, match=r"planted.*model-00003"):
        gaiafs.load_safetensors(shards, framework=FRAMEWORK)


@pytest.fixture
def opening(monkeypatch):
    """Calls opening.call with the number of each file before the file is opened."""
    real, numbers, opening = module.open_file, itertools.count(), SimpleNamespace(call=lambda i: None)

    def open_file(*arguments):
        opening.call(next(numbers))
        return real(*arguments)

    monkeypatch.setattr(module, "open_file", open_file)
    return opening


@pytest.fixture
def asked(monkeypatch):
    """Counts the views that were asked for. count.wait(n) waits until n were."""
    real, changed, asked = _core.map_view, threading.Condition(), SimpleNamespace(n=0)

    def map_view(*arguments):
        with changed:
            asked.n += 1
            changed.notify_all()
        return real(*arguments)

    def wait(n):
        with changed:
            return changed.wait_for(lambda: asked.n >= n, 20)

    asked.wait = wait
    monkeypatch.setattr(_core, "map_view", map_view)
    return asked


@pytest.mark.parametrize("plan", [None, {"**": None}])
def test_a_view_is_asked_for_before_the_next_file_is_opened(shards, opening, asked, plan):
    def call(i):
        assert asked.wait(i), i

    opening.call = call
    options = {} if plan is None else {"shard": gaiafs.ShardPlan(plan), "rank": 0, "world": 2}
    assert same(gaiafs.load_safetensors(shards, framework=FRAMEWORK, **options))
    assert asked.n == 5


def test_plans_that_need_all_files(shards, opening, asked):
    """Experts are counted before they are divided, and the tensors of a group may be in several files."""
    last = []
    opening.call = lambda i: last.append((i, asked.n))
    plan = gaiafs.ShardPlan({"layer.**": None, "**": None, "x.experts.**": "experts"})
    gaiafs.load_safetensors(shards, framework=FRAMEWORK, shard=plan, rank=0, world=2)
    gaiafs.load_safetensors(shards, framework=FRAMEWORK, fuse={"all": ["layer.0.weight", "layer.1.weight"]})
    assert last == [(i, 0) for i in range(5)] + [(i, 5) for i in range(5, 10)]


@pytest.mark.parametrize("fuse", [None, {"all": ["layer.0.weight", "layer.1.weight"]}])
def test_the_order_of_names_is_that_of_the_files(shards, monkeypatch, fuse):
    """The first file is the last that is mapped."""
    want = list(gaiafs.load_safetensors(shards, framework="array", fuse=fuse))
    place = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    assert fuse or want == list(place)
    real, numbers, others = _core.map_view, itertools.count(), threading.Semaphore(0)

    def map_view(*arguments):
        if next(numbers) == 0:
            assert all(others.acquire(timeout=20) for _ in range(4))
        made = real(*arguments)
        others.release()
        return made

    monkeypatch.setattr(_core, "map_view", map_view)
    assert list(gaiafs.load_safetensors(shards, framework="array", fuse=fuse)) == want


def not_a_header(shards, last):
    last.write_bytes(b"x" * 100)
    return gaiafs.FormatError


def no_file(shards, last):
    last.unlink()
    last.symlink_to("nowhere")
    return FileNotFoundError


def tensor_in_two_files(shards, last):
    first = safetensors.numpy.load_file(shards / "model-00001-of-00005.safetensors")
    last.write_bytes(safetensors.numpy.save(first))
    return gaiafs.FormatError


@pytest.mark.parametrize("break_it", [not_a_header, no_file, tensor_in_two_files])
def test_a_last_file_that_fails(shards, opening, asked, break_it):
    """The views of the others, which exist by then, are given back."""
    (shards / "model.safetensors.index.json").unlink()
    gaiafs.load_safetensors(shards, framework=FRAMEWORK)
    fds = len(os.listdir("/proc/self/fd"))
    settled(shards, fds)
    asked.n = 0

    def call(i):
        assert asked.wait(i - 5), i

    opening.call = call
    error = break_it(shards, shards / "model-00005-of-00005.safetensors")
    with pytest.raises(error) as e:
        gaiafs.load_safetensors(shards, framework=FRAMEWORK)
    assert "model-00005" in str(e.value) and asked.n == 4
    for i in range(1, 5):
        assert [v["mappings"] for v in views(shards / f"model-{i:05}-of-00005.safetensors")] == [0]
    assert len(os.listdir("/proc/self/fd")) == fds


def test_an_interrupt_while_the_last_file_is_opened(shards, opening, asked):
    """The call ends at once, and the file is not mapped."""
    gaiafs.load_safetensors(shards, framework=FRAMEWORK)
    fds = len(os.listdir("/proc/self/fd"))
    seen, go_on = [], threading.Event()

    def call(i):
        if i == 9:
            assert asked.wait(9)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            seen.append(go_on.wait(20))

    opening.call = call
    with pytest.raises(KeyboardInterrupt):
        gaiafs.load_safetensors(shards, framework=FRAMEWORK)
    assert not seen
    go_on.set()
    settled(shards, fds)
    assert seen == [True] and asked.n == 9


@pytest.mark.parametrize("seconds", [0.0001, 0.001, 0.005])
def test_interrupts(shards, mount, interrupting, seconds):
    def load():
        windows = module.map_weights(names, 0).windows
        while windows:
            windows[-1].close()  # not left to finalizers, where Python loses an interrupt
            windows.pop()

    names = formats.shards_of(shards)
    load()
    fds = len(os.listdir("/proc/self/fd"))
    gc.disable()  # Python loses interrupts in what it calls for a collection, too
    try:
        for i in range(30):
            try:
                with interrupting(seconds * random.Random(i).random()):
                    while True:
                        load()
            except KeyboardInterrupt:
                pass
    finally:
        gc.enable()
    settled(shards, fds)


def test_works_together():
    def fail(i):
        raise KeyError(i)

    def several(n, bad=None, worse=None):
        for i in range(n):
            if i == worse:
                fail(i)
            yield (lambda: fail(bad)) if i == bad else (lambda i=i: i), i < n - 1

    undone = []
    for n in (0, 1, 2, 9, 30):
        assert shelter.together(several(n), undone.append, []) == list(range(n)) and not undone
        for bad in {0, n // 2, n - 1} - {n, -1}:
            for works in (several(n, bad), several(n, worse=bad)):
                undone.clear()
                with pytest.raises(KeyError):
                    shelter.together(works, undone.append, [])
                assert bad not in undone and len(undone) == len(set(undone))
    undone.clear()
    with pytest.raises(KeyError):
        shelter.together(several(3), undone.append, [KeyError()])
    assert not undone


def test_results_are_in_the_order_of_works():
    turns = [threading.Event() for _ in range(4)]
    turns[3].set()

    def work(i):
        assert turns[i].wait(20)
        turns[i - 1].set()  # the last one begins
        return i

    works = [(lambda i=i: work(i), i < 3) for i in range(4)]
    assert shelter.together(works, None, []) == [0, 1, 2, 3]


def test_no_more_works_are_asked_for_after_a_failure():
    failed, seen = threading.Event(), []

    class Failures(list):
        def append(self, e):
            super().append(e)
            failed.set()

    def works():
        yield lambda: [][0], True
        assert failed.wait(20)
        yield lambda: seen.append("it begins"), True
        seen.append("another one is asked for")

    with pytest.raises(IndexError):
        shelter.together(works(), None, Failures())
    assert seen == []


def test_one_file_takes_two_threads(path, monkeypatch):
    real, begun = shelter._thread.start_new_thread, []
    monkeypatch.setattr(shelter._thread, "start_new_thread", lambda *a: begun.append(a) or real(*a))
    gaiafs.load_safetensors(path, framework=FRAMEWORK)
    assert len(begun) == 2  # to look at the path, and to load


def test_what_was_made_is_given_back_at_once(shards):
    """Not with garbage collection: the caller may load again after the error."""
    arrays, tensors, windows, _ = module.map_weights(formats.shards_of(shards), 0, framework=FRAMEWORK)
    made = module._Made(windows, arrays, tensors)
    made.undo()
    assert len(windows) == 5 and all(w.closed for w in windows)


def test_works_begin_before_all_are_known():
    begun, ended = threading.Event(), threading.Event()

    def works():
        yield lambda: begun.set() or ended.wait(20), True
        assert begun.wait(20)
        ended.set()
        yield lambda: True, False

    assert shelter.together(works(), None, []) == [True, True]


def test_works_have_the_callers_cuda_context(monkeypatch):
    lent = {}
    monkeypatch.setattr(
        _core,
        "_library",
        SimpleNamespace(gaia_context=lambda: 7, gaia_lend_context=lambda c: lent.update({_thread.get_ident(): c})),
    )
    works = [(lambda: lent.get(_thread.get_ident()), i < 2) for i in range(3)]
    assert _core.apart_together(lambda fds: works, lambda made: None, contextlib.nullcontext()) == [7, 7, 7]
    assert set(lent.values()) == {None}


def test_one_work_needs_no_further_thread(monkeypatch):
    monkeypatch.setattr(shelter._thread, "start_new_thread", lambda *arguments: pytest.fail("a thread"))
    assert shelter.together([(_thread.get_ident, False)], None, []) == [_thread.get_ident()]


def test_no_threads(monkeypatch):
    def none(*arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(shelter._thread, "start_new_thread", none)
    works = [(lambda i=i: i, True) for i in range(20)]
    assert shelter.together(works, None, []) == list(range(20))


def split(tensors, dims, world):
    """Returns each rank's part, computed by NumPy."""
    found = []
    for r in range(world):
        part = {}
        for name, t in tensors.items():
            dim, blocks = dims[name] if isinstance(dims[name], tuple) else (dims[name], 1)
            if dim is None:
                part[name] = t
                continue
            pieces = [np.split(block, world, dim)[r] for block in np.split(t, blocks, dim)]
            part[name] = np.concatenate(pieces, dim)
        found.append(part)
    return found


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_shards_are_the_tensors(directory, world):
    rng = np.random.default_rng(world)
    dims = {"column": 0, "row": 1, "middle": 1, "last": -1, "packed": (0, 2), "packed row": (1, 3), "whole": None, "one": None,
            "empty": 0, "bias": 0}  # fmt: skip
    shapes = {"column": (16, 5), "row": (6, 24), "middle": (3, 8, 5), "last": (2, 3, 8), "packed": (32, 3), "packed row": (2, 24),
              "whole": (3,), "one": (), "empty": (8, 0), "bias": (8,)}  # fmt: skip
    tensors = {n: rng.standard_normal(s).astype("f2") for n, s in shapes.items()}
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(tensors))
    plan = gaiafs.ShardPlan({n: gaiafs.Split(*d) if isinstance(d, tuple) else d for n, d in dims.items()})
    for r, want in enumerate(split(tensors, dims, world)):
        got = gaiafs.load_safetensors(path, r % 2, framework=FRAMEWORK, shard=plan, rank=r, world=world)
        assert same(got, {n: t.copy("C") for n, t in want.items()})
        if KIND == "emulated":
            assert all(t.ctypes.data % 256 == 0 for t in got.values() if t.size)


@pytest.mark.parametrize("world, fine", [(1, True), (2, True), (4, True), (3, False), (8, False)])
def test_experts(directory, world, fine):
    tensors = {
        f"m.{i}.experts.{e}.w{k}": np.full((2, 2), 100 * i + 10 * e + k)
        for i in range(2)
        for e in range(4)
        for k in (1, 2)
    }
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(tensors | {"gate": np.ones(3)}))
    plan, together = gaiafs.ShardPlan({"m.*.experts.**": "experts", "**": None}), {}
    for r in range(world):
        if not fine:
            with pytest.raises(ValueError, match=f"{world} ranks cannot share the 4 experts"):
                gaiafs.load_safetensors(path, framework=FRAMEWORK, shard=plan, rank=r, world=world)
            continue
        got = gaiafs.load_safetensors(path, framework=FRAMEWORK, shard=plan, rank=r, world=world)
        assert len(got) == 16 // world + 1 and not (together.keys() & got.keys() - {"gate"})
        together.update(got)
    assert not fine or same(together, tensors | {"gate": np.ones(3)})


def test_tensors_on_a_gpu_are_made_with_it_as_the_current_device(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def device(n):
        current.append(n)
        yield
        current.pop()

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device=device)))
    array = SimpleNamespace(torch=lambda: current[-1])
    assert tensors_of({"a": array}, "torch", 3) == {"a": 3} and current == [0]
    assert tensors_of({"a": array}, "torch", None) == {"a": 0}


def test_tensors_are_made_for_the_views_device(shards, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "tensors_of", lambda arrays, *which: seen.append(which) or arrays)
    gaiafs.load_safetensors(shards, 1, framework="array")
    assert seen == [("array", None if KIND == "emulated" else 1)] * 5


def test_experts_in_two_files(directory):
    """A rank's share is one of all experts, not of those in each file."""
    tensors = {f"experts.{e}": np.full(2, e) for e in range(4)}
    for i in range(2):
        some = {f"experts.{e}": tensors[f"experts.{e}"] for e in (2 * i, 2 * i + 1)}
        (directory / f"{i}.safetensors").write_bytes(safetensors.numpy.save(some))
    plan = gaiafs.ShardPlan({"**": "experts"})
    for r in range(2):
        got = gaiafs.load_safetensors(directory, framework=FRAMEWORK, shard=plan, rank=r, world=2)
        assert same(got, {f"experts.{e}": tensors[f"experts.{e}"] for e in (2 * r, 2 * r + 1)})


def test_plans_that_do_not_fit(directory):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({"a": np.zeros((6, 4)), "b": np.zeros(()), "c.experts.x": np.zeros(3)}))

    def refused(words, rules, rank=0, world=4, error=ValueError):
        with pytest.raises(error, match=words):
            gaiafs.load_safetensors(path, framework=FRAMEWORK, shard=gaiafs.ShardPlan(rules), rank=rank, world=world)

    refused("dimension 0 of tensor 'a', with 6 elements, is not divisible by 4", {"a": 0, "**": None})
    refused("of 3 blocks of tensor 'a', with 6 elements, is not divisible", {"a": gaiafs.Split(0, 3), "**": None})
    refused("divides dimension 2 of tensor 'a'", {"a": 2, "**": None})
    refused("divides dimension -3 of tensor 'a'", {"a": -3, "**": None})
    refused("divides dimension 0 of tensor 'b'", {"**": 0}, world=2)
    refused("no rule for 1 of 3 tensors: 'b'", {"a": 1, "c.**": None})
    refused("no rule for 3 of 3 tensors", {})
    refused("no rank 4", {"**": None}, rank=4)
    refused("no rank -1", {"**": None}, rank=-1)
    refused("0 ranks", {"**": None}, world=0)
    refused("no number after 'experts'", {"c.**": "experts", "**": None})
    refused("rule of 'a'", {"a": "columns"}, error=TypeError)
    refused("rule of 'a'", {"a": True}, error=TypeError)
    refused("pattern", {1: None}, error=TypeError)
    refused("passed together", {"**": None}, rank=None)
    with pytest.raises(ValueError, match="passed together"):
        gaiafs.load_safetensors(path, framework=FRAMEWORK, rank=0, world=1)


def test_patterns():
    plan = gaiafs.ShardPlan({"a.*.w": 0, "a.**": 1, "x[1]?": None})
    assert plan.rule_of("a.5.w") == gaiafs.Split(0) and plan.rule_of("a.5.6.w") == gaiafs.Split(1)
    assert plan.rule_of("x[1]?") is None
    for name in ("b", "a", "x1y", "a\n"):
        with pytest.raises(KeyError):
            plan.rule_of(name)


def test_parts_within_a_byte():
    from gaiafs.dtypes import SAFETENSORS
    from gaiafs.safetensors import Tensor

    t = Tensor("a", SAFETENSORS["F4"], (2, 6), 100, 106)
    plan = gaiafs.ShardPlan({"a": 1})
    with pytest.raises(ValueError, match="within a byte"):
        plan.parts([t], 0, 2)
    assert plan.parts([t], 2, 3)["a"][1:] == ((2, 2), 102, 1, 3, 2)
    assert plan.parts([t], 0, 1)["a"] == whole(t)


def test_four_shards_take_no_more_than_the_file(directory):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({f"{i}": np.ones((512, 512), "f4") for i in range(8)}))
    plan = gaiafs.ShardPlan({"*": 1})
    held = [gaiafs.load_safetensors(path, r % 2, framework="array", shard=plan, rank=r, world=4) for r in range(4)]
    assert sum(v["bytes"] for v in views(path)) <= 1.05 * path.stat().st_size
    del held


DENSE = {
    "model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8), "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.self_attn.k_proj.weight": (4, 8), "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8), "model.layers.0.self_attn.o_proj.bias": (8,),
    "model.layers.0.input_layernorm.weight": (8,), "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_norm.weight": (8,),
}  # fmt: skip
MLP = {"gate_proj.weight": (12, 8), "up_proj.weight": (12, 8), "down_proj.weight": (8, 12)}
FILES = {
    **dict.fromkeys("llama mistral qwen2 qwen3 gemma gemma2".split(),
                    {**DENSE, **{f"model.layers.0.mlp.{n}": s for n, s in MLP.items()}}),
    "mixtral": {**DENSE, "model.layers.0.block_sparse_moe.gate.weight": (4, 8),
                **{f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight": (8, 12) if w == "w2" else (12, 8)
                   for e in range(4) for w in ("w1", "w2", "w3")}},
    "qwen3_moe": {**DENSE, "model.layers.0.mlp.gate.weight": (4, 8),
                  **{f"model.layers.0.mlp.experts.{e}.{n}": s for e in range(4) for n, s in MLP.items()}},
}  # fmt: skip


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("kind", FILES)
def test_plans_of_transformers(directory, kind, experts):
    """All ranks' parts together are the tensors, and large tensors are divided."""
    tensors = {n: RNG.standard_normal(s).astype("f2") for n, s in FILES[kind].items()}
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(tensors))
    plan = gaiafs.ShardPlan.from_transformers(kind, experts=experts)
    parts = [gaiafs.load_safetensors(path, 0, framework="array", shard=plan, rank=r, world=2) for r in range(2)]
    for name, want in tensors.items():
        got = [np.frombuffer(p[name].tobytes(), "f2").reshape(p[name].shape) for p in parts if name in p]
        rule = plan.rule_of(name)
        if rule == "experts" or rule is None:
            assert all((g == want).all() for g in got) and len(got) == (2 if rule is None else 1)
        else:
            assert (np.concatenate(got, rule.dim) == want).all()
        whole = "norm" in name or "embed" in name or name.endswith(("o_proj.bias", ".gate.weight"))
        # transformers 4 divides the router of Mixtral.
        assert (rule is None) == whole or name.endswith(".gate.weight"), name
    assert any(rule == "experts" for rule in map(plan.rule_of, tensors)) == (experts and "experts" in str(tensors.keys()))


def test_plans_of_configs():
    class Config:
        model_type = "some"
        base_model_tp_plan = {"layers.*.fc": "colwise", "layers.*.experts.gate_up_proj": "packed_colwise"}
        base_model_tp_plan["wte"] = "embedding_rowwise"

    plan = gaiafs.ShardPlan.from_transformers(Config())
    assert plan.rule_of("model.layers.3.fc.weight") == gaiafs.Split(-2) and plan.rule_of("layers.3.fc.bias") == gaiafs.Split(-1)
    assert plan.rule_of("model.layers.3.experts.gate_up_proj") == gaiafs.Split(-2, 2)
    assert plan.rule_of("model.wte.weight") == gaiafs.Split(0)
    with pytest.raises(KeyError):
        plan.rule_of("transformer.h.0.attn.c_attn.weight")
    Config.base_model_tp_plan = {"layers.*.fc": "sideways"}
    with pytest.raises(ValueError, match="'layers.\\*.fc' is divided as 'sideways'"):
        gaiafs.ShardPlan.from_transformers(Config())
    Config.base_model_tp_plan = None
    for config in (Config(), "some", "gpt2"):
        with pytest.raises(ValueError, match="no plan for models of kind"):
            gaiafs.ShardPlan.from_transformers(config)
