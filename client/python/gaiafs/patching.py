"""Shared weights for programs that do not know gaiafs.

``patch`` replaces ``safetensors.safe_open``. ``safetensors.torch.load_file``, ``safetensors.numpy.load_file`` and
transformers read files through it. The replacement takes files of a mount, and leaves all others to the original.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from . import opened
from .errors import CopiedWarning, Error
from .frameworks import framework_of
from .residency import status

_MODELS = "transformers.modeling_utils"
_FRAMEWORKS = ("pt", "torch", "pytorch", "np", "numpy")
_original: Any = None


def patch() -> None:
    """Makes this process share the weights that it loads from a mount through safetensors or transformers.

    After this call, ``safetensors.safe_open`` and ``load_file`` return shared tensors if the file is on a mount and the
    program asks for a device of the mount: ``device="cuda:0"`` on a mount with GPUs, or ``"cpu"`` on a mount with
    emulated devices. So does transformers' ``from_pretrained``, on GPUs with a ``device_map`` of one GPU. Everything
    else is loaded the usual way. If sharing fails, the usual way is taken with a ``gaiafs.CopiedWarning``.

    The tensors are read-only: a store into one ends the process or, on a GPU, its CUDA context. Programs that train or
    change weights in place need copies. Call it before or after the program imports safetensors' functions: names that
    modules have imported already are replaced, too. A second call does nothing. ``python -m gaiafs run`` calls it.
    """
    global _original
    if _original is not None:
        return
    try:
        import safetensors
    except ImportError:
        return  # nothing can be loaded through it
    _original = safetensors.safe_open
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("safe_open") is _original:
            names["safe_open"] = _SafeOpen
    if _MODELS in sys.modules:
        _patch_models(sys.modules[_MODELS])
    else:
        sys.meta_path.insert(0, _WhenImported())


class _SafeOpen:
    """Takes the place of ``safetensors.safe_open``, with the same arguments."""

    def __new__(cls, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
        ours = _device_at(filename, device) if framework in _FRAMEWORKS else None
        if ours is not None:
            try:
                return opened.safe_open(filename, framework_of(framework), ours)
            except (Error, ImportError, ValueError) as e:
                _usual_way(filename, e)
        return _original(filename, framework, device, **options)


def _usual_way(path: Any, e: Exception) -> None:
    words = f"{os.fsdecode(path)} is loaded the usual way, into memory of this process alone: {e}"
    warnings.warn(words, CopiedWarning, stacklevel=4)


def _device_at(path: Any, device: Any) -> Any:
    """Returns the mount's device for a file that is asked for on a device, or None if it has none."""
    kind = _kind_at(path)
    cpu = str(device) == "cpu"
    if kind == "emulated" and cpu:
        return 0
    return device if kind == "cuda" and not cpu and re.fullmatch(r"(cuda(:\d+)?|\d+)", str(device)) else None


def _kind_at(path: Any) -> str | None:
    """Returns the kind of devices of a path's mount, or "cuda" if it has several kinds. None if the path is not on a
    mount.
    """
    try:
        number = os.stat(path).st_dev
    except (OSError, TypeError, ValueError):
        return None
    return _kind_of(number)


@functools.cache
def _kind_of(number: int) -> str | None:
    wanted = f"{os.major(number)}:{os.minor(number)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields, _, rest = line.partition(" - ")
            of, root, mountpoint = fields.split()[2:5]
            if of == wanted and root == "/" and rest.startswith("fuse.gaiafs "):
                name = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), mountpoint)
                try:
                    devices = status(name)["devices"]
                except Error:
                    return None
                return max((str(d["kind"]) for d in devices), key=lambda kind: kind == "cuda", default=None)
    return None


class _WhenImported(importlib.abc.MetaPathFinder):
    """Patches transformers when the program imports it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute: Callable[[Any], None] = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _patch_models(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_models(module: Any) -> None:
    """Makes models that are loaded onto one GPU take shared weights. transformers itself reads their files for the
    CPU."""
    original = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, path: Any = None, *arguments: Any, **options: Any) -> Any:
        device = options.get("device_map")
        if isinstance(device, dict) and list(device) == [""]:
            device = device[""]
        if device is not None and not arguments and not isinstance(device, dict) and _kind_at(path) == "cuda":
            ours = _device_at(path, device)
            if ours is not None:
                from .transformers import from_pretrained as shared

                try:
                    return shared(cls, path, ours, **{k: v for k, v in options.items() if k != "device_map"})
                except (Error, ImportError, ValueError) as e:
                    _usual_way(path, e)
        return original(cls, path, *arguments, **options)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
