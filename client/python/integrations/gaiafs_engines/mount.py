"""The common base of the engines' loaders."""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .sharing import Loading

if TYPE_CHECKING:
    _Loader = Any
else:
    _Loader = object


class FromMount(_Loader):  # type: ignore[misc]
    """Takes files from a mount. Among a loader's bases it stands before the engine's ``DefaultModelLoader``."""

    engine = ""  # the name of the engine, whose logger is used
    counter_before_loading_weights = 0.0  # when loading began; the engine logs the time since then

    def __init__(self, load_config: Any) -> None:
        # So that the engine's own loader chooses safetensors files.
        config = copy.copy(load_config)
        config.load_format = "safetensors"
        super().__init__(config)
        self._asked = False
        self._logger = logging.getLogger(f"{self.engine}.gaiafs")
        self._loading = Loading(self._device(), self._logger, self._framework())

    def _framework(self) -> str:
        return "torch"

    def _device(self) -> Any:
        """Returns the device that the engine has chosen for this process, or an emulated one on a machine without
        GPUs."""
        import torch

        return torch.cuda.current_device() if torch.cuda.is_available() else 0

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        """Loads and processes a model as the engine does, and then shares the weights that it left unchanged."""
        model = super().load_model(*arguments, **options)
        self._loading.share(model)
        if not self._asked:
            self._logger.warning("gaiafs: %s has not asked for tensors: nothing is shared", self.engine)
        return model

    def _files(self, source: Any) -> tuple[str, list[str]]:
        """Returns the directory and the safetensors files that the engine chooses for a source."""
        options = {}
        for name, parameter in inspect.signature(self._prepare_weights).parameters.items():  # versions differ
            of_source = "model_or_path" if name == "model_name_or_path" else name
            if hasattr(source, of_source):
                options[name] = getattr(source, of_source)
            elif parameter.default is parameter.empty:
                words = f"it asks for {name} to choose files, which load format gaiafs does not know: use another one"
                raise RuntimeError(f"{self.engine} is of another version than gaiafs fits: {words}")
        options["fall_back_to_pt"] = False
        found = self._prepare_weights(**options)
        if not found[2]:
            words = "load format gaiafs reads safetensors files, and there are none"
            raise RuntimeError(f"{source.model_or_path}: {words}")
        return found[0], list(found[1])

    def _tensors(self, files: list[str]) -> Iterator[tuple[str, Any]]:
        self._asked = True
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return self._loading.tensors(files)
