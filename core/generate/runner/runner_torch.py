"""The runner in torch: one cache of all rows, of which a step uses a view."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from sabia.core.generate.prefixes import Prefix, PrefixCaches
from sabia.core.generate.requests import Echo, Ranked
from sabia.core.generate.runner.draw_torch import Columns, draw, likeliest
from sabia.core.generate.runner.interface import ECHO_POSITIONS, Drawn, Model, Prefilled
from sabia.core.generate.sampling import RowParams
from sabia.core.model import forward
from sabia.core.ops.base import dtype_name
from sabia.core.ops.row_adapters import adapters_of, row_adapters

Tensor = torch.Tensor
READ_STEP = 16  # a step reads a multiple of so many positions


class TorchRunner:
    """See core.generate.runner.interface.Runner."""

    def __init__(self, model: Model, capacity: int, context: int) -> None:
        self.model = model
        self._cache = self._new_cache(capacity, context)
        self._prefixes = PrefixCaches(
            self._run_prefix, lambda slots: self._new_cache(1, slots), model.ops
        )
        self._columns: Columns | None = None
        self._adapters = np.zeros(capacity, np.int64)  # of each row

    def computing(self) -> AbstractContextManager[Any]:
        """See Runner.computing."""
        return torch.inference_mode()

    def prefill(
        self, prompts: Sequence[Sequence[int]], prefix: Prefix, adapters: Sequence[str]
    ) -> Prefilled:
        """See Runner.prefill."""
        start, width = len(prefix), max(map(len, prompts))
        ids = np.zeros((len(prompts), width - start), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - start] = prompt[start:]
        lengths = np.array([len(prompt) for prompt in prompts])
        cache = self._new_cache(len(prompts), width)
        cache.lengths = lengths - start
        if start:
            for ours, theirs in zip(cache.layers, self._prefixes.of(prefix).layers, strict=True):
                for name, tensor in ours.items():
                    (tensor if "state" in ours else tensor[:, :start])[:] = theirs[name]
        positions = np.tile(np.arange(start, width), (len(ids), 1))
        numbers = adapters_of(self.model.ops, adapters)
        hidden = self._hidden(self._tensor(ids), self._tensor(positions), cache, numbers)
        rows = torch.arange(len(ids), device=self._device)
        logits = self._logits(hidden[rows, self._tensor(cache.lengths - 1)])
        return Prefilled(logits, hidden, cache, lengths, numbers)

    def admit(self, prefilled: Prefilled, which: np.ndarray, first: int) -> None:
        """See Runner.admit."""
        rows, width = self._tensor(which), int(prefilled.lengths.max())
        self._adapters[first : first + len(which)] = prefilled.adapters[which]
        for ours, theirs in zip(self._cache.layers, prefilled.cache.layers, strict=True):
            for name, tensor in ours.items():
                new = tensor[first : first + len(which)]
                (new if "state" in ours else new[:, :width])[:] = theirs[name][rows]

    def step(self, ids: np.ndarray, positions: np.ndarray) -> Tensor:
        """See Runner.step."""
        reads = -(-int(positions.max() + 1) // READ_STEP) * READ_STEP
        view = self._cache.first(len(ids)).upto(min(reads, self._cache.slots))
        adapters = self._adapters[: len(ids)]
        hidden = self._hidden(self._tensor(ids), self._tensor(positions), view, adapters)
        self._cache.take_states(view, len(ids))
        return self._logits(hidden.flatten(0, 1))

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See Runner.move."""
        self._adapters[target] = self._adapters[source]
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
        return Drawn(*(x.cpu().numpy() for x in draw(chosen, self._columns, uniform, bias)))

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
    def _device(self) -> torch.device:
        device: torch.device = self.model.params["embed"].device
        return device

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _new_cache(self, rows: int, positions: int) -> forward.KVCache:
        model, embed = self.model, self.model.params["embed"]
        create = forward.KVCache.create
        return create(model.spec, rows, positions, model.ops, dtype_name(embed), embed)

    def _run_prefix(
        self, ids: np.ndarray, positions: np.ndarray, cache: forward.KVCache
    ) -> forward.KVCache:
        none = np.zeros(len(ids), np.int64)
        self._hidden(self._tensor(ids), self._tensor(positions), cache, none)
        return cache

    def _hidden(
        self, ids: Tensor, positions: Tensor, cache: forward.KVCache, adapters: np.ndarray
    ) -> Tensor:
        if (rule := row_adapters(self.model.ops)) is not None:
            rule.rows = adapters
        spec, params, ops = self.model.spec, self.model.params, self.model.ops
        hidden: Tensor = forward.hidden(spec, params, ids, ops, positions=positions, cache=cache)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits[B, V] of hidden states [B, D]."""
        model = self.model
        logits: Tensor = forward.logits(model.spec, model.params, hidden[:, None], model.ops)
        return logits[:, 0]
