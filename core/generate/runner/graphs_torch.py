"""CUDA graphs of decoding steps: one launch instead of hundreds of small kernels.

A step of one token a row is a graph of a number of rows and of slots that attention reads; both are
rounded up, so that few graphs serve a whole generation. The rows added hold nothing: what they
write is replaced when a sample is admitted to them. Graphs keep the addresses of the parameters and
of the cache, and are captured again when other parameters are given.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from sabia.core import notes

Tensor = torch.Tensor
Step = Callable[[Tensor, Tensor, int], Tensor]
WARM_UP = 2  # steps before a capture, which compile kernels and choose algorithms
LEAST_SLOTS = 256
MOST = 256  # graphs


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    ids: Tensor
    positions: Tensor
    logits: Tensor


def rounded_up(count: int, least: int = 1) -> int:
    """The next number of at most three significant bits, so at most a quarter more; ≥ `least`."""
    step = 1 << max((count - 1).bit_length() - 3, 0)
    return max(-(-count // step) * step, least)


def padded(values: np.ndarray, rows: int) -> np.ndarray:
    """values[n, 1] with zeros for further rows."""
    return np.pad(values, ((0, rows - len(values)), (0, 0)))


class StepGraphs:
    """The graphs of one cache. run(ids[n, 1], positions[n, 1], slots read) makes a step."""

    def __init__(self, run: Step, device: torch.device, rows: int, slots: int) -> None:
        """rows, slots: of the cache."""
        self._run, self._device, self._rows, self._slots = run, device, rows, slots
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._uses: dict[tuple[int, int], int] = {}
        self._pool: Any = None
        self._params: Mapping[str, Any] | None = None
        self._works = True

    def step(self, ids: np.ndarray, positions: np.ndarray, params: Mapping[str, Any]) -> Tensor:
        """Logits[n or more, V] of a step with the parameters."""
        if params is not self._params:
            self._graphs, self._uses, self._params = {}, {}, params
        rows = min(rounded_up(len(ids)), self._rows)
        reads = min(rounded_up(int(positions.max()) + 1, LEAST_SLOTS), self._slots)
        tokens, at = (torch.from_numpy(padded(x, rows)) for x in (ids, positions))
        if (one := self._graph(rows, reads)) is None:
            return self._run(tokens.to(self._device), at.to(self._device), reads)
        one.ids.copy_(tokens)
        one.positions.copy_(at)
        one.graph.replay()
        return one.logits.clone()  # the next step writes there

    def _graph(self, rows: int, reads: int) -> _Graph | None:
        """The graph of a size, once it has been used often enough."""
        key = rows, reads
        if key not in self._graphs:
            self._uses[key] = self._uses.get(key, 0) + 1
            if not self._works or self._uses[key] <= WARM_UP or len(self._graphs) >= MOST:
                return None
            try:
                self._graphs[key] = self._captured(rows, reads)
            except RuntimeError as error:  # an operation that waits for the device
                self._works = False
                first = (str(error).splitlines() or [""])[0]
                notes.warn(f"generation without CUDA graphs, which is slower: {first}")
                return None
        return self._graphs[key]

    def _captured(self, rows: int, reads: int) -> _Graph:
        ids, positions = (
            torch.zeros((rows, 1), dtype=torch.int64, device=self._device) for _ in range(2)
        )
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # other threads of a server may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._run(ids, positions, reads)
        return _Graph(graph, ids, positions, logits)
