"""A small generation engine: continuous batching over a slot KV cache, in torch or JAX.

Tokens depend on (seed, request id, sample, position) and on the model; the other rows of a batch
can change logits in the last bits only. For models that need paged attention use an
OpenAI-compatible server instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sabia.core import units
from sabia.core.errors import UsageError
from sabia.core.generate.pages import PAGE, PageTable
from sabia.core.generate.requests import Completion, Request
from sabia.core.generate.runner.interface import Runner
from sabia.core.generate.runner.load import load_runner
from sabia.core.generate.runner.memory import cache_memory
from sabia.core.generate.session import Counts, Session
from sabia.core.generate.slots import CONTEXT_STEP
from sabia.core.model.storage.stored_weights import Stored
from sabia.core.ops.base import Ops, Params, dtype_name
from sabia.core.ops.kv_cache import cache_bytes, check_context
from sabia.core.ops.row_adapters import adapters_of, row_adapters
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import ModelSpec
from sabia.core.spec.model import check_predicts
from sabia.core.text.tokenize.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sabia.core.generate.draft.draft import Draft
    from sabia.core.parallel.split_interface import SplitModel

SLOTS = 512
PAGES_SHARE = 5  # a fifth of the memory is for pages


class Engine:
    """Generates with one model; `params` may be replaced between calls (by a trainer)."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, Any],
        tokenizer: Tokenizer,
        dtype: str = "float32",
        slots: int = SLOTS,
        cache_bytes: int | None = None,
        on_step: Callable[[], None] | None = None,
        ops: Ops | None = None,
        shares_prefixes: bool = False,
        prefill_positions: int = 1 << 40,
        draft: Draft | None = None,
        split: SplitModel | None = None,
    ) -> None:
        """`params` are NumPy arrays or tensors by spec name; arrays are moved to the device.

        `slots` samples are decoded together, fewer where their cache would exceed `cache_bytes`
        (None: a share of what is free on the device), but always one if the device has room.
        `on_step` is called before each step and may raise to end a call (a stop signal). `ops`:
        those of the backend, with rules (default: torch, without).
        `shares_prefixes`: what several prompts of a call begin with is run once; its keys and
        values are kept in pages, in a fifth of `cache_bytes`, and the parameters must stay as they
        are during a call. `prefill_positions`: of the prompts that are run together. `split`: the
        processes that hold the parameters together (torch); all of them make the same calls.
        """
        check_predicts(spec)
        self.spec, self.tokenizer, self.split = spec, tokenizer, split
        self.cached = split.cached if split else spec
        self.ops = ops or load_ops("torch")
        self.dtype = dtype
        self.params = self.placed(params)
        self.slots, self.on_step = slots, on_step
        embed = self.params["embed"] if cache_bytes is None else None
        self.cache_bytes = cache_memory(embed) if cache_bytes is None else cache_bytes
        if split:
            self.cache_bytes = split.agreed(self.cache_bytes)
        self.shares_prefixes, self.prefill_positions = shares_prefixes, prefill_positions
        self.draft, self.counts = draft, Counts()  # of all calls
        self._prepared: Params = {}

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters that requests may have."""
        rule = row_adapters(self.ops)
        return rule.names[1:] if rule else ()

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters, arrays among them moved to the device, or this process's part of them."""
        arrays = {
            name: value for name, value in params.items() if isinstance(value, np.ndarray | Stored)
        }
        if self.split:
            parts = {n: self.split.to_mesh(n, x, self.dtype) for n, x in arrays.items()}
            return {**params, **parts}
        return {**params, **(self.ops.to_device(arrays, self.dtype) if arrays else {})}

    def prepared(self) -> Params:
        """The parameters for the products of a session, which stay as they are during it."""
        most_bytes = cache_memory(self.params["embed"])
        self._prepared = self.ops.prepared(self.params, self._prepared, most_bytes)
        return self._prepared

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
        row, for_pages = self.row_bytes(context), self.cache_bytes // PAGES_SHARE
        fit = (self.cache_bytes - for_pages * self.shares_prefixes) // row
        if not fit and row > (most := max(self.cache_bytes, cache_memory(self.params["embed"]))):
            raise UsageError(
                f"generate: a sample of {longest} tokens needs {units.format_bytes(row)} for keys "
                f"and values (expected at most {units.format_bytes(most)}; ask for fewer new "
                "tokens or use a machine with more memory)"
            )
        # samples decoded together: as requested, limited by the memory
        capacity = min(self.slots, sum(len(request.samples) for request in requests), max(fit, 1))
        prompts = sum(len(request.prompt) for request in requests) if self.shares_prefixes else 0
        session = self.session(
            capacity, context, max(r.max_new_tokens for r in requests), for_pages, prompts // PAGE
        )
        for request in requests:
            session.add(request)
        while session.busy:
            if self.on_step is not None:
                self.on_step()
            with session.runner.computing():
                ended = session.step()
            yield from (one.completion for one in ended)
        self.counts.add(session.counts)

    def session(
        self, capacity: int, context: int, max_new_tokens: int,
        page_memory: int = 0, most_pages: int = 1 << 40, keeps_replies: bool = False,
    ) -> Session:  # fmt: skip
        """A session for `capacity` samples of `context` positions, with pages in so many bytes."""
        table = PageTable.fitting(self.cached, self._cache_dtype, page_memory, most_pages)
        runner, drafter = self.runner(capacity, context, table), None
        if self.draft is not None:
            drafter = self.draft.drafter(capacity, context, self._row_slots(context))
        return Session(
            self,
            runner,
            capacity,
            max_new_tokens,
            table,
            keeps_replies,
            self.prefill_positions,
            drafter,
            self._slack,
        )

    def runner(self, capacity: int, context: int, table: PageTable) -> Runner:
        """A runner with a cache of `capacity` rows of `context` positions and the table's pages."""
        check_context(self.spec, context)
        pages = table.size, table.states or 0
        return load_runner(self, capacity, self._row_slots(context), *pages, self._slack)

    def row_bytes(self, context: int) -> int:
        """Bytes of the cache for a sample of `context` positions, with that of a draft model."""
        slots = self._row_slots(context)
        slack = None if self.ops.exact else self._slack
        own = cache_bytes(self.cached, 1, slots, self._cache_dtype, slack)
        return own + (self.draft.row_bytes(slots) if self.draft else 0)

    def _row_slots(self, context: int) -> int:
        """Slots of a row: whole pages, with room for tokens that are not kept."""
        return -(-(context + self._slack) // PAGE) * PAGE

    @property
    def _slack(self) -> int:
        return self.draft.tokens if self.draft else 0

    @property
    def _cache_dtype(self) -> str:
        return dtype_name(self.params["embed"])
