"""Models of transformers on shared weights: the same outputs, bit for bit, as from transformers' own from_pretrained.

Without PyTorch and transformers, which are large, nothing is tested here. tests/gpu has the same on a GPU.
"""

import sys
import types
import warnings

import pytest

import gaiafs

from conftest import KIND

torch = pytest.importorskip("torch", exc_type=ImportError) if KIND != "cuda" else None
transformers = pytest.importorskip("transformers", exc_type=ImportError) if KIND != "cuda" else None
pytestmark = [pytest.mark.kind("emulated"), pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

VERSION = tuple(map(int, transformers.__version__.split(".")[:2])) if transformers else (0, 0)
merges = pytest.mark.skipif(VERSION < (5, 0), reason="transformers 4 merges nothing")

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 131, "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "Llama": SMALL,
    "Mistral": {**SMALL, "sliding_window": 8},
    "Qwen2": {**SMALL, "tie_word_embeddings": True},
    "Gemma": {**SMALL, "head_dim": 16},
    "Mixtral": {**SMALL, "num_local_experts": 4},
    "Qwen2Moe": {**SMALL, "hidden_size": 72, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                 "shared_expert_intermediate_size": 40},
    "Qwen3Moe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 64},
}


def classes(name):
    model = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    return getattr(transformers, f"{name}Config"), getattr(transformers, model)


def saved(name, directory, dtype, **options):
    config, model = classes(name)
    torch.manual_seed(3)
    made = model(config(**MODELS[name], bos_token_id=1, eos_token_id=2, pad_token_id=0)).to(dtype)
    made.generation_config.temperature = 0.7
    made.generation_config.do_sample = True
    made.save_pretrained(directory / name, **options)
    return directory / name, model


def logits(model):
    ids = torch.arange(40).reshape(2, 20) % 131
    with torch.no_grad():
        return model(ids).logits


def aligned(model):
    """Puts the weights at aligned addresses. transformers 4 leaves them where they are in the file, and with unaligned
    weights, products on the CPU may differ in the last bits."""
    for p in model.parameters():
        p.data = p.data.clone()
    return model


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(directory, name, dtype, auto):
    from gaiafs.transformers import from_pretrained, weights_of

    path, cls = saved(name, directory, getattr(torch, dtype))
    want = aligned(cls.from_pretrained(path, dtype="auto"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", gaiafs.CopiedWarning)
        got = from_pretrained(transformers.AutoModelForCausalLM if auto else cls, path, 0, dtype="auto")
    said = [w for w in said if w.category is gaiafs.CopiedWarning]
    assert type(got) is cls and not got.training and got.dtype is want.dtype is getattr(torch, dtype)
    assert torch.equal(logits(got), logits(want))
    assert got.state_dict().keys() == want.state_dict().keys()
    for (n, a), (_, b) in zip(want.named_buffers(), got.named_buffers(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype, n
    assert not any(p.requires_grad for p in got.parameters())
    assert got.generation_config.temperature == 0.7 and got.name_or_path == str(path)
    shared = {t.data_ptr() for t in weights_of(got).values()}
    assert [n for n, p in got.named_parameters() if p.data_ptr() not in shared] == [] and not said
    assert all(address % 256 == 0 for address in shared)
    if name == "Qwen2":
        assert got.lm_head.weight is got.model.embed_tokens.weight
    assert weights_of(got).acquire() == 0


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe"])
def test_experts_in_several_files(directory, name):
    from gaiafs.transformers import from_pretrained, weights_of

    path, cls = saved(name, directory, torch.bfloat16, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 5
    want = cls.from_pretrained(path, dtype="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error", gaiafs.CopiedWarning)
        got = from_pretrained(cls, path, dtype="auto")
    assert torch.equal(logits(got), logits(want))
    assert weights_of(got).acquire() == 0


def test_experts_are_saved_as_they_were(directory, tmp_path):
    import safetensors.torch

    from gaiafs.transformers import from_pretrained

    path, cls = saved("Mixtral", directory, torch.bfloat16)
    from_pretrained(cls, path, dtype="auto").save_pretrained(tmp_path)
    want = safetensors.torch.load_file(path / "model.safetensors")
    got = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert got.keys() == want.keys() and any(".experts.3.w1." in k for k in got)
    assert all(torch.equal(got[k], want[k]) for k in want)


@merges
def test_an_expert_is_missing(directory):
    import safetensors.torch

    from gaiafs.transformers import from_pretrained

    path, cls = saved("Mixtral", directory, torch.float32)
    tensors = {k: v.clone() for k, v in safetensors.torch.load_file(path / "model.safetensors").items()}
    del tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    gaiafs.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    said = []
    for load in (cls.from_pretrained, lambda path: from_pretrained(cls, path)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gaiafs.CopiedWarning)
            with pytest.raises(RuntimeError) as e:
                load(path)
        said.append(str(e.value))
    assert said[0] == said[1]


def without(name):
    """Makes gaiafs see a table as in another version of transformers: its module lacks a name."""

    def change(patch):
        from gaiafs import merging

        table = types.SimpleNamespace(**{k: v for k, v in vars(merging._table()).items() if k != name})
        patch.setattr(merging, "_table", lambda: table)

    return change


def other_order(patch):
    merge = transformers.core_model_loading.MergeModulelist
    convert = merge.convert

    def backwards(self, tensors, *arguments, **options):
        return convert(self, {k: v[::-1] for k, v in tensors.items()}, *arguments, **options)

    patch.setattr(merge, "convert", backwards)


def other_names(patch):
    from gaiafs.merging import Merging

    groups = Merging._groups
    patch.setattr(Merging, "_groups", lambda self, parts: {f"another.{k}x": g for k, g in groups(self, parts).items()})


@merges
@pytest.mark.parametrize("change", [
    without("get_checkpoint_conversion_mapping"), without("WeightConverter"), without("get_model_conversion_mapping"),
    other_names, other_order,
])  # fmt: skip
def test_transformers_of_another_version(directory, monkeypatch, change):
    """Experts are then copies, with a warning, and the model is what transformers makes of the files."""
    from gaiafs.transformers import from_pretrained, weights_of

    path, cls = saved("Mixtral", directory, torch.bfloat16)
    change(monkeypatch)
    want = cls.from_pretrained(path, dtype="auto")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", gaiafs.CopiedWarning)
        got = from_pretrained(cls, path, dtype="auto")
    said = [str(w.message) for w in said if w.category is gaiafs.CopiedWarning]
    assert torch.equal(logits(got), logits(want))
    shared = {t.data_ptr() for t in weights_of(got).values()}
    copied = [n for n, p in got.named_parameters() if p.data_ptr() not in shared]
    assert copied and all(".experts." in n for n in copied)
    merging = [m for m in said if m.startswith(f"what transformers {transformers.__version__} merges")]
    assert len(merging) == (change is not other_order) and "copies of this process alone" in said[-1], said
    if change is not other_order:
        monkeypatch.undo()
        got.save_pretrained(directory / "saved")
        assert torch.equal(logits(cls.from_pretrained(directory / "saved", dtype="auto")), logits(want))


def test_a_class_is_found_without_the_insides_of_auto_classes(monkeypatch):
    from gaiafs.transformers import _class_of

    config, model = classes("Llama")
    monkeypatch.setitem(sys.modules, "transformers.models.auto.auto_factory", types.SimpleNamespace())
    assert _class_of(transformers.AutoModelForCausalLM, config(**MODELS["Llama"])) is model


@pytest.mark.parametrize("version", ["4.55.4", "3.0", "4.9.1"])
def test_transformers_that_is_too_old(directory, monkeypatch, version):
    from gaiafs.transformers import from_pretrained

    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=f"transformers {version} is installed, and gaiafs needs 4.56 or newer"):
        from_pretrained(transformers.AutoModelForCausalLM, directory)


def test_another_dtype_takes_copies_and_says_so(directory):
    from gaiafs.transformers import from_pretrained

    path, cls = saved("Llama", directory, torch.bfloat16)
    want = cls.from_pretrained(path, dtype=torch.float32)
    with pytest.warns(gaiafs.CopiedWarning, match="copies of this process alone"):
        got = from_pretrained(cls, path, dtype=torch.float32)
    assert got.dtype is torch.float32 and torch.equal(logits(got), logits(want))


def test_missing_and_unexpected_keys(directory):
    import safetensors.torch

    from gaiafs.transformers import from_pretrained

    path, cls = saved("Llama", directory, torch.float32)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    tensors = {k: v.clone() for k, v in tensors.items()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.none"] = torch.ones(3)
    gaiafs.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    _, want = cls.from_pretrained(path, output_loading_info=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gaiafs.CopiedWarning)
        got, info = from_pretrained(cls, path, output_loading_info=True)
    assert sorted(info["missing_keys"]) == sorted(want["missing_keys"]) == ["model.layers.1.mlp.up_proj.weight"]
    assert sorted(info["unexpected_keys"]) == sorted(want["unexpected_keys"]) == ["model.none"]
    assert logits(got).isfinite().all()


def test_what_is_refused(directory):
    from gaiafs.transformers import from_pretrained, weights_of

    path, cls = saved("Llama", directory, torch.float32)
    for option in ("device_map", "state_dict", "quantization_config"):
        with pytest.raises(ValueError, match=option):
            from_pretrained(cls, path, **{option: {"": 0}})
    with pytest.raises(ValueError, match="no class of models"):
        from_pretrained(transformers.AutoModelForSpeechSeq2Seq, path)
    with pytest.raises(KeyError):
        weights_of(cls.from_pretrained(path))
    (path / "model.safetensors").unlink()
    with pytest.raises(gaiafs.Error):
        from_pretrained(cls, path)
