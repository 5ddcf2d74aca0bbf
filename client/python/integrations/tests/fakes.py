"""Fakes of the engines and of PyTorch's modules, as far as the loaders need them. NumPy arrays stand for tensors."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class Parameter:
    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def is_contiguous(self) -> bool:
        return self.data.flags.c_contiguous


class UnquantizedLinearMethod:
    pass


class Fp8LinearMethod:
    pass


class Layer:
    def __init__(self, quant_method: Any = None, **arrays: np.ndarray | Parameter) -> None:
        self.quant_method = quant_method
        self.own = {k: a if isinstance(a, Parameter) else Parameter(a) for k, a in arrays.items()}

    def named_parameters(self, recurse: bool) -> list[tuple[str, Parameter]]:
        assert not recurse
        return list(self.own.items())


class Model:
    """load puts tensors into the layers, like a model's load_weights. after is the processing that follows."""

    def __init__(
        self, layers: dict[str, Layer], load: Callable[[dict[str, Any]], None], after: Callable[[], None] = lambda: None
    ) -> None:
        self.layers, self._load, self.after = layers, load, after

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        self._load(dict(weights))

    def named_modules(self) -> list[tuple[str, Layer]]:
        return list(self.layers.items())

    def parameters(self) -> list[Parameter]:
        return list({id(p): p for layer in self.layers.values() for p in layer.own.values()}.values())


@dataclasses.dataclass
class LoadConfig:
    load_format: Any = "gaiafs"
    draft_model_idx: int | None = None


@dataclasses.dataclass
class Source:
    model_or_path: str
    revision: str | None = None
    subfolder: str | None = None
    prefix: str = ""
    fall_back_to_pt: bool = True
    allow_patterns_overrides: list[str] | None = None
    model_config: Any = None


class _Loader:
    counter_before_loading_weights = 0.0

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    def load_model(self, *, model: Model, path: pathlib.Path) -> Model:
        if model.layers:  # no layers: an engine that loads in another way
            model.load_weights(self._get_weights_iterator(Source(str(path), prefix="m.")))
            assert self.counter_before_loading_weights > 0
        model.after()
        return model

    def _chosen(self, path: str, fall_back_to_pt: bool) -> tuple[str, list[str], bool]:
        assert self.load_config.load_format == "safetensors" and not fall_back_to_pt
        files = sorted(map(str, pathlib.Path(path).glob("*.safetensors")))
        return path, files, bool(files)


class VllmLoader(_Loader):
    def _prepare_weights(self, model_name_or_path, subfolder, revision, fall_back_to_pt, allow_patterns_overrides):
        return *self._chosen(model_name_or_path, fall_back_to_pt), "model.safetensors.index.json"


class SglangLoader(_Loader):
    def _prepare_weights(self, model_name_or_path, revision, fall_back_to_pt, allow_patterns_overrides=None):
        return self._chosen(model_name_or_path, fall_back_to_pt)

    @classmethod
    def _filter_mtp_weights(cls, weights, prefix, draft_model_idx):
        return ((prefix + name, t) for name, t in weights if f"mtp.{draft_model_idx}" in name)


class HookRegistry:
    hooks: list[tuple[Any, ...]] = []

    @classmethod
    def register(cls, *arguments: Any) -> None:
        cls.hooks.append(arguments)


def modules(monkeypatch: Any) -> dict[str, Any]:
    """Puts the fakes where the engines are imported from, and returns vLLM's table of loaders."""
    loaders: dict[str, Any] = {}

    def register_model_loader(name: str) -> Callable[[Any], Any]:
        return lambda cls: loaders.setdefault(name, cls)

    def add(name: str, **contents: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    for package in ("vllm", "vllm.model_executor", "sglang", "sglang.srt"):
        add(package)
    for package in ("arg_groups", "plugins", "model_loader"):
        add(f"sglang.srt.{package}")
    register = {"register_model_loader": register_model_loader}
    add("vllm.model_executor.model_loader", DefaultModelLoader=VllmLoader, **register)
    add("sglang.srt.arg_groups.choices", LOAD_FORMAT_CHOICES=["auto"])
    kinds = types.SimpleNamespace(AROUND="around")
    add("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=kinds)
    add(
        "sglang.srt.model_loader.loader",
        DefaultModelLoader=SglangLoader,
        maybe_add_mtp_safetensors=lambda files, folder, index, config: files,
    )
    for name in ("vllm_loader", "sglang_loader"):
        monkeypatch.delitem(sys.modules, f"gaiafs_engines.{name}", raising=False)
    return loaders
