"""Models of transformers on shared weights: the same outputs, bit for bit, as from transformers' own from_pretrained.

Without PyTorch and transformers, which are large, nothing is tested here. tests/gpu has the same on a GPU.
"""

import warnings

import pytest

import gaiafs

from conftest import KIND

torch = pytest.importorskip("torch", exc_type=ImportError) if KIND != "cuda" else None
transformers = pytest.importorskip("transformers", exc_type=ImportError) if KIND != "cuda" else None
pytestmark = [pytest.mark.kind("emulated"), pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 131, "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "Llama": SMALL,
    "Mistral": {**SMALL, "sliding_window": 8},
    "Qwen2": {**SMALL, "tie_word_embeddings": True},
    "Gemma": {**SMALL, "head_dim": 16},
    "Mixtral": {**SMALL, "num_local_experts": 4},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 64},
}


def classes(name):
    model = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    return getattr(transformers, f"{name}Config"), getattr(transformers, model)


def saved(name, directory, dtype):
    config, model = classes(name)
    torch.manual_seed(3)
    made = model(config(**MODELS[name], bos_token_id=1, eos_token_id=2, pad_token_id=0)).to(dtype)
    made.generation_config.temperature = 0.7
    made.generation_config.do_sample = True
    made.save_pretrained(directory / name)
    return directory / name, model


def logits(model):
    ids = torch.arange(40).reshape(2, 20) % 131
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(directory, name, dtype, auto):
    from gaiafs.transformers import from_pretrained, weights_of

    path, cls = saved(name, directory, getattr(torch, dtype))
    want = cls.from_pretrained(path, dtype="auto")
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
    merged = [n for n, p in got.named_parameters() if p.data_ptr() not in shared]
    assert all("experts" in n for n in merged) and bool(merged) == bool(said), merged
    if name == "Qwen2":
        assert got.lm_head.weight is got.model.embed_tokens.weight
    assert weights_of(got).acquire() == 0


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
