"""safe_open returns the same as the safetensors package's, with the same errors."""

import gc
import itertools
import json
import os
import random
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import gaiafs
from gaiafs import opened

from conftest import KIND

FRAMEWORK = "np" if KIND == "emulated" else "array"
RNG = np.random.default_rng(2)
TENSORS = {
    "m": RNG.integers(0, 99, (7, 12)).astype("i2"),
    "cube": RNG.standard_normal((3, 5, 4)).astype("f4"),
    "v": RNG.integers(0, 99, 300, "u1"),
    "scalar": np.array(1.5),
    "empty": np.zeros((0, 4), "f4"),
}
try:
    import torch
except ImportError:
    torch = None


@pytest.fixture
def path(directory):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(TENSORS, {"a": "b"}))
    return path


def outcome(f, index):
    """Returns what an index returns: an array, or the error and its message."""
    try:
        t = f[index]
    except Exception as e:
        return type(e), str(e)
    return tuple(t.shape), t.tobytes()


def test_as_safetensors(path):
    with safetensors.safe_open(path, "np") as theirs, gaiafs.safe_open(path, FRAMEWORK) as f:
        assert f.keys() == theirs.keys() and f.metadata() == theirs.metadata() == {"a": "b"}
        assert f.offset_keys() == theirs.offset_keys()
        for name, want in theirs.get_tensors().items():
            got = f.get_tensor(name)
            assert got.tobytes() == want.tobytes() and tuple(got.shape) == want.shape
            s = f.get_slice(name)
            assert (
                s.get_shape() == theirs.get_slice(name).get_shape()
                and s.get_dtype() == theirs.get_slice(name).get_dtype()
            )
        assert f.get_tensors().keys() == theirs.get_tensors().keys()
        for use in (lambda f: f.get_tensor("none"), lambda f: f.get_slice("none")):
            said = []
            for each in (theirs, f):
                with pytest.raises(safetensors.SafetensorError) as e:
                    use(each)
                said.append(str(e.value))
            assert said[0] == said[1]
        del got, s
    for use in (f.keys, f.offset_keys, f.metadata, f.get_tensors, lambda: f.get_slice("m")):
        with pytest.raises(safetensors.SafetensorError, match="File is closed"):
            use()


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_metadata_is_that_of_safetensors(directory, metadata):
    header = {} if metadata is None else {"__metadata__": metadata}
    header["a"] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    text = json.dumps(header).encode()
    file = directory / "metadata.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"abcd")
    with safetensors.safe_open(file, "np") as theirs, gaiafs.safe_open(file, "array") as f:
        assert f.metadata() == theirs.metadata() == metadata
        f.prefetch()
        with pytest.raises(NotImplementedError):
            f.prefetch("a plan")
        with pytest.raises(AttributeError):
            f.nothing  # noqa: B018


def test_slices_are_those_of_safetensors(path):
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    rng = random.Random(seed)
    indexes = [(), [], [1], 0, -1, 2, -3, 99, -99, slice(None), slice(1), slice(1, 3), slice(2, 99), slice(3, 3), None,
               "a", 1.5, True, np.int64(1), slice(0, 4, 2), ..., slice(-1, None), (0, 0), (slice(None), 1),
               (0, 0, 0, 0), (..., 1), (1, ...), (..., ...), slice(0, 4, -1), slice(0, 4, 0),
               (slice(1, 7, 3), slice(0, 9, 2))]  # fmt: skip
    numbers = [None, 0, 1, 2, 3, 4, 5, 7, 12, 13]
    for _ in range(400):
        part = slice(*sorted(rng.choices(numbers, k=2), key=lambda x: (x is None, x)))
        one = [rng.choice([part, rng.randrange(-4, 5)]) for _ in range(rng.choice([1, 2, 3]))]
        indexes.append(tuple(one))
    with safetensors.safe_open(path, "np") as theirs, gaiafs.safe_open(path, FRAMEWORK) as f:
        for name, index in itertools.product(["m", "cube", "v", "scalar"], indexes):
            want, got = outcome(theirs.get_slice(name), index), outcome(f.get_slice(name), index)
            if want[0] in (SystemError, TypeError, OverflowError):  # SystemError: of a slice that ends before it begins
                assert isinstance(got[0], type), (name, index, want, got)
            else:
                assert got == want, (name, index)
        assert outcome(f.get_slice("m"), slice(-1, None))[0] is OverflowError
        gc.collect()


def test_parts_are_aligned_and_only_they_are_fetched(directory, mount):
    def copied():
        files = gaiafs.status(mount)["files"]
        return sum(f["counters"]["view_pages"] for f in files if f["name"] == str(path.relative_to(mount)))

    big = np.arange(1 << 20, dtype="u4").reshape(1024, 1024)
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({"big": big}))
    with gaiafs.safe_open(path, "array") as f:
        assert f.keys() == ["big"]
        for index in (slice(10, 12), (slice(5, 9), slice(3, 7)), (0, slice(1, 9)), 17):
            part = f.get_slice("big")[index]
            assert part.ptr % 16 == 0 and part.tobytes() == big[index].tobytes()
        assert f.get_slice("big")[10:12].ptr == f.get_tensor("big").ptr + 2 * 4 * 5120
        del part
        assert copied() < 1024 + 64


def test_what_is_asked_for_is_as_it_is_now(path):
    with gaiafs.safe_open(path, FRAMEWORK) as f:
        s = f.get_slice("v")
        first = s[:16].tobytes()
        content = bytearray(path.read_bytes())
        at = content.index(first)
        with open(path, "r+b") as g:
            g.seek(at)
            g.write(b"0123456789abcdef")
        assert s[:16].tobytes() == b"0123456789abcdef" == f.get_tensor("v").tobytes()[:16]
        del s


def test_the_same_memory_as_load_safetensors(path):
    loaded = gaiafs.load_safetensors(path, framework="array")
    f = gaiafs.safe_open(path, "array")
    assert [v["mappings"] for v in gaiafs.info(path)["files"][0]["views"]] == [2]
    assert f.get_tensor("cube").tobytes() == loaded["cube"].tobytes()


def test_bad_arguments(path, directory):
    with pytest.raises(ValueError, match="framework"):
        gaiafs.safe_open(path, "flax")
    with pytest.raises(gaiafs.Error):
        gaiafs.safe_open(directory / "none", "array")
    with pytest.raises(ValueError, match="no device"):
        gaiafs.safe_open(path, "array", "cpu")
    if KIND == "cuda":
        with pytest.raises(ValueError, match="NumPy cannot"):
            gaiafs.safe_open(path, "np")


@pytest.mark.kind("emulated")
@pytest.mark.skipif("torch is None", reason="PyTorch is not installed")
def test_torch(path):
    indexes = [0, -1, slice(1, 3), (slice(None), slice(2, 4)), (..., 0), [0, 2], slice(None, None, 2), (0, 1), 99, None,
               torch.tensor([True, False, True])]  # fmt: skip
    with safetensors.safe_open(path, "pt") as theirs, gaiafs.safe_open(path, "pt") as f:
        for name, index in itertools.product(["m", "cube", "v"], indexes):
            try:
                want = theirs.get_slice(name)[index]
            except Exception as e:
                with pytest.raises(type(e)):
                    f.get_slice(name)[index]
                continue
            got = f.get_slice(name)[index]
            assert torch.equal(got, want) and got.is_contiguous() and got.data_ptr() % 16 == 0, (name, index)
            del got


def test_without_safetensors(python):
    import subprocess

    script = "import sys; sys.modules['safetensors'] = None; from gaiafs import opened; print(opened.SafetensorError.__module__)"
    done = subprocess.run([*python, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "gaiafs.opened\n", done.stderr
    assert opened.SafetensorError is safetensors.SafetensorError
