"""What the engines' entry points call, in each of their processes."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any


def register_vllm() -> None:
    """Registers the load format "gaiafs" with vLLM. Further calls do nothing.

    What it raises would end vLLM, whatever load format it is to use. So it logs where vLLM is another than it knows.
    """
    try:
        importlib.import_module(".vllm_loader", __package__)
    except Exception as e:  # of whatever kind another version's interface leads to
        _tell("vllm", e)


def register_sglang() -> None:
    """Has SGLang accept ``--load-format gaiafs``.

    SGLang takes a class as a load format, and knows no other way to add one. So the name is allowed on the command
    line, and becomes the class where SGLang checks it.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        try:
            from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
        except ImportError:  # where older versions have them
            from sglang.srt.server_args import LOAD_FORMAT_CHOICES
    except ImportError as e:
        _tell("sglang", e)
        return
    if "gaiafs" in LOAD_FORMAT_CHOICES:
        return
    LOAD_FORMAT_CHOICES.append("gaiafs")
    HookRegistry.register("sglang.srt.configs.load_config.LoadConfig._verify_load_format", _verify, HookType.AROUND)


def _tell(engine: str, e: Exception) -> None:
    try:
        version = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    logging.getLogger(f"{engine}.gaiafs").warning(
        "gaiafs: there is no load format gaiafs, since this package does not fit %s %s: %s", engine, version, e
    )


def _verify(original: Callable[[Any], None], config: Any) -> None:
    if config.load_format != "gaiafs":
        original(config)
        return
    from .sglang_loader import GaiafsModelLoader

    config.load_format = GaiafsModelLoader
