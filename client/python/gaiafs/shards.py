"""Parts of weights, for programs in which each rank has a part of every layer (tensor parallelism)."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, SupportsIndex

from .safetensors import Tensor, shown
from .views import MAX_ROWS

EXPERTS = "experts"


class Split(NamedTuple):
    """A tensor is divided along a dimension.

    With blocks, this dimension consists of several tensors side by side (``gate_up_proj`` has two), and each of them is
    divided.
    """

    dim: int
    blocks: int = 1


Rule = int | Split | str | None


class Part(NamedTuple):
    """A rank's part of a tensor: some rows of length bytes. If the part is empty, length is 0."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: int  # in the file
    length: int
    stride: int
    rows: int


def whole(t: Tensor) -> Part:
    return Part(t, t.shape, t.begin, t.end - t.begin, 0, 1)


class ShardPlan:
    """Says which part of each tensor a rank gets.

    ::

        plan = gaiafs.ShardPlan({
            "model.layers.*.self_attn.q_proj.weight": 0,     # column-parallel: the rank's part of dimension 0
            "model.layers.*.self_attn.o_proj.weight": 1,     # row-parallel: its part of dimension 1
            "model.layers.*.mlp.gate_up_proj.weight": gaiafs.Split(0, blocks=2),  # its part of each half
            "model.layers.*.mlp.experts.**": "experts",      # the rank's share of the experts, each whole
            "**": None,                                      # every rank has everything else whole
        })
        weights = gaiafs.load_safetensors(path, device, shard=plan, rank=rank, world=world)

    In patterns, ``*`` stands for anything without a dot, and ``**`` for anything. The first rule whose pattern
    matches a name counts. Dimensions may be negative.

    ``ShardPlan.from_transformers`` makes plans for models of Hugging Face's transformers.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = [(_pattern(p), _rule(p, r)) for p, r in rules.items()]
        self._text = dict(rules)

    def __repr__(self) -> str:
        return f"gaiafs.ShardPlan({self._text!r})"

    @classmethod
    def from_transformers(cls, config: Any, *, experts: bool = False) -> ShardPlan:
        """Returns the plan for a model of transformers, from its config or from the name of its kind ("llama").

        The plan is the config's ``base_model_tp_plan``. If there is none, or no transformers, it comes from a table in
        this package. The output layer is divided by rows of the vocabulary. With experts, each rank gets its share of
        the experts, each whole. Otherwise it gets a part of each expert. Raises ValueError for unknown kinds of models.
        """
        from .tpplans import rules_of

        return cls(rules_of(config, experts))

    def rule_of(self, name: str) -> Rule:
        """Returns the rule of a tensor. Raises KeyError if there is none."""
        for pattern, rule in self._rules:
            if pattern.fullmatch(name):
                return rule
        raise KeyError(name)

    @property
    def by_tensor(self) -> bool:
        """Whether a rank's part of a tensor depends on that tensor alone."""
        return not any(rule == EXPERTS for _, rule in self._rules)

    def parts(self, tensors: Iterable[Tensor], rank: SupportsIndex, world: SupportsIndex) -> dict[str, Part]:
        """Returns a rank's parts, by name. Experts of other ranks are left out."""
        r, n = operator.index(rank), operator.index(world)
        if n < 1:
            raise ValueError(f"there are {n} ranks")
        if not 0 <= r < n:
            raise ValueError(f"there is no rank {r}: {n} ranks count from 0")
        rules, unknown = [], []
        for t in tensors:
            try:
                rules.append((t, self.rule_of(t.name)))
            except KeyError:
                unknown.append(t.name)
        if unknown:
            few = ", ".join(map(shown, unknown[:3])) + (", …" if len(unknown) > 3 else "")
            raise ValueError(f"the plan has no rule for {len(unknown)} of {len(unknown) + len(rules)} tensors: {few}")
        experts = _experts([t.name for t, rule in rules if rule == EXPERTS])
        found = {}
        for t, rule in rules:
            if rule == EXPERTS:
                if _mine(t.name, experts, r, n):
                    found[t.name] = whole(t)
            else:
                found[t.name] = _part(t, rule, r, n)
        return found


def _pattern(pattern: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern of a plan is a str, not {pattern!r}")
    pieces = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"**": ".*", "*": r"[^.]*"}.get(p, re.escape(p)) for p in pieces), re.DOTALL)


def _rule(pattern: str, rule: Any) -> Rule:
    if rule is None or rule == EXPERTS:
        return rule  # type: ignore[no-any-return]
    if isinstance(rule, (Split, SupportsIndex)) and not isinstance(rule, bool):
        split = rule if isinstance(rule, Split) else Split(operator.index(rule))
        if split.blocks >= 1:
            return split
    raise TypeError(f"the rule of {pattern!r} is a dimension, a Split, 'experts' or None, not {rule!r}")


@functools.lru_cache(maxsize=1 << 16)
def _expert(name: str) -> tuple[str, int]:
    """Returns the name of a group of experts, and the number of the expert in it."""
    found = re.search(r"(.*(?:^|\.)experts)\.(\d{1,9})(?:\.|$)", name, re.DOTALL)
    if found is None:
        raise ValueError(f"the plan divides experts, and tensor {shown(name)} has no number after 'experts'")
    return found[1], int(found[2])


def _experts(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of experts in each group."""
    found: dict[str, int] = {}
    for name in names:
        where, number = _expert(name)
        found[where] = max(found.get(where, 0), number + 1)
    return found


def _mine(name: str, experts: dict[str, int], rank: int, world: int) -> bool:
    where, number = _expert(name)
    if experts[where] % world:
        raise ValueError(f"{world} ranks cannot share the {experts[where]} experts of {shown(where)} evenly")
    return number // (experts[where] // world) == rank


def _part(t: Tensor, rule: Any, rank: int, world: int) -> Part:
    if rule is None:
        return whole(t)
    dims = len(t.shape)
    dim, blocks = rule.dim + dims if rule.dim < 0 else rule.dim, rule.blocks
    if not 0 <= dim < dims:
        raise ValueError(
            f"the plan divides dimension {rule.dim} of tensor {shown(t.name)}, whose shape is {list(t.shape)}"
        )
    n = t.shape[dim]
    if n % (blocks * world):
        of = f" of {blocks} blocks" if blocks > 1 else ""
        raise ValueError(
            f"dimension {dim}{of} of tensor {shown(t.name)}, with {n} elements, is not divisible by {world} ranks"
        )
    shape = (*t.shape[:dim], n // world, *t.shape[dim + 1 :])
    bits = n // blocks // world * math.prod(t.shape[dim + 1 :]) * t.dtype.bits
    count = math.prod(t.shape[:dim]) * blocks
    if bits % 8:
        raise ValueError(
            f"a rank's part of tensor {shown(t.name)} begins within a byte: its elements have {t.dtype.bits} bits"
        )
    if not bits or not count:
        return Part(t, shape, t.begin, 0, 0, 1)
    if world == 1:
        return whole(t)
    if count > MAX_ROWS:
        raise ValueError(
            f"dimension {dim} of tensor {shown(t.name)} is divided in {count} places, more than {MAX_ROWS}"
        )
    length = bits // 8
    return Part(t, shape, t.begin + rank * length, length, world * length if count > 1 else 0, count)
