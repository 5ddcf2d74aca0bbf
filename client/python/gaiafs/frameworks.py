"""The libraries whose tensors this package can return."""

from __future__ import annotations

import importlib
from typing import Any

from .array import Array

_ALSO = {"pt": "torch", "pytorch": "torch", "np": "numpy"}  # their names in the safetensors package


def framework_of(framework: str | None) -> str:
    """Chooses the framework. The default is PyTorch if it is installed, otherwise NumPy. Raises ImportError if the
    framework is not installed.
    """
    framework = _ALSO.get(framework or "", framework)
    if framework not in (None, "torch", "numpy", "array"):
        raise ValueError(f"framework is 'torch', 'numpy' or 'array', not {framework!r}")
    for name in ("torch", "numpy") if framework is None else (framework,):
        if name == "array" or _installed(name):
            return name
    what = "neither PyTorch nor NumPy is" if framework is None else f"{framework} is not"
    raise ImportError(f"{what} installed: install it, or use framework='array', which needs no library")


def _installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name != name:
            raise
        return False
    return True


def tensors_of(arrays: dict[str, Array], framework: str, ordinal: int | None) -> dict[str, Any]:
    """Returns arrays of one device as tensors of the framework. Any thread may call it."""
    if framework == "torch" and ordinal is not None:
        import torch

        # PyTorch would otherwise use device 0 of a new thread, and make a context there.
        with torch.cuda.device(ordinal):
            return {name: a.torch() for name, a in arrays.items()}
    return arrays if framework == "array" else {name: tensor_of(a, framework) for name, a in arrays.items()}


def tensor_of(a: Array, framework: str) -> Any:
    """Returns the array as a tensor of the framework."""
    if framework == "torch":
        return a.torch()
    return a.numpy() if framework == "numpy" else a
