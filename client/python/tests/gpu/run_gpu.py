#!/usr/bin/env python3
"""Tests of the package on a real GPU, with PyTorch and without pytest.

    GAIAFS=build/gaiafs client/python/tests/gpu/run_gpu.py [--size MIB] [NAME...]

It mounts a directory of its own with --gpus cuda:0 and runs each test, or those named, prints a line for each and a count at
the end, and exits with 1 if one failed. pytest runs the same functions where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(HERE.parents[1]))

import torch  # noqa: E402

import gaiafs  # noqa: E402

SIZE = 256 << 20  # of the weights
PAGE = 4096


class Mount:
    """A mount of a fresh directory on the first GPU."""

    def __init__(self, gpus: str = "cuda:0", *options: str) -> None:
        self.gaiafs = os.path.abspath(os.environ.get("GAIAFS", ROOT / "build" / "gaiafs"))
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="gaiafs-python-"))
        self.source, self.point = self.dir / "source", self.dir / "mnt"
        self.source.mkdir(), self.point.mkdir()
        command = [self.gaiafs, "mount", "--daemon", "--gpus", gpus, "--log-file", str(self.dir / "log"), *options]
        try:
            subprocess.run([*command, str(self.source), str(self.point)], check=True, timeout=120)
        except BaseException:
            shutil.rmtree(self.dir, ignore_errors=True)
            raise

    def close(self) -> None:
        done = subprocess.run([self.gaiafs, "umount", str(self.point)], timeout=120)
        if done.returncode == 0:
            shutil.rmtree(self.dir)
        else:
            print((self.dir / "log").read_text()[-4000:], file=sys.stderr)
            raise RuntimeError(f"umount failed with {done.returncode}")


_mount: Mount | None = None


def mnt() -> pathlib.Path:
    global _mount
    if _mount is None:
        _mount = Mount()
    return _mount.point


def teardown_module() -> None:
    global _mount
    gc.collect()
    if _mount is not None:
        m, _mount = _mount, None
        m.close()


@contextlib.contextmanager
def raises(kind: type[BaseException], words: str = ""):
    try:
        yield
    except kind as e:
        assert words in str(e), f"{e} does not say {words!r}"
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def make(name: str, content: bytes) -> pathlib.Path:
    path = mnt() / name
    path.write_bytes(content)
    return path


def save(name: str, tensors: dict[str, torch.Tensor]) -> pathlib.Path:
    """Writes safetensors, by the package of that name where it is installed."""
    path = mnt() / name
    try:
        from safetensors.torch import save_file

        save_file(tensors, path)
        return path
    except ImportError:
        pass
    words = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8",
             torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}  # fmt: skip
    header, data = {}, b""
    for key, t in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        raw = t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        header[key] = {"dtype": words[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bit by bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.to(a.device).contiguous().reshape(-1).view(torch.uint8))


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    n = 1024
    found = {f"layers.{i}": torch.randn(n, n, generator=g).to(torch.bfloat16) for i in range(4)}
    found["half"] = torch.randn(33, 65, generator=g).to(torch.float16)
    found["single"] = torch.randn(1000, generator=g)
    found["ids"] = torch.randint(-(1 << 60), 1 << 60, (77,), generator=g)
    found["mask"] = torch.randint(0, 2, (99,), generator=g).to(torch.bool)
    found["bytes"] = torch.randint(0, 256, (101,), generator=g).to(torch.uint8)
    found["e4m3"] = torch.randn(64, generator=g).to(torch.float8_e4m3fn)
    found["e5m2"] = torch.randn(64, generator=g).to(torch.float8_e5m2)
    return found


def test_zero_copy() -> None:
    path = make("zero-copy", os.urandom(5 << 20))
    content = path.read_bytes()
    for offset, length in [(0, 5 << 20), (PAGE, 10000), (2 << 20, 1 << 20), (3 * PAGE, 4 << 20)]:
        with gaiafs.mmap(path, "cuda:0", offset=offset, length=length) as m:
            assert m.kind == "cuda" and m.device == 0
            t = m.tensor()
            assert t.device == torch.device("cuda", 0) and t.data_ptr() == m.ptr and t.numel() == length
            assert bytes(t.cpu().numpy()) == m.read() == content[offset : offset + length]
            del t


def test_tensors_see_stores_of_others() -> None:
    path = make("others", bytes(1 << 20))
    with gaiafs.mmap(path, mode="r+") as a, gaiafs.mmap(path) as b:
        s, t = a.tensor("float32"), b.tensor("float32")
        assert s.data_ptr() != t.data_ptr()
        s.fill_(3)
        torch.cuda.synchronize()
        assert (t == 3).all()  # the same memory
        del s, t


def test_matmul() -> None:
    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(512, 256, generator=g), torch.randn(256, 64, generator=g)
    path = make("matmul", w.numpy().tobytes())
    with gaiafs.mmap(path, torch.device("cuda", 0)) as m:
        t = m.tensor(torch.float32, (512, 256))
        torch.testing.assert_close((t @ x.cuda()).cpu(), w @ x, rtol=1e-2, atol=1e-2)
        del t


def test_from_dlpack() -> None:
    path = make("dlpack", bytes(range(256)) * 64)
    for mode in ("r", "r+"):
        m = gaiafs.mmap(path, mode=mode)
        a = m.array("int32", (4, 5), 8)
        try:
            t = torch.from_dlpack(a)
        except BufferError as e:  # a PyTorch with an older DLPack
            assert mode == "r" and "DLPack before 1.0" in str(e)
            del a
            m.close()
            continue
        assert t.data_ptr() == m.ptr + 8 and t.shape == (4, 5) and t.dtype is torch.int32 and t.device.index == 0
        del a
        with raises(BufferError):
            m.close()
        del t
        m.close()
    b = torch.from_dlpack(gaiafs.mmap(path, mode="r+").array("BF16", (8,)))
    gc.collect()
    assert b.dtype is torch.bfloat16 and bytes(b.view(torch.uint8).cpu().numpy()) == bytes(range(16))


def test_cuda_array_interface() -> None:
    path = make("interface", bytes(range(256)))
    assert gaiafs.mmap(path).array("float64", (0, 3)).__cuda_array_interface__["data"] == (0, True)
    m = gaiafs.mmap(path, mode="r+")
    t = torch.as_tensor(m.array("float64", (2, 3), 16), device="cuda:0")
    assert t.data_ptr() == m.ptr + 16 and t.dtype is torch.float64
    del t
    m.close()


def test_cupy() -> str | None:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    path = make("cupy", bytes(range(256)) * 16)
    m = gaiafs.mmap(path, mode="r+")
    for make_array in (cupy.asarray, cupy.from_dlpack):
        c = make_array(m.array("uint32", (16, 64)))
        assert c.data.ptr == m.ptr
        c += 1
        m.release(stream=cupy.cuda.get_current_stream())
        del c
    assert path.read_bytes()[:1] == b"\2"
    m.close()
    return None


def test_training_in_place_is_seen_by_the_cpu() -> None:
    n = 4096
    path = make("training", bytes(4 * n))
    with gaiafs.mmap(path, mode="r+") as m:
        w = m.tensor("float32", (n,))
        want = torch.arange(n, dtype=torch.float32, device="cuda")
        parameter = torch.nn.Parameter(w)
        assert parameter.data_ptr() == m.ptr
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        for i in range(60):
            with m.acquire():
                optimizer.zero_grad()
                ((parameter - want) ** 2 / 2).sum().backward()
                optimizer.step()
            if i % 20 == 0:  # released: a plain read sees it, with no call of ours
                got = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
                assert torch.equal(got, parameter.detach().cpu())
        got = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
        assert torch.allclose(got, torch.arange(n, dtype=torch.float32))
        del w, parameter, optimizer


def test_writes_of_the_cpu_are_seen_after_acquire() -> None:
    path = make("cpu", bytes(8 << 20))
    with gaiafs.mmap(path) as m:
        t = m.tensor()
        with open(path, "r+b") as f:
            f.seek(3 << 20)
            f.write(b"\7" * 10000)
        assert m.acquire().pages == 3
        assert int(t.sum()) == 70000
        del t


def test_release_waits_for_streams() -> None:
    path = make("streams", bytes(16 << 20))
    with gaiafs.mmap(path, mode="r+") as m:
        t = m.tensor("float32")
        s = torch.cuda.Stream()
        a = torch.randn(4096, 4096, device="cuda")
        for stream in (s, None):
            with torch.cuda.stream(s):
                b = a
                for _ in range(20):
                    b = b @ a  # keeps the stream busy for a while
                t.fill_(9 if stream else 8)
            m.release(stream=stream)
            want = struct.pack("<f", 9 if stream else 8)
            assert path.read_bytes() == want * (4 << 20)
        del t


def test_load_safetensors() -> None:
    want = weights()
    path = save("weights.safetensors", want)
    got = gaiafs.load_safetensors(path, "cuda:0")
    assert got.keys() == want.keys()
    for name, t in got.items():
        assert t.device == torch.device("cuda", 0) and same(t, want[name]), name
    try:
        from safetensors.torch import load_file
    except ImportError:
        return
    theirs = load_file(path, device="cuda:0")
    assert all(same(got[name], theirs[name]) for name in want)


def test_two_processes_share_memory() -> None:
    n = SIZE // 8
    path = save("shared.safetensors", {f"w{i}": torch.full((n // 2,), i, dtype=torch.float16) for i in range(8)})
    script = """
import sys, torch, gaiafs
torch.zeros(1, device="cuda:0").item()
free = torch.cuda.mem_get_info(0)[0]
w = gaiafs.load_safetensors(sys.argv[1], "cuda:0")
assert all((w[f"w{i}"] == i).all().item() for i in range(8))
print(free, torch.cuda.mem_get_info(0)[0], flush=True)
sys.stdin.readline()
"""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    children, numbers = [], []
    try:
        for _ in range(2):
            child = subprocess.Popen([sys.executable, "-c", script, str(path)], env=env, stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)  # fmt: skip
            children.append(child)
            line = child.stdout.readline()
            assert line, "a process failed"
            numbers.append([int(n) for n in line.split()])
    finally:
        for child in children:
            child.communicate("\n")
    assert all(child.returncode == 0 for child in children)
    print(f"    memory that loading {SIZE >> 20} MiB took: {[(a - b) >> 20 for a, b in numbers]} MiB")
    before, after = numbers[1]
    # What PyTorch takes to compare is less than half of the weights; a second copy would be all of them.
    assert before - after < SIZE // 2, "the second process took memory of its own"


def test_warm() -> None:
    path = save("warm.safetensors", {"w": torch.ones(SIZE // 4)})
    assert gaiafs.warm(path, 0) == path.stat().st_size
    begin = time.monotonic()
    w = gaiafs.load_safetensors(path)["w"]
    print(f"    loading {SIZE >> 20} MiB that were warm took {1000 * (time.monotonic() - begin):.1f} ms")
    assert float(w.sum(dtype=torch.float64)) == SIZE // 4


def test_use_after_close() -> None:
    m = gaiafs.mmap(make("closed", bytes(PAGE)), mode="r+")
    t = m.tensor()
    with raises(BufferError):
        m.close()
    del t
    m.close()
    for use in (m.acquire, m.release, m.read, m.array, m.tensor, lambda: m.ptr):
        with raises(ValueError, "closed"):
            use()
    t = gaiafs.mmap(make("closed", b"\5" * PAGE)).tensor()
    gc.collect()
    assert int(t.sum()) == 5 * PAGE  # the tensor keeps the memory
    assert (t + 1).sum().item() == 6 * PAGE
    del t
    gc.collect()
    torch.cuda.synchronize()


def test_memory_goes_with_the_last_tensor_while_kernels_run() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        t = gaiafs.mmap(make("kernels", bytes(64 << 20))).tensor("float32", (4096, 4096))
        for _ in range(10):
            b = a @ t
        del t  # unmapped, but not before the kernels are done
        assert float(b.abs().sum()) == 0


def test_hostile_headers() -> None:
    for n, content in enumerate([
        b"", b"\0" * 7, struct.pack("<Q", 1 << 62), struct.pack("<Q", 9) + b"{}", struct.pack("<Q", 2) + b"{}x",
        struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 60) + json.dumps({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode().ljust(60),
    ]):  # fmt: skip
        with raises(gaiafs.FormatError):
            gaiafs.load_safetensors(make(f"hostile-{n}.safetensors", content))


def test_unaligned() -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = make("unaligned.safetensors", struct.pack("<Q", len(text)) + text + b"x" + struct.pack("<2f", 1.5, -2))
    with raises(ValueError, "copy_unaligned"):
        gaiafs.load_safetensors(path)
    assert gaiafs.load_safetensors(path, copy_unaligned=True)["b"].tolist() == [1.5, -2]


def test_file_that_shrinks() -> None:
    path = make("shrinks", b"\1" * (4 << 20))
    with gaiafs.mmap(path) as m:
        t = m.tensor()
        os.truncate(path, 100)
        m.acquire()
        assert int(t.sum()) == 100
        del t


def test_devices() -> None:
    path = make("devices", b"x")
    with raises(gaiafs.Error, "CUDA_VISIBLE_DEVICES"):
        gaiafs.mmap(path, 99)
    script = """
import errno, sys, gaiafs
try:
    gaiafs.mmap(sys.argv[1])
except gaiafs.Error as e:
    assert e.errno == errno.ENODEV, e
    print(e)
"""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "CUDA" in done.stdout, done.stdout + done.stderr


def test_context_is_left_as_it_was() -> None:
    script = """
import ctypes, sys, gaiafs
lib, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(1)
lib.cuInit(0)
m = gaiafs.mmap(sys.argv[1], mode="r+")
m.write(b"stored")
m.release()
assert lib.cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context.value
m.close()
assert lib.cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context.value
"""
    path = make("context", bytes(PAGE))
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    subprocess.run([sys.executable, "-c", script, str(path)], env=env, check=True, timeout=120)
    assert path.read_bytes()[:6] == b"stored"


def test_fork() -> None:
    path = make("fork", b"\3" * PAGE)
    m = gaiafs.mmap(path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            m.acquire()
        except gaiafs.Error as e:
            code = 0 if e.errno == errno.ECHILD else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert m.read(0, 2) == b"\3\3"
    m.close()


def test_interrupts() -> None:
    path = make("interrupts", bytes(16384))
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, HERE.parent / "interrupts.py", path, "300", str(time.time_ns()), "all_of_it"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), (command, done)
    print("    " + done.stdout.rstrip())


def test_exit_with_everything_open() -> None:
    script = """
import sys, torch, gaiafs
m = gaiafs.mmap(sys.argv[1], mode="r+")
t, d = m.tensor(), torch.from_dlpack(m.array())
t.fill_(66)
m.release()
w = m.tensor("float32")
"""
    path = make("exit", bytes(1 << 20))
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stderr)
    assert path.read_bytes() == b"B" * (1 << 20)


def test_examples() -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    for name, *options in (["load_model.py", "--size", "256"], ["train_and_serve.py"], ["numpy_and_cuda.py"]):
        done = subprocess.run([sys.executable, HERE.parents[1] / "examples" / name, *options, mnt()], env=env,
                              capture_output=True, text=True, timeout=300)  # fmt: skip
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        print("    " + done.stdout.rstrip().replace("\n", "\n    "))


def main() -> int:
    global SIZE
    tests = {name.removeprefix("test_"): f for name, f in globals().items() if name.startswith("test_")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"tests to run: {', '.join(tests)}")
    parser.add_argument("--size", type=int, default=SIZE >> 20, metavar="MIB", help="size of large weights (%(default)s)")
    arguments = parser.parse_args()
    SIZE = arguments.size << 20
    if not torch.cuda.is_available():
        print("FAIL: PyTorch finds no GPU")
        return 1
    for name in arguments.name:
        if name not in tests:
            parser.error(f"there is no test {name}")
    failed = skipped = passed = 0
    for name in arguments.name or tests:
        begin = time.monotonic()
        try:
            why = tests[name]()
        except Exception:
            traceback.print_exc()
            print(f"FAIL {name}", flush=True)
            failed += 1
            continue
        took = f"{time.monotonic() - begin:.1f} s"
        print(f"skip {name}: {why}" if why else f"ok   {name} ({took})", flush=True)
        skipped, passed = skipped + bool(why), passed + (not why)
    try:
        teardown_module()
    except Exception as e:
        print(f"FAIL unmounting: {e}")
        failed += 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
