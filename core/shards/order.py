"""Data order as arithmetic: which rows step number `step` of a run sees, from integers alone.

The order of a run is a pure function of (seed, position): no state is kept, so a resumed run, on
any number of hosts, reads no row twice and skips none. Within an epoch a source's rows follow a
permutation computed on the fly: a Feistel network over the next power of four, walked along its
cycle until it falls below the size (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains"). Sources are mixed by a fixed interleave of PERIOD slots in which each source's k-th of c
slots lies at (k + 1/2)/c, so every prefix is within half a row per source of its weights.

`OrderByLength` has batches of rows of similar length. The samples of WINDOW batches are sorted by
length and cut into batches, and the batches are permuted: only differences within a batch need
padding, and each epoch has other batches. A batch remains a pure function of (seed, position), and
every row of a window is in exactly one of its batches, so a run resumes as with any other order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np

from sabia.core.errors import UsageError

Name = TypeVar("Name", str, int)

PERIOD = 1 << 16
ROUNDS = 8
_U64 = np.uint64
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finalizer of SplitMix64 (Steele et al. 2014): a bijection on 64-bit integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def key64(*parts: int) -> int:
    """One 64-bit key of several integers; the order of the parts matters."""
    key = 0
    for part in parts:
        key = mix64((key + _GOLDEN & _MASK) ^ mix64(part & _MASK))
    return key


def _mix64_array(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> _U64(27))) * _U64(0x94D049BB133111EB)
    return value ^ (value >> _U64(31))


@dataclass(frozen=True)
class Permutation:
    """A permutation of range(size), different for each key, computed at the indices needed."""

    size: int
    key: int

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Images int64[n] of indices int64[n], all in range(size)."""
        return self._walked(index, forwards=True)

    def inverse(self, image: np.ndarray) -> np.ndarray:
        """The indices int64[n] of images int64[n]."""
        return self._walked(image, forwards=False)

    def _walked(self, start: np.ndarray, forwards: bool) -> np.ndarray:
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        bits, mask = _U64(half_bits), _U64((1 << half_bits) - 1)
        round_keys = [_U64(key64(self.key, number)) for number in range(ROUNDS)]
        value = np.asarray(start).astype(_U64)
        outside = np.ones(value.shape, bool)
        while outside.any():
            left, right = value[outside] >> bits, value[outside] & mask
            for round_key in round_keys if forwards else reversed(round_keys):
                if forwards:
                    left, right = right, left ^ (_mix64_array(right ^ round_key) & mask)
                else:
                    left, right = right ^ (_mix64_array(left ^ round_key) & mask), left
            value[outside] = (left << bits) | right
            outside = value >= _U64(self.size)
        return value.astype(np.int64)


@dataclass(frozen=True)
class Interleave:
    """Which source the n-th sample of a run comes from, and its index within that source."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.weights or min(self.weights) < 0 or sum(self.weights) <= 0:
            raise UsageError(f"weights: {self.weights} (expected 0 or more, not all 0)")

    @cached_property
    def counts(self) -> np.ndarray:
        """Slots of each source in a period int64[S] (largest remainders)."""
        share = np.array(self.weights, np.float64) / sum(self.weights) * PERIOD
        counts = np.floor(share).astype(np.int64)
        rest = np.argsort(counts - share, kind="stable")[: PERIOD - int(counts.sum())]
        counts[rest] += 1
        return counts

    @cached_property
    def _slots(self) -> tuple[np.ndarray, np.ndarray]:
        """(source, rank within the source) of each slot of a period."""
        source = np.repeat(np.arange(len(self.counts)), self.counts)
        rank = np.concatenate([np.arange(count) for count in self.counts])
        position = (rank + 0.5) / self.counts[source]
        order = np.lexsort((source, position))
        return source[order], rank[order]

    def taken(self, count: int) -> np.ndarray:
        """How many of the first `count` samples come from each source, int64[S]."""
        source = self._slots[0][: count % PERIOD]
        return count // PERIOD * self.counts + np.bincount(source, minlength=len(self.counts))

    def at(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source[n], position within that source[n]) of samples index[n]."""
        period, slot = np.divmod(np.asarray(index, np.int64), PERIOD)
        source, rank = self._slots[0][slot], self._slots[1][slot]
        return source, period * self.counts[source] + rank

    def samples(self, source: int, position: np.ndarray) -> np.ndarray:
        """The samples index[n] at position[n] within a source: the inverse of `at`."""
        period, rank = np.divmod(position, self.counts[source])
        return period * PERIOD + np.flatnonzero(self._slots[0] == source)[rank]


@dataclass(frozen=True)
class Stage:
    """From sample `start` of the run on, sources are mixed by these weights."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class DataOrder:
    """The order of rows of several sources; without weights all rows are one source.

    `sizes` are the numbers of rows; a row's number counts through the sources in turn. Without
    weights every row is read once per epoch; with weights each source has epochs of its own.
    `stages` change the weights during the run (a curriculum, or the mix of the LR decay); a source
    continues where it was, so that no row is repeated before all rows of its source were read.
    """

    sizes: tuple[int, ...]
    seed: int = 0
    weights: tuple[float, ...] | None = None
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        if not sum(self.sizes):
            raise UsageError("data: no rows (expected at least one row to read)")
        if self.weights is None:
            if self.stages:
                raise UsageError("data: stages need a mix to start from; give --mix")
            return
        starts = [stage.start for stage in self.stages]
        if starts != sorted(set(starts)) or min(starts, default=1) < 1:
            raise UsageError(f"data: stages from samples {starts} (expected ascending, above 0)")
        for weights in (self.weights, *(stage.weights for stage in self.stages)):
            if len(weights) != len(self.sizes):
                raise UsageError(f"weights: {len(weights)} for {len(self.sizes)} sources")
            empty = [i for i, n in enumerate(self.sizes) if not n and weights[i] > 0]
            if empty:
                raise UsageError(f"weights: source number {empty[0]} has a weight but no rows")

    def rows(self, start: int, count: int) -> np.ndarray:
        """Row numbers int64[count] of the samples start … start + count - 1 of the run."""
        index = np.arange(start, start + count, dtype=np.int64)
        if self.weights is None:
            return self._permuted(index, 0, sum(self.sizes))
        source, position = self._drawn(index)
        first = np.concatenate([[0], np.cumsum(self.sizes)])
        rows = np.empty(count, np.int64)
        for number in np.unique(source):
            here = source == number
            rows[here] = first[number] + self._permuted(
                position[here], int(number) + 1, self.sizes[number]
            )
        return rows

    def samples(self, rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the first `count` samples read one of the rows int64[n]: (number of the row in
        `rows`, sample) of each, int64[k], ordered by sample."""
        rows = np.asarray(rows, np.int64)
        reads = [np.zeros((2, 0), np.int64)]
        if self.weights is None:
            size = sum(self.sizes)
            for position, which in self._positions(rows, 0, size, 0, count):
                reads.append(np.stack([which, position]))
        first = np.concatenate([[0], np.cumsum(self.sizes)])
        of_row = np.searchsorted(first[1:], rows, side="right")
        for begin, end, mix, before in self._parts if self.weights is not None else ():
            taken = mix.taken(max(0, min(count, end) - begin))
            for number in np.flatnonzero(np.bincount(of_row, minlength=len(taken)) * taken):
                here = np.flatnonzero(of_row == number)
                span = int(before[number]), int(before[number] + taken[number])
                local, size = rows[here] - first[number], self.sizes[number]
                for position, which in self._positions(local, int(number) + 1, size, *span):
                    sample = begin + mix.samples(int(number), position - span[0])
                    reads.append(np.stack([here[which], sample]))
        which, sample = np.concatenate(reads, 1)
        order = np.argsort(sample, kind="stable")
        return which[order], sample[order]

    def _positions(
        self, rows: np.ndarray, stream: int, size: int, begin: int, end: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(positions from `begin` to before `end` at which rows of a source are read, which of the
        rows they are) for each epoch: the inverse of `_permuted`."""
        for epoch in range(begin // size, -(-end // size)):
            permutation = Permutation(size, key64(self.seed, stream, epoch))
            position = epoch * size + permutation.inverse(rows)
            inside = np.flatnonzero((position >= begin) & (position < end))
            yield position[inside], inside

    def within(self, repeats: float, count: int) -> DataOrder:
        """The order whose first `count` samples read no source more than `repeats` times.

        A source without enough rows gives each stage a proportional share of its rows; the rest of
        a stage comes from its other sources, by their weights. Raises UsageError if they have too
        few rows.
        """
        if self.weights is None:
            if count > repeats * sum(self.sizes):
                raise UsageError(_too_few(repeats, int(repeats * sum(self.sizes)), count))
            return self
        mixes = [self.weights, *(stage.weights for stage in self.stages)]
        edges = [0, *(min(stage.start, count) for stage in self.stages), count]
        rows = [end - begin for begin, end in pairwise(edges)]
        capacity = [int(repeats * size) for size in self.sizes]
        taken = _within(mixes, rows, capacity)
        if sum(map(sum, taken)) < count:
            raise UsageError(_too_few(repeats, sum(map(sum, taken)), count))
        starts = [
            tuple(map(float, split)) if sum(split) else mix
            for split, mix in zip(taken, mixes, strict=True)
        ]
        stages = tuple(map(Stage, (stage.start for stage in self.stages), starts[1:]))
        return DataOrder(self.sizes, self.seed, starts[0], stages)

    def epochs(self, count: int) -> list[float]:
        """How often each source has been read after `count` samples."""
        if self.weights is None:
            return [count / sum(self.sizes)] * len(self.sizes)
        taken = np.zeros(len(self.sizes), np.int64)
        for begin, end, mix, _ in self._parts:
            taken += mix.taken(max(0, min(count, end) - begin))
        return [float(n / size) if size else 0.0 for n, size in zip(taken, self.sizes, strict=True)]

    @cached_property
    def _parts(self) -> tuple[tuple[int, int, Interleave, np.ndarray], ...]:
        """Each stage's (first sample, end, interleave, samples of each source before it)."""
        edges = [0, *(stage.start for stage in self.stages), 1 << 62]
        mixes = [self.weights or (), *(stage.weights for stage in self.stages)]
        before, parts = np.zeros(len(self.sizes), np.int64), []
        for begin, end, weights in zip(edges[:-1], edges[1:], mixes, strict=True):
            mix = Interleave(weights)
            parts.append((begin, end, mix, before))
            if end < 1 << 62:
                before = before + mix.taken(end - begin)
        return tuple(parts)

    def _drawn(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source[n], index within that source[n]) of samples index[n]."""
        source, position = np.empty_like(index), np.empty_like(index)
        for begin, end, mix, before in self._parts:
            here = (index >= begin) & (index < end)
            if here.any():
                source[here], rank = mix.at(index[here] - begin)
                position[here] = rank + before[source[here]]
        return source, position

    def _permuted(self, position: np.ndarray, stream: int, size: int) -> np.ndarray:
        epoch, within = np.divmod(position, size)
        rows = np.empty(len(position), np.int64)
        for number in np.unique(epoch):
            here = epoch == number
            rows[here] = Permutation(size, key64(self.seed, stream, int(number)))(within[here])
        return rows


def _within(
    mixes: Sequence[Sequence[float]], rows: Sequence[int], capacity: Sequence[int]
) -> list[list[int]]:
    """Rows of each source in each stage of some rows, within the capacity of each source."""
    named = [{n: w for n, w in enumerate(mix) if w > 0} for mix in mixes]
    plan = [apportion(mix, count) for mix, count in zip(named, rows, strict=True)]
    wanted = [sum(split.get(n, 0) for split in plan) for n in range(len(capacity))]
    taken, left = np.zeros((len(rows), len(capacity)), np.int64), np.array(capacity)
    for stage, split in enumerate(plan):  # scarce sources are shared between the stages
        fair = {
            n: capacity[n] * k // wanted[n] if wanted[n] > capacity[n] else k
            for n, k in split.items()
        }
        taken[stage, list(fair)] = list(fair.values())
    left -= taken.sum(0)
    for stage, mix in enumerate(named):  # the other sources fill what a stage lacks
        more = fill(mix, dict(enumerate(left.tolist())), rows[stage] - int(taken[stage].sum()))
        taken[stage, list(more)] += list(more.values())
        left[list(more)] -= list(more.values())
    return taken.tolist()


def _too_few(repeats: float, rows: int, wanted: int) -> str:
    return (
        f"--max-repeat: {repeats:g} passes over the sources give {rows:,} rows of this mix "
        f"(expected {wanted:,}: fewer steps, more passes or other sources)"
    )


def parse_weights(text: str, names: Sequence[str], flag: str = "--mix") -> tuple[float, ...] | None:
    """'web=3,books=1' → a weight for each of the names (0 where not named); '' → None.

    Raises UsageError, which names the option that gave the text.
    """
    if not text:
        return None
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        try:
            given[name.strip()] = float(value)
        except ValueError:
            raise UsageError(f"{flag}: {part!r} (expected SOURCE=WEIGHT)") from None
    unknown = [name for name in given if name not in names]
    if unknown:
        known = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
        raise UsageError(f"{flag}: no rows of source {unknown[0]!r} (expected some of {known})")
    return tuple(given.get(name, 0.0) for name in names)


def apportion(weights: Mapping[Name, float], budget: int) -> dict[Name, int]:
    """Whole numbers that sum to the budget, by largest remainder; ties in order of the names."""
    total = sum(weights.values())
    exact = {name: budget * weight / total for name, weight in weights.items()}
    whole = {name: int(value) for name, value in exact.items()}
    rest = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
    for name in rest[: budget - sum(whole.values())]:
        whole[name] += 1
    return whole


def fill(weights: Mapping[Name, float], limits: Mapping[Name, int], budget: int) -> dict[Name, int]:
    """Split a budget by weight; the excess over a limit is split over the others, by their weights.

    The sum is the budget, or less if all limits are reached.
    """
    taken: dict[Name, int] = {}
    free = dict(weights)
    while free:
        split = apportion(free, budget - sum(taken.values()))
        over = [name for name in free if split[name] > limits[name]]
        if not over:
            return taken | split
        for name in over:
            taken[name] = limits[name]
            del free[name]
    return taken


WINDOW = 64  # batches
_STREAM = 0x6C656E  # tells this permutation's keys from those of the sources


@dataclass(frozen=True)
class OrderByLength(DataOrder):
    """`lengths[n]` of the rows by number; `batch` rows a step; `total` samples in the run."""

    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0), compare=False)
    batch: int = 1
    total: int = 0

    def rows(self, start: int, count: int) -> np.ndarray:
        """See DataOrder.rows."""
        first, last = start // self.batch, -(-(start + count) // self.batch)
        indices = np.concatenate([self._batch(number) for number in range(first, last)])
        return indices[start - first * self.batch :][:count]

    def _batch(self, number: int) -> np.ndarray:
        window, index = divmod(number, WINDOW)
        first = window * WINDOW * self.batch
        size = min(WINDOW * self.batch, max(self.total - first, (index + 1) * self.batch))
        rows = super().rows(first, size)
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        mixed = Permutation(size // self.batch, key64(self.seed, _STREAM, window))
        chosen = int(mixed(np.array([index]))[0])
        return rows[chosen * self.batch : (chosen + 1) * self.batch]


def by_length(order: DataOrder, lengths: np.ndarray, batch: int, steps: int) -> OrderByLength:
    """The order of a run of `steps` batches, arranged so."""
    given = {f.name: getattr(order, f.name) for f in fields(DataOrder)}
    return OrderByLength(**given, lengths=lengths, batch=batch, total=steps * batch)
