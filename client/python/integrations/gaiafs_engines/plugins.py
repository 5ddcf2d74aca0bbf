"""The engines' entry points. Each process of an engine calls them."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any


def register_vllm() -> None:
    """Registers the load format "gaiafs" with vLLM. Further calls do nothing.

    An exception here would end vLLM, whatever load format it uses. So if this package does not fit, it only logs that.
    """
    try:
        importlib.import_module(".vllm_loader", __package__)
    except Exception as e:  # another version's interface may cause any exception
        _tell("vllm", e)


def register_sglang() -> None:
    """Makes SGLang accept ``--load-format gaiafs``.

    SGLang takes a class as a load format, and has no other way to add one. So the name is allowed on the command line.
    When SGLang checks the load format, the name is replaced by the class.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        try:
            from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
        except ImportError:  # older versions have them here
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
        "gaiafs: the load format gaiafs is not available, because this package does not fit %s %s: %s", engine, version,
        e
    )


def _verify(original: Callable[[Any], None], config: Any) -> None:
    if config.load_format != "gaiafs":
        original(config)
        return
    from .sglang_loader import GaiafsModelLoader

    config.load_format = GaiafsModelLoader
