"""Every layout of a number of chips, as arrays: one per field, one entry a candidate.

A mesh is an ordered factorisation of the chips over the axes; there are ∏ C(e + k - 1, k - 1) of
them over k axes (e: exponents of the primes). Axes are added one by one. A rule is applied as soon
as its fields are known, and what falls by it is counted with all the meshes that it would have
grown into, so that fallen and surviving meshes add up to all that there are. A mesh then becomes
candidates by micro-batch and interleaving. NumPy is imported here; only a search comes here.

Of all candidates `front` keeps those that no other beats. A candidate is beaten where another is at
most as large in every column and smaller in one; of equal ones the first is kept. The
lexicographically least of a set is never beaten, so taking it, dropping what it beats and going on
costs one pass over the rest for each that is kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sabia.core.plan.device.layout import AXES, Layout, Workload
from sabia.core.plan.device.search_rules import (
    MOST_STAGES,
    Abilities,
    LayoutRule,
    Pinned,
    even_stages,
)

# the axes that few values fit come first; the last two only have to divide what is left
ORDER = ("tensor", "context", "pipe", "expert", "fsdp", "data")
Array = Any


@dataclass(frozen=True)
class Meshes:
    """Meshes that keep all rules, a field an array; `total`: before the rules, `fell`: by them."""

    fields: Mapping[str, Array]
    total: int
    fell: dict[str, int]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.fields["data"])


@dataclass(frozen=True)
class Candidates:
    """Meshes with a micro-batch and virtual stages; `mesh`: the number of each one's mesh."""

    layout: Layout
    mesh: Array

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.mesh)

    def where(self, chosen: Array) -> "Candidates":
        """Those that a mask, or their numbers, choose."""
        fields: Any = {name: getattr(self.layout, name)[chosen] for name in ARRAYS}
        return Candidates(replace(self.layout, **fields), self.mesh[chosen])

    def one(self, number: int) -> Layout:
        """A candidate in plain numbers."""
        fields: Any = {name: int(getattr(self.layout, name)[number]) for name in ARRAYS}
        return replace(self.layout, **fields)


INNER = ("micro_batch", "virtual")  # what a mesh leaves open
ARRAYS = (*AXES, *INNER)


@lru_cache(maxsize=100_000)
def factorisations(number: int, parts: int) -> int:
    """Ordered ways to write `number` as a product of `parts` factors."""
    if parts == 0:
        return int(number == 1)
    found, prime = 1, 2
    while number > 1:
        if prime * prime > number:
            prime = number
        exponent = 0
        while number % prime == 0:
            number, exponent = number // prime, exponent + 1
        found *= math.comb(exponent + parts - 1, parts - 1)
        prime += 1
    return found


def _ways(left: Array, parts: int) -> int:
    """The meshes that all of `left` would grow into over `parts` more axes."""
    numbers, times = np.unique(left, return_counts=True)
    pairs = zip(numbers.tolist(), times.tolist(), strict=True)
    return sum(factorisations(n, parts) * t for n, t in pairs)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def divisors(numbers: Array) -> Array:
    """All numbers that divide one of `numbers`."""
    found: set[int] = set()
    for number in np.unique(numbers).tolist():
        found.update(_divisors(number))
    return np.array(sorted(found), np.int64)


class _Growing:
    """Meshes of some axes; `left`: the chips along the others."""

    def __init__(self, counts: Sequence[int], free: list[str], pinned: Mapping[str, int]) -> None:
        left, fixed = np.array(sorted(set(counts)), np.int64), math.prod(pinned.values())
        self.left = left[left % fixed == 0] // fixed
        self.fields = {name: np.full(len(self.left), n, np.int64) for name, n in pinned.items()}
        self.free = free
        self.fell: dict[str, int] = {}
        self.total = _ways(self.left, len(free))

    def keep(self, rule: LayoutRule, mask: Array) -> None:
        """Drop what does not keep `rule`, and count it."""
        mask = np.broadcast_to(mask, self.left.shape)
        if mask.all():
            return
        self.count(rule, _ways(self.left[~mask], len(self.free)))
        self.left = self.left[mask]
        self.fields = {name: values[mask] for name, values in self.fields.items()}

    def count(self, rule: LayoutRule, number: int) -> None:
        """Note that so many meshes fell by `rule`."""
        if number:
            self.fell[rule.reason] = self.fell.get(rule.reason, 0) + number

    def grow(self, rules: Sequence[LayoutRule]) -> None:
        """Add the next axis with every value that keeps the rules, which are of this axis alone."""
        axis, parts = self.free[0], len(self.free) - 1
        before = _ways(self.left, parts + 1)
        values = divisors(self.left)
        for number, rule in enumerate(rules):
            values = values[np.broadcast_to(rule.fits(values), values.shape)]
            if number < len(rules) - 1:
                before -= self._falls(rule, values, before, parts)
        self._expand(axis, values)
        if rules:
            self.count(rules[-1], before - _ways(self.left, parts))

    def _falls(self, rule: LayoutRule, values: Array, before: int, parts: int) -> int:
        """Count what falls where only `values` are kept."""
        kept = sum(_ways(self.left[self.left % n == 0] // n, parts) for n in values.tolist())
        self.count(rule, before - kept)
        return before - kept

    def _expand(self, axis: str, values: Array) -> None:
        self.free = self.free[1:]
        if not self.free:  # the last axis takes all that is left
            chosen = np.flatnonzero(np.isin(self.left, values))
            self._take(chosen, axis, self.left[chosen])
            return
        places = [np.flatnonzero(self.left % n == 0) for n in values.tolist()]
        repeated = np.repeat(values, [len(some) for some in places])
        self._take(np.concatenate([*places, np.array([], np.int64)]), axis, repeated)

    def _take(self, chosen: Array, axis: str, values: Array) -> None:
        self.fields = {name: array[chosen] for name, array in self.fields.items()}
        self.fields[axis], self.left = values, self.left[chosen] // values

    def settle(self, rules: Sequence[LayoutRule]) -> list[LayoutRule]:
        """Apply the rules whose fields are all known, or of which only all that is left is not."""
        waiting = []
        for rule in rules:
            unknown = {*rule.fields} - {*self.fields}
            if unknown and unknown != {*self.free}:
                waiting.append(rule)
                continue
            product = rule.product(self.fields) * (self.left if unknown else 1)
            self.keep(rule, rule.fits(product))
        return waiting


def all_meshes(
    counts: Sequence[int], rules: Sequence[LayoutRule], axes: Sequence[str], pinned: Pinned
) -> Meshes:
    """Every mesh over `axes` of each number of chips that keeps the rules.

    pinned: fields with a value. Axes not in `axes` are 1, as are micro-batch and virtual stages
    unless pinned.
    """
    fixed = {axis: pinned[axis] for axis in AXES if axis in pinned}
    free = [axis for axis in ORDER if axis in axes and axis not in fixed]
    growing = _Growing(counts, free, fixed | dict.fromkeys({*AXES} - {*axes} - {*fixed}, 1))
    for name in INNER:
        growing.fields[name] = np.full(len(growing.left), pinned.get(name, 1), np.int64)
    waiting = growing.settle(rules)
    while growing.free:
        alone = {growing.free[0], *INNER}
        growing.grow([rule for rule in waiting if {*rule.fields} <= alone])
        waiting = growing.settle([rule for rule in waiting if not {*rule.fields} <= alone])
    if not free:  # all is pinned: only its own number of chips will do
        done = growing.left == 1
        growing.fields = {name: values[done] for name, values in growing.fields.items()}
    return Meshes(growing.fields, growing.total, growing.fell)


def candidates_of(meshes: Meshes, workload: Workload, can: Abilities, pinned: Pinned) -> Candidates:
    """Each mesh with every micro-batch that divides its rows, and every interleaving.

    Arrays are float64, in which products beyond 2**63 do not wrap and counts are exact.
    """
    rows = meshes.fields["data"] * meshes.fields["fsdp"] * meshes.fields["expert"]
    tried = [pinned["micro_batch"]] if "micro_batch" in pinned else _divisors(workload.batch_rows)
    chosen = [np.flatnonzero(workload.batch_rows % (rows * size) == 0) for size in tried]
    mesh = np.concatenate([*chosen, np.array([], np.int64)])
    micro = np.repeat(np.array(tried, np.int64), [len(some) for some in chosen])
    # several virtual stages need even runs of layers and rounds of micro-batches
    most = MOST_STAGES if can.interleaved else 1
    virtuals = [pinned["virtual"]] if "virtual" in pinned else list(range(1, most + 1))
    even = even_stages(workload.architecture.depth, can.outer)
    pipe, passes = meshes.fields["pipe"][mesh], workload.batch_rows // (rows[mesh] * micro)
    found = []
    for virtual in virtuals:
        rounds = (pipe > 1) & (passes % pipe == 0) & even.fits(pipe * virtual)
        some = np.flatnonzero(rounds) if virtual > 1 else np.arange(len(mesh))
        found.append((mesh[some], micro[some], np.full(len(some), virtual, np.int64)))
    mesh, *inner = (np.concatenate(parts) for parts in zip(*found, strict=True))
    fields = {axis: meshes.fields[axis][mesh] for axis in AXES}
    fields |= dict(zip(INNER, inner, strict=True))
    arrays = {name: values.astype(np.float64) for name, values in fields.items()}
    split = pinned.get("sequence_parallel", can.sequence_parallel)
    return Candidates(Layout(**arrays, sequence_parallel=split), mesh)


def front(*columns: Any) -> Any:
    """Numbers of the entries that no other beats, in order of the first column (then the second…).

    columns: arrays of equal length, smaller being better, without NaN.
    """
    table = np.column_stack(columns).astype(np.float64)
    order = np.lexsort(tuple(table[:, n] for n in reversed(range(table.shape[1]))))
    left, kept = order, []
    while len(left):
        first = left[0]
        kept.append(first)
        better = (table[left] < table[first]).any(1)
        left = left[better]
    return np.array(kept, np.int64)
