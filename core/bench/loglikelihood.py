"""Log-likelihoods of given continuations and of whole documents, on either backend.

What many questions begin with (fixed examples, a description) is run once; see
core/generate/prefixes.py. The options of a question share all tokens up to where they first differ:
in torch these are run once too, and then the remaining tokens of one option after another, in the
same cache. JAX scores the options apart, padded to a few shapes so that few programs are compiled.
Over a mesh of devices all rows are scored whole, without caches. All caches together take
`cache_bytes` at most, unless one row needs more. Logits are computed only at the positions that
predict a scored token. Tokens of a continuation are tokens(context + continuation) after the first
len(tokens(context)); rows too long for the model are truncated on the left; documents are scored in
windows that overlap by one token, as in lm-evaluation-harness.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Protocol

import numpy as np

from sabia.core import stop
from sabia.core.errors import BadData, Interrupted
from sabia.core.generate.prefixes import Prefix, PrefixCaches, cache_limit, prefix_tree
from sabia.core.model import forward
from sabia.core.model.storage.safetensors_file import release_pages
from sabia.core.notes import progress
from sabia.core.ops.base import Ops, Params
from sabia.core.ops.kv_cache import KVCache
from sabia.core.ops.product import Array
from sabia.core.parallel.build_ops import ops_as_served
from sabia.core.parallel.split_interface import SplitModel
from sabia.core.spec import ModelSpec
from sabia.core.spec.model import check_predicts
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.kernels.runtime.torch_support import keep_few_products

BATCH_TOKENS = 4_096
PREFIX_SHARE = 1 / 4  # of the bytes of caches
LEAST_SAVED = {"torch": 256, "jax": 8_192}  # tokens, for which a prefix is worth a program
POSITIONS = 64  # whose logits are held at once
_IDS: dict[int, int] = {}  # one integer object for a token id, in all rows: a third of the memory
LENGTH_STEP = 64  # JAX: row lengths are padded to this times a power of two


@dataclass(frozen=True)
class Row:
    """Token ids of which the last `scored` are predicted and scored."""

    ids: tuple[int, ...]
    scored: int

    def fitting(self, context: int) -> "Row":
        """The row truncated on the left to the context of a model of `context` positions."""
        kept = self.ids[-(context + 1) :]
        return Row(kept, min(self.scored, len(kept) - 1))


Unit = tuple[Row, ...]  # rows that are scored together: options after what they share, or one row
# of a row: its log-likelihood (nats), or this and whether (1 or 0) all its tokens are greedy ones
Value = float | list[float]


class Kept(Protocol):
    """Log-likelihoods that are known, and a place for new ones."""

    def loglikelihoods(self, unit: Unit, greedy: bool) -> list[Value] | None:
        """Those of a unit's rows, if they are known."""

    def keep_loglikelihoods(self, values: Sequence[tuple[Unit, list[Value]]], greedy: bool) -> None:
        """Keep those of the units of a batch."""


def units(rows: Sequence[Row], shares: bool) -> list[Unit]:
    """What is scored of a question, by a scorer that `shares` what rows begin with, or not."""
    if shares and len(rows) > 1 and shared_prefix(rows):
        return [tuple(rows)]
    return [(row,) for row in rows]


def shares_options(spec: ModelSpec, backend: str) -> bool:
    """Whether tokens that the options of a question share are run once."""
    return backend == "torch" and has_fixed_rotations(spec)


def has_fixed_rotations(spec: ModelSpec) -> bool:
    """Whether rotations do not depend on the length of the text, so that a cache can be used."""
    limits = [rope.original_length for rope in spec.ropes if rope.by_length]
    return spec.max_positions <= min(limits, default=spec.max_positions)


def known_units(
    questions: Iterable[Sequence[Row]], shares: bool, kept: Kept | None, greedy: bool = False
) -> dict[Unit, list[Value]]:
    """The different units of all questions with their log-likelihoods, which are empty where they
    are not kept."""
    every = dict.fromkeys(unit for rows in questions for unit in units(rows, shares))
    return {unit: (kept.loglikelihoods(unit, greedy) if kept else None) or [] for unit in every}


def encode_options(
    tokenizer: Tokenizer, context: str, continuations: Sequence[str], special: bool
) -> tuple[Row, ...]:
    """A row for each continuation of `context`.

    White space at the end of the context is moved to the continuations. `special`: the context is a
    rendered chat, which has its own special tokens; otherwise the tokenizer adds its BOS.
    """
    if not special and (bare := context.rstrip()) != context:
        space, context = context[len(bare) :], bare
        continuations = [space + text for text in continuations]
    before = tokenizer.encode(context, bos=not special) if context else []
    first, start = [] if before else [prefix_token(tokenizer)], len(before) or 1
    rows = []
    for text in continuations:
        whole = first + tokenizer.encode(context + text, bos=not special and bool(context))
        if len(whole) <= start:
            raise BadData(f"continuation {text!r:.40} adds no token to its context")
        ids = tuple(_IDS.setdefault(token, token) for token in whole)
        rows.append(Row(ids, len(ids) - start))
    return tuple(rows)


def prefix_token(tokenizer: Tokenizer) -> int:
    """The token before the first token of a text: BOS, else end of document."""
    for token in (tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return token
    raise BadData("the tokenizer has neither BOS nor EOS to start an unconditional text with")


def document_rows(ids: Sequence[int], prefix: int, context: int) -> list[Row]:
    """Windows that score each token of a document once, seeing at most `context` tokens each."""
    whole = (prefix, *ids)
    ends = [*range(context, len(ids), context), len(ids)]
    return [
        Row(whole[max(end - context, 0) : end + 1], end - start)
        for start, end in pairwise([0, *ends])
    ]


@dataclass(frozen=True)
class Batch:
    """Units, by number, that are scored together; all continue `prefix`. The largest batch of the
    prefix has `rows` units, and its longest row `slots` tokens."""

    units: list[int]
    prefix: Prefix
    rows: int
    slots: int


class Scorer:
    """Scores rows with one model. `params` are NumPy arrays by spec name."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Any],
        backend: str = "torch",
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
        cache_bytes: int | None = None,
        split: SplitModel | None = None,
    ) -> None:
        """`batch_tokens` are run together, fewer where their caches would need more than
        `cache_bytes` (None: see cache_limit). split: over the devices of a mesh; its processes make
        the same calls."""
        check_predicts(spec)
        keep_few_products()
        self.spec, self.backend, self.batch_tokens = spec, backend, batch_tokens
        self.split = split
        self.ops = ops_as_served(backend, spec, ops=split.ops if split else None)
        self.params: dict[str, Any] = {}
        for name, array in params.items():
            if split:
                self.params[name] = split.to_mesh(name, array, dtype)
            else:
                self.params |= self.ops.to_device({name: array}, dtype)
            if isinstance(array, np.ndarray):
                release_pages(array)  # of the file: else all weights are in memory twice
        self.dtype = dtype
        self.cache_bytes = cache_limit(self.params) if cache_bytes is None else cache_bytes
        self._batch_bytes = int(self.cache_bytes * (1 - PREFIX_SHARE))
        self._prefixes = PrefixCaches(
            self._run_prefix, lambda slots: self._cache(1, slots), self.ops
        )
        self._space: tuple[Prefix, KVCache] | None = None  # rows of the last one's batches
        self._extend: Callable[..., KVCache] | None = None  # compiled
        self._flat: dict[bool, Callable[..., Any]] = {}  # compiled: without and with greedy ones

    @property
    def context(self) -> int:
        """Maximum number of positions of the model."""
        return self.spec.max_positions

    def score(
        self, questions: Sequence[Sequence[Row]], kept: Kept | None = None, greedy: bool = False
    ) -> list[np.ndarray]:
        """For each question the log-likelihoods[options] (nats) of its rows' scored tokens; if
        `greedy`, [options, 2] with 1 for a row whose every scored token is the likeliest, else 0.

        What is `kept` is not computed again; the batches are the same with and without it, so that
        an interrupted run gives the same numbers. Raises BadData for token ids that the model does
        not have.
        """
        fitted = [[row.fitting(self.context) for row in rows] for rows in questions]
        largest = max((max(row.ids) for rows in fitted for row in rows), default=0)
        if largest >= (size := self.spec.vocab_size):
            described = f"token id {largest} of a vocabulary of {size}"
            raise BadData(f"{described} (is this the model's tokenizer?)")
        values = known_units(fitted, self.shares, kept, greedy)
        every = list(values)
        if self.split:  # the same units are left for all processes that score them
            values = dict(zip(every, self.split.agreed(list(values.values())), strict=True))
            kept = kept if self.split.leads else None
        with progress(sum(map(len, every)), "score", "texts") as bar:
            for batch in self._batches(every):
                self.check_stop()
                new = [every[number] for number in batch.units if not values[every[number]]]
                if new:
                    score = self._score_shared if len(new[0]) > 1 else self._score_rows
                    made = list(zip(new, score(new, batch, greedy), strict=True))
                    values.update(made)
                    if kept is not None:
                        kept.keep_loglikelihoods(made, greedy)
                bar.advance(sum(len(every[number]) for number in batch.units))
        self._space = None
        of_units = ([values[unit] for unit in units(rows, self.shares)] for rows in fitted)
        return [np.array([value for part in parts for value in part]) for parts in of_units]

    def check_stop(self) -> None:
        """Raise Interrupted where this process was asked to stop, or the leading one of those that
        make the same calls: all stop before the same batch."""
        if self.split is None:
            stop.check()
        elif self.split.agreed(stop.requested()):
            stop.check()
            raise Interrupted("stopped with the first process of the mesh; run again to resume")

    @property
    def shares(self) -> bool:
        """Whether tokens that the options of a question share are run once."""
        return shares_options(self.spec, self.backend) and not self.split

    @property
    def _caches(self) -> bool:
        return has_fixed_rotations(self.spec) and not self.split

    def _batches(self, every: Sequence[Unit]) -> Iterator[Batch]:
        """The units in batches of similar length (little padding), prefix by prefix; the longest
        first, so that arrays of later batches fit where those of former ones were."""
        common = [shared_prefix(unit) for unit in every]
        most, position, states = 0, 1, 0
        if self._caches:
            one, two = (self._cache(1, slots).nbytes for slots in (1, 2))
            # bytes of a token, and of a row's states before and after a call
            position, states = max(two - one, 1), 2 * (2 * one - two)
            most = int(self.cache_bytes * PREFIX_SHARE) // position
        step = LENGTH_STEP if self.backend == "jax" else 1
        # of each unit one token or more is left to run
        contexts = [unit[0].ids[: n - 1] for unit, n in zip(every, common, strict=True)]
        least = LEAST_SAVED[self.backend]
        for prefix in prefix_tree(contexts, least, most, step, -(-states // position)):
            start = len(prefix)
            longest = max((len(row.ids) for n in prefix.members for row in every[n]), default=0)
            made = list[list[int]]()
            for several in (True, False):
                members = [n for n in prefix.members if (len(every[n]) > 1) is several]
                lengths = {n: common[n] if several else len(every[n][0].ids) for n in members}
                rows = {n: max(len(row.ids) for row in every[n]) for n in members}
                # without a prefix, rows are scored whole without a cache
                slots = dict.fromkeys(rows, longest) if start else rows if several else {}
                sizes = {n: states + slots[n] * position for n in slots}
                made += self._grouped({n: lengths[n] - start for n in members}, sizes)
            rows_at_once = max(map(len, made), default=0)
            yield from (Batch(numbers, prefix, rows_at_once, longest) for numbers in made[::-1])

    def _grouped(self, tokens: Mapping[int, int], sizes: Mapping[int, int]) -> Iterator[list[int]]:
        """Units by number in batches, by the tokens to run and the bytes of cache of each."""

        def too_large(batch: Sequence[int]) -> bool:
            size = len(batch) * max(sizes.get(number, 0) for number in batch)
            return len(batch) * tokens[batch[-1]] > self.batch_tokens or size > self._batch_bytes

        yield from grouped(sorted(tokens, key=tokens.__getitem__), too_large)

    def _begun(self, batch: Batch, rows: int, slots: int) -> KVCache:
        """A cache of so many rows, that begin with the prefix of a batch."""
        if not len(batch.prefix):
            return self._cache(rows, slots)
        if self._space is None or self._space[0] is not batch.prefix:
            self._space = None  # released before the next one is created
            begun = self._prefixes.of(batch.prefix)
            self._space = batch.prefix, begun.repeated(batch.rows, batch.slots, self.ops)
        return self._space[1].first(rows)

    def _run_prefix(self, ids: np.ndarray, positions: np.ndarray, cache: KVCache) -> KVCache:
        if self.backend == "torch":
            self._hidden(ids, positions, cache)
            return cache
        if self._extend is None:
            self._extend = _compiled_prefix(self.spec, self.ops)
        return self._extend(self.params, ids, positions, cache.upto(cache.slots))

    def _score_shared(self, asked: Sequence[Unit], batch: Batch, greedy: bool) -> list[list[Value]]:
        """Run what the options of each question share once, then the rest of each option."""
        start, every = len(batch.prefix), sorted(range(len(asked)), key=lambda n: -len(asked[n]))
        ordered = [asked[number] for number in every]  # those of most options first
        ends = np.array([shared_prefix(unit) for unit in ordered])
        longest = max(len(row.ids) for unit in ordered for row in unit)
        cache = self._begun(batch, len(ordered), longest)
        width = int(ends.max()) - start
        cache.lengths = ends - start
        ids = padded([u[0].ids[start:end] for u, end in zip(ordered, ends, strict=True)], width)
        positions = np.tile(np.arange(start, start + width), (len(ids), 1))
        hidden = self._hidden(ids, positions, cache.upto(start + width))
        last = hidden[np.arange(len(ids)), ends - start - 1][:, None]
        made: list[list[Value]] = [[] for _ in asked]
        for option in range(len(ordered[0])):
            count = sum(len(unit) > option for unit in ordered)
            rows = [unit[option] for unit in ordered[:count]]
            tails = [row.ids[end:] for row, end in zip(rows, ends[:count], strict=True)]
            width, states = max(map(len, tails)) - 1, [last[:count]]
            if width:
                inputs = padded([tail[:-1] for tail in tails], width)
                # the last slot is of padding only
                after = np.minimum(ends[:count, None] + np.arange(width), longest - 1)
                # slots after those of the shared tokens are written anew for each option
                view = cache.first(count).upto(int(after.max()) + 1)
                states.append(self._hidden(inputs, after, view))
            targets = np.full((count, width + 1), -1)
            for number, (row, tail) in enumerate(zip(rows, tails, strict=True)):
                targets[number, len(tail) - row.scored : len(tail)] = tail[len(tail) - row.scored :]
            values = _values(*self._losses(self.ops.concat(states, 1), targets, greedy))
            for number, value in zip(every[:count], values, strict=True):
                made[number].append(value)
        return made

    def _score_rows(self, asked: Sequence[Unit], batch: Batch, greedy: bool) -> list[list[Value]]:
        """Log-likelihoods of rows, without a cache of what is not in the prefix."""
        rows, start = [row for (row,) in asked], len(batch.prefix)
        length, count = max(len(row.ids) for row in rows) - 1 - start, len(rows)
        scored = max(row.scored for row in rows)
        if self.backend == "jax":
            length = LENGTH_STEP * _power(-(-length // LENGTH_STEP))
            count, scored = _power(count), _power(scored)
            if self.split:
                count = -(-count // self.split.rows) * self.split.rows
        ids, index = (np.zeros((count, size), np.int32) for size in (length, scored))
        targets = np.full((count, scored), -1, np.int32)
        for number, row in enumerate(rows):
            last = len(row.ids) - 1 - start
            ids[number, :last] = row.ids[start:-1]
            index[number, : row.scored] = np.arange(last - row.scored, last)
            targets[number, : row.scored] = row.ids[len(row.ids) - row.scored :]
        # so that rotations that depend on the length of a text do not count its padding
        apart = None
        if not has_fixed_rotations(self.spec):
            apart = (np.arange(length) <= index.max(1, keepdims=True)) + 0
        if self.backend == "jax":
            if greedy not in self._flat:
                self._flat[greedy] = _compiled(self.spec, self.ops, greedy, self.split)
            begun = self._prefixes.of(batch.prefix) if start else None
            losses, hits = self._flat[greedy](self.params, begun, ids, index, targets, apart)
            return [[v] for v in _values(np.asarray(losses), hits, len(rows))]
        cache = positions = None
        if start:
            cache = self._begun(batch, count, start + length).upto(start + length)
            positions = np.tile(np.arange(start, start + length), (count, 1))
        hidden = self._hidden(ids, positions, cache, apart)[np.arange(count)[:, None], index]
        return [[v] for v in _values(*self._losses(hidden, targets, greedy))]

    def _cache(self, rows: int, slots: int) -> KVCache:
        like = self.params["embed"]
        return KVCache.create(self.spec, rows, slots, self.ops, self.dtype, like)

    def _hidden(
        self,
        ids: np.ndarray,
        positions: np.ndarray | None,
        cache: KVCache | None,
        segments: np.ndarray | None = None,
    ) -> Any:
        if self.split is None:
            stop.check()
        given: Any = {"positions": positions, "cache": cache, "segments": segments}
        return forward.hidden(self.spec, self.params, ids, self.ops, **given)

    def _losses(
        self, hidden: Array, targets: np.ndarray, greedy: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """-log p of targets[B, S] at hidden[B, S, D], 0 where a target is negative; and, if asked,
        whether they are the likeliest tokens, true there."""
        used = np.nonzero(targets >= 0)
        picked, wanted = hidden[used][None], targets[used][None]
        losses, _ = forward.token_losses(self.spec, self.params, picked, wanted, self.ops)
        full, hits = np.zeros(targets.shape), np.full(targets.shape, True)
        full[used] = self.ops.to_numpy({"losses": losses})["losses"][0]
        if greedy:
            best = np.concatenate([logits.argmax(-1) for logits in self.logits(picked)])
            hits[used] = best == wanted[0]
        return full, hits if greedy else None

    def logits(self, hidden: Array) -> Iterator[np.ndarray]:
        """The logits at hidden[1, N, D], of at most POSITIONS positions at once."""
        for at in range(0, hidden.shape[1], POSITIONS):
            part = hidden[:, at : at + POSITIONS]
            scores = forward.logits(self.spec, self.params, part, self.ops)
            whole = self.split.whole_vocabulary(scores) if self.split else scores
            yield self.ops.to_numpy({"logits": whole})["logits"][0]


def _values(losses: np.ndarray, hits: Array, count: int | None = None) -> list[Value]:
    """The values of the first `count` rows of losses[B, S] and hits[B, S]."""
    nats = -losses.sum(1, dtype=np.float64)[:count]
    if hits is None:
        return nats.tolist()
    return np.stack([nats, np.asarray(hits)[:count].all(1)], 1).tolist()


def grouped(
    numbers: Iterable[int], too_large: Callable[[Sequence[int]], bool]
) -> Iterator[list[int]]:
    """The numbers in order, in the largest batches that are not too large, of one at least."""
    batch: list[int] = []
    for number in numbers:
        if batch and too_large([*batch, number]):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def shared_prefix(rows: Sequence[Row]) -> int:
    """Number of leading tokens that all rows share, before the first scored one of each."""
    most = min(len(row.ids) - row.scored for row in rows)
    columns = zip(*(row.ids[:most] for row in rows), strict=True)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """ids[B, width], padded with 0 on the right, which no earlier position attends to."""
    ids = np.zeros((len(rows), width), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return ids


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _compiled(
    spec: ModelSpec, ops: Ops, greedy: bool, split: SplitModel | None
) -> Callable[..., Any]:
    """A jitted (params, begun, ids[B, T], index[B, S], targets[B, S], segments[B, T]) →
    losses[B, S], and if `greedy` whether the targets are the likeliest tokens, true where there is
    none. begun: the cache of the prefix that ids continue, of one row, or None; segments: None, or
    the texts of a row."""
    import jax

    def scored(
        params: Params, begun: Array, ids: Array, index: Array, targets: Array, segments: Array
    ) -> Any:
        rows, length = ids.shape
        cache = positions = None
        if begun is not None:
            start = begun.reads
            cache = begun.repeated(rows, start + length, ops).upto(start + length)
            positions = np.tile(np.arange(start, start + length), (rows, 1))
        given: Any = {"positions": positions, "cache": cache, "segments": segments}
        states = forward.hidden(spec, params, ids, ops, **given)
        picked = states[np.arange(ids.shape[0])[:, None], index]
        losses = forward.token_losses(spec, params, picked, targets, ops)[0]
        if not greedy:
            return losses, None
        best = forward.logits(spec, params, picked, ops).argmax(-1)
        return losses, (best == targets) | (targets < 0)

    return split.compiled(scored) if split else jax.jit(scored)


def _compiled_prefix(spec: ModelSpec, ops: Ops) -> Callable[..., KVCache]:
    """A jitted (params, ids[1, T], positions[1, T], cache) → the cache after these tokens."""
    import jax

    def run(params: Params, ids: Array, positions: Array, cache: KVCache) -> KVCache:
        forward.hidden(spec, params, ids, ops, positions=positions, cache=cache)
        return cache

    return jax.jit(run)
