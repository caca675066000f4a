"""A session of an engine: requests that come and go, over the cache of one runner.

A prompt is run once and its keys and values are copied to the slots of its `n` samples; these are
admitted together, as soon as enough slots are free. Each step computes one position for every
active row and the logits of that position only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from sabia.core.generate.prefixes import NO_PREFIX, Prefix
from sabia.core.generate.requests import Completion, Echo, Ended, Request
from sabia.core.generate.runner.interface import Model, Runner
from sabia.core.generate.slots import Sample, Slots, Waiting

PREFILL_TOKENS = 16_384


class Session:
    """The samples that a runner of `capacity` rows decodes together, of which at most
    `max_new_tokens` tokens are drawn. The caller checks that requests fit, and makes all calls in
    `runner.computing()`."""

    def __init__(self, model: Model, runner: Runner, capacity: int, max_new_tokens: int) -> None:
        self.model, self.runner = model, runner
        none = np.zeros((0, model.spec.vocab_size), bool)
        self.slots = Slots(capacity, max_new_tokens, none, runner)
        self.version = 0  # of the weights
        self.waiting = deque[Waiting]()
        self._kinds: dict[tuple[int, ...], int] = {}
        self._echoes: dict[int, Echo] = {}
        self._tickets = 0

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or in flight."""
        return bool(self.waiting or self.slots.active)

    def add(self, request: Request, prefix: Prefix = NO_PREFIX) -> int:
        """Queue a request; its ticket, by which its completions are told apart.

        prefix: what its prompt begins with; those of requests that follow each other are depth
        first, and as long as they have one the parameters are not replaced.
        """
        self._tickets += 1
        self.waiting.append(Waiting(self._tickets, request, self._kind(request), prefix))
        return self._tickets

    def cancel(self, ticket: int) -> None:
        """Forget a request, and its samples in flight."""
        self.waiting = deque(one for one in self.waiting if one.ticket != ticket)
        rows = [row for row, one in enumerate(self.slots.owner) if one.of.ticket == ticket]
        if rows:
            self._release(rows)
        self._echoes.pop(ticket, None)

    def replace(self, params: dict[str, Any], version: int) -> None:
        """Go on with other weights; samples in flight keep what the former ones have computed."""
        self.model.params, self.version = params, version

    def step(self) -> list[Ended]:
        """Admit requests, or draw a token for every active row; the samples that ended."""
        group = self._next_group()
        if group:
            self._prefill(group)
        else:
            self._decode()
        return self._collect()

    def in_flight(self) -> Iterator[tuple[Sample, np.ndarray, np.ndarray, np.ndarray]]:
        """Each active sample, its tokens so far, their `raw_logprobs`, and the versions of the
        weights that drew them."""
        slots = self.slots
        for row, sample in enumerate(slots.owner):
            drawn = row, slice(slots.drawn[row])
            yield sample, slots.tokens[drawn], slots.raw[drawn], slots.versions[drawn]

    def _kind(self, request: Request) -> int:
        """The row of the stop table for the ids that end the request's samples."""
        ids = request.stop_ids
        ids = tuple(self.model.tokenizer.stop_ids if ids is None else ids)
        if ids not in self._kinds:
            ends = np.zeros((1, self.model.spec.vocab_size), bool)
            ends[0, [i for i in ids if i < ends.shape[1]]] = True
            self._kinds[ids] = len(self._kinds)
            self.slots.stop_table = np.concatenate([self.slots.stop_table, ends])
        return self._kinds[ids]

    def _next_group(self) -> list[Waiting]:
        """Requests to admit now: as many as fit, once an eighth of the slots is free."""
        slots, waiting = self.slots, self.waiting
        if not waiting or (slots.active and slots.free < slots.capacity // 8):
            return []
        group = list[Waiting]()
        free, tokens = slots.free, 0
        while waiting and len(waiting[0].request.samples) <= free:
            if group and waiting[0].prefix is not group[0].prefix:
                break
            tokens += len(waiting[0].request.prompt) - len(waiting[0].prefix)
            if group and tokens > PREFILL_TOKENS:
                break
            free -= len(waiting[0].request.samples)
            group.append(waiting.popleft())
        return group

    def _prefill(self, group: list[Waiting]) -> None:
        """Run the prompts once, copy their keys and values to their samples, draw token 0."""
        slots, runner, first = self.slots, self.runner, self.slots.active
        prompts = [one.request.prompt for one in group]
        adapters = [one.request.adapter for one in group]
        prefilled = runner.prefill(prompts, group[0].prefix, adapters)
        for row, (ticket, request) in enumerate((one.ticket, one.request) for one in group):
            if request.echo:
                echo = runner.echo(prefilled, row, request.prompt, request.top_logprobs)
                self._echoes[ticket] = echo
        which = slots.admit(group)
        runner.admit(prefilled, which, first)
        slots.draw(prefilled.logits, first, self.version, which)

    def _decode(self) -> None:
        """One more token for every active row."""
        self.slots.draw(self.runner.step(*self.slots.inputs()), 0, self.version)

    def _collect(self) -> list[Ended]:
        """The samples that have ended; their slots are filled with active rows."""
        ended = self.slots.finished(self.model.tokenizer)
        if not ended:
            return []
        samples = [self._ended(row, *how) for row, how in ended.items()]
        self._release(list(ended))
        left = {one.of.ticket for one in self.slots.owner}
        self._echoes = {ticket: echo for ticket, echo in self._echoes.items() if ticket in left}
        return samples

    def _release(self, rows: list[int]) -> None:
        source, target = self.slots.release(rows)
        if len(source):
            self.runner.move(source, target)

    def _ended(self, row: int, reason: str, text: str | None) -> Ended:
        slots, sample = self.slots, self.slots.owner[row]
        count = int(slots.drawn[row])
        tokens = slots.tokens[row, :count].tolist()
        if text is None:
            ends = slots.stop_table[slots.kind[row], tokens[-1]]
            text = self.model.tokenizer.decode(tokens[:-1] if ends else tokens)
        logprobs, raw = (x[row, :count].tolist() for x in (slots.logprobs, slots.raw))
        name = sample.of.request.name
        made = Completion(name, sample.number, tokens, text, logprobs, raw, reason)
        echo = self._echoes.get(sample.of.ticket)
        versions = slots.versions[row, :count].tolist()
        return Ended(sample.of.ticket, made, sample.ranked, echo, versions)
