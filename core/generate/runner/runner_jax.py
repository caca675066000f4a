"""The runner in JAX: compiled programs of few shapes.

Rows, contexts, prompts and pages are padded to powers of two, so a session needs a program for each
doubling. The cache has as many rows and positions as the rows in flight need, and is enlarged by a
copy; programs that write it take it donated. Padding is row 0 where it is read, and out of bounds,
which JAX drops, where it is written.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sabia.core.generate.pages import PAGE, ROOT, Begun, Kept
from sabia.core.generate.requests import Echo, Ranked
from sabia.core.generate.runner.draw_jax import (
    double_precision,
    draw,
    given,
    likeliest,
    verify,
)
from sabia.core.generate.runner.interface import (
    ECHO_POSITIONS,
    Drawn,
    Model,
    Prefilled,
    Proposed,
)
from sabia.core.generate.sampling import RowParams
from sabia.core.model import forward
from sabia.core.ops.base import Ops, Params, dtype_name
from sabia.core.ops.kv_cache import KVCache, cache_shapes, ring_layers
from sabia.core.ops.row_adapters import adapters_of, row_adapters
from sabia.core.spec import ModelSpec

Array = jax.Array
Adapters = tuple[Any, Any] | None  # numbers of rows, and the matrices of all of them
Chosen = Array | None  # experts [n, T, L, k], if they are recorded
LEAST_ROWS, LEAST_POSITIONS, LEAST_TOKENS = 8, 64, 16
OUTSIDE = 1 << 30  # an index out of bounds


def padded_size(count: int, least: int, most: int = OUTSIDE) -> int:
    """The smallest `least` times a power of two that is no less than `count`, or `most`."""
    return min(max(least, 1 << max(count - 1, 0).bit_length()), most)


def _padded(values: Sequence[int] | np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """values[n] with `fill` behind them, int32 [size]."""
    made = np.full(size, fill, np.int32)
    made[: len(values)] = values
    return made


class _Programs(NamedTuple):
    """The compiled functions of one model."""

    run: Callable[..., tuple[Array, Chosen, KVCache]]
    last: Callable[..., Array]
    step: Callable[..., tuple[Array, Chosen, KVCache]]
    ahead: Callable[..., tuple[Array, Chosen, KVCache, list[dict[str, Array]]]]
    logits: Callable[..., Array]


@lru_cache(16)
def _programs(spec: ModelSpec, ops: Ops, records: bool) -> _Programs:
    rule: Any = row_adapters(ops)
    wanted = frozenset({"experts"} if records else ())

    def hidden(
        params: Params, cache: KVCache, ids: Array, positions: Array, adapters: Adapters
    ) -> tuple[Array, Chosen]:
        if adapters is not None:
            rule.bind(*adapters)
        given: Any = {"positions": positions, "cache": cache, "wanted": wanted}
        made, stats = forward.hidden_and_stats(spec, params, ids, ops, **given)
        chosen = [*stats.get("experts", {}).values()]
        return made, jnp.stack(chosen, 2).astype(jnp.int16) if chosen else None

    def run(
        params: Params,
        cache: KVCache,
        ids: Array,
        starts: Array,
        lengths: Array,
        adapters: Adapters,
    ) -> tuple[Array, Chosen, KVCache]:
        traced: Any = lengths
        cache.lengths = traced
        slots = starts[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)
        made, chosen = hidden(params, cache, ids, slots, adapters)
        cache.lengths = None
        return made, chosen, cache

    def logits(params: Params, states: Array) -> Array:
        made: Array = forward.logits(spec, params, states[:, None], ops)
        return made[:, 0]

    def last(params: Params, states: Array, at: Array) -> Array:
        return logits(params, states[jnp.arange(len(at)), at])

    def step(
        params: Params, cache: KVCache, ids: Array, positions: Array, lengths: Array | None,
        adapters: Adapters,
    ) -> tuple[Array, Chosen, KVCache]:  # fmt: skip
        traced: Any = lengths
        cache.lengths = traced
        states, chosen = hidden(params, cache, ids, positions, adapters)
        cache.lengths = None
        return logits(params, states.reshape(-1, states.shape[-1])), chosen, cache

    def ahead(
        params: Params, cache: KVCache, before: list[dict[str, Array]], *inputs: Any
    ) -> tuple[Array, Chosen, KVCache, list[dict[str, Array]]]:
        made, chosen, cache = step(params, _with_states(cache, before), *inputs)
        return made, chosen, _with_states(cache, [{} for _ in before]), _states(cache)

    donated: Any = {"donate_argnums": 1}
    return _Programs(
        jax.jit(run, **donated), jax.jit(last), jax.jit(step, **donated),
        jax.jit(ahead, **donated), jax.jit(logits),
    )  # fmt: skip


def _states(cache: KVCache) -> list[dict[str, Array]]:
    """The states of the layers that have them, nothing of others."""
    return [dict(layer) if "state" in layer else {} for layer in cache.layers]


def _with_states(cache: KVCache, states: list[dict[str, Array]]) -> KVCache:
    """A cache with the states of another in the layers that have them."""
    pairs = zip(cache.layers, states, strict=True)
    kept = [state if state or "state" in layer else layer for layer, state in pairs]
    return replace(cache, layers=kept)


@jax.jit
def _load(pages: KVCache, numbers: Array, states: Array) -> list[dict[str, Array]]:
    """The layers of a cache whose rows begin with pages numbers[P, n]; states[P]: out of bounds for
    rows without one."""

    def row(name: str, layer: dict[str, Array]) -> Array:
        if "state" in layer:
            return layer[name].at[states].get(mode="fill", fill_value=0)
        taken = layer[name].at[numbers].get(mode="fill", fill_value=0)  # [P, n, PAGE, K, N]
        return taken.reshape(len(numbers), -1, *taken.shape[3:])

    return [{name: row(name, layer) for name in layer} for layer in pages.layers]


@partial(jax.jit, donate_argnums=0)
def _keep(
    pages: KVCache, made: KVCache, states: list[dict[str, Array]], numbers: Array, rows: Array,
    blocks: Array, of_states: Array, state_rows: Array,
) -> KVCache:  # fmt: skip
    """Pages `numbers` from page `blocks` of rows `rows`; the states `of_states` from state_rows."""
    layers = []
    for layer, new, state in zip(pages.layers, made.layers, states, strict=True):
        if "state" in layer:
            layers.append({n: x.at[of_states].set(state[n][state_rows], mode="drop") if state else x
                           for n, x in layer.items()})  # fmt: skip
            continue
        cut = {n: x.reshape(len(x), -1, PAGE, *x.shape[2:])[rows, blocks] for n, x in new.items()}
        layers.append({n: x.at[numbers].set(cut[n], mode="drop") for n, x in layer.items()})
    return replace(pages, layers=layers)


@partial(jax.jit, donate_argnums=0)
def _admit(cache: KVCache, made: KVCache, which: Array, first: Array, ends: Array) -> KVCache:
    """Rows first.. of the cache from rows `which` of prompts, the last tokens of which are at
    ends[B]; which: out of bounds for padding."""
    to = jnp.where(which < OUTSIDE, first + jnp.arange(len(which)), OUTSIDE)
    layers = []
    for layer, new in zip(cache.layers, made.layers, strict=True):
        rows = {}
        for name, x in layer.items():
            if "state" in layer:
                rows[name] = x.at[to].set(new[name][which], mode="drop")
                continue
            size, width = x.shape[1], new[name].shape[1]
            # of a window: the last token of those that have a slot in common
            slots = jnp.arange(size)
            last = ends[:, None] - (ends[:, None] - slots) % size
            last = jnp.clip(last, 0, width - 1)
            rows[name] = x.at[to].set(new[name][which[:, None], last], mode="drop")
        layers.append(rows)
    return replace(cache, layers=layers)


@partial(jax.jit, donate_argnums=0)
def _move(cache: KVCache, source: Array, target: Array) -> KVCache:
    layers = [{name: x.at[target].set(x[source], mode="drop") for name, x in layer.items()}
              for layer in cache.layers]  # fmt: skip
    return replace(cache, layers=layers)


class JaxRunner:
    """See core.generate.runner.interface.Runner."""

    def __init__(
        self, model: Model, capacity: int, context: int, pages: int = 0, states: int = 0,
        slack: int = 0,
    ) -> None:  # fmt: skip
        self.model, self._capacity, self._context, self._slack = model, capacity, context, slack
        ops: Any = model.ops
        self._compiled = [_programs(model.spec, ops, records) for records in (False, True)]
        self.records = False
        self.experts: np.ndarray | None = None
        embed = model.params["embed"]
        self._dtype, self._size = dtype_name(embed), (0, 0)
        self._cache = KVCache([{} for _ in model.spec.layers])
        self._rule: Any = row_adapters(ops)
        self._adapters = np.zeros(capacity, np.int64)  # of each row
        self._ahead: list[dict[str, Array]] = []  # the states after steps ahead
        self._last: tuple[np.ndarray, np.ndarray, np.ndarray | None]  # step ahead
        empty = KVCache.pages(model.spec, pages, PAGE, states, model.ops, self._dtype, embed)
        self._pages = KVCache(self._placed(empty.layers))

    def _placed(self, layers: list[dict[str, Array]]) -> list[dict[str, Array]]:
        """The layers of a cache on the devices that hold the model."""
        split: Any = self.model.split
        return split.of_cache(layers) if split else layers

    @property
    def _programs(self) -> _Programs:
        return self._compiled[self.records]

    def _note(self, chosen: Chosen, rows: int) -> None:
        self.experts = None if chosen is None else np.asarray(chosen)[:rows]

    def computing(self) -> AbstractContextManager[Any]:
        """See Runner.computing."""
        return nullcontext()

    def prefill(
        self, prompts: Sequence[Sequence[int]], begun: Sequence[Begun], adapters: Sequence[str]
    ) -> Prefilled:
        """See Runner.prefill."""
        numbers = adapters_of(self.model.ops, adapters)
        rows = padded_size(len(prompts), 1)
        lengths = np.array([len(prompt) for prompt in prompts])
        starts = np.array([len(one) for one in begun])
        ends = np.array([one.keep_at for one in begun])
        parts = [np.maximum(ends, starts), lengths] if (ends > starts).any() else [lengths]
        # positions of padding lie behind those of every row
        width, after = 0, starts
        for part in parts:
            width = max(width, int(after.max()) + _tokens(part - after))
            after = part
        blocks = padded_size(width, LEAST_POSITIONS) // PAGE
        pages, of_states = np.full((rows, blocks), OUTSIDE, np.int32), [ROOT] * rows
        for row, one in enumerate(begun):
            pages[row, : len(one.pages)] = one.pages
            of_states[row] = one.state
        free = [OUTSIDE if number == ROOT else number for number in of_states]
        cache = KVCache(self._begun(pages, np.array(free, np.int32)))
        states: list[dict[str, Array]] = []
        for part in parts:
            hidden, cache = self._run(prompts, starts, part, numbers, cache)
            if part is not lengths:  # states are kept where a page ends
                copies = ({name: jnp.copy(x) for name, x in layer.items()} if "state" in layer
                          else {} for layer in cache.layers)  # fmt: skip
                states = list(copies)
                starts = part
        at = _padded(lengths - starts - 1, rows)
        logits = self._programs.last(self.model.params, hidden, at)
        return Prefilled(logits, hidden, cache, states, lengths, numbers)

    def _begun(self, numbers: np.ndarray, states: np.ndarray) -> list[dict[str, Array]]:
        """The layers of a cache for prompts that begin with these pages."""
        if (numbers < OUTSIDE).any():
            return _load(self._pages, numbers, states)
        shapes = (len(numbers), numbers.shape[1] * PAGE)
        made = KVCache.create(self.model.spec, *shapes, self.model.ops, self._dtype)
        return self._placed(made.layers)

    def _run(
        self, prompts: Sequence[Sequence[int]], starts: np.ndarray, ends: np.ndarray,
        adapters: np.ndarray, cache: KVCache,
    ) -> tuple[Array, KVCache]:  # fmt: skip
        """Run the tokens starts[p]..ends[p] of each prompt; their hidden states [rows, T, D]."""
        rows = padded_size(len(prompts), 1)
        ids = np.zeros((rows, _tokens(ends - starts)), np.int32)
        for row, (prompt, start, end) in enumerate(zip(prompts, starts, ends, strict=True)):
            ids[row, : end - start] = prompt[start:end]
        where = _padded(starts, rows), _padded(ends - starts, rows)
        own = self._of_rows(adapters, rows)
        made, chosen, cache = self._programs.run(self.model.params, cache, ids, *where, own)
        self._note(chosen, len(prompts))
        return made, cache

    def _of_rows(self, adapters: np.ndarray, rows: int) -> Adapters:
        """The argument of programs for the adapters of rows, padded to so many."""
        return None if self._rule is None else (_padded(adapters, rows), self._rule.stacked)

    def keep(self, prefilled: Prefilled | None, kept: Kept) -> None:
        """See Runner.keep."""
        if not kept.pages and not kept.states:
            return
        size = padded_size(len(kept.pages), 1)
        pages = _padded(kept.pages, size, OUTSIDE)
        of_prompts = _padded(kept.rows, size), _padded(kept.blocks, size)
        source = self._cache if prefilled is None else prefilled.cache
        count = padded_size(max(len(kept.states), 1), 1)
        states = _padded(kept.states, count, OUTSIDE), _padded(kept.state_rows, count)
        copies = prefilled.states if prefilled is not None else []
        copies = copies or [{} for _ in self._pages.layers]
        self._pages = _keep(self._pages, source, copies, pages, *of_prompts, *states)

    def admit(self, prefilled: Prefilled, which: np.ndarray, first: int) -> None:
        """See Runner.admit."""
        self._fit(first + len(which), int(prefilled.lengths.max()) + 1)
        self._adapters[first : first + len(which)] = prefilled.adapters[which]
        size = padded_size(len(which), 1)
        ends = _padded(prefilled.lengths[which] - 1, size)
        rows = _padded(which, size, OUTSIDE)
        self._cache = _admit(self._cache, prefilled.cache, rows, np.int32(first), ends)

    def width(self, tokens: int) -> int:
        """See Runner.width: one of few."""
        if 1 < tokens <= self._slack + 1:
            return self._slack + 1
        return padded_size(tokens, 1)

    def step(
        self, ids: np.ndarray, positions: np.ndarray, counts: np.ndarray | None = None,
        ahead: bool = False,
    ) -> Array:  # fmt: skip
        """See Runner.step."""
        self._fit(len(ids), int(positions.max()) + 1)
        inputs = np.zeros((2, self._size[0], ids.shape[1]), np.int32)
        inputs[0, : len(ids)], inputs[1, : len(ids)] = ids, positions
        lengths = None if counts is None else _padded(counts, self._size[0])
        params, states = self.model.params, _states(self._cache)
        own = self._of_rows(self._adapters[: len(ids)], self._size[0])
        if not (ahead and any(states)):
            given = self._cache, *inputs, lengths, own
            made, chosen, self._cache = self._programs.step(params, *given)
            self._note(chosen, len(ids))
            return made
        bare = _with_states(self._cache, [{} for _ in states])
        given = bare, self._ahead or states, *inputs, lengths, own
        made, chosen, cache, self._ahead = self._programs.ahead(params, *given)
        self._note(chosen, len(ids))
        self._cache, self._last = _with_states(cache, states), (ids, positions, counts)
        return made

    def settle(self, counts: np.ndarray | None) -> None:
        """See Runner.settle."""
        states, self._ahead = self._ahead, []
        if not states or counts is None:
            return
        ids, positions, written = self._last
        if np.array_equal(counts, written if written is not None else counts * 0 + ids.shape[1]):
            self._cache = _with_states(self._cache, states)
            return
        rows, tokens = self._size[0], np.zeros((self._size[0], ids.shape[1]), np.int32)
        tokens[: len(ids)] = ids
        where = _padded(positions[:, 0], rows), _padded(counts, rows)
        own = self._of_rows(self._adapters[: len(ids)], rows)
        self._cache = self._programs.run(self.model.params, self._cache, tokens, *where, own)[-1]

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See Runner.move."""
        size = padded_size(len(source), 1)
        self._adapters[target] = self._adapters[source]
        numbers = _padded(source, size), _padded(target, size, OUTSIDE)
        self._cache = _move(self._cache, *numbers)

    def draw(
        self,
        logits: Array,
        which: np.ndarray | None,
        params: RowParams,
        uniform: np.ndarray,
        bias: np.ndarray | None,
    ) -> Drawn:
        """See Runner.draw."""
        count, (inputs, _) = len(params), _sampling(which, params, uniform, bias)
        with double_precision():
            made = draw(logits, *inputs, params.plain, params.filters)
        return Drawn(*(np.asarray(x)[:count] for x in made))

    def stacked(self, parts: Sequence[tuple[Array, np.ndarray]]) -> Array:
        """See Runner.stacked."""
        rows = padded_size(len(parts[0][1]), LEAST_ROWS)
        return jnp.stack([logits[_padded(which, rows)] for logits, which in parts])

    def verify(
        self, logits: Array, which: np.ndarray, params: RowParams, uniform: np.ndarray,
        bias: np.ndarray | None, proposed: Proposed,
    ) -> tuple[Drawn, np.ndarray]:  # fmt: skip
        """See Runner.verify."""
        count, (inputs, size) = len(params), _sampling(which, params, uniform, bias)
        draft = (_padded(x, size) for x in (proposed.steps, proposed.rows, proposed.tokens))
        keeping = np.pad(proposed.uniform, (0, size - count))
        given = proposed.logits, *draft, keeping, params.plain, params.filters
        with double_precision():
            *made, kept = verify(logits, *inputs, *given)
        return Drawn(*(np.asarray(x)[:count] for x in made)), np.asarray(kept)[:count]

    def likeliest(self, logits: Array, which: np.ndarray, count: int) -> list[Ranked]:
        """See Runner.likeliest."""
        most = min(count, logits.shape[-1])
        rows = _padded(which, padded_size(len(which), LEAST_ROWS))
        values, best = likeliest(logits[rows], most)
        return _pairs(values, best, len(which))

    def echo(self, prefilled: Prefilled, row: int, prompt: Sequence[int], ranked: int) -> Echo:
        """See Runner.echo."""
        logprobs, best, count = list[float](), list[Ranked](), len(prompt) - 1
        for begin in range(0, count, ECHO_POSITIONS):
            end = min(begin + ECHO_POSITIONS, count)
            size = padded_size(end - begin, LEAST_TOKENS)
            at = begin + _padded(np.arange(end - begin), size)
            logits = self._programs.logits(self.model.params, prefilled.hidden[row, at])
            ids = _padded(prompt[begin + 1 : end + 1], size)
            logprobs += np.asarray(given(logits, ids))[: end - begin].tolist()
            if ranked:
                most = min(ranked, logits.shape[-1])
                values, likely = likeliest(logits, most)
                best += _pairs(values, likely, end - begin)
        return Echo(logprobs, best)

    def _fit(self, rows: int, positions: int) -> None:
        """Give the cache so many rows and positions; it keeps what it has."""
        has_rows, has_positions = self._size
        needed = padded_size(rows, LEAST_ROWS, max(self._capacity, LEAST_ROWS))
        if needed > has_rows or 4 * needed <= has_rows:
            has_rows = needed
        if positions > has_positions:
            has_positions = padded_size(positions, LEAST_POSITIONS, self._context)
        if (has_rows, has_positions) == self._size:
            return
        spec = self.model.spec
        shapes = cache_shapes(spec, has_rows, has_positions, self._dtype, self._slack)
        if not self._size[0]:
            layers = KVCache.create(
                spec, has_rows, has_positions, self.model.ops, self._dtype, slack=self._slack
            ).layers
        else:
            layers = [
                {name: _resized(x, shapes[index][name][0]) for name, x in layer.items()}
                for index, layer in enumerate(self._cache.layers)
            ]
        self._size = has_rows, has_positions
        rings = ring_layers(spec, has_positions, self._slack)
        self._cache = KVCache(self._placed(layers), rings=rings, slack=self._slack)


def _sampling(
    which: np.ndarray | None, params: RowParams, uniform: np.ndarray, bias: np.ndarray | None
) -> tuple[tuple[Any, ...], int]:
    """(rows of logits, columns of `params`, uniform numbers, biases) and their padded number."""
    count, size = len(params), padded_size(len(params), LEAST_ROWS)
    pad = (0, size - count)
    rows = _padded(np.arange(count) if which is None else which, size)
    columns = tuple(np.pad(column, pad, mode="edge") for column in params.columns)
    more = None if bias is None else np.pad(bias, (pad, (0, 0)))
    return (rows, columns, np.pad(uniform, pad), more), size


def _tokens(counts: np.ndarray) -> int:
    """The padded number of tokens of a row."""
    return padded_size(int(counts.max()), LEAST_TOKENS)


def _resized(x: Array, shape: Sequence[int]) -> Array:
    """x with other numbers of rows and positions."""
    x = x[tuple(slice(size) for size in shape)]
    return jnp.pad(x, [(0, more - size) for more, size in zip(shape, x.shape, strict=True)])


def _pairs(values: Array, ids: Array, count: int) -> list[Ranked]:
    pairs = zip(np.asarray(ids)[:count].tolist(), np.asarray(values)[:count].tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]
