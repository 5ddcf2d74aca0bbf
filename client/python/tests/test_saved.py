"""save_file: byte for byte what safetensors writes, whole or not at all."""

import errno
import os

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import gaiafs
from gaiafs import saved
from gaiafs.dtypes import SAFETENSORS

from conftest import KIND

ml_dtypes = pytest.importorskip("ml_dtypes")
RNG = np.random.default_rng(2)
try:
    import torch
except ImportError:
    torch = None


def every_type():
    found = {}
    for i, (word, dtype) in enumerate(SAFETENSORS.items()):
        if dtype.bits < 8:
            continue
        t = np.dtype(dtype.typestr or getattr(ml_dtypes, dtype.name))
        for j, shape in enumerate([(3, 5), (), (0, 2), (7,)]):
            raw = RNG.integers(0, 2, int(np.prod(shape)) * t.itemsize, "u1")
            found[f"{(i * 7 + j) % 5}.{word}.{j}"] = raw.view(t).reshape(shape)
    return found


@pytest.mark.parametrize("metadata", [None, {}, {"format": "np"}, {"é\n\"\\\x01\x7f": "\u2028\U0001f600\t"}])
def test_the_same_bytes(directory, metadata):
    tensors = every_type()
    tensors |= {"é\n\"\\\x01\x7f\u2028\U0001f600": np.ones(3, "u1"), "": np.zeros(2), "A": np.ones(1),
                "a.10": np.ones(1), "a.2": np.ones(1), "\uffff": np.ones(1), "\U00010000": np.ones(1)}  # fmt: skip
    path, theirs = directory / "ours.safetensors", directory / "theirs.safetensors"
    gaiafs.save_file(tensors, path, metadata)
    safetensors.numpy.save_file(tensors, theirs, metadata)
    assert path.read_bytes() == theirs.read_bytes()
    assert sorted(os.listdir(directory)) == ["ours.safetensors", "theirs.safetensors"]
    got = gaiafs.load_safetensors(path, framework="array")
    assert all(got[n].tobytes() == t.tobytes() for n, t in tensors.items())


def test_arrays_of_devices(directory):
    tensors = {"a": RNG.standard_normal((300, 300)), "b": np.arange(10, dtype="u2"), "e": np.zeros((0, 2))}
    first, second = directory / "first.safetensors", directory / "second.safetensors"
    gaiafs.save_file(tensors, first, {"x": "y"})
    gaiafs.save_file(gaiafs.load_safetensors(first, 1, framework="array"), second, {"x": "y"})
    assert first.read_bytes() == second.read_bytes() == safetensors.numpy.save(tensors, {"x": "y"})


def test_anywhere(tmp_path, monkeypatch):
    some = {"a": np.arange(9, dtype=">i4"), "b": np.arange(12).reshape(3, 4)[:, ::2], "c": np.float32(1)}
    gaiafs.save_file(some, tmp_path / "f")
    got = safetensors.numpy.load_file(tmp_path / "f")
    assert got["a"].tolist() == list(range(9)) and got["b"].tolist() == [[0, 2], [4, 6], [8, 10]] and got["c"] == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saved, "STEP", 10)
    gaiafs.save_file({"a": np.arange(99)}, "g")
    assert safetensors.numpy.load_file("g")["a"].tolist() == list(range(99))


def test_whole_or_not_at_all(directory, monkeypatch):
    path = directory / "model.safetensors"
    gaiafs.save_file({"a": np.ones(100_000)}, path)
    before, real, calls = path.read_bytes(), os.pwrite, []

    def fail(fd, data, at):
        calls.append(at)
        if len(calls) > 1:
            raise OSError(28, "planted")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(gaiafs.Error, match="planted") as e:
        gaiafs.save_file({"a": np.zeros(100_000)}, path)
    assert e.value.filename == str(path)
    monkeypatch.undo()
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        gaiafs.save_file({"a": np.zeros(100_000)}, path)
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(directory) == ["model.safetensors"]
    loaded = gaiafs.load_safetensors(path, framework="array")
    gaiafs.save_file({"a": np.zeros(3)}, path)
    assert loaded["a"].tobytes() == np.ones(100_000).tobytes()  # of the file that had the name
    assert gaiafs.load_safetensors(path, framework="array")["a"].tobytes() == bytes(24)


def test_short_writes(directory, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    gaiafs.save_file({"a": np.arange(5000)}, directory / "f")
    assert safetensors.numpy.load_file(directory / "f")["a"].tolist() == list(range(5000))


def test_checkpoints_through_a_device(directory, monkeypatch, mount):
    tensors = {"a": np.arange(50_000), "b": np.arange(7, dtype="u1"), "empty": np.zeros((0, 3)), "c": np.ones((3, 5000))}
    gaiafs.save_file(tensors, directory / "want", {"a": "b"})
    for step in (saved.STEP, 10_000, 4096):
        monkeypatch.setattr(saved, "STEP", step)
        gaiafs.save(directory / "got", tensors, {"a": "b"}, device=1)
        assert (directory / "got").read_bytes() == (directory / "want").read_bytes()
    assert sorted(os.listdir(directory)) == ["got", "want"]
    gaiafs.save(directory / "none", {}, device=0)
    assert safetensors.numpy.load_file(directory / "none") == {}


@pytest.mark.parametrize("where", ["sync", "close", "write", "mmap"])
def test_checkpoints_that_fail_half_way(directory, monkeypatch, where):
    tensors = {"a": np.arange(50_000)}
    path = directory / "model"
    gaiafs.save(path, tensors, device=0)
    before, calls = path.read_bytes(), []
    monkeypatch.setattr(saved, "STEP", 20_000)
    of = saved if where == "mmap" else gaiafs.Mapping
    real = getattr(of, where)

    def fail(*arguments, **options):
        calls.append(where)
        if len(calls) == 4:
            raise gaiafs.Error(errno.ENOSPC, "planted")
        return real(*arguments, **options)

    monkeypatch.setattr(of, where, fail)
    with pytest.raises(gaiafs.Error, match="planted: free some space, and save again; the file is as it was") as e:
        gaiafs.save(path, {"a": np.zeros(50_000)}, device=0)
    assert e.value.errno == errno.ENOSPC and e.value.filename == str(path)
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(directory) == ["model"]


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(gaiafs.Error, match="choose a path there"):
        gaiafs.save(tmp_path / "f", {"a": np.ones(3)}, device=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tensors, metadata, error, words", [
    ({"a": [1]}, None, TypeError, "'a' is a tensor"),
    ({1: np.ones(1)}, None, TypeError, "name"),
    ({"a": np.ones(1, "c16")}, None, TypeError, "complex128"),
    ({"a": np.array(["x"])}, None, TypeError, "."),
    ({"a": np.ones(1)}, {"a": 1}, TypeError, "strings"),
    ({"__metadata__": np.ones(1)}, None, ValueError, "__metadata__"),
])  # fmt: skip
def test_what_cannot_be_saved(directory, tensors, metadata, error, words):
    with pytest.raises(error, match=words):
        gaiafs.save_file(tensors, directory / "f", metadata)
    assert os.listdir(directory) == []
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.save_file({"a": np.ones(1)}, directory / "none" / "f")
    assert e.value.errno == 2


@pytest.mark.kind("emulated")
@pytest.mark.skipif("torch is None", reason="PyTorch is not installed")
def test_torch(directory):
    import safetensors.torch

    names = "float32 float16 bfloat16 int64 uint8 bool complex64 float8_e4m3fn float8_e5m2 uint16 float8_e8m0fnu".split()
    tensors = {n: torch.arange(6).reshape(2, 3).to(torch.float32).to(getattr(torch, n)) for n in names}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "grad": torch.ones(3, requires_grad=True)}
    tensors["f4"] = torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    gaiafs.save_file(tensors, directory / "ours", {"format": "pt"})
    safetensors.torch.save_file(tensors, directory / "theirs", {"format": "pt"})
    assert (directory / "ours").read_bytes() == (directory / "theirs").read_bytes()
    for bad, words in [(torch.ones(3, 4).t(), "contiguous"), (torch.ones(3).to_sparse(), "sparse"),
                       (torch.ones(1, device="meta"), "meta")]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            gaiafs.save_file({"a": bad}, directory / "bad")
    with pytest.raises(TypeError, match="complex128"):
        gaiafs.save_file({"a": torch.ones(1, dtype=torch.complex128)}, directory / "bad")
    assert KIND == "emulated" and not (directory / "bad").exists()
