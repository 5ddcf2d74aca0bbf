"""Tensors that transformers 5 merges from those in a model's files, if it only puts them side by side: mostly experts.

transformers has a table of conversions. Each has patterns of names, and operations on the tensors whose names match. A
view can have the result, which then goes to transformers as if the files had it. The table is not a public interface,
and differs between versions. So this code verifies everything: it tries each conversion on small tensors, with
transformers itself, and afterwards checks that the model has the merged tensors. If the result differs, or the table
has changed, transformers gets the files' own tensors. It then merges them itself, into copies.
"""

from __future__ import annotations

import warnings
from typing import Any

from .errors import CopiedWarning
from .fusing import Group, Groups, fits
from .shards import Part

_OPERATIONS = {"MergeModulelist", "Concatenate"}


class Merging:
    """The merged tensors of one model. config is the model's config, cls its class."""

    def __init__(self, cls: Any, config: Any) -> None:
        self.merged: Groups = {}
        """By their names in the model."""
        self._cls, self._config = cls, config
        self._used: set[str] = set()

    def groups(self, parts: dict[str, Part]) -> Groups:
        """Returns what is merged from parts. What does not fit is left to transformers, which says what is wrong."""
        try:
            self.merged = self._groups(parts)
        except Exception as e:  # another version's table may cause any exception
            self.merged = {}
            warn(f"{type(e).__name__}: {e}")
        return self.merged

    def missed(self, model: Any, tensors: dict[str, Any]) -> list[str]:
        """Returns the merged tensors that the model lacks: it has neither the tensor nor its values in another
        dtype."""
        import torch

        has = {t.data_ptr() for t in model.parameters()}
        named = dict(model.named_parameters())

        def copied(name: str) -> bool:
            return any(
                p.shape == tensors[name].shape and torch.equal(p, tensors[name].to(p.dtype))
                for n, p in named.items()
                if f".{n}".endswith(f".{name}") or f".{name}".endswith(f".{n}")
            )

        return [name for name in self.merged if tensors[name].data_ptr() not in has and not copied(name)]

    def note(self, model: Any) -> None:
        """Tells the model which conversions its files needed, so that it saves them in the same form."""
        if self.merged:
            of_model = _table().get_model_conversion_mapping(model)
            used = self._used | {str(c) for c in getattr(model, "_weight_conversions", None) or ()}
            model._weight_conversions = [c for c in of_model if str(c) in used]

    def _groups(self, parts: dict[str, Part]) -> Groups:
        if (library := _table()) is None:
            return {}
        kinds = {self._cls.__name__: None}
        for config in (self._config, *(getattr(self._config, n, None) for n in self._config.sub_configs)):
            if config is not None:
                kinds[config.model_type] = None
        table = [c for kind in kinds for c in library.get_checkpoint_conversion_mapping(kind) or ()]
        renamings = [c for c in table if isinstance(c, library.WeightRenaming)]
        converters = [c for c in table if isinstance(c, library.WeightConverter)]
        if not converters:
            return {}
        found: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        for name in sorted(parts, key=_numbers_by_size):
            renamed = name
            for renaming in renamings:
                renamed, _ = renaming.rename_source_key(renamed)
            for converter in converters:
                target, pattern = converter.rename_source_key(renamed)
                if pattern is not None:
                    found.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(name)
                    break
        groups: Groups = {}
        for target, (converter, names) in found.items():
            group = self._group(converter, names)
            if group is not None and fits(group, parts):
                groups[target] = group
                self._used.add(str(converter))
        return groups

    def _group(self, converter: Any, names: dict[str, list[str]]) -> Group | None:
        """Returns what a conversion makes of tensors, given by the pattern that they match. None if it does anything
        other than put them side by side.
        """
        import torch

        rows = [names.get(pattern, []) for pattern in converter.source_patterns]
        if {type(o).__name__ for o in converter.operations} - _OPERATIONS or len(converter.target_patterns) > 1:
            return None
        if {len(row) for row in rows} != {len(rows[0])} or not rows[0]:
            return None
        small = torch.arange(len(rows) * len(rows[0]) * 6).reshape(len(rows), -1, 2, 3)
        made: Any = {pattern: list(row) for pattern, row in zip(converter.source_patterns, small, strict=True)}
        for operation in converter.operations:
            made = operation.convert(
                made, source_patterns=converter.source_patterns, target_patterns=converter.target_patterns,
                full_layer_name=converter.target_patterns[0], model=None, config=self._config, missing_keys=None,
            )  # fmt: skip
        (outcome,) = made.values()
        stacked = torch.cat(list(small), dim=1)
        for like, is_stacked in ((stacked, True), (stacked[0], False)):
            if torch.equal(outcome, like):
                return Group([list(row) for row in zip(*rows, strict=True)], is_stacked)
        return None


def _table() -> Any:
    """Returns the module of transformers that has the table and the classes of its entries. None for transformers 4,
    which merges nothing.
    """
    try:
        from transformers import conversion_mapping
    except ImportError:
        return None
    return conversion_mapping


def _numbers_by_size(name: str) -> list[tuple[int, str]]:
    """A sort key that puts expert 10 after expert 9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in name.split(".")]


def warn(why: str) -> None:
    import transformers

    warnings.warn(
        f"what transformers {transformers.__version__} merges, such as experts, is copied into this process's own memory "
        f"and not shared: {why}",
        CopiedWarning,
        stacklevel=5,
    )
