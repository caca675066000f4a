"""The runner in torch: one cache of all rows, of which a step uses a view."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from sabia.core.generate.pages import PAGE, ROOT, Begun, Kept
from sabia.core.generate.requests import Echo, Ranked
from sabia.core.generate.runner.draw_torch import Columns, draw, likeliest, verify
from sabia.core.generate.runner.graphs_torch import StepGraphs
from sabia.core.generate.runner.interface import (
    ECHO_POSITIONS,
    Drawn,
    Model,
    Prefilled,
    Proposed,
)
from sabia.core.generate.runner.shared_prefixes import SharedPrefixes
from sabia.core.generate.sampling import RowParams
from sabia.core.model import forward
from sabia.core.ops.base import Params, dtype_name
from sabia.core.ops.kv_cache import KVCache
from sabia.core.ops.row_adapters import adapters_of, row_adapters

Tensor = torch.Tensor
READ_STEP = 16  # a step reads a multiple of so many positions
RECORDED = frozenset({"experts"})


class TorchRunner:
    """See core.generate.runner.interface.Runner."""

    def __init__(
        self, model: Model, capacity: int, context: int, pages: int = 0, states: int = 0,
        slack: int = 0,
    ) -> None:  # fmt: skip
        self.model = model
        self.records = False
        self.experts: np.ndarray | None = None
        # in a ring keys have another order than in a row
        self._cache = self._new_cache(capacity, context, None if model.ops.exact else slack)
        embed = model.params["embed"]
        self._pages = KVCache.pages(
            model.cached, pages, PAGE, states, model.ops, dtype_name(embed), embed
        )
        self._columns: Columns | None = None
        self._adapters = np.zeros(capacity, np.int64)  # of each row
        self._stateful = any("state" in layer for layer in self._cache.layers)
        self._ahead: KVCache | None = None  # with the states after steps ahead
        self._last: tuple[np.ndarray, np.ndarray, np.ndarray | None]  # step ahead
        # a graph would keep the adapters of the rows that it was captured with
        alone = row_adapters(model.ops) is None and model.split is None
        graphs = self._device.type == "cuda" and alone
        sizes = capacity, min(context, self._cache.slots)
        self._graphs = StepGraphs(self._one_each, self._device, *sizes) if graphs else None
        self._shared = SharedPrefixes()
        self._version = 0  # of the parameters
        self._source: Params = {}
        self._prepared: Params = {}

    def computing(self) -> AbstractContextManager[Any]:
        """See Runner.computing."""
        return torch.inference_mode()

    def prefill(
        self, prompts: Sequence[Sequence[int]], begun: Sequence[Begun], adapters: Sequence[str]
    ) -> Prefilled:
        """See Runner.prefill."""
        lengths = np.array([len(prompt) for prompt in prompts])
        starts = np.array([len(one) for one in begun])
        width = int(starts.max() + (lengths - starts).max())
        cache = self._new_cache(len(prompts), -(-width // PAGE) * PAGE)
        self._load(cache, begun)
        ends = np.array([one.keep_at for one in begun])
        numbers = adapters_of(self.model.ops, adapters)
        states = list[dict[str, Tensor]]()
        if (ends > starts).any():  # states are kept where a page ends
            ends = np.maximum(ends, starts)
            self._run(prompts, starts, ends, cache, numbers)
            states = [dict(layer) if "state" in layer else {} for layer in cache.layers]
            starts = ends
        hidden = self._run(prompts, starts, lengths, cache, numbers)
        last = self._tensor(lengths - starts - 1)
        logits = self._logits(hidden[torch.arange(len(prompts), device=self._device), last])
        return Prefilled(logits, hidden, cache, states, lengths, numbers, prompts)

    def keep(self, prefilled: Prefilled | None, kept: Kept) -> None:
        """See Runner.keep."""
        source = self._cache if prefilled is None else prefilled.cache
        pages, rows, blocks, states, state_rows = (
            self._tensor(np.array(numbers, np.int64))
            for numbers in (kept.pages, kept.rows, kept.blocks, kept.states, kept.state_rows)
        )
        for index, (ours, theirs) in enumerate(zip(self._pages.layers, source.layers, strict=True)):
            for name, array in ours.items():
                if "state" not in ours:
                    array[pages] = theirs[name].unflatten(1, (-1, PAGE))[rows, blocks]
                elif prefilled is not None and kept.states:
                    array[states] = prefilled.states[index][name][state_rows]

    def _load(self, cache: KVCache, begun: Sequence[Begun]) -> None:
        """Copy what is in pages to the rows of a cache."""
        most = max(len(one.pages) for one in begun)
        if not most:
            return
        # rows of fewer pages get others after these, which their own tokens replace
        pages = np.array([[*one.pages, *[0] * (most - len(one.pages))] for one in begun])
        rows = np.flatnonzero([one.state != ROOT for one in begun])
        states = np.array([one.state for one in begun], np.int64)[rows]
        to, numbers, of_rows = self._tensor(rows), self._tensor(pages), self._tensor(states)
        for ours, theirs in zip(cache.layers, self._pages.layers, strict=True):
            for name, array in ours.items():
                if "state" in ours:
                    array[to] = theirs[name][of_rows]
                else:
                    array[:, : most * PAGE] = theirs[name][numbers].flatten(1, 2)

    def _run(
        self, prompts: Sequence[Sequence[int]], starts: np.ndarray, ends: np.ndarray,
        cache: KVCache, adapters: np.ndarray,
    ) -> Tensor:  # fmt: skip
        """Run the tokens starts[p]..ends[p] of each prompt; their hidden states [P, T, D]."""
        cache.lengths = ends - starts
        ids = np.zeros((len(prompts), int(cache.lengths.max())), np.int64)
        for row, (prompt, start, end) in enumerate(zip(prompts, starts, ends, strict=True)):
            ids[row, : end - start] = prompt[start:end]
        positions = starts[:, None] + np.arange(ids.shape[1])
        return self._hidden(self._tensor(ids), self._tensor(positions), cache, adapters)

    def admit(self, prefilled: Prefilled, which: np.ndarray, first: int) -> None:
        """See Runner.admit."""
        rows, width = self._tensor(which), int(prefilled.lengths.max())
        adapters = self._adapters[first : first + len(which)] = prefilled.adapters[which]
        mine = [prefilled.prompts[one] for one in which.tolist()]
        self._shared.admit(mine, first, self._version, adapters)
        for ours, theirs in zip(self._cache.layers, prefilled.cache.layers, strict=True):
            for name, tensor in ours.items():
                new, made = tensor[first : first + len(which)], theirs[name]
                if "state" in ours:
                    new[:] = made[rows]
                elif width <= tensor.shape[1]:
                    new[:, :width] = made[rows, :width]
                else:  # a window: the last token of those that have a slot in common
                    size, ends = tensor.shape[1], prefilled.lengths[which, None] - 1
                    last = ends - (ends - np.arange(size)) % size
                    new[:] = made[rows[:, None], self._tensor(np.maximum(last, 0))]

    def width(self, tokens: int) -> int:
        """See Runner.width."""
        return tokens

    def step(
        self, ids: np.ndarray, positions: np.ndarray, counts: np.ndarray | None = None,
        ahead: bool = False,
    ) -> Tensor:  # fmt: skip
        """See Runner.step."""
        plain = ids.shape[1] == 1 and counts is None and not ahead and not self.records
        if self._graphs is not None and plain:
            return self._graphs.step(ids, positions, self.model.params)
        hidden = self._step(ids, positions, counts, ahead)
        return self._logits(hidden.flatten(0, 1))

    def _one_each(self, ids: Tensor, positions: Tensor, reads: int) -> Tensor:
        """The logits [n, V] after tokens ids[n, 1], with arrays of the device alone."""
        view = self._cache.first(len(ids)).upto(reads)
        hidden = self._hidden(ids, positions, view, self._adapters[: len(ids)])
        self._cache.take_states(view, len(ids))
        return self._logits(hidden[:, 0])

    def _step(
        self, ids: np.ndarray, positions: np.ndarray, counts: np.ndarray | None, ahead: bool
    ) -> Tensor:
        """The hidden states [n, T, D] of a step."""
        reads = -(-int(positions.max() + 1) // READ_STEP) * READ_STEP
        view = self._ahead if ahead and self._ahead else self._cache.first(len(ids))
        view.upto(min(reads, self._cache.slots)).lengths = counts
        if self._device.type == "cpu":
            view.shared = self._shared.of(len(ids))
        adapters = self._adapters[: len(ids)]
        hidden = self._hidden(self._tensor(ids), self._tensor(positions), view, adapters)
        if ahead and self._stateful:
            self._ahead, self._last = view, (ids, positions, counts)
        else:
            self._cache.take_states(view, len(ids))
        return hidden

    def settle(self, counts: np.ndarray | None) -> None:
        """See Runner.settle."""
        view, self._ahead = self._ahead, None
        if view is None or counts is None:
            return
        ids, positions, written = self._last
        if np.array_equal(counts, written if written is not None else counts * 0 + ids.shape[1]):
            self._cache.take_states(view, len(ids))
        else:
            most = int(counts.max())
            self._step(ids[:, :most], positions[:, :most], counts, ahead=False)

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See Runner.move."""
        self._adapters[target] = self._adapters[source]
        self._shared.move(source, target)
        moved, to = self._tensor(source), self._tensor(target)
        for layer in self._cache.layers:
            for tensor in layer.values():
                tensor[to] = tensor[moved]

    def draw(
        self,
        logits: Tensor,
        which: np.ndarray | None,
        params: RowParams,
        uniform: np.ndarray,
        bias: np.ndarray | None,
    ) -> Drawn:
        """See Runner.draw."""
        if self._columns is None or self._columns.of is not params:
            self._columns = Columns(params, self._device)
        chosen = logits[: len(params)] if which is None else logits[self._tensor(which)]
        drawn = draw(chosen, self._columns, uniform, bias, self.model.ops.exact)
        made = Drawn(*(x.cpu().numpy() for x in drawn))
        return made if self.model.split is None else self.model.split.agreed(made)

    def stacked(self, parts: Sequence[tuple[Tensor, np.ndarray]]) -> Tensor:
        """See Runner.stacked."""
        return torch.stack([logits[self._tensor(which)] for logits, which in parts])

    def verify(
        self, logits: Tensor, which: np.ndarray, params: RowParams, uniform: np.ndarray,
        bias: np.ndarray | None, proposed: Proposed,
    ) -> tuple[Drawn, np.ndarray]:  # fmt: skip
        """See Runner.verify."""
        theirs = proposed.logits[self._tensor(proposed.steps), self._tensor(proposed.rows)]
        draft = theirs, self._tensor(proposed.tokens), self._tensor(proposed.uniform)
        columns = Columns(params, self._device)
        *made, kept = verify(logits[self._tensor(which)], columns, uniform, bias, *draft)
        checked = Drawn(*(x.cpu().numpy() for x in made)), kept.cpu().numpy()
        return checked if self.model.split is None else self.model.split.agreed(checked)

    def likeliest(self, logits: Tensor, which: np.ndarray, count: int) -> list[Ranked]:
        """See Runner.likeliest."""
        return [*likeliest(logits[self._tensor(which)], count)]

    def echo(self, prefilled: Prefilled, row: int, prompt: Sequence[int], ranked: int) -> Echo:
        """See Runner.echo."""
        ids, hidden = self._tensor(np.array(prompt)), prefilled.hidden[row]
        logprobs, best = list[float](), list[Ranked]()
        for begin in range(0, len(prompt) - 1, ECHO_POSITIONS):
            end = min(begin + ECHO_POSITIONS, len(prompt) - 1)
            logits = self._logits(hidden[begin:end])
            given = torch.log_softmax(logits, -1).gather(1, ids[begin + 1 : end + 1, None])
            logprobs += given[:, 0].tolist()
            if ranked:
                best += likeliest(logits, ranked)
        return Echo(logprobs, best)

    @property
    def _params(self) -> Params:
        """The model's present parameters, prepared."""
        if self.model.params is not self._source:
            self._source, self._prepared = self.model.params, self.model.prepared()
            self._version += 1
        return self._prepared

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.model.params["embed"].device
        return device

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _new_cache(self, rows: int, positions: int, slack: int | None = None) -> KVCache:
        model, embed = self.model, self.model.params["embed"]
        create = KVCache.create
        return create(model.cached, rows, positions, model.ops, dtype_name(embed), embed, slack)

    def _hidden(
        self, ids: Tensor, positions: Tensor, cache: KVCache, adapters: np.ndarray
    ) -> Tensor:
        if (rule := row_adapters(self.model.ops)) is not None:
            rule.rows = adapters
        spec, params, ops = self.model.spec, self._params, self.model.ops
        given: Any = {"positions": positions, "cache": cache}
        given["wanted"] = RECORDED if self.records else frozenset()
        hidden, stats = forward.hidden_and_stats(spec, params, ids, ops, **given)
        if self.records:
            chosen = torch.stack([*stats["experts"].values()], 2)
            self.experts = chosen.to(torch.int16).cpu().numpy()
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits[B, V] of hidden states [B, D]."""
        model = self.model
        logits: Tensor = forward.logits(model.spec, self._params, hidden[:, None], model.ops)
        return logits[:, 0] if model.split is None else model.split.whole_vocabulary(logits[:, 0])
