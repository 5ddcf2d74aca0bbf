"""Many files in one buffer, and data sets of them."""

import errno
import multiprocessing
import os
import pickle
import resource
import warnings

import numpy as np
import pytest

import gaiafs
from gaiafs import files as opening
from gaiafs import packs

from conftest import KIND

FRAMEWORK = "numpy" if KIND != "cuda" else "array"


def content(i):
    return bytes([i & 255, i >> 8, 7]) * (30 + i % 11)


@pytest.fixture
def folder(directory):
    (directory / "below" / "more").mkdir(parents=True)
    for i in range(40):
        (directory / ("below" if i % 3 else "below/more") / f"{i:03}").write_bytes(content(i))
    (directory / "empty").touch()
    return directory


def bytes_of(item):
    return item.tobytes()


def test_a_pack_has_the_files(folder):
    with gaiafs.pack(folder, framework=FRAMEWORK) as p:
        names = [os.path.relpath(os.path.join(d, f), folder) for d, _, files in os.walk(folder) for f in files]
        assert sorted(p) == sorted(names) and len(p) == 41
        for name, item in p.items():
            want = (folder / name).read_bytes()
            assert bytes_of(item) == p.tobytes(name) == want and p.sizes[name] == len(want)
            if want:
                assert p.offsets[name] % 256 == 0
                assert p.view.read(len(want), offset=p.offsets[name]) == want
            del item
        assert "empty" in p and "nothing" not in p and p.get("nothing") is None
        with pytest.raises(KeyError):
            p.tobytes("nothing")
        assert p.array("below/004", "uint16", (3,)).tobytes() == content(4)[:6]
        a = p["below/004"]
        with pytest.raises(BufferError):
            p.close()
        del a
    assert p.closed
    with gaiafs.pack([folder / "empty"], framework=FRAMEWORK) as p:
        assert bytes_of(p[str(folder / "empty")]) == b"" and p.acquire() == 0


def test_a_pack_wastes_little(folder):
    paths = [folder / "below" / f"{i:03}" for i in range(40) if i % 3]
    for align, most in ((1, 0), (256, 255)):
        with gaiafs.pack(paths, 1, framework="array", align=align) as p:
            assert list(p) == list(map(str, paths))
            assert p.view.nbytes <= sum(p.sizes.values()) + most * len(paths)


def test_a_pack_is_shared_and_refreshed(folder):
    one = folder / "below" / "001"
    with gaiafs.pack(folder, framework="array") as p, pickle.loads(pickle.dumps(p)) as q:
        with gaiafs.pack(str(folder), framework="array") as r:
            assert len(gaiafs.info(one)["files"][0]["views"]) == 1
            with open(one, "r+b") as f:
                f.write(b"changed")
            assert p.acquire() == 1
            assert all(x.tobytes("below/001")[:7] == b"changed" for x in (p, q, r))
            assert q.acquire() == 0


# More files than a view keeps descriptors of, and more than most processes may have open.
def test_a_pack_of_many_files(directory, source, mount):
    there = source / directory.relative_to(mount)
    for i in range(1030):
        (there / f"{i:04}").write_bytes(content(i))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 4000:
        pytest.skip(f"the process may have {limits[1]} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        before = len(os.listdir("/proc/self/fd"))
        with gaiafs.pack(directory, framework="array", align=16) as p:
            assert len(os.listdir("/proc/self/fd")) < before + 20
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
            assert not [i for i in range(1030) if p.tobytes(f"{i:04}") != content(i)]
            with open(directory / "1029", "r+b") as f:
                f.write(b"changed")
            assert p.acquire() == 1 and p.tobytes("1029")[:7] == b"changed"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_cannot_be_packed(folder, tmp_path, monkeypatch):
    for files, number in (([], errno.ENOENT), (folder / "no", errno.ENOENT), (tmp_path, errno.ENOENT)):
        with pytest.raises(gaiafs.Error) as e:
            gaiafs.pack(files, framework="array")
        assert e.value.errno == number
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(gaiafs.Error) as e:
        gaiafs.pack(tmp_path, framework="array")
    assert e.value.errno == errno.ENOTTY
    with pytest.raises(ValueError, match="twice"):
        gaiafs.pack([folder / "empty"] * 2)
    with pytest.raises(gaiafs.Error, match="power of two"):
        gaiafs.pack(folder, framework="array", align=3)
    monkeypatch.setattr(packs, "MAX_FILES", 39)
    with pytest.raises(gaiafs.Error, match="more than 39 files"):
        gaiafs.pack(folder, framework="array")
    monkeypatch.setattr(opening, "_FEW", 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(gaiafs.Error, match="5 files must be open at once.* 8 open, and the daemon") as e, opening.room_for(5):
        raise gaiafs.Error(errno.EMFILE)
    assert e.value.errno == errno.EMFILE and limits


def described(name, item):
    return name, bytes_of(item)


def item_of(arguments):
    data, i = arguments
    return data[i]


@pytest.mark.parametrize("method", ["here", "fork", "spawn"])
@pytest.mark.skipif(KIND == "cuda", reason="a forked child has no CUDA")
def test_a_data_set_of_files(folder, method, monkeypatch):
    monkeypatch.setattr("gaiafs.datasets.MAX_FILES", 25)
    data = gaiafs.Dataset.files(folder, framework=FRAMEWORK, transform=described)
    want = [(name, (folder / name).read_bytes()) for name in data.names]
    assert len(data) == 41 and data[-1] == want[-1]  # this process has it open when it forks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest and the pool have threads
        if method == "here":
            assert [data[i] for i in range(41)] == want
        else:
            with multiprocessing.get_context(method).Pool(2) as pool:
                assert pool.map(item_of, [(data, i) for i in range(41)]) == want
    with pytest.raises(IndexError):
        data[41]
    with open(folder / "below" / "001", "r+b") as f:
        f.write(b"changed")
    assert data.acquire() == 1 and data[data.names.index("below/001")][1][:7] == b"changed"


@pytest.mark.kind("emulated")
def test_a_data_set_of_rows(make):
    rows = np.arange(33 * 5 * 2, dtype="<i4").reshape(33, 5, 2)
    path = make(b"header" + rows.tobytes() + b"odd")
    data = gaiafs.Dataset.rows(path, "int32", (5, 2), offset=6, framework="numpy")
    assert len(data) == 33
    for i in (0, 7, 32, -1):
        assert np.array_equal(data[i], rows[i]) and not data[i].flags.writeable
    again = pickle.loads(pickle.dumps(data))
    assert np.array_equal(again[5], rows[5])
    assert gaiafs.Dataset.rows(path, "int32", 2, offset=6, count=4, framework="numpy", transform=np.sum)[3] == 6 + 7
    for wrong in ({"offset": 100_000}, {"count": 34, "offset": 6}, {"offset": -1}, {"count": 0}):
        with pytest.raises(ValueError, match="rows of 40 bytes"):
            gaiafs.Dataset.rows(path, "int32", (5, 2), framework="numpy", **wrong)
    with pytest.raises(ValueError, match="1329 bytes: 0 rows of 1600 bytes from byte 0 on, and a data set needs one"):
        gaiafs.Dataset.rows(path, "int32", (400,), framework="numpy")
    with pytest.raises(ValueError, match="not made of whole bytes"):
        gaiafs.Dataset.rows(path, "int32", (0,), framework="numpy")


def named_sum(name, item):
    return name, int(item.sum())


@pytest.mark.kind("emulated")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore")
def test_a_data_loader_with_workers(folder, make, method):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    files = gaiafs.Dataset.files(folder, transform=named_sum)
    rows = torch.arange(60, dtype=torch.float32).reshape(20, 3)
    numbers = gaiafs.Dataset.rows(make(rows.numpy().tobytes()), torch.float32, (3,))
    assert numbers[2].tolist() == [6, 7, 8] and files[0]
    options = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": method}
    assert torch.equal(torch.cat(list(torch.utils.data.DataLoader(numbers, **options))), rows)
    batches = torch.utils.data.DataLoader(files, **options)
    got = [pair for names, sums in batches for pair in zip(names, sums.tolist(), strict=True)]
    assert got == [(name, sum((folder / name).read_bytes())) for name in files.names]
