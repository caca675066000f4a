"""The key-value cache of decoding: per layer, arrays of a fixed number of slots per row.

`layers[i]` maps names to arrays [B, S, K, N], as the mixer's `cache_shapes` says (attention: keys
and values; latent attention: latents and one rotated key). `forward.hidden` updates the object:
under torch the arrays are written in place; under jax they are replaced, and since the class is
registered as a pytree, a jitted function takes the cache as an argument and returns it.

Layers that have a state of all tokens so far (gated delta nets) keep it instead, and a call
continues from it: `lengths[B]` says how many tokens of each row are no padding (None: all).

Layers with a window that are in `rings` keep only so many slots as their window and `slack` have;
the token at position p is in slot p modulo their number. A call writes at most `slack` + 1 tokens
of each row then, and the next call may begin at any position after the first of them: what the
former one wrote behind it is replaced, or outside of every window.

`reads` is the number of slots that attention reads (static under jit). None: computed from the
positions if that is free (torch on CPU), otherwise all slots. A caller that knows the largest
position of a call sets it with `upto(largest + 1)`; later slots are not read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.ops.base import Array, Ops
from sabia.core.spec.layers import GatedDeltaNet
from sabia.core.spec.model import ModelSpec

UNBOUNDED = 2**31
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Shapes = list[dict[str, tuple[tuple[int, ...], str]]]  # layer → name → (shape, dtype)


def ring_layers(spec: ModelSpec, slots: int, slack: int | None) -> frozenset[int]:
    """The layers whose window and slack are smaller than a row of so many slots."""
    if slack is None:
        return frozenset()
    windows = {i: getattr(layer.mixer, "window", None) for i, layer in enumerate(spec.layers)}
    return frozenset(i for i, w in windows.items() if w is not None and w + slack < slots)


def cache_shapes(
    spec: ModelSpec, batch: int, slots: int, dtype: str, slack: int | None = None
) -> Shapes:
    """The arrays of a cache by layer. slack: layers with a window keep only so many tokens more
    than it has; None: all."""
    short = ring_layers(spec, slots, slack)
    made: Shapes = []
    for index, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaNet):
            made.append({
                name: ((batch, *shape), "float32" if name == "state" else dtype)
                for name, shape in mixer.state_shapes().items()
            })  # fmt: skip
            continue
        length = mixer.window + (slack or 0) if index in short and mixer.window else slots
        shapes = mixer.cache_shapes().items()
        made.append({name: ((batch, length, *shape), dtype) for name, shape in shapes})
    return made


def cache_bytes(
    spec: ModelSpec, batch: int, slots: int, dtype: str = "float32", slack: int | None = None
) -> int:
    """Bytes of such a cache, without creating it."""
    every = (one for layer in cache_shapes(spec, batch, slots, dtype, slack)
             for one in layer.values())  # fmt: skip
    return sum(math.prod(shape) * ITEM_BYTES[kind] for shape, kind in every)


def check_context(spec: ModelSpec, slots: int) -> None:
    """Raise UsageError for rows beyond which all rotations of a text change with its length."""
    limits = [r.original_length for r in spec.ropes if r.by_length]
    if limits and slots > min(limits):
        raise UsageError(
            f"generation: {slots} tokens (expected at most {min(limits):g}: beyond it all "
            "rotations of a text change with its length; run the exported model in a server and "
            "give its URL)"
        )


def _zeros(shapes: Shapes, ops: Ops, like: Array | None) -> list[dict[str, Array]]:
    return [
        {name: ops.zeros(shape, kind, like) for name, (shape, kind) in layer.items()}
        for layer in shapes
    ]


@dataclass
class KVCache:
    """The cached arrays of all layers, for B rows of S slots."""

    layers: list[dict[str, Array]] = field(default_factory=list)
    reads: int | None = None
    lengths: np.ndarray | None = None
    rings: frozenset[int] = frozenset()  # layers that keep their window and `slack` only
    slack: int = 0
    shared: Sequence[Any] = ()  # under torch: groups of rows whose first keys and values are equal

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        batch: int,
        slots: int,
        ops: Ops,
        dtype: str = "float32",
        like: Array | None = None,
        slack: int | None = None,
    ) -> "KVCache":
        """An empty cache on the device of `like` (default: the backend's); with slack, the
        caller checks the context."""
        if not slack:
            check_context(spec, slots)
        layers = _zeros(cache_shapes(spec, batch, slots, dtype, slack), ops, like)
        return cls(layers, rings=ring_layers(spec, slots, slack), slack=slack or 0)

    @classmethod
    def pages(
        cls, spec: ModelSpec, pages: int, size: int, states: int, ops: Ops, dtype: str, like: Array
    ) -> "KVCache":
        """Arrays of `pages` pieces of `size` tokens of a row, and of `states` states."""
        pairs = zip(cache_shapes(spec, pages, size, dtype),
                    cache_shapes(spec, states, size, dtype), strict=True)  # fmt: skip
        chosen = [of_state if "state" in of_state else of_page for of_page, of_state in pairs]
        return cls(_zeros(chosen, ops, like))

    @property
    def slots(self) -> int:
        """Slots per row; without an end where all layers have a state or keep their window."""
        every = (x for index, layer in enumerate(self.layers)
                 if "state" not in layer and index not in self.rings
                 for x in layer.values())  # fmt: skip
        return next((int(x.shape[1]) for x in every), UNBOUNDED)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for layer in self.layers for x in layer.values())

    def upto(self, reads: int | None) -> "KVCache":
        """This cache, of which attention reads the first `reads` slots (None: see above)."""
        self.reads = reads
        return self

    def select(self, rows: Sequence[int] | Array) -> "KVCache":
        """A cache of copies of the given rows; a row may occur several times (shared prompt)."""
        rows = np.asarray(rows) if isinstance(rows, list | tuple | range) else rows
        layers = [{name: x[rows] for name, x in layer.items()} for layer in self.layers]
        return replace(self, layers=layers, lengths=None)

    def first(self, rows: int) -> "KVCache":
        """The first rows. Under torch what is written to keys and values is written to this cache;
        states are replaced in the result only."""
        layers = [{name: x[:rows] for name, x in layer.items()} for layer in self.layers]
        return KVCache(layers, rings=self.rings, slack=self.slack)

    def take_states(self, view: "KVCache", rows: int) -> None:
        """Set the states of the first rows to those of a view, which a call has replaced."""
        for layer, replaced in zip(self.layers, view.layers, strict=True):
            if "state" in layer:
                for name, x in replaced.items():
                    layer[name][:rows] = x

    def repeated(self, rows: int, slots: int, ops: Ops) -> "KVCache":
        """A cache of so many copies of the first row, each with empty slots after those of this
        one."""

        def copies(x: Array) -> Array:
            return x[:1] + ops.full((rows, *[1] * (len(x.shape) - 1)), 0.0, x)

        layers = []
        for layer in self.layers:
            made = {name: copies(x) for name, x in layer.items()}
            if "state" not in layer:
                more = slots - self.slots
                made = {name: ops.concat((x, ops.full((rows, more, *x.shape[2:]), 0.0, x)), 1)
                        for name, x in made.items()}  # fmt: skip
            layers.append(made)
        return KVCache(layers)

    def reads_for(self, positions: Array, ops: Ops) -> int:
        """Number of slots that attention reads in a call with these positions[B, T].

        Raises UsageError if a known position has no slot or is not below `reads`.
        """
        bound = self.slots if self.reads is None else self.reads
        largest = ops.known_max(positions)
        if bound > self.slots or (largest is not None and largest >= bound):
            raise UsageError(
                f"cache: position {largest} with {bound} of {self.slots} slots in use "
                "(expected positions below the slots; create a larger cache)"
            )
        return bound if self.reads is not None or largest is None else largest + 1

    def extend(
        self, index: int, new: Mapping[str, Array], slots: Array, reads: int, ops: Ops
    ) -> tuple[Array, ...]:
        """Write arrays [B, T, K, N] of layer `index`; returns the first `reads` slots of each, or
        those of a ring with slack in the order of their positions."""
        layer, order = self.layers[index], None
        if index in self.rings:
            size = next(iter(layer.values())).shape[1]
            reads = min(reads, size)
            if self.slack:
                at = self._first_kept(slots, size, ops) + ops.arange(reads, slots)
                order = ops.arange(len(slots), slots)[:, None], at % size
            slots = slots % size
        for name, array in new.items():
            layer[name] = ops.cache_write(layer[name], array, slots)
        if order is not None:
            return tuple(layer[name][order] for name in new)
        return tuple(layer[name][:, :reads] for name in new)

    @staticmethod
    def _first_kept(slots: Array, size: int, ops: Ops) -> Array:
        """[B, 1]: the first position that a ring of `size` slots has after tokens at slots[B, T],
        of which the last is at the largest."""
        first = slots[:, -1:] + (1 - size)
        return ops.where(first > 0, first, first * 0)

    def mask(self, x: Array, window: int | None, slots: Array, reads: int, ops: Ops) -> Any:
        """The mask of the layers with this window, for x[B, T, D] at slots[B, T]."""
        sizes = {next(iter(self.layers[index].values())).shape[1] for index in self.rings}
        if window is None or window + self.slack not in sizes:
            return ops.attention_mask(x, reads, window=window, slots=slots, shared=self.shared)
        if x.shape[1] > self.slack + 1:
            raise UsageError(
                f"cache: {x.shape[1]} tokens of a row at once, of layers that keep their window of "
                f"{window} (expected at most {self.slack + 1}; create a cache without rings)"
            )
        if self.slack:
            size = window + self.slack
            slots = slots - self._first_kept(slots, size, ops)
            return ops.attention_mask(x, min(reads, size), window=window, slots=slots)
        # all slots that have been written are in the window, and all are once it is full
        last = ops.where(slots < window, slots, slots * 0 + (window - 1))
        return ops.attention_mask(x, min(reads, window), slots=last)
