"""SGLang's loader, a class to pass as ``load_format``: ``sglang.Engine(load_format=GaiafsModelLoader, …)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.model_loader.loader import DefaultModelLoader, maybe_add_mtp_safetensors

from .mount import FromMount


class GaiafsModelLoader(FromMount, DefaultModelLoader):  # type: ignore[misc]
    """Loads safetensors files of a gaiafs mount, and shares parameters that are the same as in the files.

    If SGLang captures CUDA graphs before it has the weights (startup weight-load overlap), all parameters stay copies,
    because the graphs have their addresses.
    """

    engine = "sglang"

    def _get_weights_iterator(
        self, source: Any, *, resolved_source: Any = None, **prefetching: bool
    ) -> Iterator[tuple[str, Any]]:
        if resolved_source is not None:
            files = list(resolved_source.weight_files)
        else:
            folder, files = self._files(source)
            if source.model_config is not None:
                index = "model.safetensors.index.json"
                files = maybe_add_mtp_safetensors(files, folder, index, source.model_config.hf_config)
        tensors = self._tensors(files)
        draft = self.load_config.draft_model_idx
        if draft is not None:
            filtered: Iterator[tuple[str, Any]] = self._filter_mtp_weights(tensors, source.prefix, draft)
            return filtered
        return ((source.prefix + name, tensor) for name, tensor in tensors)
