"""What the engines' entry points call, in each of their processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def register_vllm() -> None:
    """Registers the load format "gaiafs" with vLLM. Further calls do nothing."""
    importlib.import_module(".vllm_loader", __package__)


def register_sglang() -> None:
    """Has SGLang accept ``--load-format gaiafs``.

    SGLang takes a class as a load format, and knows no other way to add one. So the name is allowed on the command
    line, and becomes the class where SGLang checks it.
    """
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "gaiafs" in LOAD_FORMAT_CHOICES:
        return
    LOAD_FORMAT_CHOICES.append("gaiafs")
    HookRegistry.register("sglang.srt.configs.load_config.LoadConfig._verify_load_format", _verify, HookType.AROUND)


def _verify(original: Callable[[Any], None], config: Any) -> None:
    if config.load_format != "gaiafs":
        original(config)
        return
    from .sglang_loader import GaiafsModelLoader

    config.load_format = GaiafsModelLoader
