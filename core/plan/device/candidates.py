"""Every layout of a number of chips, as arrays: one per field, one entry per candidate.

A mesh is an ordered factorisation of the chips over the axes; there are ∏ C(e + k - 1, k - 1) of
them over k axes (e: exponents of the primes). Axes are added one by one. A rule is applied as soon
as its fields are known. A partial mesh that it rejects counts as all the complete meshes that could
be made from it, so that rejected and remaining meshes add up to the total. A mesh then becomes
candidates by micro-batch and interleaving. Only a search imports this module, which needs NumPy.

`front` keeps the Pareto-optimal candidates. A candidate is dominated where another is at most as
large in every column and smaller in one; of equal ones the first is kept. The lexicographically
least of a set is never dominated, so each one that is kept costs one pass over the remaining ones.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sabia.core.plan.device import search_rules
from sabia.core.plan.device.layout import AXES, Abilities, Layout, Workload
from sabia.core.plan.device.search_rules import NUMBERS, LayoutRule, Pinned

# axes with few possible values come first; the last two must only divide the remaining chips
ORDER = ("tensor", "context", "pipe", "expert", "fsdp", "data")
Array = Any


@dataclass(frozen=True)
class Candidates:
    """Meshes with a micro-batch and virtual stages; `mesh`: the index of each one's mesh."""

    layout: Layout
    mesh: Array

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.mesh)

    def where(self, chosen: Array) -> "Candidates":
        """Those that a mask or indices select."""
        fields: Any = {name: getattr(self.layout, name)[chosen] for name in NUMBERS}
        return Candidates(replace(self.layout, **fields), self.mesh[chosen])

    def one(self, number: int) -> Layout:
        """A candidate in plain numbers."""
        fields: Any = {name: int(getattr(self.layout, name)[number]) for name in NUMBERS}
        return replace(self.layout, **fields)


INNER = ("micro_batch", "virtual")  # fields that a mesh does not determine


@lru_cache(maxsize=100_000)
def factorisations(number: int, parts: int) -> int:
    """Ordered ways to write `number` as a product of `parts` factors."""
    if parts == 0:
        return int(number == 1)
    return sum(factorisations(rest, parts - 1) for rest in _divisors(number))


def _ways(left: Array, parts: int) -> int:
    """Complete meshes that `left` remaining chips can make over `parts` more axes."""
    numbers, times = np.unique(left, return_counts=True)
    pairs = zip(numbers.tolist(), times.tolist(), strict=True)
    return sum(factorisations(n, parts) * t for n, t in pairs)


@lru_cache(maxsize=10_000)
def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def divisors(numbers: Array) -> Array:
    """All numbers that divide one of `numbers`."""
    every = {n for number in np.unique(numbers).tolist() for n in _divisors(number)}
    return np.array(sorted(every), np.int64)


class Meshes:
    """Meshes that pass the rules, one array per field; `left`: chips for the other axes, `free`.

    total: before the rules; rejected: number of meshes by the reason.
    """

    def __init__(self, counts: Sequence[int], free: list[str], pinned: Mapping[str, int]) -> None:
        left, fixed = np.array(sorted(set(counts)), np.int64), math.prod(pinned.values())
        self.left = left[left % fixed == 0] // fixed
        self.fields = {name: np.full(len(self.left), n, np.int64) for name, n in pinned.items()}
        self.free = free
        self.rejected: dict[str, int] = {}
        self.total = _ways(self.left, len(free))

    def keep(self, rule: LayoutRule, mask: Array) -> None:
        """Reject meshes by `rule`, and count them."""
        mask = np.broadcast_to(mask, self.left.shape)
        if mask.all():
            return
        self.count(rule, _ways(self.left[~mask], len(self.free)))
        self.select(mask)

    def select(self, chosen: Array) -> None:
        """Keep those that a mask or indices select."""
        self.left = self.left[chosen]
        self.fields = {name: values[chosen] for name, values in self.fields.items()}

    def count(self, rule: LayoutRule, number: int) -> None:
        """Add `number` meshes to those that `rule` rejects."""
        if number:
            self.rejected[rule.reason] = self.rejected.get(rule.reason, 0) + number

    def grow(self, rules: Sequence[LayoutRule]) -> None:
        """Add the next axis with every value that passes the rules, which are of this axis only."""
        axis, parts = self.free[0], len(self.free) - 1
        before = _ways(self.left, parts + 1)
        values = divisors(self.left)
        for number, rule in enumerate(rules):
            values = values[np.broadcast_to(rule.fits(values), values.shape)]
            if number < len(rules) - 1:
                divided = (self.left[self.left % n == 0] // n for n in values.tolist())
                kept = sum(_ways(left, parts) for left in divided)
                self.count(rule, before - kept)
                before = kept
        self.free = self.free[1:]
        if self.free:
            indices = [np.flatnonzero(self.left % n == 0) for n in values.tolist()]
            chosen = np.concatenate([*indices, np.array([], np.int64)])
            sizes = np.repeat(values, [len(some) for some in indices])
        else:  # the last axis has all remaining chips
            chosen = np.flatnonzero(np.isin(self.left, values))
            sizes = self.left[chosen]
        self.select(chosen)
        self.fields[axis], self.left = sizes, self.left // sizes
        if rules:
            self.count(rules[-1], before - _ways(self.left, parts))

    def settle(self, rules: Iterable[LayoutRule]) -> list[LayoutRule]:
        """Apply the rules whose unknown fields are none or exactly all free axes; return others."""
        waiting = []
        for rule in rules:
            unknown = {*rule.fields} - {*self.fields}
            if unknown and unknown != {*self.free}:
                waiting.append(rule)
                continue
            self.keep(rule, rule.fits(rule.product(self.fields) * (self.left if unknown else 1)))
        return waiting


def all_meshes(
    counts: Sequence[int], rules: Iterable[LayoutRule], axes: Sequence[str], pinned: Pinned
) -> Meshes:
    """Every mesh over `axes` of each number of chips that passes the rules.

    pinned: fields with a fixed value. Axes not in `axes` are 1, and so are micro-batch and virtual
    stages unless pinned.
    """
    fixed = {axis: pinned[axis] for axis in AXES if axis in pinned}
    free = [axis for axis in ORDER if axis in axes and axis not in fixed]
    meshes = Meshes(counts, free, fixed | dict.fromkeys({*AXES} - {*axes} - {*fixed}, 1))
    for name in INNER:
        meshes.fields[name] = np.full(len(meshes.left), pinned.get(name, 1), np.int64)
    waiting = meshes.settle(rules)
    while meshes.free:
        alone = {meshes.free[0], *INNER}
        meshes.grow([rule for rule in waiting if {*rule.fields} <= alone])
        waiting = meshes.settle([rule for rule in waiting if not {*rule.fields} <= alone])
    if not free:  # all axes are pinned: only one number of chips is possible
        meshes.select(meshes.left == 1)
    return meshes


def candidates_of(meshes: Meshes, workload: Workload, can: Abilities, pinned: Pinned) -> Candidates:
    """Each mesh with every micro-batch that divides its rows, and every number of virtual stages.

    Arrays are float64: products above 2**63 do not overflow, and the counts are exact.
    """
    rows = meshes.fields["data"] * meshes.fields["fsdp"] * meshes.fields["expert"]
    tried = [pinned["micro_batch"]] if "micro_batch" in pinned else _divisors(workload.batch_rows)
    chosen = [np.flatnonzero(workload.batch_rows % (rows * size) == 0) for size in tried]
    mesh = np.concatenate([*chosen, np.array([], np.int64)])
    micro = np.repeat(np.array(tried, np.int64), [len(some) for some in chosen])
    # several virtual stages need equal numbers of layers and whole rounds of micro-batches
    most = search_rules.MOST_STAGES if can.interleaved else 1
    virtuals = [pinned["virtual"]] if "virtual" in pinned else list(range(1, most + 1))
    even = search_rules.even_stages(workload.architecture.depth, can.outer)
    pipe, passes = meshes.fields["pipe"][mesh], workload.batch_rows // (rows[mesh] * micro)
    parts_by_virtual = []
    for virtual in virtuals:
        rounds = (pipe > 1) & (passes % pipe == 0) & even.fits(pipe * virtual)
        some = np.flatnonzero(rounds) if virtual > 1 else np.arange(len(mesh))
        parts_by_virtual.append((mesh[some], micro[some], np.full(len(some), virtual, np.int64)))
    mesh, *inner = (np.concatenate(parts) for parts in zip(*parts_by_virtual, strict=True))
    fields = {axis: meshes.fields[axis][mesh] for axis in AXES}
    fields |= dict(zip(INNER, inner, strict=True))
    arrays = {name: values.astype(np.float64) for name, values in fields.items()}
    split = pinned.get("sequence_parallel", can.sequence_parallel)
    return Candidates(Layout(**arrays, sequence_parallel=split), mesh)


def front(*columns: Any) -> Any:
    """Indices of the entries that no other dominates, sorted by the columns.

    columns: arrays of equal length, smaller is better, without NaN.
    """
    table = np.column_stack(columns).astype(np.float64)
    order = np.lexsort(tuple(table[:, n] for n in reversed(range(table.shape[1]))))
    left, kept = order, []
    while len(left):
        kept.append(left[0])
        left = left[(table[left] < table[left[0]]).any(1)]
    return np.array(kept, np.int64)
