"""Slots: the samples that an engine decodes together, as columns.

Rows 0..n-1 are active and contiguous: a finished row is replaced by the last active one, so a step
computes active rows only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sabia.core.generate.requests import LENGTH, STOP, Ranked, Request
from sabia.core.generate.runner.interface import Drawn, Logits, Runner
from sabia.core.generate.sampling import RowParams, stream_keys, uniforms
from sabia.core.generate.thinking import Thought
from sabia.core.grammar.guide import Walk
from sabia.core.text.tokenize.tokenizer import Tokenizer

CONTEXT_STEP = 16  # contexts are multiples of it


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request of a session. ticket: its number there. kind: of the ids that end its samples."""

    ticket: int
    request: Request
    kind: int


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample in flight: its request, its number there, its way through the request's grammar,
    its reasoning if that has a budget, the likeliest tokens of each step, and the experts
    [T, L, k] of the tokens of each pass."""

    of: Waiting
    number: int
    walk: Walk | None
    thought: Thought | None = None
    ranked: list[Ranked] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)

    @property
    def steered(self) -> bool:
        """Whether its next logits are changed before a token is drawn."""
        return self.of.request.steers or bool(self.thought and self.thought.pending)

    @classmethod
    def first(cls, of: Waiting, number: int) -> "Sample":
        """A sample without tokens."""
        guide, thinking = of.request.guide, of.request.thinking
        thought = Thought(thinking) if thinking else None
        return cls(of, number, Walk(guide) if guide else None, thought)


@dataclass
class Slots:
    """Columns of [capacity] rows; the first `active` of them are samples in flight."""

    capacity: int
    max_new_tokens: int
    stop_table: np.ndarray  # [kinds, V] bool: which ids end a sample of that kind
    runner: Runner
    active: int = 0
    owner: list[Sample] = field(default_factory=list)  # of each row
    params: Any = None  # RowParams, once rows are active

    def __post_init__(self) -> None:
        rows = self.capacity
        self.key = np.zeros(rows, np.uint64)
        self.kind = np.zeros(rows, np.int64)
        self.length = np.zeros(rows, np.int64)  # prompt tokens
        self.drawn = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.watches_text = np.zeros(rows, bool)
        self.tokens = np.zeros((rows, self.max_new_tokens), np.int32)
        self.logprobs = np.zeros((rows, self.max_new_tokens), np.float32)
        self.raw = np.zeros((rows, self.max_new_tokens), np.float32)
        self.versions = np.zeros((rows, self.max_new_tokens), np.int32)  # of the weights

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.capacity - self.active

    def admit(self, group: Sequence[Waiting]) -> np.ndarray:
        """Append all samples of the requests after the active rows.

        Returns the number in the group for each new row, for copying prompts and logits.
        """
        requests = [waiting.request for waiting in group]
        counts = np.array([len(request.samples) for request in requests])
        which = np.repeat(np.arange(len(requests)), counts)
        new = slice(self.active, self.active + len(which))
        self.key[new] = np.concatenate([stream_keys(r.seed, r.name, r.samples) for r in requests])
        self.kind[new] = np.array([waiting.kind for waiting in group])[which]
        self.length[new] = np.array([len(r.prompt) for r in requests])[which]
        self.limit[new] = np.array([r.max_new_tokens for r in requests])[which]
        self.watches_text[new] = np.array([bool(r.stop) for r in requests])[which]
        self.drawn[new] = 0
        self.owner += [
            Sample.first(waiting, s) for waiting in group for s in waiting.request.samples
        ]
        added = RowParams.of([requests[i].sampling for i in which.tolist()])
        self.params = added if self.active == 0 else self.params.joined(added)
        self.active += len(which)
        return which

    def draw(
        self, logits: Logits, start: int, version: int, which: np.ndarray | None = None
    ) -> None:
        """Draw one token for rows start..active, and store it, from logits[which[row - start]]
        (None: from those of their number), which weights of this version gave."""
        rows = np.arange(start, self.active)
        params = self.params if start == 0 else self.params.take(rows)
        uniform, bias = uniforms(self.key[rows], self.drawn[rows]), self.bias(start)
        made = self.runner.draw(logits, which, params, uniform, bias)
        self.store(rows, 0, made, version)
        self.rank(logits, rows, rows - start if which is None else which)

    def store(self, rows: np.ndarray, at: np.ndarray | int, made: Drawn, version: int) -> None:
        """Store a token for each of the rows, `at` so many places behind those that it has; a row
        that occurs several times gets as many."""
        places = self.drawn[rows] + at
        self.tokens[rows, places], self.logprobs[rows, places], self.raw[rows, places] = made
        self.versions[rows, places] = version
        self.drawn[: self.active] += np.bincount(rows, minlength=self.active)
        for row in np.unique(rows).tolist():
            if (walk := self.owner[row].walk) is not None:
                token = int(self.tokens[row, self.drawn[row] - 1])
                if not self.stop_table[self.kind[row], token]:
                    walk.take(token)

    def most_proposed(self, most: int) -> np.ndarray:
        """[active]: how many tokens of each row may be checked together."""
        rows = np.arange(self.active)
        counts = np.minimum(most, (self.limit - self.drawn)[rows] - 1)
        counts[[sample.steered for sample in self.owner]] = 0
        return counts

    def cut(self, first: np.ndarray, tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """Drop what rows have got after a token that ends them, or their reasoning, of the last
        tokens[active] behind first[active]; how many are left."""
        rows = np.arange(self.active)
        slow = self.watches_text[rows] | np.array([one.thought is not None for one in self.owner])
        for row in rows[tokens > 1].tolist():
            made = self.tokens[row, first[row] : self.drawn[row]]
            ends = np.flatnonzero(self.stop_table[self.kind[row], made])
            count = int(ends[0]) + 1 if len(ends) else len(made)
            for one in range(1, count) if slow[row] else ():
                self.drawn[row] = first[row] + one
                if self._cut(row, tokenizer) is not None or self._turns(row, tokenizer):
                    count = one
                    break
            self.drawn[row] = first[row] + count
        return self.drawn[rows] - first

    def _turns(self, row: int, tokenizer: Tokenizer) -> bool:
        """Whether the reasoning of a row has come to the end of its budget."""
        if (thought := self.owner[row].thought) is None:
            return False
        thought.take(self.tokens[row, : self.drawn[row]].tolist(), tokenizer.decode)
        return thought.over or bool(thought.pending)

    def bias(self, start: int) -> np.ndarray | None:
        """What penalties, biases and grammars of rows start..active add to their logits; None
        if they have none."""
        steered = [row for row, sample in enumerate(self.owner[start:], start) if sample.steered]
        if not steered:
            return None
        bias = np.zeros((self.active - start, self.stop_table.shape[1]), np.float32)
        for row in steered:
            request, tokens = self.owner[row].of.request, self.tokens[row, : self.drawn[row]]
            counts = np.bincount(tokens, minlength=bias.shape[1])
            bias[row - start] -= request.frequency_penalty * counts
            bias[row - start] -= request.presence_penalty * (counts > 0)
            for token, more in request.logit_bias:
                bias[row - start, token] += more
            if (walk := self.owner[row].walk) is not None:
                allowed = walk.allowed(int(self.limit[row] - self.drawn[row]))
                ends = self.stop_table[self.kind[row]]
                bias[row - start, ~np.where(ends, walk.accepts, allowed)] = -np.inf
            if (thought := self.owner[row].thought) is not None and thought.pending:
                bias[row - start] = -np.inf
                bias[row - start, thought.pending[0]] = 0
        return bias

    def rank(self, logits: Logits, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Keep the likeliest tokens of the rows that ask for them, from logits[numbers]."""
        counts = np.array([sample.of.request.top_logprobs for sample in self.owner])[rows]
        if counts.any():
            rows, numbers, counts = (x[counts > 0] for x in (rows, numbers, counts))
            every = self.runner.likeliest(logits, numbers, int(counts.max()))
            for row, count, ranked in zip(rows.tolist(), counts.tolist(), every, strict=True):
                self.owner[row].ranked.append(ranked[:count])

    def record(self, start: int, which: np.ndarray, counts: np.ndarray) -> None:
        """Keep the experts of the last pass for the rows start.. that ask for them: those of the
        first counts[i] tokens of its row which[i]."""
        experts = self.runner.experts if self.runner.records else None
        if experts is None:
            return
        for i, sample in enumerate(self.owner[start:]):
            if sample.of.request.routed_experts:
                sample.experts.append(experts[which[i], : counts[i]])

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """(the last token[active, 1] of each row, its position[active, 1])."""
        rows = np.arange(self.active)
        last = self.tokens[rows, self.drawn[rows] - 1].astype(np.int64)
        return last[:, None], (self.length + self.drawn)[rows, None] - 1

    def finished(self, tokenizer: Tokenizer) -> dict[int, tuple[str, str | None]]:
        """Rows that have just ended → (finish reason, text if a stop string ended it)."""
        rows = np.arange(self.active)
        last = self.tokens[rows, self.drawn[rows] - 1]
        stopped = self.stop_table[self.kind[rows], last]
        full = self.drawn[rows] >= self.limit[rows]
        for row in rows.tolist():
            if (thought := self.owner[row].thought) is not None:
                thought.take(self.tokens[row, : self.drawn[row]].tolist(), tokenizer.decode)
                full[row] |= thought.over
        ended: dict[int, tuple[str, str | None]] = {}
        complete = np.array([one.walk is not None and one.walk.complete for one in self.owner])
        for row in np.flatnonzero(stopped | full | complete | self.watches_text[rows]).tolist():
            text = None if stopped[row] else self._cut(row, tokenizer)
            if stopped[row] or complete[row] or text is not None:
                ended[row] = (STOP, text)
            elif full[row]:
                ended[row] = (LENGTH, None)
        return ended

    def _cut(self, row: int, tokenizer: Tokenizer) -> str | None:
        """The row's text before the first stop string, None if it contains none.

        Every token is at least one byte, so a tail of as many tokens as the longest stop string has
        bytes decides whether the whole text is decoded; 4 more make it start at a character.
        """
        stops = self.owner[row].of.request.stop
        if not stops:
            return None
        tail = max(len(text.encode()) for text in stops) + 4
        tokens = self.tokens[row, : self.drawn[row]]
        if not any(text in tokenizer.decode(tokens[-tail:]) for text in stops):
            return None
        whole = tokenizer.decode(tokens)
        positions = [at for text in stops if (at := whole.find(text)) >= 0]
        return whole[: min(positions)] if positions else None

    def release(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Release rows; the last active rows replace them. Returns (source rows, target rows)."""
        released = np.zeros(self.active, bool)
        released[list(rows)] = True
        left = self.active - len(rows)
        to = np.flatnonzero(released[:left])
        moved = left + np.flatnonzero(~released[left:])
        for name in ("key", "kind", "length", "drawn", "limit", "watches_text",
                     "tokens", "logprobs", "raw", "versions"):  # fmt: skip
            column = getattr(self, name)
            column[to] = column[moved]
        for source, target in zip(moved.tolist(), to.tolist(), strict=True):
            self.owner[target] = self.owner[source]
        del self.owner[left:]
        order = np.arange(left)
        order[to] = moved
        self.params = self.params.take(order)
        self.active = left
        return moved, to
