"""What the loaders take for granted of the real vLLM and SGLang.

make test-engines runs it, and installs both without what they need to run. Of that PyTorch alone is larger than all of
the tests' environment, so most is read and not run. What needs no more than Python is run, from the engines' files.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import types
from typing import Any

import pytest

from gaiafs_engines import plugins

SITE = pathlib.Path(os.environ["GAIAFS_ENGINES"])
VLLM = SITE / "vllm/model_executor/model_loader"
SGLANG = SITE / "sglang/srt"


def definition(file: pathlib.Path, *names: str) -> Any:
    """Returns what a file defines under a name, or within a class."""
    found: Any = ast.parse(file.read_text())
    for name in names:
        found = next(
            n for n in found.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name
        )
    return found


def parameters(function: ast.FunctionDef) -> list[str]:
    a = function.args
    return [p.arg for p in [*a.posonlyargs, *a.args, *a.kwonlyargs]]


def fields(cls: ast.ClassDef) -> set[str]:
    return {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def strings(node: ast.AST) -> set[object]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}


def run(file: pathlib.Path, name: str) -> Any:
    """Imports a single file of an engine."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_engines_find_the_entry_points():
    (ours,) = importlib.metadata.distributions(name="gaiafs-engines", path=[str(SITE)])
    points = {p.group: p.load() for p in ours.entry_points}
    assert points == {
        "vllm.general_plugins": plugins.register_vllm,
        "sglang.srt.plugins": plugins.register_sglang,
    }
    assert "vllm.general_plugins" in strings(ast.parse((SITE / "vllm/plugins/__init__.py").read_text()))
    assert "sglang.srt.plugins" in strings(ast.parse((SGLANG / "plugins/__init__.py").read_text()))


@pytest.mark.parametrize("file", [VLLM / "default_loader.py", SGLANG / "model_loader/loader.py"])
def test_sources_have_what_files_are_chosen_by(file):
    loader = definition(file, "DefaultModelLoader")
    (_, *wanted) = parameters(definition(file, "DefaultModelLoader", "_prepare_weights"))
    assert wanted[0] == "model_name_or_path" and "fall_back_to_pt" in wanted
    known = fields(definition(file, "DefaultModelLoader", "Source"))
    assert {"model_or_path", "prefix", *wanted[1:]} <= known
    assert "counter_before_loading_weights" in fields(loader)
    assert parameters(definition(file, "DefaultModelLoader", "__init__")) == ["self", "load_config"]
    assert parameters(definition(file, "DefaultModelLoader", "_get_weights_iterator"))[:2] == ["self", "source"]
    returned = next(
        n.value for n in definition(file, "DefaultModelLoader", "_prepare_weights").body if isinstance(n, ast.Return)
    )
    assert [n.id for n in returned.elts[:3]] == ["hf_folder", "hf_weights_files", "use_safetensors"]


def test_vllm_registers_and_finds_a_loader():
    file = VLLM / "__init__.py"

    class BaseModelLoader:
        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config

    names = {
        "BaseModelLoader": BaseModelLoader,
        "LoadConfig": object,
        "logger": types.SimpleNamespace(info=print, warning=pytest.fail),
        "_LOAD_FORMAT_TO_MODEL_LOADER": {},
    }
    functions = [definition(file, "register_model_loader"), definition(file, "get_model_loader")]
    exec(compile(ast.Module(functions, []), str(file), "exec"), names)

    class Ours(BaseModelLoader):
        pass

    assert names["register_model_loader"]("gaiafs")(Ours) is Ours
    assert type(names["get_model_loader"](types.SimpleNamespace(load_format="gaiafs"))) is Ours
    assert "safetensors" in strings(definition(VLLM / "default_loader.py", "DefaultModelLoader", "_prepare_weights"))
    # Weights are processed before it returns, and the loader has it from a base.
    calls = {n.func.id for n in ast.walk(definition(VLLM / "base_loader.py", "BaseModelLoader", "load_model"))
             if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}  # fmt: skip
    assert "process_weights_after_loading" in calls


def test_sglang_takes_the_name_for_the_class(monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.plugins", "sglang.srt.configs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    choices = run(SGLANG / "arg_groups/choices.py", "sglang.srt.arg_groups.choices")
    hooks = run(SGLANG / "plugins/hook_registry.py", "sglang.srt.plugins.hook_registry")
    configs = types.ModuleType("sglang.srt.configs.load_config")
    loaders = types.ModuleType("gaiafs_engines.sglang_loader")
    for module in (choices, hooks, configs, loaders):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    class LoadConfig:
        load_format: Any = "gaiafs"

        def _verify_load_format(self) -> None:
            self.load_format = "checked"

    class Ours:
        pass

    configs.LoadConfig, loaders.GaiafsModelLoader = LoadConfig, Ours
    sys.modules["sglang.srt.configs"].load_config = configs
    plugins.register_sglang()
    hooks.HookRegistry.apply_hooks()
    assert "gaiafs" in choices.LOAD_FORMAT_CHOICES
    config = LoadConfig()
    config._verify_load_format()
    assert config.load_format is Ours
    config.load_format = "auto"
    config._verify_load_format()
    assert config.load_format == "checked"


def test_sglang_has_what_the_hook_and_the_loader_use():
    file = SGLANG / "configs/load_config.py"
    assert parameters(definition(file, "LoadConfig", "_verify_load_format")) == ["self"]
    assert "draft_model_idx" in fields(definition(file, "LoadConfig"))
    loader = SGLANG / "model_loader/loader.py"
    given = parameters(definition(loader, "DefaultModelLoader", "_get_weights_iterator"))
    assert given[2:] == ["resolved_source", "startup_prefetch_started", "startup_prefetch_active"]
    assert "weight_files" in fields(definition(loader, "DefaultModelLoader", "ResolvedSource"))
    assert "model_config" in fields(definition(loader, "DefaultModelLoader", "Source"))
    filtering = parameters(definition(loader, "DefaultModelLoader", "_filter_mtp_weights"))
    assert filtering == ["cls", "weights_iterator", "prefix", "draft_model_idx"]
    adding = parameters(definition(SGLANG / "model_loader/weight_utils.py", "maybe_add_mtp_safetensors"))
    assert len(adding) == 4, adding
    assert "type" in {n.id for n in ast.walk(definition(loader, "get_model_loader")) if isinstance(n, ast.Name)}


@pytest.mark.parametrize(
    "file, names",
    {
        "vllm/model_executor/layers/linear.py": ["UnquantizedLinearMethod"],
        "vllm/model_executor/layers/vocab_parallel_embedding.py": ["UnquantizedEmbeddingMethod"],
        "sglang/srt/layers/quantization/unquant.py": ["UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"],
    }.items(),
)
def test_methods_of_layers_that_are_not_quantized(file, names):
    for name in names:
        assert definition(SITE / file, name).name.startswith("Unquantized")
