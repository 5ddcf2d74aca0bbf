"""What a program's author sees of a failure: its own line, one of the package, and the words."""

import errno
import inspect
import pathlib
import traceback

import numpy as np
import pytest
import safetensors.numpy

import gaiafs

PACKAGE = str(pathlib.Path(gaiafs.__file__).parent)

CALLS = {
    "mmap": lambda p: gaiafs.mmap(p),
    "mmap, new file": lambda p: gaiafs.mmap(p, mode="w+", length=4096),
    "view": lambda p: gaiafs.view(p, [(0, 100)]),
    "load_safetensors": lambda p: gaiafs.load_safetensors(p, framework="numpy"),
    "load_file": lambda p: gaiafs.load_file(p, framework="numpy"),
    "safe_open": lambda p: gaiafs.safe_open(p, "numpy"),
    "pack": lambda p: gaiafs.pack([p]),
    "warm": lambda p: gaiafs.warm(p),
    "info": lambda p: gaiafs.info(p),
    "status": lambda p: gaiafs.status(p.parent),
}


def raised(call, *arguments):
    with pytest.raises(gaiafs.Error) as caught:
        call(*arguments)
    e = caught.value
    inside = [f for f in traceback.extract_tb(e.__traceback__) if f.filename.startswith(PACKAGE)]
    assert len(inside) == 1, inside
    assert e.__cause__ is None and (e.__context__ is None or e.__suppress_context__)
    return e


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_file_on_no_mount(call, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({"w": np.zeros(8192, np.float32)}))
    e = raised(call, path)
    assert e.errno == errno.ENOTTY and e.filename in (str(path), str(path.parent))


@pytest.mark.parametrize("call", [c for n, c in CALLS.items() if n != "mmap, new file"])
def test_a_file_that_is_missing(call, directory):
    e = raised(call, directory / "none" / "model.safetensors")
    assert isinstance(e, FileNotFoundError)


@pytest.mark.parametrize("name", ["load_safetensors", "load_file", "safe_open", "pack", "warm"])
def test_a_device_that_is_missing(name, directory):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({"w": np.zeros(8192, np.float32)}))
    more = {"safe_open": ["numpy"]}.get(name, [])
    e = raised(lambda: getattr(gaiafs, name)([path] if name == "pack" else path, *more, device=77))
    assert e.errno == errno.ENODEV and e.filename == str(path)


def test_groups(make):
    with gaiafs.mmap(make(bytes(4096))) as m:
        assert raised(gaiafs.atomic, m).errno == errno.EACCES
    with pytest.raises(ValueError, match="no mapping"):
        gaiafs.atomic()
    with pytest.raises(TypeError, match="'x' is no mapping"):
        gaiafs.acquire("x")


def test_signatures_and_names_are_kept():
    assert list(inspect.signature(gaiafs.load_file).parameters) == ["path", "device", "framework"]
    assert gaiafs.load_file.__qualname__ == "load_file" and "safetensors" in gaiafs.load_file.__doc__
