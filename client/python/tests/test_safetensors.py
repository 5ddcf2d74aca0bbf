"""Weights: what the safetensors package writes is what comes, and what is not of the format is refused with a
sentence.
"""

import errno
import gc
import json
import os
import random
import shlex
import struct
import subprocess

import numpy as np
import pytest
import safetensors.numpy

import gaiafs
from gaiafs import _core
from gaiafs import safetensors as ours
from gaiafs.__main__ import main

import typed_paths
from conftest import KIND

ml_dtypes = pytest.importorskip("ml_dtypes")
torch = None
if KIND != "cuda":
    try:
        import torch
    except ImportError:
        pass

FRAMEWORK = "numpy" if KIND == "emulated" else "array"


def encode(header, data=b""):
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
        header += b" " * (-len(header) % 8)
    text = header
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def parse(content):
    """Parses a whole file's bytes."""
    (n,) = struct.unpack_from("<Q", content)
    return ours.parse_header(content[8 : 8 + n], len(content) - 8 - n)


def values(t):
    """Returns the bytes of a tensor of any framework."""
    if isinstance(t, (np.ndarray, gaiafs.Array)):
        return t.tobytes()
    return (
        t.contiguous().view(torch.uint8).numpy().tobytes()
        if t.ndim
        else t.reshape(1).view(torch.uint8).numpy().tobytes()
    )


@pytest.fixture
def weights():
    rng = np.random.default_rng(7)
    names = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64".split()
    found = {n: rng.integers(0, 2, (3, 5)).astype(n) for n in names}
    for n in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        found[n] = rng.standard_normal((4, 4)).astype(getattr(ml_dtypes, n))
    found["empty"] = np.zeros((0, 7), "float32")
    found["scalar"] = np.array(3.5)
    found["large"] = rng.standard_normal((700, 1000)).astype("float32")
    return found


def test_what_the_package_writes_is_what_comes(weights, directory):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(weights, metadata={"format": "np"}))
    got = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    assert got.keys() == weights.keys()
    for name, want in weights.items():
        assert got[name].shape == want.shape, name
        assert str(got[name].dtype) == str(want.dtype), name
        assert values(got[name]) == want.tobytes(), name
    info = gaiafs.info(path)["files"][0]
    assert info["metadata"] == {"format": "np"} and info["tensors"]["large"] == {
        "dtype": "float32",
        "shape": [700, 1000],
        "bytes": 2800000,
    }


def test_no_second_copy(weights, directory, mount):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(weights))
    first = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    held = gaiafs.status(mount)["devices"][0]["used_bytes"]
    second = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    assert gaiafs.status(mount)["devices"][0]["used_bytes"] == held
    assert values(first["large"]) == values(second["large"])
    f = next(f for f in gaiafs.status(mount)["files"] if f["name"] == str(path.relative_to(mount)))
    assert [(v["mappings"], v["segments"]) for v in f["views"]] == [(2, len(weights) - 1)]  # one is empty
    del first, second
    gc.collect()


def test_tensors_keep_the_mapping(weights, directory, mount):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(weights))
    got = gaiafs.load_safetensors(path, framework=FRAMEWORK)
    large = got.pop("large")
    del got
    gc.collect()
    assert values(large) == weights["large"].tobytes()
    if FRAMEWORK == "numpy":
        with pytest.raises(ValueError, match="read-only"):
            large[0] = 1


@pytest.mark.kind("emulated")
@pytest.mark.skipif("torch is None", reason="PyTorch is not installed")
def test_torch(weights, directory):
    import safetensors.torch

    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(weights))
    want = safetensors.torch.load_file(path)
    got = gaiafs.load_safetensors(path)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, name
        assert values(got[name]) == values(want[name]), name
    path.write_bytes(encode({"a": entry("F4", (2, 4), (0, 4)), "b": entry("F8_E8M0", (2,), (4, 6))}, b"abcdef"))
    got = gaiafs.load_safetensors(path)
    assert got["a"].dtype == torch.float4_e2m1fn_x2 and got["a"].shape == (2, 2)
    path.write_bytes(encode({"a": entry("F6_E2M3", (4,), (0, 3))}, b"abc"))
    with pytest.raises(TypeError, match="float6"):
        gaiafs.load_safetensors(path)


def shards(directory, weights, n=3, index="model.safetensors.index.json"):
    names = sorted(weights)
    place = {}
    for i in range(n):
        file = f"model-{i + 1:05}-of-{n:05}.safetensors"
        (directory / file).write_bytes(safetensors.numpy.save({k: weights[k] for k in names[i::n]}))
        place.update({k: file for k in names[i::n]})
    if index:
        text = json.dumps({"metadata": {"total_size": 1.5}, "weight_map": place})
        (directory / index).write_text(text)
    return place


@pytest.mark.parametrize("index", ["model.safetensors.index.json", None])
def test_directories(weights, directory, index):
    shards(directory, weights, index=index)
    paths = [directory, directory / index] if index else [str(directory)]
    for path in paths:
        got = gaiafs.load_safetensors(path, device=1, framework=FRAMEWORK)
        assert got.keys() == weights.keys()
        assert all(values(got[k]) == weights[k].tobytes() for k in weights)
    assert gaiafs.warm(directory) >= sum(v.nbytes for v in weights.values())
    warm = [f["views"] for f in gaiafs.info(directory)["files"]]
    assert all(sorted((v["device"], v["mappings"]) for v in views) == [(0, 0), (1, 1)] for views in warm)
    got = [gaiafs.load_safetensors(directory, framework=FRAMEWORK)]
    assert all(sorted((v["device"], v["mappings"]) for v in f["views"])[0] == (0, 1) for f in gaiafs.info(directory)["files"])
    del got


def test_indexes_that_lie(weights, directory):
    place = shards(directory, {k: weights[k] for k in ("int8", "float32", "large")})
    path = directory / "model.safetensors.index.json"
    for change, words in [
        ({"int9": place["int8"]}, "places tensor 'int9' in this file"),
        ({"int8": "../model.safetensors"}, "outside"),
        ({"int8": "/etc/passwd"}, "outside"),
        ({"int8": "a/../../b"}, "outside"),
        ({"int8": ""}, "no file name"),
        ({"int8": 7}, "no file name"),
        ({"int8": "a\0b"}, "no file name"),
        ({"": place["int8"]}, "places tensor '' in this file"),
        ({"\ud800": place["int8"]}, "half a character"),
    ]:
        path.write_text(json.dumps({"weight_map": {**place, **change}}))
        with pytest.raises(gaiafs.FormatError, match=words):
            gaiafs.load_safetensors(directory, framework=FRAMEWORK)
    for text in ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "b", "a": "c"}}', "[" * 100000, '{"a": \xff']:
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(gaiafs.FormatError):
            gaiafs.load_safetensors(directory, framework=FRAMEWORK)
    path.write_text(json.dumps({"weight_map": {"a": "none.safetensors"}}))
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.load_safetensors(path)
    assert e.value.filename.endswith("none.safetensors")
    path.unlink()
    (directory / "again.safetensors").write_bytes((directory / place["int8"]).read_bytes())
    with pytest.raises(gaiafs.FormatError, match="in another file"):
        gaiafs.load_safetensors(directory, framework=FRAMEWORK)


def test_directories_without_weights(directory):
    with pytest.raises(gaiafs.Error, match="no \\*.safetensors"):
        gaiafs.load_safetensors(directory)
    for name in ("a", "b"):
        (directory / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(gaiafs.FormatError, match="several"):
        gaiafs.load_safetensors(directory)


def test_frameworks(directory, weights):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({"a": weights["int8"]}))
    with pytest.raises(ValueError, match="framework is"):
        gaiafs.load_safetensors(directory / "none", framework="jax")  # before anything is loaded
    assert gaiafs.load_safetensors(os.fsencode(path), framework="array").keys() == {"a"}
    if KIND == "cuda":
        with pytest.raises(ValueError, match="NumPy cannot"):
            gaiafs.load_safetensors(path, framework="numpy")
    a = gaiafs.load_safetensors(path, framework="array")["a"]
    assert isinstance(a, gaiafs.Array) and a.readonly and a.tobytes() == weights["int8"].tobytes()


@pytest.mark.parametrize("framework", [None, "torch", "numpy"])
def test_library_that_is_not_installed(directory, python, framework):
    """It fails before anything is loaded, and the error says what to do."""
    script = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
import gaiafs
try:
    gaiafs.load_safetensors(sys.argv[1], framework=eval(sys.argv[2]))
except ImportError as e:
    print(e)
"""
    command = [*python, "-c", script, directory / "none.safetensors", repr(framework)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "not installed: install it" in done.stdout or "nor NumPy is installed" in done.stdout, done.stderr
    assert "framework='array'" in done.stdout


def test_paths(weights, directory, mount):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({"a": weights["int8"]}))
    typed_paths.use(str(path), str(mount))


def test_directory_that_cannot_be_read(directory, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)  # root may read everything
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.load_safetensors(directory, framework="array")
    assert e.value.errno == errno.EACCES and e.value.filename == str(directory)


GOOD = encode(
    {"__metadata__": {"a": "b"}, "x": entry(), "y": entry("U8", (0, 5), (8, 8)), "z": entry("I64", (), (8, 16))}, bytes(16)
)

HOSTILE = {
    "nothing": b"",
    "too short": b"\1\2\3",
    "header past the end": struct.pack("<Q", 100) + b"{}",
    "header of 2**63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "header over the cap": struct.pack("<Q", ours.MAX_HEADER + 1) + b"{}",
    "empty header": struct.pack("<Q", 0),
    "space first": encode(b" {}"),
    "an array": encode(b"[]"),
    "cut": encode(b'{"a": '),
    "two objects": encode(b"{}{}"),
    "not UTF-8": encode(b'{"\xff": 1}'),
    "byte order mark": encode(b"\xef\xbb\xbf{}"),
    "nested": encode(b'{"a":' * 100_000),
    "duplicate": encode(b'{"a": 1, "a": 2}'),
    "duplicate in an entry": encode(b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [], "data_offsets": [0, 1]}}', b"x"),
    "NaN": encode(b'{"a": NaN}'),
    "metadata of numbers": encode({"__metadata__": {"a": 1}}),
    "metadata array": encode({"__metadata__": []}),
    "entry array": encode({"a": []}),
    "no dtype": encode({"a": {"shape": [], "data_offsets": [0, 0]}}),
    "unknown dtype": encode({"a": entry("F33")}, bytes(8)),
    "dtype number": encode({"a": entry(7)}, bytes(8)),
    "dtype list": encode({"a": entry([])}, bytes(8)),
    "shape string": encode({"a": {"dtype": "U8", "shape": "8", "data_offsets": [0, 8]}}, bytes(8)),
    "negative size": encode({"a": entry(shape=(-2,))}, bytes(8)),
    "two negative sizes": encode({"a": entry(shape=(-2, -1))}, bytes(8)),
    "fractional size": encode({"a": entry(shape=(2.0,))}, bytes(8)),
    "boolean size": encode({"a": entry(shape=(True, 2))}, bytes(8)),
    "overflow": encode({"a": entry("U8", (1 << 32, 1 << 32), (0, 0))}),
    "overflow beside zero": encode({"a": entry("U8", (0, 1 << 62, 8), (0, 0))}),
    "a number of 5000 digits": encode(b'{"a": ' + b"9" * 5000 + b"}"),
    "65 dimensions": encode({"a": entry("U8", (1,) * 65, (0, 1))}, b"x"),
    "one offset": encode({"a": entry(offsets=(0,))}, bytes(8)),
    "offsets swapped": encode({"a": entry(offsets=(8, 0))}, bytes(8)),
    "negative offset": encode({"a": entry(offsets=(-8, 0))}, bytes(8)),
    "past the end": encode({"a": entry(offsets=(0, 8))}, bytes(7)),
    "shape and bytes differ": encode({"a": entry(shape=(3,))}, bytes(8)),
    "bits": encode({"a": entry("F4", (3,), (0, 1))}, b"x"),
    "bytes after the end": encode({"a": entry()}, bytes(9)),
    "hole": encode({"a": entry(), "b": entry(offsets=(9, 17))}, bytes(17)),
    "hole before the first": encode({"a": entry(offsets=(1, 9))}, bytes(9)),
    "overlap": encode({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": encode({"a": entry(), "b": entry()}, bytes(8)),
    "half a character in the metadata": encode(b'{"__metadata__": {"a": "\\ud800"}}'),
    "half a character in a key of the metadata": encode(b'{"__metadata__": {"\\udfff": "a"}}'),
    "minus zero": encode(b'{"a": {"dtype": "U8", "shape": [-0], "data_offsets": [0, 0]}}'),
    "half a character in a name": encode(b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(make, name):
    path = make(HOSTILE[name], "model.safetensors")
    with pytest.raises(gaiafs.FormatError) as e:
        gaiafs.load_safetensors(path, framework=FRAMEWORK)
    assert str(path) in str(e.value) and str(e.value).replace("…", "").isascii()


def test_good_file(make):
    assert list(parse(GOOD).tensors) == ["x", "y", "z"]
    got = gaiafs.load_safetensors(make(GOOD), framework=FRAMEWORK)
    assert tuple(got["y"].shape) == (0, 5)
    assert parse(encode(b"{}   ")).tensors == {}
    assert gaiafs.load_safetensors(make(encode(b"{}"), "empty"), framework=FRAMEWORK) == {}


@pytest.mark.parametrize("name", ["", "a\nb", "\0", "\x7f", "\u202e", "\U0001f600"])
def test_names_that_the_package_allows(make, name):
    content = encode({name: entry(), "__metadata__": None}, bytes(8))
    assert [n for n, _ in safetensors.deserialize(content)] == [name]
    path = make(content, "model.safetensors")
    assert list(gaiafs.load_safetensors(path, framework=FRAMEWORK)) == [name]
    assert json.loads(json.dumps(gaiafs.info(path)))["files"][0]["metadata"] == {}


def test_fuzz():
    """Whatever bytes there are, they parse or are refused; and whatever parses is consistent and read by the package
    alike.
    """
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    rng = random.Random(seed)
    words = [b'"', b"{", b"}", b"[", b"]", b"-", b"1e9", b"null", b"true", b"\\u0000", b"\xff", b"9" * 30, b",", b":", b" "]
    accepted = refused = 0
    for _ in range(4000):
        content = bytearray(rng.choice([GOOD, rng.choice(list(HOSTILE.values()))])[:4096])
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(len(content) + 1)
            how = rng.randrange(4)
            if how == 0 and at < len(content):
                content[at] = rng.randrange(256)
            elif how == 1:
                content[at:at] = rng.choice(words)
            elif how == 2:
                del content[at : at + rng.randrange(8)]
            elif len(content) >= 8:
                content[:8] = struct.pack("<Q", max(0, len(content) - 8 - rng.randrange(32)))
        if len(content) < 8:
            continue
        (n,) = struct.unpack_from("<Q", content)
        if n > len(content) - 8:
            continue
        try:
            h = parse(bytes(content))
        except gaiafs.FormatError:
            refused += 1
            continue
        accepted += 1
        assert sum(t.end - t.begin for t in h.tensors.values()) == len(content) - 8 - n
        safetensors.deserialize(bytes(content))  # safetensors accepts everything that is accepted here
    assert accepted > 10 and refused > 100, (accepted, refused)


def test_file_that_shrank(directory, monkeypatch):
    path = directory / "model.safetensors"
    path.write_bytes(encode({"a": entry("U8", (9000,), (0, 9000))}, bytes(9000)))
    real = _core.map_view

    def late(*arguments, **options):
        os.truncate(path, 100)
        return real(*arguments, **options)

    monkeypatch.setattr(_core, "map_view", late)
    with pytest.raises(gaiafs.FormatError, match="shrank"):
        gaiafs.load_safetensors(path, framework=FRAMEWORK)


def test_command(weights, directory, python, tmp_path):
    def command(*arguments):
        return subprocess.run([*python, "-m", "gaiafs", *map(str, arguments)], capture_output=True, text=True, timeout=60)

    shards(directory, weights)
    done = command("warm", directory, "--device", "1")
    assert done.returncode == 0 and done.stderr == "" and "bytes on device 1" in done.stdout
    done = command("info", directory)
    files = json.loads(done.stdout)["files"]
    assert len(files) == 3 and all(f["views"][0]["device"] == 1 and f["tensors"] for f in files)
    done = subprocess.run(f"{shlex.join([*python, '-m', 'gaiafs', 'info', str(directory)])} | true", shell=True,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.stderr == ""
    none = [(d / "none", "No such file") for d in (tmp_path, directory)]
    for path, words in [(tmp_path, "not on a gaiafs mount"), *none]:
        done = command("info", path)
        assert done.returncode == 1 and done.stderr.startswith("gaiafs: ") and "Traceback" not in done.stderr
        assert words in done.stderr and done.stderr.rstrip().endswith(repr(str(path)))


@pytest.mark.parametrize(
    "arguments, code", [([], 2), (["warm"], 2), (["warm", "/none"], 1), (["warm", "/", "--device", "x"], 2),
                        (["--help"], 0), (["warm", "--help"], 0), (["info", "--help"], 0), (["--version"], 0)]
)  # fmt: skip
def test_arguments_of_the_command(arguments, code, capsys):
    try:
        done = main(arguments)
    except SystemExit as e:
        done = e.code
    said = capsys.readouterr()
    assert done == code and (said.err if code else said.out)


def test_weights_in_subfolders_are_warmed_on_all_devices(directory, python):
    """As in the folder of a diffusion model."""
    for part in ("unet", "vae"):
        (directory / part).mkdir()
        safetensors.numpy.save_file({"w": np.arange(300.0)}, directory / part / "model.safetensors")
    (directory / "scheduler").mkdir()
    command = [*python, "-m", "gaiafs", "warm", "--quiet", directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    kind = {"emulated": "emulated", "cuda": "cuda"}[KIND]
    lines = [line.partition(" in ")[0] for line in done.stdout.splitlines()]
    assert lines == [f"{directory}: 4800 bytes on device {kind}:{i}" for i in range(2)], done
    views = [sorted((v["device"], v["mappings"]) for v in f["views"]) for f in gaiafs.info(directory)["files"]]
    assert views == [[(0, 0), (1, 0)]] * 2
