"""Whatever leaves the package for kernels begins at a multiple of 16 bytes, unless the caller asked for less by name."""

import ctypes
import gc
import inspect
import json
import struct
import warnings

import numpy as np
import pytest
import safetensors.numpy

import gaiafs
from gaiafs import safetensors as ours
from gaiafs.__main__ import main
from gaiafs.copies import Copies
from gaiafs.dtypes import SAFETENSORS
from gaiafs.mapping import Lease

from conftest import KIND

PAGE = 4096
CONTENT = bytes(range(256)) * 64
try:
    import torch
except ImportError:
    torch = None
# PyTorch would need a GPU for the other kind.
FRAMEWORKS = {"emulated": ["array", "numpy"] + ["torch"] * (torch is not None), "cuda": ["array"]}.get(KIND, [])
SHAPES = [(8,), (3, 8), (0, 4), (64,), (8, 1, 5)]


def encode(tensors, padding):
    """Makes a file of (word, shape, bytes) by name, whose data begins at that residue of 16."""
    header, data = {}, b""
    for name, (word, shape, raw) in tensors.items():
        header[name] = {"dtype": word, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * ((padding - 8 - len(text)) % 16)
    return struct.pack("<Q", len(text)) + text + data


def of_every_type(words):
    """Returns tensors of every type and of awkward shapes, scalars and empty ones included."""
    rng, found = np.random.default_rng(3), {}
    for word in words:
        bits = SAFETENSORS[word].bits
        for shape in [*SHAPES, ()] if bits >= 8 else SHAPES:
            raw = rng.integers(0, 2, int(np.prod(shape)) * bits // 8, dtype="u1").tobytes()
            found[f"{word} {shape}"] = (word, shape, raw)
    return found


def address(t):
    if isinstance(t, gaiafs.Array):
        return t.ptr
    return t.ctypes.data if isinstance(t, np.ndarray) else t.data_ptr()


def content(t):
    if isinstance(t, (gaiafs.Array, np.ndarray)):
        return t.tobytes()
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("padding", range(16))
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_tensor_is_aligned(make, framework, padding):
    words = [w for w in SAFETENSORS if framework == "array" or SAFETENSORS[w].bits >= 8]
    tensors = of_every_type(words)
    path = make(encode(tensors, padding), "model.safetensors")
    crooked, at = set(), padding
    for name, (_, _, raw) in tensors.items():
        if raw and at % 16:
            crooked.add(name)
        at += len(raw)
    with pytest.warns(gaiafs.MisalignedWarning, match=f"{len(crooked)} of {len(tensors)} tensors .* bytes of device memory") as w:
        got = gaiafs.load_safetensors(path, framework=framework)
    assert len(w) == 1 and w[0].filename == __file__
    for name, (_, shape, raw) in tensors.items():
        assert content(got[name]) == raw and tuple(got[name].shape) == shape, name
        assert not raw or address(got[name]) % 16 == 0, name
        if framework == "array":
            copied = isinstance(got[name]._lease, Copies)
            assert copied == (name in crooked), name
            assert not copied or address(got[name]) % 256 == 0
    if framework == "array":
        assert len({id(a._lease) for n, a in got.items() if n in crooked}) == 1, "one allocation"


def test_what_is_aligned_is_shared_without_a_word(make):
    tensors = {n: t for n, t in of_every_type(["F32", "BF16", "U8"]).items() if len(t[2]) % 16 == 0}
    path = make(encode(tensors, 0), "model.safetensors")
    for misaligned in ("copy", "share", "error"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = gaiafs.load_safetensors(path, framework="array", misaligned=misaligned)
        assert all(isinstance(a._lease, Lease) for a in got.values())


def test_misaligned_is_chosen(make):
    tensors = {"a": ("U8", (1,), b"x"), "b": ("F32", (2,), bytes(range(8))), "c": ("I64", (1,), bytes(8)), "d": ("U8", (0,), b"")}
    path = make(encode(tensors, 8), "model.safetensors")
    with pytest.raises(ValueError, match="'a', one of 3, begins at byte .* not a multiple of 16"):
        gaiafs.load_safetensors(path, framework="array", misaligned="error")
    with pytest.raises(ValueError, match="misaligned is"):
        gaiafs.load_safetensors(path, framework="array", misaligned="maybe")
    with pytest.warns(gaiafs.MisalignedWarning, match="2 of 4"):
        got = gaiafs.load_safetensors(path, framework="array", misaligned="share")
    assert got["a"].ptr % 16 == 8 and isinstance(got["a"]._lease, Lease)
    assert got["b"].ptr % 16 == 0 and got["b"].tobytes() == bytes(range(8))  # no library takes it at byte 9
    path = make(encode({"b": tensors["b"]}, 8), "shared.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gaiafs.load_safetensors(path, framework="array", misaligned="share")["b"].ptr % 16 == 8


def test_one_warning_for_all_shards(directory):
    for i in range(3):
        (directory / f"{i}.safetensors").write_bytes(encode({f"{i}": ("F32", (4,), bytes(16))}, 4))
    with pytest.warns(gaiafs.MisalignedWarning, match="3 of 3 tensors .* 768 bytes") as w:
        gaiafs.load_safetensors(directory, framework="array")
    assert len(w) == 1


@pytest.mark.filterwarnings("ignore::gaiafs.MisalignedWarning")
def test_copies_show_the_file_as_it_was(make, mount):
    path = make(encode({"a": ("U8", (64,), b"1" * 64)}, 8), "model.safetensors")
    a = gaiafs.load_safetensors(path, framework="array")["a"]
    with gaiafs.mmap(path, mode="r+") as m:
        m.write(b"2" * 64, len(m) - 64)
    with gaiafs.mmap(path) as m:
        m.acquire()
        assert m.read(len(m) - 64) == b"2" * 64
    assert a.tobytes() == b"1" * 64 and ctypes.string_at(a.ptr, 64) == b"1" * 64
    f = next(f for f in gaiafs.status(mount)["files"] if f["name"] == str(path.relative_to(mount)))
    assert f["mappings"] == 0  # nothing is shared, so nothing is mapped


@pytest.mark.kind("cuda")
@pytest.mark.filterwarnings("ignore::gaiafs.MisalignedWarning")
def test_copies_are_freed(make, python):
    from test_mapping import run

    path = make(encode(of_every_type(["F32", "U8"]), 1), "model.safetensors")
    script = """
import gc, sys, gaiafs
for _ in range(3):
    w = gaiafs.load_safetensors(sys.argv[1], 1, framework="array")
    c = next(a for a in w.values() if a.nbytes).__dlpack__(max_version=(1, 0))
    del w, c; gc.collect()
gaiafs.mmap(sys.argv[1]).close()
"""
    done = run([*python, "-W", "ignore"], script, path, FAKECUDA_LEAKS="1")
    assert (done.returncode, done.stderr) == (0, "")
    script = """
import errno, sys, gaiafs
try:
    gaiafs.load_safetensors(sys.argv[1], framework="array")
except gaiafs.Error as e:
    assert e.errno == errno.ENOMEM and "could not be copied" in str(e) and e.filename == sys.argv[1], e
else:
    sys.exit(1)
"""
    for call in ("cuMemAlloc:2", "cuStreamCreate:2", "cuMemcpyDtoDAsync:2:1"):
        done = run(python, script, path, FAKECUDA_LEAKS="1", FAKECUDA_FAIL=call)
        assert (done.returncode, done.stderr) == (0, ""), call


def test_mappings_refuse(make):
    with gaiafs.mmap(make(CONTENT)) as m:
        for offset in range(33):
            if offset % 16 == 0:
                assert m.array("uint8", (5,), offset).ptr % 16 == 0
                continue
            with pytest.raises(ValueError, match=f"offset {offset} is not a multiple of 16.*misaligned=True"):
                m.array("uint8", (5,), offset)
            with pytest.raises(ValueError, match="not a multiple of 16"):
                m.tensor("uint8", (5,), offset)
            assert m.array("uint8", (5,), offset, misaligned=True).ptr == m.ptr + offset
            assert m.array("uint8", (0,), offset).nbytes == 0
        with pytest.raises(ValueError, match="multiple of the 4 bytes"):
            m.array("float32", (1,), 2, misaligned=True)
        if KIND == "emulated":
            assert m.numpy("float32", (1,), 4).tobytes() == CONTENT[4:8]
            assert bytes(m.buffer(3, 2)) == CONTENT[3:5]
        if KIND == "emulated" and torch is not None:
            assert m.tensor("uint8", (5,), 3, misaligned=True).data_ptr() == m.ptr + 3
        gc.collect()


# What the public functions return: nothing of memory, memory that only code of the CPU uses, or arrays for kernels, which the
# tests above look at. A new function has to be put into one of these.
NOTHING = {
    "Acquired.pages", "Array.device", "Array.nbytes", "Array.size", "Array.tobytes", "DType", "Error", "FormatError",
    "Mapping.acquire", "Mapping.advise", "Mapping.close", "Mapping.closed", "Mapping.device", "Mapping.kind", "Mapping.mode",
    "Mapping.nbytes", "Mapping.offset", "Mapping.read", "Mapping.release", "Mapping.sync", "Mapping.write", "MisalignedWarning",
    "ReadOnlyWarning", "align", "info", "mmap", "status", "warm",
}  # fmt: skip
OF_THE_CPU = {"Array.numpy", "Mapping.buffer", "Mapping.numpy", "Mapping.ptr"}
FOR_KERNELS = {"Array.torch", "Mapping.array", "Mapping.tensor", "load_safetensors"}


def test_nothing_else_leaves_the_package():
    found = set()
    for name in gaiafs.__all__:
        thing = getattr(gaiafs, name)
        if thing not in (gaiafs.Mapping, gaiafs.Array, gaiafs.Acquired):
            found.add(name)
            continue
        members = {k for k, v in vars(thing).items() if not k.startswith("_") and not inspect.ismemberdescriptor(v)}
        found.update(f"{name}.{k}" for k in members)
    assert found | {"Acquired.pages"} == NOTHING | OF_THE_CPU | FOR_KERNELS


def test_align(directory, tmp_path, capsys):
    rng = np.random.default_rng(1)
    want = {f"w{i}": rng.standard_normal((n, 4)).astype("f4") for i, n in enumerate([1, 5, 16])}
    want |= {"odd": np.arange(3, dtype="u1"), "even": np.arange(32, dtype="u2"), "empty": np.zeros((0, 3), "f8")}
    want["s"] = np.array(1.5)
    crooked, aligned = directory / "crooked.safetensors", directory / "aligned.safetensors"
    safetensors.numpy.save_file(want, crooked, {"format": "np", "é": "\n"})
    content = bytearray(crooked.read_bytes())
    (n,) = struct.unpack_from("<Q", content)
    content[:8] = struct.pack("<Q", n + 3)
    content[8 + n : 8 + n] = b"   "
    crooked.write_bytes(content)
    assert gaiafs.align(crooked, aligned) == 1  # of the two that are not 16 bytes long, the second
    got = safetensors.numpy.load_file(aligned)
    assert got.keys() == want.keys()
    assert all(got[k].tobytes() == v.tobytes() and got[k].shape == v.shape and got[k].dtype == v.dtype for k, v in want.items())
    with safetensors.safe_open(aligned, "np") as f:
        assert f.metadata() == {"format": "np", "é": "\n"}
    with pytest.warns(gaiafs.MisalignedWarning, match="1 of 7"):
        ours_now = gaiafs.load_safetensors(aligned, framework="array")
    assert all(ours_now[k].tobytes() == v.tobytes() for k, v in want.items())
    with pytest.raises(FileExistsError):
        gaiafs.align(crooked, aligned)
    (tmp_path / "bad").write_bytes(b"{}")
    with pytest.raises(gaiafs.FormatError):
        gaiafs.align(tmp_path / "bad", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert main(["align", str(crooked), str(tmp_path / "again")]) == 0
    assert "1 tensors are not aligned" in capsys.readouterr().out
    assert (tmp_path / "again").read_bytes() == aligned.read_bytes()
    assert main(["align", str(crooked), str(aligned)]) == 1 and "exists: remove it" in capsys.readouterr().err


def test_align_of_large_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "STEP", 1000)
    want = {"a": np.arange(5000, dtype="u2"), "b": np.arange(500, dtype="u2")}
    safetensors.numpy.save_file(want, tmp_path / "old")
    assert gaiafs.align(tmp_path / "old", tmp_path / "new") == 0
    got = safetensors.numpy.load_file(tmp_path / "new")
    assert all((got[k] == want[k]).all() for k in want)
