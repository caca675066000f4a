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
from itertools import takewhile
from typing import Any

import numpy as np

from sabia.core import stop
from sabia.core.errors import BadData
from sabia.core.model import forward
from sabia.core.ops.backend import load_ops
from sabia.core.progress import progress
from sabia.core.spec import ModelSpec
from sabia.core.spec.model import check_predicts

BATCH_TOKENS = 4_096
CACHE_BYTES = 1 << 30
LENGTH_STEP = 64  # JAX: row lengths are padded to this times a power of two
Cell = tuple[int, int]  # number of a question, and an option or the length of the shared prefix


@dataclass(frozen=True)
class Row:
    """Token ids of which the last `scored` are predicted and scored."""

    ids: tuple[int, ...]
    scored: int

    def fitting(self, context: int) -> "Row":
        """The row truncated on the left to the context of a model of `context` positions."""
        kept = self.ids[-(context + 1) :]
        return Row(kept, min(self.scored, len(kept) - 1))


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
        self.ops = load_ops(backend)
        self.params = self.ops.to_device(params, dtype)
        self.dtype = dtype
        self._flat = _compiled(spec, self.ops) if backend == "jax" else None
        slot = self._cache(1, 1)
        self._position_bytes = sum(x.nbytes for layer in slot.layers for x in layer.values())

    @property
    def context(self) -> int:
        """Maximum number of positions of the model."""
        return self.spec.max_positions

    def score(self, questions: Sequence[Sequence[Row]]) -> list[np.ndarray]:
        """For each question the log-likelihoods[options] (nats) of its rows' scored tokens.

        Raises BadData for token ids the model does not have.
        """
        fitted = [[row.fitting(self.context) for row in rows] for rows in questions]
        largest = max((max(row.ids) for rows in fitted for row in rows), default=0)
        if largest >= self.spec.vocab_size:
            raise BadData(
                f"token id {largest} of a vocabulary of {self.spec.vocab_size} "
                "(is this the model's tokenizer?)"
            )
        loglikelihoods = [np.zeros(len(rows)) for rows in fitted]
        alone: list[Cell] = []
        with progress(sum(map(len, fitted)), "score", "texts") as bar:
            for batch in self._batches(fitted, alone):
                stop.check()
                self._score_shared(fitted, batch, loglikelihoods)
                bar.advance(sum(len(fitted[question]) for question, _ in batch))
            for cells in self._cells(fitted, alone):
                stop.check()
                for (q, o), value in zip(cells, self._score_rows(fitted, cells), strict=True):
                    loglikelihoods[q][o] = value
                bar.advance(len(cells))
        return loglikelihoods

    def _batches(
        self, questions: Sequence[Sequence[Row]], alone: list[Cell]
    ) -> Iterator[list[Cell]]:
        """(question, length of its shared prefix), in batches; rows without one are added to
        `alone`.

        Questions of similar length are batched together, so that padding is small.
        """
        shared: list[Cell] = []
        for number, rows in enumerate(questions):
            prefix = shared_prefix(rows) if self.backend == "torch" and len(rows) > 1 else 0
            if prefix:
                shared.append((number, prefix))
            else:
                alone += [(number, option) for option in range(len(rows))]

        def too_large(batch: Sequence[Cell]) -> bool:
            widest = max(prefix for _, prefix in batch)
            options = sum(len(questions[number]) for number, _ in batch)
            tail = max(len(row.ids) for number, _ in batch for row in questions[number])
            too_many = len(batch) * widest > self.batch_tokens
            return too_many or options * tail * self._position_bytes > CACHE_BYTES

        yield from grouped(sorted(shared, key=lambda pair: pair[1]), too_large)

    def _score_shared(
        self,
        questions: Sequence[Sequence[Row]],
        batch: Sequence[Cell],
        loglikelihoods: list[np.ndarray],
    ) -> None:
        """Run the prefixes once, then each option's remaining tokens on a copy of their cache."""
        cells = [(q, o, p) for q, p in batch for o in range(len(questions[q]))]
        tails = [questions[q][o].ids[p:] for q, o, p in cells]
        width, widest = max(map(len, tails)) - 1, max(p for _, p in batch)
        cache = self._cache(len(batch), widest + width)
        prefixes = padded([questions[q][0].ids[:p] for q, p in batch], widest)
        positions = np.tile(np.arange(widest), (len(batch), 1))
        before = self._hidden(prefixes, positions, cache)
        row_of = {q: row for row, (q, _) in enumerate(batch)}
        owner = np.array([row_of[q] for q, _, _ in cells])
        states = [before[owner, np.array([p - 1 for _, _, p in cells])][:, None]]
        if width:
            starts = np.array([p for _, _, p in cells])[:, None]
            inputs = padded([tail[:-1] for tail in tails], width)
            states.append(self._hidden(inputs, starts + np.arange(width), cache.select(owner)))
        targets = np.full((len(cells), width + 1), -1)
        for row, ((q, o, _), tail) in enumerate(zip(cells, tails, strict=True)):
            scored = questions[q][o].scored
            targets[row, len(tail) - scored : len(tail)] = tail[len(tail) - scored :]
        losses = self._losses(self.ops.concat(states, 1), targets)
        for (q, o, _), loss in zip(cells, losses.sum(1), strict=True):
            loglikelihoods[q][o] = -loss

    def _cells(
        self, questions: Sequence[Sequence[Row]], alone: Sequence[Cell]
    ) -> Iterator[list[Cell]]:
        """Rows that are scored whole, in batches of similar length."""

        def length(cell: Cell) -> int:
            return len(questions[cell[0]][cell[1]].ids)

        def too_large(batch: Sequence[Cell]) -> bool:
            return len(batch) * length(batch[-1]) > self.batch_tokens

        yield from grouped(sorted(alone, key=length), too_large)

    def _score_rows(self, questions: Sequence[Sequence[Row]], cells: Sequence[Cell]) -> np.ndarray:
        """Log-likelihoods of rows scored whole, without a cache."""
        rows = [questions[q][o] for q, o in cells]
        length, count = max(len(row.ids) for row in rows) - 1, len(rows)
        scored = max(row.scored for row in rows)
        if self._flat is not None:
            length = LENGTH_STEP * _power(-(-length // LENGTH_STEP))
            count, scored = _power(count), _power(scored)
        ids = np.zeros((count, length), np.int32)
        index = np.zeros((count, scored), np.int32)
        targets = np.full((count, scored), -1, np.int32)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids) - 1] = row.ids[:-1]
            index[number, : row.scored] = np.arange(len(row.ids) - 1 - row.scored, len(row.ids) - 1)
            targets[number, : row.scored] = row.ids[len(row.ids) - row.scored :]
        if self._flat is not None:
            losses = np.asarray(self._flat(self.params, ids, index, targets))
        else:
            hidden = self._hidden(ids, None, None)[np.arange(count)[:, None], index]
            losses = self._losses(hidden, targets)
        return -losses.sum(1, dtype=np.float64)[: len(rows)]

    def _cache(self, rows: int, slots: int) -> forward.KVCache:
        like = self.params["embed"]
        return forward.KVCache.create(self.spec, rows, slots, self.ops, self.dtype, like)

    def _hidden(
        self, ids: np.ndarray, positions: np.ndarray | None, cache: forward.KVCache | None
    ) -> Any:
        return forward.hidden(
            self.spec, self.params, ids, self.ops, positions=positions, cache=cache
        )

    def _losses(self, hidden: Any, targets: np.ndarray) -> np.ndarray:
        """-log p of targets[B, S] at hidden[B, S, D], 0 where a target is negative."""
        used = np.nonzero(targets >= 0)
        losses, _ = forward.token_losses(
            self.spec, self.params, hidden[used][None], targets[used][None], self.ops
        )
        full = np.zeros(targets.shape)
        full[used] = self.ops.to_numpy({"losses": losses})["losses"][0]
        return full


def grouped(
    cells: Iterable[Cell], too_large: Callable[[Sequence[Cell]], bool]
) -> Iterator[list[Cell]]:
    """The cells in order, in the largest batches that are not too large, of one cell at least."""
    batch: list[Cell] = []
    for cell in cells:
        if batch and too_large([*batch, cell]):
            yield batch
            batch = []
        batch.append(cell)
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


def _compiled(spec: ModelSpec, ops: Any) -> Callable[..., Any]:
    """A jitted (params, ids[B, T], index[B, S], targets[B, S]) → losses[B, S]."""
    import jax

    def losses(params: Any, ids: Any, index: Any, targets: Any) -> Any:
        states = forward.hidden(spec, params, ids, ops)
        picked = states[np.arange(ids.shape[0])[:, None], index]
        return forward.token_losses(spec, params, picked, targets, ops)[0]

    return jax.jit(losses)
