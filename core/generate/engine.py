"""A small generation engine: continuous batching over a slot KV cache, in torch or JAX.

Tokens depend on (seed, request id, sample, position) and on the model; the other rows of a batch
can change logits in the last bits only. For models that need paged attention use an
OpenAI-compatible server instead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.generate.prefixes import Prefix, prefix_tree
from sabia.core.generate.requests import Completion, Request
from sabia.core.generate.runner.interface import Runner
from sabia.core.generate.runner.load import load_runner
from sabia.core.generate.session import Session
from sabia.core.generate.slots import CONTEXT_STEP
from sabia.core.ops.backend import load_ops
from sabia.core.ops.base import Ops, dtype_name
from sabia.core.ops.kv_cache import KVCache
from sabia.core.ops.row_adapters import adapters_of, row_adapters
from sabia.core.spec import ModelSpec
from sabia.core.spec.model import check_predicts

SLOTS = 512
LEAST_SAVED = 256  # tokens, for which a prefix is run apart
CACHE_BYTES = 4 << 30


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
        shares_prefixes: bool = False,
    ) -> None:
        """`params` are NumPy arrays or tensors by spec name; arrays are moved to the device.

        `slots` samples are decoded together, fewer where their cache would exceed `cache_bytes`.
        `on_step` is called before each step and may raise to end a call (a stop signal). `ops`:
        those of the backend, with rules (default: torch, without).
        `shares_prefixes`: what many prompts of a call begin with is run once; the parameters must
        stay as they are during a call, and the caches of these prefixes are a fifth of
        `cache_bytes`.
        """
        check_predicts(spec)
        self.spec, self.tokenizer = spec, tokenizer
        self.ops = ops or load_ops("torch")
        self.dtype = dtype
        self.params = self.placed(params)
        self.slots, self.cache_bytes, self.on_step = slots, cache_bytes, on_step
        self.shares_prefixes = shares_prefixes

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters that requests may have."""
        rule = row_adapters(self.ops)
        return rule.names[1:] if rule else ()

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters, arrays among them moved to the device."""
        arrays = {name: value for name, value in params.items() if isinstance(value, np.ndarray)}
        return {**params, **(self.ops.to_device(arrays, self.dtype) if arrays else {})}

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
        adapters_of(self.ops, [request.adapter for request in requests])
        if requests:
            yield from self._run(requests)

    def _run(self, requests: Sequence[Request]) -> Iterator[Completion]:
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        context = -(-longest // CONTEXT_STEP) * CONTEXT_STEP
        # slots for this call: as requested, limited by the cache size, at least one group
        counts = [len(request.samples) for request in requests]
        for_prefixes = self.cache_bytes // 5 * self.shares_prefixes
        position_bytes, state_bytes = self.cache_size()
        fit = (self.cache_bytes - for_prefixes) // (context * position_bytes + state_bytes)
        capacity = max(min(self.slots, sum(counts), fit), max(counts))
        session = self.session(capacity, context, max(r.max_new_tokens for r in requests))
        for prefix in self._prefixes(requests, for_prefixes):
            for number in sorted(prefix.members):
                session.add(requests[number], prefix)
        while session.busy:
            if self.on_step is not None:
                self.on_step()
            with session.runner.computing():
                ended = session.step()
            yield from (one.completion for one in ended)

    def _prefixes(self, requests: Sequence[Request], cache_bytes: int) -> list[Prefix]:
        """What prompts begin with, depth first; the members are numbers of requests."""
        if not self.shares_prefixes:
            return [Prefix(members=list(range(len(requests))))]
        # of each prompt one token or more is left to run, and all of it for its log-probabilities
        prompts = [() if r.echo or r.adapter else r.prompt[:-1] for r in requests]
        position_bytes, state_bytes = self.cache_size()
        width = max(position_bytes, 1)
        return prefix_tree(
            prompts, LEAST_SAVED, cache_bytes // width, extra=-(-state_bytes // width)
        )

    def session(self, capacity: int, context: int, max_new_tokens: int) -> Session:
        """A session for `capacity` samples of `context` positions."""
        return Session(self, self.runner(capacity, context), capacity, max_new_tokens)

    def runner(self, capacity: int, context: int) -> Runner:
        """A runner with a cache of `capacity` rows of `context` positions."""
        return load_runner(self, capacity, context)

    def cache_size(self) -> tuple[int, int]:
        """(bytes of the cache for a position of a sample, for its state, which has no length)."""
        create, like = KVCache.create, self.params["embed"]
        one, two = (
            create(self.spec, 1, slots, self.ops, dtype_name(like), like).nbytes for slots in (1, 2)
        )
        return two - one, 2 * one - two
