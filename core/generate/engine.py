"""A small generation engine in torch: continuous batching over a slot KV cache.

A prompt is run once and its keys and values are copied to the slots of its `n` samples; these are
admitted together, as soon as enough slots are free. Each step computes one position for every
active row and the logits of that position only. Tokens depend on (seed, request id, sample,
position) and on the model; the other rows of a batch can change logits in the last bits only. For
models that need paged attention use an OpenAI-compatible server instead.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sabia.core.errors import UsageError
from sabia.core.generate.requests import Completion, Request
from sabia.core.generate.slots import CONTEXT_STEP, Slots
from sabia.core.model import forward
from sabia.core.ops.backend import load_ops
from sabia.core.ops.base import Ops, dtype_name
from sabia.core.spec import ModelSpec
from sabia.core.spec.model import check_predicts

SLOTS = 512
CACHE_BYTES = 4 << 30
PREFILL_TOKENS = 16_384


class Engine:
    """Generates with one model; `params` may be replaced between calls (by a trainer)."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Any],
        tokenizer: Any,
        dtype: str = "float32",
        slots: int = SLOTS,
        cache_bytes: int = CACHE_BYTES,
        on_step: Callable[[], None] | None = None,
        ops: Ops | None = None,
    ) -> None:
        """`params` are NumPy arrays or tensors by spec name; arrays are moved to the device.

        `slots` samples are decoded together, fewer where their cache would exceed `cache_bytes`.
        `on_step` is called before each step and may raise to end a call (a stop signal). `ops`:
        those of torch, with rules (default: without).
        """
        check_predicts(spec)
        self.spec, self.tokenizer = spec, tokenizer
        self.ops = ops or load_ops("torch")
        arrays = {name: value for name, value in params.items() if isinstance(value, np.ndarray)}
        self.params = {**params, **(self.ops.to_device(arrays, dtype) if arrays else {})}
        self.slots, self.cache_bytes, self.on_step = slots, cache_bytes, on_step

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.params["embed"].device

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All samples of all requests, in the order of the requests, samples 0..n-1 of each.

        Raises UsageError for a request that cannot be run (empty, too long, wrong ids).
        """
        names = [request.name for request in requests]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"generate: two requests are named {twice!r}; give them ids")
        done = {(c.request_id, c.sample): c for c in self.stream(requests)}
        return [done[request.name, sample] for request in requests for sample in request.samples]

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Samples as they are finished, in no particular order."""
        for request in requests:
            request.check(self.spec.vocab_size, self.spec.max_positions)
        if requests:
            with torch.inference_mode():
                yield from self._run(requests)

    def _run(self, requests: Sequence[Request]) -> Iterator[Completion]:
        kinds, table = self._stop_table(requests)
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        context = -(-longest // CONTEXT_STEP) * CONTEXT_STEP
        # slots for this call: as requested, limited by the cache size, at least one group
        shapes = [layer.mixer.cache_shapes().values() for layer in self.spec.layers]
        width = sum(heads * size for layer in shapes for heads, size in layer)
        row_bytes = context * width * self.params["embed"].element_size()
        counts = [len(request.samples) for request in requests]
        capacity = max(min(self.slots, sum(counts), self.cache_bytes // row_bytes), max(counts))
        slots = Slots(capacity, max(r.max_new_tokens for r in requests), table, self.device)
        cache = self._cache(capacity, context)
        waiting = deque(zip(requests, kinds, strict=True))
        while waiting or slots.active:
            if self.on_step is not None:
                self.on_step()
            group = self._next_group(waiting, slots)
            if group:
                self._prefill(group, slots, cache)
            else:
                self._decode(slots, cache)
            yield from self._collect(slots, cache)

    def _stop_table(self, requests: Sequence[Request]) -> tuple[list[int], np.ndarray]:
        """(kind of each request, [kinds, V] whether an id ends a sample of the kind)."""
        default = tuple(self.tokenizer.stop_ids)
        sets = [default if r.stop_ids is None else tuple(r.stop_ids) for r in requests]
        known = {ids: number for number, ids in enumerate(dict.fromkeys(sets))}
        table = np.zeros((len(known), self.spec.vocab_size), bool)
        for ids, number in known.items():
            table[number, [i for i in ids if i < self.spec.vocab_size]] = True
        return [known[ids] for ids in sets], table

    def _cache(self, rows: int, slots: int) -> forward.KVCache:
        embed = self.params["embed"]
        return forward.KVCache.create(self.spec, rows, slots, self.ops, dtype_name(embed), embed)

    @staticmethod
    def _next_group(waiting: deque[tuple[Request, int]], slots: Slots) -> list[tuple[Request, int]]:
        """Requests to admit now: as many as fit, once an eighth of the slots is free."""
        if not waiting or (slots.active and slots.free < slots.capacity // 8):
            return []
        group: list[tuple[Request, int]] = []
        free, tokens = slots.free, 0
        while waiting and len(waiting[0][0].samples) <= free:
            tokens += len(waiting[0][0].prompt)
            if group and tokens > PREFILL_TOKENS:
                break
            free -= len(waiting[0][0].samples)
            group.append(waiting.popleft())
        return group

    def _prefill(
        self, group: list[tuple[Request, int]], slots: Slots, cache: forward.KVCache
    ) -> None:
        """Run the prompts once, copy their keys and values to their samples, draw token 0."""
        requests = [request for request, _ in group]
        width = max(len(request.prompt) for request in requests)
        padded = np.zeros((len(requests), width), np.int64)
        for row, request in enumerate(requests):
            padded[row, : len(request.prompt)] = request.prompt
        ids = torch.from_numpy(padded).to(self.device)
        lengths = torch.tensor([len(request.prompt) for request in requests], device=self.device)
        prompts = self._cache(len(requests), width)
        positions = torch.arange(width, device=self.device).expand(len(requests), width)
        hidden = self._hidden(ids, positions, prompts)
        last = hidden[torch.arange(len(requests), device=self.device), lengths - 1]
        logits = self._logits(last)
        start = slots.active
        which = torch.from_numpy(slots.admit(requests, [kind for _, kind in group]))
        which = which.to(self.device)
        for ours, theirs in zip(cache.layers, prompts.layers, strict=True):
            for name, tensor in ours.items():
                tensor[start : slots.active, :width] = theirs[name][which]
        slots.draw(logits[which], start)

    def _decode(self, slots: Slots, cache: forward.KVCache) -> None:
        """One more token for every active row."""
        ids, positions = slots.inputs()
        rows = [
            {name: tensor[: slots.active] for name, tensor in layer.items()}
            for layer in cache.layers
        ]
        view = forward.KVCache(rows, slots.context)
        slots.draw(self._logits(self._hidden(ids, positions, view)[:, 0]), 0)

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: forward.KVCache
    ) -> torch.Tensor:
        return forward.hidden(
            self.spec, self.params, ids, self.ops, positions=positions, cache=cache
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits[B, V] of hidden states [B, D]."""
        return forward.logits(self.spec, self.params, hidden[:, None], self.ops)[:, 0]

    def _collect(self, slots: Slots, cache: forward.KVCache) -> Iterator[Completion]:
        """Yield the rows that have ended and fill their slots with active rows."""
        ended = slots.finished(self.tokenizer)
        if not ended:
            return
        completions = [self._completion(slots, row, *how) for row, how in ended.items()]
        source, target = slots.release(list(ended))
        if len(source) and slots.active:
            moved, to = (torch.from_numpy(rows).to(self.device) for rows in (source, target))
            for layer in cache.layers:
                for tensor in layer.values():
                    tensor[to] = tensor[moved]
        yield from completions

    def _completion(self, slots: Slots, row: int, reason: str, text: str | None) -> Completion:
        request, sample = slots.owner[row]
        count = int(slots.drawn[row])
        tokens = slots.tokens[row, :count].tolist()
        if text is None:
            ends = slots.stop_table[slots.kind[row], tokens[-1]]
            text = self.tokenizer.decode(tokens[:-1] if ends else tokens)
        logprobs, raw = (x[row, :count].tolist() for x in (slots.logprobs, slots.raw))
        return Completion(request.name, sample, tokens, text, logprobs, raw, reason)
