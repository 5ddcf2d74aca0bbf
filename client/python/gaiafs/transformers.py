"""Models of Hugging Face's transformers, with weights that all processes share.

::

    import gaiafs.transformers
    from transformers import AutoModelForCausalLM

    model = gaiafs.transformers.from_pretrained(AutoModelForCausalLM, "/mnt/data/llama", device=0)

transformers itself builds the model and loads the weights. Its own ``from_pretrained`` handles names, buffers, tied
weights, dtypes, and missing or unexpected keys. It gets the shared tensors instead of reading files.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .arguments import PathLike
from .errors import CopiedWarning
from .merging import Merging, warn
from .safetensors import shards_of
from .weights import Private, Weights, load, make_private

_FILES = ("model.safetensors", "model.safetensors.index.json")  # in the order in which transformers looks for them
_OLDEST = (4, 56)  # the first version whose from_pretrained takes dtype
_loaded: weakref.WeakKeyDictionary[Any, Weights] = weakref.WeakKeyDictionary()
_patched = threading.RLock()


def from_pretrained(
    cls: Any, path: PathLike, device: Any = 0, *, private: Private = False, config: Any = None, **options: Any
) -> Any:
    """Returns a model whose parameters are the tensors of ``load_safetensors``, shared with every process that loads
    them.

    cls is a model class (``LlamaForCausalLM``) or an auto class (``AutoModelForCausalLM``). path is a directory on a
    mount, written by ``save_pretrained`` or downloaded. options are those of ``cls.from_pretrained``: ``dtype``,
    ``attn_implementation``, ``output_loading_info`` and so on. Options that choose files, devices or quantization are
    refused. private is as in ``load_safetensors``, with the names in the files; merged tensors (see below) have the
    model's names.

    The model is in evaluation mode, and its parameters require no gradient. They cannot be trained, and a store into
    one ends the process's CUDA context. Buffers belong to this process.

    Tensors that transformers concatenates or stacks are shared, too: the device has them in the model's order. These
    are, for example, the experts of Mixtral or Qwen, which the files have one by one. A parameter becomes a copy of
    this process alone if transformers makes another tensor from what the files have: for another dtype, for example, or
    by transposing. A ``gaiafs.CopiedWarning`` says how much memory the copies take.
    """
    import torch
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise ImportError(f"transformers {transformers.__version__} is installed, and gaiafs needs {needed} or newer")
    for name in ("device_map", "state_dict", "quantization_config", "gguf_file", "subfolder", "tp_plan", "variant"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name} cannot be passed: the weights are shared as they are in the files, on the one device"
            )
    name = os.fsdecode(path)
    if config is None:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=options.get("trust_remote_code"))
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name}: quantized models cannot be shared in this way: use load_safetensors")
    cls = _class_of(cls, config)
    files = [f for f in (os.path.join(name, file) for file in _FILES) if os.path.exists(f)]
    names = shards_of(files[0] if files else name)

    def make(merging: Merging | None) -> tuple[Any, Any, Weights]:
        """Returns what transformers returns, the model in it, and the model's weights."""
        weights = load(names, device, "torch", group=merging.groups if merging is not None else None)
        make_private(weights, private)
        where = next((t.device for t in weights.values()), torch.device("cpu"))
        with _without_warmup():
            found = cls.from_pretrained(
                None, config=config, state_dict=dict(weights), device_map={"": where}, **options
            )
        return found, found[0] if isinstance(found, tuple) else found, weights

    found, model, weights = _merged(make, Merging(cls, config)) or make(None)
    if model.can_generate() and options.get("generation_config") is None:
        with contextlib.suppress(OSError):  # without that file, the model has made one from its config
            model.generation_config = transformers.GenerationConfig.from_pretrained(name)
    model.config.name_or_path = model.name_or_path = name
    model.requires_grad_(False)
    _loaded[model] = weights
    _tell_of_copies(name, model, weights)
    return found


def weights_of(model: Any) -> Weights:
    """Returns the tensors that a model was made of, to ``acquire`` changes of the files. Raises KeyError for any other
    model.
    """
    return _loaded[model]


def _merged(make: Callable[[Merging], tuple[Any, Any, Weights]], merging: Merging) -> tuple[Any, Any, Weights] | None:
    """Makes a model of merged tensors. If transformers does not take them as its own, it warns and returns None."""
    try:
        found, model, weights = make(merging)
        if not (missed := merging.missed(model, weights)):
            merging.note(model)
            return found, model, weights
        why = f"the model has no {missed[0]}"
    except Exception as e:
        if not merging.merged:
            raise
        why = f"{type(e).__name__}: {e}"
    warn(why)
    return None


def _class_of(cls: Any, config: Any) -> Any:
    """Returns the model class that an auto class chooses."""
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return cls
    if type(config) not in mapping:
        raise ValueError(f"{cls.__name__} has no class of models for {type(config).__name__}")
    try:
        from transformers.models.auto.auto_factory import _get_model_class
    except ImportError:  # the public way builds a model without weights, which takes longer
        import torch

        with torch.device("meta"):
            return type(cls.from_config(config))
    return _get_model_class(config, mapping)


@contextlib.contextmanager
def _without_warmup() -> Iterator[None]:
    """Keeps transformers from allocating memory for a second copy of the weights before it loads them.

    That is meant to make allocations faster. Shared weights need no allocations, and PyTorch would keep the memory.
    """
    from transformers import modeling_utils

    with _patched:
        old = getattr(modeling_utils, "caching_allocator_warmup", None)
        if old is not None:
            modeling_utils.caching_allocator_warmup = lambda *arguments, **options: None
        try:
            yield
        finally:
            if old is not None:
                modeling_utils.caching_allocator_warmup = old


def _tell_of_copies(name: str, model: Any, weights: Weights) -> None:
    shared = {t.data_ptr() for t in weights.values()}
    parameters = {id(p): p for p in model.parameters()}.values()
    copied = [p for p in parameters if p.numel() and p.data_ptr() not in shared]
    if copied:
        warnings.warn(
            f"{name}: {len(copied)} of {len(parameters)} parameters are copies of this process alone, of "
            f"{sum(p.numel() * p.element_size() for p in copied)} bytes, because the model has them in another dtype or form "
            "than the files. Pass dtype='auto' to use that of the files",
            CopiedWarning,
            stacklevel=3,
        )
