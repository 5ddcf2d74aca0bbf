"""Everything that the package gives to kernels is aligned, unless the caller passed misaligned=True."""

import gc
import json
import struct

import numpy as np
import pytest

import gaiafs
from gaiafs.dtypes import SAFETENSORS

from conftest import KIND

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
    """Returns tensors of every type and of awkward shapes, including scalars and empty ones."""
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
    got = gaiafs.load_safetensors(make(encode(tensors, padding), "model.safetensors"), framework=framework)
    for name, (_, shape, raw) in tensors.items():
        assert content(got[name]) == raw and tuple(got[name].shape) == shape, name
        assert not raw or address(got[name]) % 256 == 0, name
    if framework == "array":
        assert len({id(a._lease.window) for a in got.values()}) == 1, "one view"


@pytest.mark.filterwarnings("ignore::gaiafs.ReadOnlyWarning")
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


# What the public functions return: nothing of memory, memory that only code of the CPU uses, or arrays for kernels,
# which the tests above look at. A new function has to be put into one of these.
NOTHING = {
    "Acquired.pages", "Array.device", "Array.dtype", "Array.nbytes", "Array.readonly", "Array.shape", "Array.size",
    "Array.tobytes", "CopiedWarning", "DType", "Error", "FormatError", "Mapping.mode", "Mapping.offset", "Mapping.sync",
    "Mapping.write", "Dataset", "Group", "Pack", "acquire", "atomic", "pack", "patch", "save",
    "Bracket", "Mapping.movable", "explain_faults", "use", "PastEndWarning", "ReadOnlyWarning", "Segment", "ShardPlan",
    "Split",
    "Weights.acquire", "info", "mmap", "save_file", "status", "view", "warm",
}  # fmt: skip
NOTHING |= {
    f"{thing}.{member}"
    for thing in ("Mapping", "View")
    for member in "acquire advise close closed device kind nbytes read readinto release seek tell use".split()
}
OF_THE_CPU = {"Array.numpy", "Array.ptr"} | {f"{t}.{m}" for t in ("Mapping", "View") for m in ("buffer", "numpy", "ptr")}
FOR_KERNELS = {"Array.torch", "Mapping.array", "Mapping.tensor", "View.array", "View.tensor"}
FOR_KERNELS |= {"Weights.private", "load_file", "load_safetensors", "safe_open"}


def test_nothing_else_leaves_the_package():
    found = set()
    for name in gaiafs.__all__:
        thing = getattr(gaiafs, name)
        if thing not in (gaiafs.Mapping, gaiafs.View, gaiafs.Weights, gaiafs.Array, gaiafs.Acquired):
            found.add(name)
            continue
        found.update(f"{name}.{k}" for k in dir(thing) if not k.startswith("_") and not hasattr(dict, k))
    assert found | {"Acquired.pages"} == NOTHING | OF_THE_CPU | FOR_KERNELS
