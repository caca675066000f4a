"""Prefixes: what several token sequences begin with is run once, in bounded memory.

`prefix_tree` finds the shared prefixes. They are used depth first, so that at any time only the
prefixes of one path of the tree have a cache: `PrefixCaches` keeps these and drops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sabia.core.ops.base import Ops
from sabia.core.ops.kv_cache import KVCache

CPU_CACHE_BYTES = 1 << 26


PREFILL_POSITIONS = 2_048  # on CPU, where more at once are not faster


def on_cpu(params: Mapping[str, Any]) -> bool:
    """Whether a model's parameters are in the host's memory."""
    device = getattr(params["embed"], "device", None)
    return getattr(device, "type", getattr(device, "platform", "cpu")) == "cpu"


def cache_limit(params: Mapping[str, Any], accelerator_bytes: int = 1 << 30) -> int:
    """Bytes for the caches of an evaluation: on CPU as many as the weights have, or 64 MiB."""
    if not on_cpu(params):
        return accelerator_bytes
    return max(CPU_CACHE_BYTES, sum(int(x.nbytes) for x in params.values()))


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens that sequences begin with. parent: the prefix that it continues; members: numbers of
    the sequences that begin with it and with no longer one."""

    ids: tuple[int, ...] = ()
    parent: Prefix | None = None
    members: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)


def prefix_tree(
    sequences: Sequence[Sequence[int]],
    least_saved: int,
    most_held: int,
    step: int = 1,
    extra: int = 0,
) -> list[Prefix]:
    """The shared prefixes of token sequences, depth first; the first one is empty.

    A prefix is used if running it once saves `least_saved` tokens or more and if it and those that
    it continues have at most `most_held` tokens together, where each counts `extra` tokens more
    than it has. Lengths are multiples of `step`. Every sequence is a member of exactly one prefix.
    """
    arrays = [np.asarray(ids, ">u4") for ids in sequences]
    order = sorted(range(len(arrays)), key=lambda number: arrays[number].tobytes())
    common = np.array([common_length(arrays[a], arrays[b]) for a, b in pairwise(order)], np.int64)
    made = [Prefix()]
    todo = [(0, len(order), made[0], 0)] if order else []
    while todo:
        first, end, below, held = todo.pop()
        if end - first == 1:
            below.members.append(order[first])
            continue
        shared = common[first : end - 1]
        shortest = int(shared.min())
        length = shortest // step * step
        saved = (end - first - 1) * (length - len(below))
        if length > len(below) and saved >= least_saved and held + length + extra <= most_held:
            below = Prefix(tuple(sequences[order[first]][:length]), below)
            held += length + extra
            made.append(below)
        cuts = [first, *(first + 1 + np.flatnonzero(shared == shortest)).tolist(), end]
        todo += reversed([(a, b, below, held) for a, b in pairwise(cuts)])
    return made


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading elements that are equal."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


class PrefixCaches:
    """The caches, of one row each, of a prefix and of those that it continues.

    run: (ids[1, T], positions[1, T], a cache of one row) → the cache after these tokens. create: an
    empty cache of so many slots.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray, np.ndarray, KVCache], KVCache],
        create: Callable[[int], KVCache],
        ops: Ops,
    ) -> None:
        self._run, self._create, self._ops = run, create, ops
        self._held: list[tuple[Prefix, KVCache]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the caches that are held."""
        return sum(cache.nbytes for _, cache in self._held)

    def of(self, prefix: Prefix) -> KVCache:
        """The cache of a prefix that is not empty; it is not to be written to.

        Caches of prefixes that this one does not continue are dropped.
        """
        path = [prefix]
        while path[0].parent is not None and len(path[0].parent):
            path.insert(0, path[0].parent)
        kept = 0
        while kept < min(len(path), len(self._held)) and self._held[kept][0] is path[kept]:
            kept += 1
        del self._held[kept:]
        for one in path[kept:]:
            start = 0
            if self._held:
                before, cache = self._held[-1]
                start, cache = len(before), cache.repeated(1, len(one), self._ops)
            else:
                cache = self._create(len(one))
            positions = np.arange(start, len(one))[None]
            self._held.append((one, self._run(np.array([one.ids[start:]]), positions, cache)))
        return self._held[-1][1]
