"""The key-value cache of decoding: per layer, arrays of a fixed number of slots per row.

`layers[i]` maps names to arrays [B, S, K, N], as the mixer's `cache_shapes` says (attention: keys
and values; latent attention: latents and one rotated key). `forward.hidden` updates the object:
under torch the arrays are written in place; under jax they are replaced, and since the class is
registered as a pytree, a jitted function takes the cache as an argument and returns it.

Layers that have a state of all tokens so far (gated delta nets) keep it instead, and a call
continues from it: `lengths[B]` says how many tokens of each row are no padding (None: all).

`reads` is the number of slots that attention reads (static under jit). None: computed from the
positions if that is free (torch on CPU), otherwise all slots. A caller that knows the largest
position of a call sets it with `upto(largest + 1)`; later slots are not read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.ops.base import Array, Ops
from sabia.core.spec.delta import GatedDeltaNet
from sabia.core.spec.model import ModelSpec

UNBOUNDED = 2**31


@dataclass
class KVCache:
    """The cached arrays of all layers, for B rows of S slots."""

    layers: list[dict[str, Array]] = field(default_factory=list)
    reads: int | None = None
    lengths: np.ndarray | None = None

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        batch: int,
        slots: int,
        ops: Ops,
        dtype: str = "float32",
        like: Array | None = None,
    ) -> "KVCache":
        """An empty cache on the device of `like` (default: the backend's)."""
        limit = min((r.original_length for r in spec.ropes if r.by_length), default=slots)
        if slots > limit:
            raise UsageError(
                f"generation: {slots} tokens (expected at most {limit:g}: beyond it all rotations "
                "of a text change with its length; run the exported model in a server and give its "
                "URL)"
            )
        layers = []
        for layer in spec.layers:
            if isinstance(layer.mixer, GatedDeltaNet):
                layers.append(
                    {name: ops.zeros((batch, *shape), "float32" if name == "state" else dtype, like)
                     for name, shape in layer.mixer.state_shapes().items()}
                )  # fmt: skip
                continue
            shapes = layer.mixer.cache_shapes().items()
            layers.append(
                {name: ops.zeros((batch, slots, *shape), dtype, like) for name, shape in shapes}
            )
        return cls(layers)

    @property
    def slots(self) -> int:
        """Slots per row; without an end where all layers have a state."""
        arrays = (x for layer in self.layers if "state" not in layer for x in layer.values())
        return next((int(x.shape[1]) for x in arrays), UNBOUNDED)

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
        return KVCache(layers, self.reads)

    def first(self, rows: int) -> "KVCache":
        """The first rows. Under torch what is written to keys and values is written to this cache;
        states are replaced in the result only."""
        return KVCache([{name: x[:rows] for name, x in layer.items()} for layer in self.layers])

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
        """Write arrays [B, T, K, N] of layer `index`; returns the first `reads` slots of each."""
        layer = self.layers[index]
        for name, array in new.items():
            layer[name] = ops.cache_write(layer[name], array, slots)
        return tuple(layer[name][:, :reads] for name in new)
