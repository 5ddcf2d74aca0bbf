"""Models of Hugging Face's transformers, on weights that all processes share.

::

    import gaiafs.transformers
    from transformers import AutoModelForCausalLM

    model = gaiafs.transformers.from_pretrained(AutoModelForCausalLM, "/mnt/data/llama", device=0)

transformers itself builds the model and puts the weights in: names, buffers, tied weights, dtypes, missing and
unexpected keys are what its own ``from_pretrained`` makes of them. It is given the shared tensors where it would
otherwise read files.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from .arguments import PathLike
from .errors import CopiedWarning
from .fusing import Group, Groups, fits
from .safetensors import shards_of
from .shards import Part
from .weights import Private, Weights, load, make_private

_FILES = ("model.safetensors", "model.safetensors.index.json")  # in the order in which transformers looks for them
_loaded: weakref.WeakKeyDictionary[Any, Weights] = weakref.WeakKeyDictionary()
_patched = threading.RLock()


def from_pretrained(
    cls: Any, path: PathLike, device: Any = 0, *, private: Private = False, config: Any = None, **options: Any
) -> Any:
    """Returns a model whose parameters are the tensors of ``load_safetensors``, shared with every process that loads
    them.

    cls is a class of models (``LlamaForCausalLM``) or an auto class (``AutoModelForCausalLM``). path is a directory
    on a mount that ``save_pretrained`` wrote or that was downloaded. options are those of ``cls.from_pretrained``:
    ``dtype``, ``attn_implementation``, ``output_loading_info`` and so on; those that choose files, devices or
    quantization are not taken. private is as in ``load_safetensors``, by the names in the files; what is merged, see
    below, has the model's name.

    The model is in evaluation mode, and its parameters require no gradient: they cannot be trained, and a store into
    one ends the process's context of CUDA. Buffers are this process's own.

    What transformers concatenates or stacks (the experts of Mixtral or Qwen, which files have one by one) is shared,
    too: the device has it in the model's order. A parameter becomes a copy of this process alone where transformers
    makes another tensor of what is in the files: for a dtype that is not theirs, or what it transposes, say. A
    ``gaiafs.CopiedWarning`` says how much memory these take.
    """
    import torch
    import transformers

    for name in ("device_map", "state_dict", "quantization_config", "gguf_file", "subfolder", "tp_plan", "variant"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name} cannot be passed: the weights are shared as they are in the files, on the one device"
            )
    name = os.fsdecode(path)
    if config is None:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=options.get("trust_remote_code"))
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name}: quantized models cannot be shared so: use load_safetensors")
    cls = _class_of(cls, config)
    files = [f for f in (os.path.join(name, file) for file in _FILES) if os.path.exists(f)]
    merging = _Merging(cls, config)
    weights = load(shards_of(files[0] if files else name), device, "torch", group=merging.groups)
    make_private(weights, private)
    where = next((t.device for t in weights.values()), torch.device("cpu"))
    with _without_warmup():
        found = cls.from_pretrained(None, config=config, state_dict=dict(weights), device_map={"": where}, **options)
    model = found[0] if isinstance(found, tuple) else found
    if model.can_generate() and options.get("generation_config") is None:
        with contextlib.suppress(OSError):  # the model has made one of its config, then
            model.generation_config = transformers.GenerationConfig.from_pretrained(name)
    model.config.name_or_path = model.name_or_path = name
    merging.note(model)
    model.requires_grad_(False)
    _loaded[model] = weights
    _tell_of_copies(name, model, weights)
    return found


def weights_of(model: Any) -> Weights:
    """Returns the tensors that a model was made of, to ``acquire`` changes of the files. KeyError where it is no such
    model.
    """
    return _loaded[model]


def _class_of(cls: Any, config: Any) -> Any:
    """Returns the class of models that an auto class chooses."""
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return cls
    from transformers.models.auto.auto_factory import _get_model_class

    if type(config) not in mapping:
        raise ValueError(f"{cls.__name__} has no class of models for {type(config).__name__}")
    return _get_model_class(config, mapping)


class _Merging:
    """What transformers merges of the tensors in the files of a model, where that is only to put them side by side.

    It says so in a table of conversions, of which each has patterns of names and operations. What is merged here goes
    to transformers as if the files had it so. Versions without that table merge nothing.
    """

    def __init__(self, cls: Any, config: Any) -> None:
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._used: set[str] = set()
        try:
            from transformers import conversion_mapping, core_model_loading
        except ImportError:
            return
        found: list[Any] = conversion_mapping.get_checkpoint_conversion_mapping(cls.__name__) or []
        configs = [config, *(c for n in getattr(config, "sub_configs", {}) if (c := getattr(config, n, None)) is not None)]
        for kind in {c.model_type: None for c in configs}:
            found += conversion_mapping.get_checkpoint_conversion_mapping(kind) or []
        self._library = core_model_loading
        self._renamings = [c for c in found if isinstance(c, core_model_loading.WeightRenaming)]
        self._converters = [c for c in found if isinstance(c, core_model_loading.WeightConverter)]

    def groups(self, parts: dict[str, Part]) -> Groups:
        """Returns what is merged of parts. What does not fit is left to transformers, which says what is wrong."""
        found: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        if not self._converters:
            return {}
        for name in sorted(parts, key=self._library.dot_natural_key):  # the order in which transformers has them
            renamed = self._library.apply_renamings(name, self._renamings)
            for converter in self._converters:
                target, pattern = converter.rename_source_key(renamed)
                if pattern is not None:
                    found.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(name)
                    break
        groups: Groups = {}
        for target, (converter, names) in found.items():
            group = _group(converter, names)
            if group is not None and fits(group, parts):
                groups[target] = group
                self._used.add(str(converter))
        return groups

    def note(self, model: Any) -> None:
        """Has the model know which conversions its files took: it saves them as they were."""
        if self._used:
            from transformers.conversion_mapping import get_model_conversion_mapping

            used = self._used | {str(c) for c in getattr(model, "_weight_conversions", None) or ()}
            model._weight_conversions = [c for c in get_model_conversion_mapping(model) if str(c) in used]


def _group(converter: Any, names: dict[str, list[str]]) -> Group | None:
    """Returns what a conversion makes of tensors, by the pattern that they fit, or None where it does something
    else.
    """
    operations = [
        (type(o).__name__, getattr(o, "dim", None), getattr(o, "num_shards_attribute", None))
        for o in converter.operations
    ]
    stacked = operations[:1] == [("MergeModulelist", 0, None)]
    several = len(converter.source_patterns) > 1
    if operations[stacked:] != ([("Concatenate", int(stacked), None)] if several else []):
        return None
    rows = [names.get(pattern, []) for pattern in converter.source_patterns]
    if len(converter.target_patterns) > 1 or {len(row) for row in rows} != {len(rows[0])} or not rows[0]:
        return None
    if not stacked and len(rows[0]) > 1:
        return None
    return Group([list(row) for row in zip(*rows, strict=True)], stacked)


@contextlib.contextmanager
def _without_warmup() -> Iterator[None]:
    """Has transformers not take memory for a second copy of the weights before it puts them in.

    It means to make allocations faster. There are none here, and PyTorch would keep the memory.
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
            f"{sum(p.numel() * p.element_size() for p in copied)} bytes, since the model has them in another dtype or form than "
            "the files. Pass dtype='auto' for that of the files",
            CopiedWarning,
            stacklevel=3,
        )
