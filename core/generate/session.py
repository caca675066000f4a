"""A session of an engine: requests that come and go, over one slot KV cache of fixed size.

A prompt is run once and its keys and values are copied to the slots of its `n` samples; these are
admitted together, as soon as enough slots are free. Each step computes one position for every
active row and the logits of that position only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from sabia.core.generate.prefixes import NO_PREFIX, Prefix, PrefixCaches
from sabia.core.generate.requests import Completion, Echo, Ended, Ranked, Request
from sabia.core.generate.sampling import likeliest
from sabia.core.generate.slots import Sample, Slots, Waiting
from sabia.core.model import forward
from sabia.core.ops.base import Ops, dtype_name
from sabia.core.spec import ModelSpec

PREFILL_TOKENS = 16_384
ECHO_POSITIONS = 512  # of a prompt, whose logits are computed together


class Model(Protocol):
    """What a session generates with; the parameters may be replaced between two steps."""

    spec: ModelSpec
    params: dict[str, Any]
    tokenizer: Any
    ops: Ops


class Session:
    """At most `capacity` samples of at most `context` positions, of which at most `max_new_tokens`
    are drawn. The caller checks that requests fit, and enters torch.inference_mode."""

    def __init__(self, model: Model, capacity: int, context: int, max_new_tokens: int) -> None:
        self.model = model
        none = np.zeros((0, model.spec.vocab_size), bool)
        self.slots = Slots(capacity, max_new_tokens, none, self.device)
        self.version = 0  # of the weights
        self.waiting = deque[Waiting]()
        self._cache = self._new_cache(capacity, context)
        self._prefixes = PrefixCaches(
            self._run_prefix, lambda slots: self._new_cache(1, slots), model.ops
        )
        self._kinds: dict[tuple[int, ...], int] = {}
        self._echoes: dict[int, Echo] = {}
        self._tickets = 0

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        device: torch.device = self.model.params["embed"].device
        return device

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache."""
        return self._cache.nbytes

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

    def _new_cache(self, rows: int, positions: int) -> forward.KVCache:
        model, embed = self.model, self.model.params["embed"]
        create = forward.KVCache.create
        return create(model.spec, rows, positions, model.ops, dtype_name(embed), embed)

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
        prompts = [waiting.request.prompt for waiting in group]
        slots, device, prefix = self.slots, self.device, group[0].prefix
        start, width = len(prefix), max(map(len, prompts))
        padded = np.zeros((len(prompts), width - start), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt) - start] = prompt[start:]
        ids = torch.from_numpy(padded).to(device)
        cache = self._new_cache(len(prompts), width)
        cache.lengths = np.array([len(prompt) - start for prompt in prompts])
        if start:
            for ours, theirs in zip(cache.layers, self._prefixes.of(prefix).layers, strict=True):
                for name, tensor in ours.items():
                    (tensor if "state" in ours else tensor[:, :start])[:] = theirs[name]
        positions = torch.arange(start, width, device=device).expand(ids.shape)
        hidden = self._hidden(ids, positions, cache)
        ends = torch.from_numpy(cache.lengths - 1).to(device)
        last = hidden[torch.arange(len(prompts), device=device), ends]
        logits = self._logits(last)
        for row, waiting in enumerate(group):
            if waiting.request.echo:
                self._echoes[waiting.ticket] = self._echo(hidden[row], ids[row], waiting.request)
        first = slots.active
        which = torch.from_numpy(slots.admit(group)).to(device)
        for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
            for name, tensor in ours.items():
                new = tensor[first : slots.active]
                (new if "state" in ours else new[:, :width])[:] = theirs[name][which]
        slots.draw(logits[which], first, self.version)

    def _run_prefix(
        self, ids: np.ndarray, positions: np.ndarray, cache: forward.KVCache
    ) -> forward.KVCache:
        tokens, places = (torch.from_numpy(x).to(self.device) for x in (ids, positions))
        self._hidden(tokens, places, cache)
        return cache

    def _echo(self, hidden: torch.Tensor, ids: torch.Tensor, request: Request) -> Echo:
        """The log-probabilities of the prompt ids[T] from its hidden states [T, D]."""
        logprobs, ranked = list[float](), list[Ranked]()
        for begin in range(0, len(request.prompt) - 1, ECHO_POSITIONS):
            end = min(begin + ECHO_POSITIONS, len(request.prompt) - 1)
            logits = self._logits(hidden[begin:end])
            given = torch.log_softmax(logits, -1).gather(1, ids[begin + 1 : end + 1, None])
            logprobs += given[:, 0].tolist()
            if request.top_logprobs:
                ranked += likeliest(logits, request.top_logprobs)
        return Echo(logprobs, ranked)

    def _decode(self) -> None:
        """One more token for every active row."""
        slots = self.slots
        ids, positions = slots.inputs()
        view = self._cache.first(slots.active).upto(slots.context)
        hidden = self._hidden(ids, positions, view)
        self._cache.take_states(view, slots.active)
        slots.draw(self._logits(hidden[:, 0]), 0, self.version)

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: forward.KVCache
    ) -> torch.Tensor:
        spec, params, ops = self.model.spec, self.model.params, self.model.ops
        return forward.hidden(spec, params, ids, ops, positions=positions, cache=cache)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits[B, V] of hidden states [B, D]."""
        model = self.model
        return forward.logits(model.spec, model.params, hidden[:, None], model.ops)[:, 0]

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
        if len(source) and self.slots.active:
            device = self.device
            moved, to = (torch.from_numpy(numbers).to(device) for numbers in (source, target))
            for layer in self._cache.layers:
                for tensor in layer.values():
                    tensor[to] = tensor[moved]

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
