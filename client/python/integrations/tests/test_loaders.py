"""The loaders with fakes of the engines, and arrays on emulated devices. real.py checks the real packages."""

import gc
import itertools
import logging
import os
import pathlib
import sys
import time

import numpy as np
import pytest
import safetensors.numpy

import gaiafs
import gaiafs_engines.mount
from gaiafs_engines import plugins

import fakes
from fakes import Fp8LinearMethod, Layer, Model, Parameter, UnquantizedLinearMethod

RNG = np.random.default_rng(7)
TENSORS = {
    name: RNG.standard_normal(shape).astype("f2")
    for name, shape in {
        "embed": (50, 32), "q": (16, 32), "k": (16, 32), "o": (32, 16), "up": (64, 32), "norm": (32,), "fp8": (32, 32),
        "experts": (2, 8, 32), "down": (32, 64),
    }.items()
}  # fmt: skip
_numbers = itertools.count()


@pytest.fixture
def path():
    if "GAIAFS_TEST_MOUNT" not in os.environ:
        pytest.skip("there is no mount: run the tests with go test ./client/python")
    made = pathlib.Path(os.environ["GAIAFS_TEST_MOUNT"]) / f"engines-{next(_numbers)}"
    made.mkdir()
    names = sorted(TENSORS)
    for i in range(2):
        file = made / f"model-{i}.safetensors"
        file.write_bytes(safetensors.numpy.save({n: TENSORS[n] for n in names[i::2]}))
    return made


@pytest.fixture(params=["vllm", "sglang"])
def loader(request, monkeypatch):
    """Returns the loader of an engine, as the engine gets it."""
    monkeypatch.setattr(gaiafs_engines.mount.FromMount, "_framework", lambda self: "numpy")
    monkeypatch.setattr(gaiafs_engines.mount.FromMount, "_device", lambda self: 0)
    loaders = fakes.modules(monkeypatch)
    config = fakes.LoadConfig()
    if request.param == "vllm":
        plugins.register_vllm()
        plugins.register_vllm()
        return loaders["gaiafs"](config)
    monkeypatch.setattr(fakes.HookRegistry, "hooks", [])
    plugins.register_sglang()
    plugins.register_sglang()
    ((target, hook, kind),) = fakes.HookRegistry.hooks
    assert target.endswith("LoadConfig._verify_load_format") and kind == "around"
    hook(pytest.fail, config)
    assert isinstance(config.load_format, type)
    return config.load_format(config)


def wait_for_segments(path, n):
    """Waits until n segments of views are mapped, those of two files twice. Views that nothing uses go a little later,
    in a thread."""
    until = time.monotonic() + 60
    while True:
        views = [v for f in gaiafs.info(path)["files"] for v in f["views"]]
        if sum(v["segments"] for v in views) == n and all(v["mappings"] for v in views):  # what was only read is gone
            return
        gc.collect()
        assert time.monotonic() < until, views


def model():
    """A model that processes its weights as engines do."""
    linear = UnquantizedLinearMethod()
    embed = Parameter(np.zeros((50, 32), "f2"))
    layers = {
        "m.embed": Layer(linear, weight=embed),
        "m.head": Layer(linear, weight=embed),  # tied
        "m.qkv": Layer(linear, weight=np.zeros((32, 32), "f2")),
        "m.o": Layer(linear, weight=np.zeros((32, 16), "f2")),
        "m.up": Layer(linear, weight=np.zeros((64, 32), "f2")),
        "m.down": Layer(linear, weight=np.zeros((32, 64), "f4")),  # of another type
        "m.norm": Layer(weight=np.zeros(32, "f2")),
        "m.fp8": Layer(Fp8LinearMethod(), weight=np.zeros((32, 32), "f2")),
        "m.experts": Layer(linear, weight=np.zeros((2, 8, 32), "f2")),
        "m.offloaded": Layer(linear, weight=np.zeros((16, 32), "f2")),
    }
    parameters = {n: layer.own["weight"] for n, layer in layers.items()}

    parameters["m.offloaded"]._vllm_is_uva_offloaded = True

    def load(weights):
        assert sorted(weights) == sorted(f"m.{n}" for n in TENSORS)
        for name, tensor in weights.items():
            assert tensor.flags.writeable  # some models store into what they get
            if name not in ("m.q", "m.k"):
                parameters[name].data[:] = tensor
            tensor[:] = 7
        parameters["m.offloaded"].data[:] = TENSORS["k"]
        parameters["m.qkv"].data[:16], parameters["m.qkv"].data[16:] = TENSORS["q"], TENSORS["k"]

    def after():
        parameters["m.up"].data *= 2  # processed after loading

    return Model(layers, load, after), parameters


def test_what_is_shared_and_what_is_copied(loader, path, caplog):
    made, parameters = model()
    with caplog.at_level(logging.INFO):
        assert loader.load_model(model=made, path=path) is made
    shared = {n for n, p in parameters.items() if not p.data.flags.writeable}
    assert shared == {"m.embed", "m.head", "m.o", "m.qkv"}  # q is in one file, k in the other
    want = {f"m.{n}": t for n, t in TENSORS.items()}
    want |= {"m.head": TENSORS["embed"], "m.offloaded": TENSORS["k"], "m.up": TENSORS["up"] * 2}
    want["m.qkv"] = np.concatenate([TENSORS["q"], TENSORS["k"]])
    assert all(np.array_equal(p.data, want[n]) for n, p in parameters.items())
    one = sum(TENSORS[n].nbytes for n in ("embed", "o", "q", "k"))
    rest = sum(p.data.nbytes for n, p in parameters.items() if n not in shared)
    assert caplog.messages == [
        f"gaiafs: {one} bytes of parameters are shared with other processes, {rest} are copies of this process alone"
    ]
    assert caplog.records[0].name in ("vllm.gaiafs", "sglang.gaiafs")
    # The device keeps what is shared, but not the rest of the files.
    wait_for_segments(path, 6)


def test_what_is_fused_of_a_tensor_is_shared_once(loader, path):
    for file in path.glob("*.safetensors"):
        file.unlink()
    a, b, same = TENSORS["q"], TENSORS["up"], TENSORS["q"].copy()
    same[-1] = 0  # begins like a
    (path / "model.safetensors").write_bytes(safetensors.numpy.save({"a": a, "b": b, "same": same}))
    want = {"first": np.concatenate([b, a]), "again": np.concatenate([a, b]), "torn": np.concatenate([b, a[:8]])}
    layers = {f"m.{n}": Layer(UnquantizedLinearMethod(), weight=np.zeros_like(t)) for n, t in want.items()}

    def load(weights):
        for n, t in want.items():
            layers[f"m.{n}"].own["weight"].data[:] = t

    loader.load_model(model=Model(layers, load), path=path)
    got = {n: layers[f"m.{n}"].own["weight"].data for n in want}
    assert all(np.array_equal(got[n], t) for n, t in want.items())
    assert [n for n in want if not got[n].flags.writeable] == ["first"]


def test_a_second_model_has_the_same_memory(loader, path):
    (one, first), (two, second) = model(), model()
    loader.load_model(model=one, path=path)
    loader.load_model(model=two, path=path)
    wait_for_segments(path, 6)
    assert np.array_equal(first["m.o"].data, second["m.o"].data)


def test_new_weights_are_refused(loader, path):
    made, parameters = model()
    loader.load_model(model=made, path=path)
    with pytest.raises(RuntimeError, match="restart the engine"):
        made.load_weights(iter([("m.o", TENSORS["o"])]))


def test_a_model_of_which_nothing_can_be_shared(loader, path, caplog):
    made, parameters = model()
    made.after = lambda: [p.data.__imul__(2) for p in parameters.values()]
    with caplog.at_level(logging.INFO):
        loader.load_model(model=made, path=path)
    assert caplog.messages[0].startswith("gaiafs: 0 bytes") and all(p.data.flags.writeable for p in parameters.values())
    made.load_weights((f"m.{n}", t.copy()) for n, t in TENSORS.items())


def test_no_room_for_what_could_be_shared(loader, path, caplog, monkeypatch):
    def refuse(*arguments, **options):
        raise gaiafs.Error(12, "no room")

    monkeypatch.setattr("gaiafs.weights.load", refuse)
    made, parameters = model()
    loader.load_model(model=made, path=path)
    assert all(p.data.flags.writeable for p in parameters.values())
    assert np.array_equal(parameters["m.o"].data, TENSORS["o"])
    assert "stay copies of this process alone" in caplog.text and "no room" in caplog.text


def test_files_that_are_on_no_mount(loader, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save(TENSORS))
    with pytest.raises(RuntimeError, match=r"model\.safetensors is not on a gaiafs mount.*gaiafs mount DIRECTORY"):
        loader.load_model(model=model()[0], path=tmp_path)


def test_no_safetensors_files(loader, tmp_path):
    with pytest.raises(RuntimeError, match="reads safetensors files, and there are none"):
        loader.load_model(model=model()[0], path=tmp_path)


def test_the_engines_config_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(gaiafs_engines.mount.FromMount, "_framework", lambda self: "numpy")
    monkeypatch.setattr(gaiafs_engines.mount.FromMount, "_device", lambda self: 0)
    loaders = fakes.modules(monkeypatch)
    plugins.register_vllm()
    config = fakes.LoadConfig()
    made = loaders["gaiafs"](config)
    assert config.load_format == "gaiafs" and made.load_config.load_format == "safetensors"


@pytest.mark.parametrize("loader", ["sglang"], indirect=True)
def test_files_that_sglang_chose_before_and_its_draft_models(loader, path):
    file = path / "draft.safetensors"
    file.write_bytes(safetensors.numpy.save({"mtp.0.w": TENSORS["o"], "mtp.1.w": TENSORS["q"]}))
    source = fakes.Source(str(path), prefix="p.")
    chosen = type("Resolved", (), {"weight_files": (str(file),)})()
    got = dict(loader._get_weights_iterator(source, resolved_source=chosen, startup_prefetch_started=True))
    assert sorted(got) == ["p.mtp.0.w", "p.mtp.1.w"]
    loader.load_config.draft_model_idx = 1
    got = dict(loader._get_weights_iterator(source, resolved_source=chosen))
    assert list(got) == ["p.mtp.1.w"] and np.array_equal(got["p.mtp.1.w"], TENSORS["q"])


def test_vllm_of_another_version_starts_without_the_format(monkeypatch, caplog):
    """vLLM ends when a plugin raises, whatever format it uses."""
    loaders = fakes.modules(monkeypatch)
    monkeypatch.delattr(sys.modules["vllm.model_executor.model_loader"], "register_model_loader")
    plugins.register_vllm()
    assert loaders == {} and "is not available, because this package does not fit vllm" in caplog.text
    assert "register_model_loader" in caplog.text


def test_vllm_that_refuses_the_loader_starts(monkeypatch, caplog):
    def refuse(name):
        raise ValueError("the loader must be of another class")

    fakes.modules(monkeypatch)
    monkeypatch.setattr(sys.modules["vllm.model_executor.model_loader"], "register_model_loader", refuse)
    plugins.register_vllm()
    assert "the load format gaiafs is not available" in caplog.text and "must be of another class" in caplog.text


def test_sglang_of_other_versions(monkeypatch, caplog):
    fakes.modules(monkeypatch)
    choices = sys.modules.pop("sglang.srt.arg_groups.choices")
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", choices)
    monkeypatch.setattr(fakes.HookRegistry, "hooks", [])
    plugins.register_sglang()
    assert "gaiafs" in choices.LOAD_FORMAT_CHOICES and len(fakes.HookRegistry.hooks) == 1 and caplog.text == ""
    monkeypatch.delitem(sys.modules, "sglang.srt.server_args")
    plugins.register_sglang()
    assert "does not fit sglang" in caplog.text and len(fakes.HookRegistry.hooks) == 1


def test_an_engine_that_asks_for_more_to_choose_files(loader, path, monkeypatch):
    def prepare(model_name_or_path, colour, size=3):
        raise AssertionError

    monkeypatch.setattr(loader, "_prepare_weights", prepare)
    with pytest.raises(RuntimeError, match="another version than gaiafs fits: it asks for colour to choose files"):
        loader.load_model(model=model()[0], path=path)


def test_an_engine_that_does_not_ask_for_tensors(loader, path, caplog):
    loader.load_model(model=Model({}, load=lambda weights: None), path=path)
    assert "has not asked for tensors: nothing is shared" in caplog.text
