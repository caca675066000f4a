"""A session of an engine: requests that come and go, over the cache of one runner.

A prompt is run once and its keys and values are copied to the slots of its `n` samples; these are
admitted together, as soon as enough slots are free. Each step computes one position for every
active row and the logits of that position only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sabia.core.generate.draft.proposal import Drafter, Proposal
from sabia.core.generate.pages import Begun, PageTable
from sabia.core.generate.requests import Completion, Echo, Ended, Request
from sabia.core.generate.runner.interface import Drawn, Model, Proposed, Runner
from sabia.core.generate.sampling import KEEP, purpose_keys, uniforms
from sabia.core.generate.slots import Sample, Slots, Waiting
from sabia.core.model.routing import Routing

PREFILL_TOKENS = 16_384


@dataclass
class Counts:
    """Tokens so far: drawn, proposed, and those of the proposed ones that were kept."""

    drawn: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of another session."""
        self.drawn += other.drawn
        self.proposed += other.proposed
        self.accepted += other.accepted

    def describe(self) -> str:
        """Which share of the proposed tokens was kept, for a summary."""
        share = self.accepted / max(self.proposed, 1)
        return f"{self.accepted:,} of {self.proposed:,} proposed tokens were kept ({share:.0%})"


class Session:
    """The samples that a runner of `capacity` rows decodes together, of which at most
    `max_new_tokens` tokens are drawn. The caller checks that requests fit, and makes all calls in
    `runner.computing()`."""

    def __init__(
        self,
        model: Model,
        runner: Runner,
        capacity: int,
        max_new_tokens: int,
        pages: PageTable | None = None,
        keeps_replies: bool = False,
        prefill_positions: int = 1 << 40,
        drafter: Drafter | None = None,
        proposed: int = 0,
    ) -> None:
        """pages: the table of those that the runner has (default: none). keeps_replies: what is
        drawn is kept in pages too, for the next turn of a conversation; only by models whose layers
        keep all keys and values. prefill_positions: of prompts that are run together, with what is
        in pages. drafter: proposes at most `proposed` tokens at a time."""
        self.model, self.runner = model, runner
        self.pages = pages or PageTable(0)
        whole = set(model.spec.windows) <= {None} and self.pages.states is None
        self._prefill_positions = prefill_positions
        self._keeps_replies = keeps_replies and whole and self.pages.size > 0
        none = np.zeros((0, model.spec.vocab_size), bool)
        self.slots = Slots(capacity, max_new_tokens, none, runner)
        self.version = 0  # of the weights
        self.counts = Counts()
        self._drafter, self._most = drafter, proposed
        self._routing = Routing.of(model.spec)
        self.waiting = deque[Waiting]()
        self._kinds: dict[tuple[int, ...], int] = {}
        self._echoes: dict[int, Echo] = {}
        self._tickets = 0

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or in flight."""
        return bool(self.waiting or self.slots.active)

    def add(self, request: Request) -> int:
        """Queue a request; its ticket, by which its completions are told apart.

        More samples than there are rows are admitted part by part.
        """
        self._tickets += 1
        ticket, kind, every = self._tickets, self._kind(request), request.samples
        for first in range(0, len(every), self.slots.capacity):
            part = request
            if len(every) > self.slots.capacity:
                only = tuple(every[first : first + self.slots.capacity])
                part = replace(request, only=only, echo=request.echo and not first)
            self.waiting.append(Waiting(ticket, part, kind))
        return ticket

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
        self.pages.clear()

    def step(self) -> list[Ended]:
        """Admit requests, or draw a token for every active row; the samples that ended."""
        group = self._next_group()
        if group:
            self._prefill(*group)
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

    def _next_group(self) -> tuple[list[Waiting], list[Begun]] | None:
        """Requests to admit now, with how their prompts are begun: as many as fit, once an eighth
        of the slots is free. One that would make the same page as another of them waits for it."""
        slots, waiting = self.slots, self.waiting
        if not waiting or (slots.active and slots.free < slots.capacity // 8):
            return None
        group, every, pages = list[Waiting](), list[Begun](), set[object]()
        free, tokens, longest = slots.free, 0, 0
        while waiting and len(waiting[0].request.samples) <= free:
            request = waiting[0].request
            whole = request.echo or request.routed_experts
            begun = Begun() if whole else self.pages.begin(request.prompt, request.adapter)
            page = None
            if not whole:
                page = self.pages.next_key(request.prompt, begun, request.adapter)
            tokens += len(request.prompt) - len(begun)
            longest = max(longest, len(request.prompt))
            too_large = (len(group) + 1) * longest > self._prefill_positions
            if group and (tokens > PREFILL_TOKENS or too_large or page in pages):
                break
            pages |= set() if page is None else {page}
            free -= len(request.samples)
            group.append(waiting.popleft())
            every.append(begun)
        return (group, every) if group else None

    def _prefill(self, group: list[Waiting], begun: list[Begun]) -> None:
        """Run the prompts once, copy their keys and values to their samples, draw token 0."""
        slots, runner, first = self.slots, self.runner, self.slots.active
        prompts = [waiting.request.prompt for waiting in group]
        adapters = [waiting.request.adapter for waiting in group]
        runner.records = any(waiting.request.routed_experts for waiting in group)
        prefilled = runner.prefill(prompts, begun, adapters)
        if self.pages.size:
            runner.keep(prefilled, self.pages.keep(prompts, begun, adapters))
        for row, waiting in enumerate(group):
            if (request := waiting.request).echo:
                echo = runner.echo(prefilled, row, request.prompt, request.top_logprobs)
                self._echoes[waiting.ticket] = echo
        which = slots.admit(group)
        runner.admit(prefilled, which, first)
        slots.record(first, which, np.array([len(prompt) for prompt in prompts])[which])
        if self._drafter:
            self._drafter.admit(group, which, first)
        slots.draw(prefilled.logits, first, self.version, which)
        self.counts.drawn += len(which)

    def _decode(self) -> None:
        """One more token for every active row, or several of rows that have proposals."""
        slots, drafter = self.slots, self._drafter
        self.runner.records = any(one.of.request.routed_experts for one in slots.owner)
        if drafter and (most := slots.most_proposed(self._most)).any():
            proposal = drafter.propose(slots, most)
            if proposal.counts.any():
                kept = self._checked(proposal)
            else:
                kept = proposal.counts
                self._one_more()
            drafter.settle(kept)
        else:
            self._one_more()

    def _one_more(self) -> None:
        self.slots.draw(self.runner.step(*self.slots.inputs()), 0, self.version)
        rows = np.arange(self.slots.active)
        self.slots.record(0, rows, rows * 0 + 1)
        self.counts.drawn += self.slots.active

    def _checked(self, proposal: Proposal) -> np.ndarray:
        """Tokens for every active row, from one pass over those proposed; how many were kept."""
        slots, runner, counts = self.slots, self.runner, proposal.counts + 1
        (last, position), active = slots.inputs(), slots.active
        width = runner.width(int(counts.max()))
        ids = np.zeros((active, width), np.int64)
        tokens = np.concatenate([last, proposal.tokens], 1)[:, :width]
        ids[:, : tokens.shape[1]] = tokens
        logits = runner.step(ids, position + np.arange(width), counts, ahead=True)
        # of every token: its row and its place
        rows, at = np.nonzero(np.arange(width) < counts[:, None])
        which, params = rows * width + at, slots.params.take(rows)
        uniform = uniforms(slots.key[rows], slots.drawn[rows] + at)
        bias = slots.bias(0)
        inputs = logits, which, params, uniform, None if bias is None else bias[rows]
        given = at < counts[rows] - 1
        proposed = np.full(len(rows), -1)
        proposed[given] = proposal.tokens[rows[given], at[given]]
        if proposal.logits is None:  # certain: what the row draws anyway is one of them, or not
            made = runner.draw(*inputs)
            kept = made.tokens == proposed
        else:
            keys = purpose_keys(slots.key[rows], KEEP)
            keeping = uniforms(keys, slots.drawn[rows] + at)
            steps = np.minimum(at, proposal.tokens.shape[1] - 1)
            made, kept = runner.verify(
                *inputs, Proposed(proposed, proposal.logits, steps, rows, keeping)
            )
        agreed = np.zeros((active, width), bool)
        agreed[rows, at] = kept
        got = np.logical_and.accumulate(agreed, 1).sum(1) + 1
        self.counts.proposed += int(proposal.counts.sum())
        self.counts.accepted += int(got.sum()) - active
        first, mine = slots.drawn[:active].copy(), at < got[rows]
        taken = Drawn(*(column[mine] for column in made))
        slots.store(rows[mine], at[mine], taken, self.version)
        left = slots.cut(first, got, self.model.tokenizer)
        mine = at < left[rows]
        slots.rank(logits, rows[mine], which[mine])
        slots.record(0, np.arange(active), left)
        self.counts.drawn += int(left.sum())
        runner.settle(left)
        return left - 1

    def _collect(self) -> list[Ended]:
        """The samples that have ended; their slots are filled with active rows."""
        ended = self.slots.finished(self.model.tokenizer)
        if not ended:
            return []
        samples = [self._ended(row, *how) for row, how in ended.items()]
        if self._keeps_replies:
            self._keep_replies(list(ended))
        self._release(list(ended))
        left = {one.of.ticket for one in self.slots.owner} | {one.ticket for one in self.waiting}
        self._echoes = {ticket: echo for ticket, echo in self._echoes.items() if ticket in left}
        return samples

    def _keep_replies(self, rows: list[int]) -> None:
        """Keep the pages of samples that have ended, if the present weights have computed them."""
        slots = self.slots
        rows = [row for row in rows if slots.versions[row, 0] == self.version]
        requests = [slots.owner[row].of.request for row in rows]
        texts = [
            [*request.prompt, *slots.tokens[row, : slots.drawn[row]].tolist()]
            for row, request in zip(rows, requests, strict=True)
        ]
        adapters = [request.adapter for request in requests]
        kept = self.pages.keep(texts, [Begun()] * len(rows), adapters)
        of_slots = [rows[number] for number in kept.rows]
        self.runner.keep(None, replace(kept, rows=of_slots))

    def _release(self, rows: list[int]) -> None:
        source, target = self.slots.release(rows)
        if len(source):
            self.runner.move(source, target)
            if self._drafter:
                self._drafter.move(source, target)

    def _ended(self, row: int, reason: str, text: str | None) -> Ended:
        slots, sample = self.slots, self.slots.owner[row]
        count = int(slots.drawn[row])
        tokens = slots.tokens[row, :count].tolist()
        if text is None:
            ends = slots.stop_table[slots.kind[row], tokens[-1]]
            text = self.model.tokenizer.decode(tokens[:-1] if ends else tokens)
        logprobs, raw = (x[row, :count].tolist() for x in (slots.logprobs, slots.raw))
        name = sample.of.request.name
        forced = list(sample.thought.places) if sample.thought else []
        experts = self._routing.packed(sample.experts) if sample.experts and self._routing else b""
        made = Completion(name, sample.number, tokens, text, logprobs, raw, reason, forced, experts)
        echo = self._echoes.get(sample.of.ticket)
        versions = slots.versions[row, :count].tolist()
        return Ended(sample.of.ticket, made, sample.ranked, echo, versions)
