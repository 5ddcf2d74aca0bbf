"""Tensors that a model has in one piece and files have in several: fused (q, k and v; gate and up) or stacked
(experts).

A view puts pieces of files side by side, without gaps. So such a tensor is shared like any other, and nothing is copied
twice. The bytes of a piece stay in the order of the file. Tensors that need transposing or interleaving are not
supported.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .dtypes import DType
from .safetensors import shown
from .shards import Part

Fuse = Mapping[str, "str | Sequence[str]"]


class Group(NamedTuple):
    """The tensors that one tensor is made of. Those of a row are concatenated along dimension 0, and rows are
    stacked."""

    rows: list[list[str]]
    stacked: bool  # False: there is one row, and no dimension for rows


Groups = dict[str, Group]


class Run(NamedTuple):
    """A tensor in a view: parts of tensors of files, one after the other."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: list[Part]
    length: int  # of all parts


def runs_of(parts: Mapping[str, Part], groups: Groups) -> list[Run]:
    """Returns the tensors that the views will have: the groups, and the parts that are in no group, in the order of
    parts. Raises ValueError if a group is not one tensor.
    """
    members = {name: target for target, group in groups.items() for row in group.rows for name in row}
    runs: dict[str, Run] = {}
    for name, part in parts.items():
        target = members.get(name, name)
        if target in runs and target == name:
            raise ValueError(f"tensor {shown(name)} is in the files, and is to be made of others, too")
        if target not in runs:
            runs[target] = _joined(target, groups[target], parts) if name in members else _single(part)
        elif name not in members or target in parts:
            raise ValueError(f"tensor {shown(target)} is in the files, and is to be made of others, too")
    return list(runs.values())


def _single(part: Part) -> Run:
    return Run(part.tensor.name, part.tensor.dtype, part.shape, [part], part.length * part.rows)


def fits(group: Group, parts: Mapping[str, Part]) -> bool:
    """Reports whether a group makes one tensor."""
    try:
        _joined("", group, parts)
    except ValueError:
        return False
    return True


def _joined(name: str, group: Group, parts: Mapping[str, Part]) -> Run:
    rows = [[parts[member] for member in row] for row in group.rows]
    members = [part for row in rows for part in row]
    first = members[0]
    for part in members:
        dims = len(part.shape)
        if part.tensor.dtype != first.tensor.dtype or dims != len(first.shape) or part.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"tensor {shown(name)} cannot be made of {shown(first.tensor.name)}, {first.tensor.dtype} "
                f"{list(first.shape)}, and {shown(part.tensor.name)}, {part.tensor.dtype} {list(part.shape)}"
            )
    if first.shape:
        shapes = {(sum(part.shape[0] for part in row), *first.shape[1:]) for row in rows}
    elif all(len(row) == 1 for row in rows) and group.stacked:
        shapes = {()}
    else:
        raise ValueError(f"tensor {shown(name)} cannot be made of {shown(first.tensor.name)}, which has no dimension")
    if len(shapes) > 1:
        raise ValueError(f"tensor {shown(name)} cannot be stacked: its rows have the shapes {sorted(shapes)}")
    shape = shapes.pop()
    length = sum(part.length * part.rows for part in members)
    return Run(name, first.tensor.dtype, (len(rows), *shape) if group.stacked else shape, members, length)


def grouping(rules: Fuse) -> Callable[[Iterable[str]], Groups]:
    """Returns a function that finds the groups of rules among names: see ``load_safetensors``. Raises ValueError for
    meaningless rules; the function raises it for names that match only part of a rule.
    """
    made = [_Rule(target, [of] if isinstance(of, str) else list(of)) for target, of in rules.items()]

    def groups(names: Iterable[str]) -> Groups:
        listed = list(names)
        found: Groups = {}
        taken: dict[str, str] = {}
        for rule in made:
            for target, group in rule.groups(listed).items():
                if target in found:
                    raise ValueError(f"two rules make tensor {shown(target)}")
                found[target] = group
                for name in (name for row in group.rows for name in row):
                    if name in taken:
                        raise ValueError(f"tensor {shown(name)} is in {shown(taken[name])} and in {shown(target)}")
                    taken[name] = target
        return found

    return groups


class _Rule:
    def __init__(self, target: str, sources: list[str]) -> None:
        self.target, self.sources = target, sources
        stars = {s.count("*") for s in (target, *sources)}
        numbers = {s.count("#") for s in sources}
        if not sources or len(stars) > 1 or len(numbers) > 1 or numbers > {0, 1} or "#" in target:
            raise ValueError(
                f"{target!r} cannot be made of {sources!r}: each has the same number of *, and either all or none of "
                "those it is made of have one #"
            )
        self.stacked = numbers == {1}
        self.patterns = [_pattern(s) for s in sources]

    def groups(self, names: list[str]) -> Groups:
        # By the text that the stars match: by the number of the row, then by the index of the source.
        found: dict[tuple[str, ...], dict[int, dict[int, str]]] = {}
        for name in names:
            for i, pattern in enumerate(self.patterns):
                if match := pattern.fullmatch(name):
                    at = pattern.groupindex.get("number", 0)
                    stars = tuple(v for k, v in enumerate(match.groups(), 1) if k != at)
                    number = int(match[at]) if at else 0
                    row = found.setdefault(stars, {}).setdefault(number, {})
                    if i in row:
                        raise ValueError(f"tensors {shown(row[i])} and {shown(name)} have the same number")
                    row[i] = name
        if not found:
            raise ValueError(f"no tensors fit {', '.join(map(repr, self.sources))}, of which {self.target!r} is to be made")
        return {target: self._group(target, rows) for target, rows in ((self._named(s), r) for s, r in found.items())}

    def _named(self, stars: tuple[str, ...]) -> str:
        between = self.target.split("*")
        return "".join(a + b for a, b in zip(between, (*stars, ""), strict=True))

    def _group(self, target: str, rows: dict[int, dict[int, str]]) -> Group:
        numbers = sorted(rows)
        whole = all(len(row) == len(self.sources) for row in rows.values())
        if not whole or numbers[-1] - numbers[0] != len(numbers) - 1:
            raise ValueError(f"tensor {shown(target)} lacks some of the tensors that it is to be made of")
        return Group([[rows[n][i] for i in range(len(self.sources))] for n in numbers], self.stacked)


def _pattern(source: str) -> re.Pattern[str]:
    pieces = re.split(r"([*#])", source)
    text = "".join({"*": "([^.]*)", "#": "(?P<number>[0-9]{1,9})"}.get(p, re.escape(p)) for p in pieces)
    return re.compile(text, re.DOTALL)


def alignment(runs: Iterable[Run], align: int) -> int:
    """Returns the largest power of two up to align at which pieces can follow each other without gaps."""
    between = (p.length * p.rows for run in runs for p in run.parts[:-1])
    return math.gcd(align, functools.reduce(math.gcd, between, 0))
