"""vLLM's load format "gaiafs". Importing the module registers it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from .mount import FromMount


@register_model_loader("gaiafs")
class GaiafsModelLoader(FromMount, DefaultModelLoader):  # type: ignore[misc]
    """Loads safetensors files of a gaiafs mount, and shares parameters that are the same as in the files."""

    engine = "vllm"

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        _, files = self._files(source)
        return ((source.prefix + name, tensor) for name, tensor in self._tensors(files))
