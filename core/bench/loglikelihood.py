"""Log-likelihoods of given continuations and of whole documents, on either backend.

The options of a question share all tokens up to where they first differ. In torch that prefix is
run once, its keys and values are copied to one cache row per option, and only the remaining tokens
are run for each option. JAX scores whole rows, padded to a few shapes so that few programs are
compiled. Logits are computed only at the positions that predict a scored token. Tokens of a
continuation are tokens(context + continuation) after the first len(tokens(context)); rows too long
for the model are truncated on the left; documents are scored in windows that overlap by one token,
as in lm-evaluation-harness.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, Protocol

import numpy as np

from sabia.core import stop
from sabia.core.errors import BadData
from sabia.core.model import forward
from sabia.core.parallel.build_ops import ops_as_served
from sabia.core.progress import progress
from sabia.core.spec import ModelSpec
from sabia.core.spec.model import check_predicts

BATCH_TOKENS = 4_096
CACHE_BYTES = 1 << 30
GREEDY_ROWS = 64  # positions whose logits are held at once
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


def known_units(
    questions: Iterable[Sequence[Row]], shares: bool, kept: Kept | None, greedy: bool = False
) -> dict[Unit, list[Value]]:
    """The different units of all questions with their log-likelihoods, which are empty where they
    are not kept."""
    every = dict.fromkeys(unit for rows in questions for unit in units(rows, shares))
    return {unit: (kept.loglikelihoods(unit, greedy) if kept else None) or [] for unit in every}


def encode_options(
    tokenizer: Any, context: str, continuations: Sequence[str], special: bool
) -> tuple[Row, ...]:
    """A row for each continuation of `context`.

    White space at the end of the context is moved to the continuations. `special`: the context is a
    rendered chat, which has its own special tokens; otherwise the tokenizer adds its BOS.
    """
    if not special and (bare := context.rstrip()) != context:
        tail, context = context[len(bare) :], bare
        continuations = [tail + text for text in continuations]
    before = tokenizer.encode(context, bos=not special) if context else []
    first = before or [prefix_token(tokenizer)]
    rows = []
    for text in continuations:
        whole = tokenizer.encode(context + text, bos=not special and bool(context))
        tail = whole[len(before) :] if before else whole
        if not tail:
            raise BadData(f"continuation {text!r:.40} adds no token to its context")
        rows.append(Row((*(whole[: len(before)] if before else first), *tail), len(tail)))
    return tuple(rows)


def prefix_token(tokenizer: Any) -> int:
    """The token before the first token of a text: BOS, else end of document."""
    for token in (tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return token
    raise BadData("the tokenizer has neither BOS nor EOS to start an unconditional text with")


def document_rows(ids: Sequence[int], prefix: int, context: int) -> list[Row]:
    """Windows that score each token of a document once, seeing at most `context` tokens each."""
    whole = (prefix, *ids)
    if len(ids) <= context:
        return [Row(whole, len(ids))]
    rows, done = [Row(whole[: context + 1], context)], context
    while done < len(ids):
        step = min(context, len(ids) - done)
        end = done + step
        rows.append(Row(whole[end - context : end + 1], step))
        done = end
    return rows


class Scorer:
    """Scores rows with one model. `params` are NumPy arrays by spec name."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Any],
        backend: str = "torch",
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        check_predicts(spec)
        self.spec, self.backend, self.batch_tokens = spec, backend, batch_tokens
        self.ops = ops_as_served(backend, spec)
        self.params = self.ops.to_device(params, dtype)
        self.dtype = dtype
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
        if largest >= self.spec.vocab_size:
            raise BadData(
                f"token id {largest} of a vocabulary of {self.spec.vocab_size} "
                "(is this the model's tokenizer?)"
            )
        values = known_units(fitted, self.shares, kept, greedy)
        every = list(values)
        with progress(sum(map(len, every)), "score", "texts") as bar:
            for batch in chain(self._batches(every), self._cells(every)):
                stop.check()
                new = [every[number] for number in batch if not values[every[number]]]
                if new:
                    score = self._score_shared if len(new[0]) > 1 else self._score_rows
                    made = list(zip(new, score(new, greedy), strict=True))
                    values.update(made)
                    if kept is not None:
                        kept.keep_loglikelihoods(made, greedy)
                bar.advance(sum(len(every[number]) for number in batch))
        of_units = ([values[unit] for unit in units(rows, self.shares)] for rows in fitted)
        return [np.array([value for part in parts for value in part]) for parts in of_units]

    @property
    def shares(self) -> bool:
        """Whether tokens that the options of a question share are run once."""
        return self.backend == "torch"

    def _batches(self, every: Sequence[Unit]) -> Iterator[list[int]]:
        """The units of several rows, by number, in batches of similar length, so that padding is
        small."""
        prefix = {n: shared_prefix(unit) for n, unit in enumerate(every) if len(unit) > 1}
        if not prefix:
            return
        one, two = (self._cache(1, slots).nbytes for slots in (1, 2))
        position, states = two - one, 2 * one - two  # bytes of a token, and of a row's states

        def too_large(batch: Sequence[int]) -> bool:
            widest = max(prefix[number] for number in batch)
            options = sum(len(every[number]) for number in batch)
            tail = max(len(row.ids) for number in batch for row in every[number])
            too_many = len(batch) * widest > self.batch_tokens
            return too_many or options * (states + tail * position) > CACHE_BYTES

        yield from grouped(sorted(prefix, key=prefix.__getitem__), too_large)

    def _score_shared(self, batch: Sequence[Unit], greedy: bool) -> list[list[Value]]:
        """Run the prefixes once, then each option's remaining tokens on a copy of their cache."""
        shared = [shared_prefix(unit) for unit in batch]
        cells = [(row, shared[n], n) for n, unit in enumerate(batch) for row in unit]
        tails = [row.ids[p:] for row, p, _ in cells]
        width, widest = max(map(len, tails)) - 1, max(shared)
        cache = self._cache(len(batch), widest + width)
        cache.lengths = np.array(shared)
        prefixes = padded([u[0].ids[:p] for u, p in zip(batch, shared, strict=True)], widest)
        positions = np.tile(np.arange(widest), (len(batch), 1))
        before = self._hidden(prefixes, positions, cache)
        owner = np.array([n for _, _, n in cells])
        states = [before[owner, np.array([p - 1 for _, p, _ in cells])][:, None]]
        if width:
            starts = np.array([p for _, p, _ in cells])[:, None]
            inputs = padded([tail[:-1] for tail in tails], width)
            states.append(self._hidden(inputs, starts + np.arange(width), cache.select(owner)))
        targets = np.full((len(cells), width + 1), -1)
        for number, ((row, _, _), tail) in enumerate(zip(cells, tails, strict=True)):
            targets[number, len(tail) - row.scored : len(tail)] = tail[len(tail) - row.scored :]
        values = iter(_values(*self._losses(self.ops.concat(states, 1), targets, greedy)))
        return [[next(values) for _ in unit] for unit in batch]

    def _cells(self, every: Sequence[Unit]) -> Iterator[list[int]]:
        """The units of one row, by number, in batches of similar length."""

        def length(number: int) -> int:
            return len(every[number][0].ids)

        def too_large(batch: Sequence[int]) -> bool:
            return len(batch) * length(batch[-1]) > self.batch_tokens

        single = (number for number, unit in enumerate(every) if len(unit) == 1)
        yield from grouped(sorted(single, key=length), too_large)

    def _score_rows(self, batch: Sequence[Unit], greedy: bool) -> list[list[Value]]:
        """Log-likelihoods of rows scored whole, without a cache."""
        rows = [row for (row,) in batch]
        length, count = max(len(row.ids) for row in rows) - 1, len(rows)
        scored = max(row.scored for row in rows)
        if self.backend == "jax":
            length = LENGTH_STEP * _power(-(-length // LENGTH_STEP))
            count, scored = _power(count), _power(scored)
        ids = np.zeros((count, length), np.int32)
        index = np.zeros((count, scored), np.int32)
        targets = np.full((count, scored), -1, np.int32)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids) - 1] = row.ids[:-1]
            index[number, : row.scored] = np.arange(len(row.ids) - 1 - row.scored, len(row.ids) - 1)
            targets[number, : row.scored] = row.ids[len(row.ids) - row.scored :]
        if self.backend == "jax":
            if greedy not in self._flat:
                self._flat[greedy] = _compiled(self.spec, self.ops, greedy)
            losses, hits = self._flat[greedy](self.params, ids, index, targets)
            return [[v] for v in _values(np.asarray(losses), hits, len(rows))]
        hidden = self._hidden(ids, None, None)[np.arange(count)[:, None], index]
        return [[v] for v in _values(*self._losses(hidden, targets, greedy))]

    def _cache(self, rows: int, slots: int) -> forward.KVCache:
        like = self.params["embed"]
        return forward.KVCache.create(
            self.spec, rows, slots, self.ops, self.dtype, like, states=True
        )

    def _hidden(
        self, ids: np.ndarray, positions: np.ndarray | None, cache: forward.KVCache | None
    ) -> Any:
        return forward.hidden(
            self.spec, self.params, ids, self.ops, positions=positions, cache=cache
        )

    def _losses(
        self, hidden: Any, targets: np.ndarray, greedy: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """-log p of targets[B, S] at hidden[B, S, D], 0 where a target is negative; and, if asked,
        whether they are the likeliest tokens, true there."""
        used = np.nonzero(targets >= 0)
        picked, wanted = hidden[used][None], targets[used][None]
        losses, _ = forward.token_losses(self.spec, self.params, picked, wanted, self.ops)
        full = np.zeros(targets.shape)
        hits: Any = np.full(targets.shape, True)
        full[used] = self.ops.to_numpy({"losses": losses})["losses"][0]
        if greedy:
            parts = [
                self.ops.to_numpy({"logits": self._logits(picked[:, at : at + GREEDY_ROWS])})
                for at in range(0, len(used[0]), GREEDY_ROWS)
            ]
            best = np.concatenate([part["logits"][0].argmax(-1) for part in parts])
            hits[used] = best == wanted[0]
        return full, hits if greedy else None

    def _logits(self, hidden: Any) -> Any:
        return forward.logits(self.spec, self.params, hidden, self.ops)


def _values(losses: np.ndarray, hits: Any, count: int | None = None) -> list[Value]:
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


def _compiled(spec: ModelSpec, ops: Any, greedy: bool) -> Callable[..., Any]:
    """A jitted (params, ids[B, T], index[B, S], targets[B, S]) → losses[B, S], and if `greedy`
    whether the targets are the likeliest tokens, true where there is none."""
    import jax

    def scored(params: Any, ids: Any, index: Any, targets: Any) -> Any:
        states = forward.hidden(spec, params, ids, ops)
        picked = states[np.arange(ids.shape[0])[:, None], index]
        losses = forward.token_losses(spec, params, picked, targets, ops)[0]
        if not greedy:
            return losses, None
        best = forward.logits(spec, params, picked, ops).argmax(-1)
        return losses, (best == targets) | (targets < 0)

    return jax.jit(scored)
