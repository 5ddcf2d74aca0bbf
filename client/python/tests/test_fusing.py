"""Tensors that are made of several tensors in the files: fused, stacked, sharded, and brought up to date."""

import numpy as np
import pytest
import safetensors.numpy

import gaiafs

from conftest import KIND

FRAMEWORK = "numpy" if KIND == "emulated" else "array"
RNG = np.random.default_rng(6)
EXPERTS = 6
FUSED = {
    **{f"layers.{i}.{n}.weight": RNG.standard_normal((12 if n == "q" else 4, 8)).astype("f2") for i in range(2) for n in "qkv"},
    **{
        f"layers.{i}.experts.{e}.{n}.weight": RNG.standard_normal((6, 5)).astype("f2")
        for i in range(2)
        for e in range(EXPERTS)
        for n in ("gate", "up", "down")
    },
    **{f"layers.{i}.experts.{e}.scale": np.array(RNG.random(), "f4") for i in range(2) for e in range(EXPERTS)},
    "norm": RNG.standard_normal(7).astype("f4"),
}
FUSE = {
    "layers.*.qkv": ["layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"],
    "layers.*.experts.gate_up": ["layers.*.experts.#.gate.weight", "layers.*.experts.#.up.weight"],
    "layers.*.experts.down": "layers.*.experts.#.down.weight",
    "layers.*.experts.scale": ["layers.*.experts.#.scale"],
}


def address(t):
    return t.ptr if isinstance(t, gaiafs.Array) else t.ctypes.data


def same(got, tensors):
    assert got.keys() == tensors.keys()
    for name, want in tensors.items():
        assert tuple(got[name].shape) == want.shape and got[name].tobytes() == want.tobytes(), name
    return True


def fused(tensors, experts=range(EXPERTS)):
    made = {"norm": tensors["norm"]}
    for i in range(2):
        of = f"layers.{i}"
        made[f"{of}.qkv"] = np.concatenate([tensors[f"{of}.{n}.weight"] for n in "qkv"])
        pairs = [[tensors[f"{of}.experts.{e}.{n}.weight"] for n in ("gate", "up")] for e in experts]
        made[f"{of}.experts.gate_up"] = np.stack([np.concatenate(pair) for pair in pairs])
        made[f"{of}.experts.down"] = np.stack([tensors[f"{of}.experts.{e}.down.weight"] for e in experts])
        made[f"{of}.experts.scale"] = np.stack([tensors[f"{of}.experts.{e}.scale"] for e in experts])
    return made


@pytest.fixture(params=[1, 4])
def fusible(directory, request):
    """A model in one file, and in four files with parts of each tensor."""
    names = sorted(FUSED)
    for i in range(request.param):
        part = {k: FUSED[k] for k in names[i :: request.param]}
        (directory / f"{i}.safetensors").write_bytes(safetensors.numpy.save(part))
    return directory


def test_fused_tensors(fusible):
    got = gaiafs.load_safetensors(fusible, framework=FRAMEWORK, fuse=FUSE)
    assert same(got, fused(FUSED))
    assert all(at % 256 == 0 for at in map(address, got.values()))
    again = gaiafs.load_safetensors(fusible, framework=FRAMEWORK, fuse=FUSE)
    assert all(len(f["views"]) <= 2 and f["views"][0]["mappings"] == 2 for f in gaiafs.info(fusible)["files"])
    assert same(again, fused(FUSED)) and same(again.private("*.gate_up"), {k: v for k, v in fused(FUSED).items() if "_up" in k})


def test_fused_tensors_see_changes(fusible):
    got = gaiafs.load_safetensors(fusible, framework="array", fuse=FUSE)
    changed = {**FUSED, "layers.1.experts.3.up.weight": np.full((6, 5), 3, "f2"), "layers.0.k.weight": np.ones((4, 8), "f2")}
    for file in fusible.glob("*.safetensors"):
        names = safetensors.numpy.load_file(file).keys()
        with open(file, "r+b") as f:
            f.write(safetensors.numpy.save({k: changed[k] for k in names}))
    assert got.acquire() > 0
    assert same(got, fused(changed))


@pytest.mark.parametrize("world", [1, 2])
def test_shards_of_fused_tensors(fusible, world):
    rules = {
        **{f"layers.*.{n}.weight": 0 for n in "qkv"},
        **{f"layers.*.experts.*.{n}.weight": 0 for n in ("gate", "up")},
        **{"layers.*.experts.*.down.weight": -2, "**": None},
    }
    for rank in range(world):

        def half(t, dim=0, rank=rank):
            return np.split(t, world, dim)[rank]

        whole_ones = ("scale", "norm")
        parts = {k: t if k.endswith(whole_ones) else half(t) for k, t in FUSED.items()}
        got = gaiafs.load_safetensors(
            fusible, framework=FRAMEWORK, shard=gaiafs.ShardPlan(rules), rank=rank, world=world, fuse=FUSE
        )
        assert same(got, fused(parts))
        rows = {**{f"layers.*.{n}.weight": 1 for n in "qkv"}, "**": None}  # row-parallel: pieces of pieces
        parts = {k: half(t, 1) if k.endswith(("q.weight", "k.weight", "v.weight")) else t for k, t in FUSED.items()}
        got = gaiafs.load_safetensors(
            fusible, framework=FRAMEWORK, shard=gaiafs.ShardPlan(rows), rank=rank, world=world, fuse=FUSE
        )
        assert same(got, fused(parts))
        experts = gaiafs.ShardPlan({"layers.*.experts.**": "experts", "**": None})
        got = gaiafs.load_safetensors(fusible, framework=FRAMEWORK, shard=experts, rank=rank, world=world, fuse=FUSE)
        assert same(got, fused(FUSED, range(EXPERTS * rank // world, EXPERTS * (rank + 1) // world)))


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"a": ["none"]}, "no tensors fit"),
        ({"a.*": ["layers.#.q.weight"]}, "same number of"),
        ({"a": ["layers.0.experts.#.up.weight", "norm"]}, "same number of"),
        ({"a": []}, "cannot be made of"),
        ({"layers.*": ["layers.*.q.weight", "norm.*"]}, "lacks some"),
        ({"norm": "layers.1.q.weight"}, "is in the files"),
        ({"a": ["layers.0.q.weight", "layers.0.experts.0.up.weight"]}, "cannot be made of"),
        ({"a": ["layers.0.experts.0.scale", "layers.0.experts.1.scale"]}, "no dimension"),
        ({"a": "layers.0.q.weight", "b": "layers.0.q.weight"}, "is in 'a' and in 'b'"),
        ({"a": "layers.0.q.weight", "*": "layers.0.*.weight"}, "cannot|same number|is in"),
    ],
)
def test_rules_that_do_not_fit(fusible, rules, says):
    with pytest.raises(ValueError, match=says):
        gaiafs.load_safetensors(fusible, framework=FRAMEWORK, fuse=rules)


def test_a_missing_expert(directory):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({k: v for k, v in FUSED.items() if ".0.experts.2.up" not in k}))
    with pytest.raises(ValueError, match="lacks some"):
        gaiafs.load_safetensors(path, framework=FRAMEWORK, fuse=FUSE)
    path.write_bytes(safetensors.numpy.save({k: v for k, v in FUSED.items() if ".experts.2." not in k}))
    with pytest.raises(ValueError, match="lacks some"):
        gaiafs.load_safetensors(path, framework=FRAMEWORK, fuse=FUSE)


def test_pieces_of_other_dimensions(directory):
    path = directory / "model.safetensors"
    one, several = np.array(1, "f4"), np.arange(5, dtype="f4")
    for tensors in ({"e.0.s": one, "e.1.s": several}, {"e.0.s": several, "e.1.s": one}):
        path.write_bytes(safetensors.numpy.save(tensors))
        with pytest.raises(ValueError, match="cannot be made of"):
            gaiafs.load_safetensors(path, framework=FRAMEWORK, fuse={"s": "e.#.s"})


def test_two_experts_of_one_number(directory):
    path = directory / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({f"e.{n}.s": np.ones(4, "f4") for n in ("0", "1", "01")}))
    with pytest.raises(ValueError, match="the same number"):
        gaiafs.load_safetensors(path, framework=FRAMEWORK, fuse={"s": "e.#.s"})
