"""All operations that a backend provides to the forward pass, and those that are alike in both.

`device_torch.TorchOps` and `device_jax.JaxOps` compute on one device; `forward` uses nothing else,
so it has no backend branches. Arrays are the backend's own; both support `+ - * @`, slicing,
`.shape`, `.dtype`, `.reshape`. Letters: B batch, T queries, S key slots, D width, H query heads,
K key-value heads, N head dim, V vocabulary. Reductions (norms, softmax, losses) run in fp32
whatever the dtype of their inputs.

Every matrix product is named and passes the chain of rules (core.ops.product): precisions, adapters
and the tensor-parallel part of a mesh are rules. The other operations of a mesh are those of a
subclass in core.parallel; `gather`, `shard`, `relayout` and `positions` exist for it and do nothing
here. On a mesh arrays are either global (JAX) or this process's shards (torch); the axis names say
which dimensions are sharded. `core.parallel.build_ops` composes all of it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

import numpy as np

from sabia.core.numerics.optimizers import ArrayFunctions
from sabia.core.ops.kernel_choice import raises_missing_backend
from sabia.core.ops.product import (
    Array,
    Axes,
    Matrix,
    Multiply,
    Product,
    Rule,
    chained,
    check_sizes,
)
from sabia.kernels.attention.interface import attention, attention_mask
from sabia.kernels.rms_norm.interface import rms_norm
from sabia.kernels.vocabulary_loss.interface import linear_cross_entropy

if TYPE_CHECKING:
    from sabia.core.numerics.stored import Stored

Params = Mapping[str, Array]
Remat = Literal["none", "full", "matmuls"]
Angles = tuple[Array, Array]
FORWARD_DTYPES = ("float32", "bfloat16", "float16")
_attention = raises_missing_backend(attention)
_rms_norm = raises_missing_backend(rms_norm)
_linear_cross_entropy = raises_missing_backend(linear_cross_entropy)


def dtype_name(x: Array) -> str:
    """Name of an array's dtype, in either backend."""
    return str(x.dtype).removeprefix("torch.")


def is_stored(array: object) -> TypeGuard["Stored"]:
    """Whether an array of parameters is a quantized matrix of numerics.stored, in codes."""
    return hasattr(array, "decoded")


class Stage(Protocol):
    """The layers that one process of a pipeline, or one step of a calibration, computes."""

    def begin(self, embed: Callable[[], Array], layers: int) -> tuple[Array, range]:
        """See Ops.stage_input."""

    def end(self, x: Array, stats: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """See Ops.stage_output."""


class Ops(ArrayFunctions, Protocol):
    """The operations of a backend; made by `load_ops` or `core.parallel.build_ops`.

    rules: the links of the chain before the backend's `kernel`, in order. stage: a part of the
    layers. sizes: axis name → the sizes that an activation may have there (for checks).
    activations: dtype of the residual stream, None: of the embedding.
    """

    name: str
    exact: bool = False  # whether a token's results depend on its own inputs alone, to the last bit
    requested: Mapping[str, str | None]  # operation → the implementation that the user named
    stage: Stage | None
    activations: str | None = None
    rules: tuple[Rule, ...]
    sizes: Mapping[str, frozenset[int]]
    multiply: Multiply  # all results of a product: the chain of rules and kernel

    def __init__(self, stage: Stage | None = None) -> None:
        self.stage, self.sizes = stage, {}
        self.set_rules(())

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """Compose the chain anew."""
        self.rules = tuple(rules)
        self.multiply = chained(self.rules, self.kernel)

    def mesh_rules(self) -> tuple[Rule, ...]:
        """The rules by which a mesh splits products over its processes."""
        return ()

    def at(self, step: Array, part: Array = 0) -> "Ops":
        """The operations of a part of a step; those of a precision that rounds stochastically
        differ (call it before each update, in JAX under jit with traced integers)."""
        rules = tuple(rule.at(step, part) for rule in self.rules)
        if all(new is old for new, old in zip(rules, self.rules, strict=True)):
            return self
        ops = copy.copy(self)
        ops.set_rules(rules)
        return ops

    def input_parts(self, name: str) -> int:
        """Into how many parts, of as many processes, the inputs of a matrix are split."""
        return 1

    def largest_input(self, name: str, largest: Array) -> Array:
        """max|x| of the whole inputs of a matrix, from those of this process's part."""
        return largest

    # -- products

    def kernel(self, product: Product) -> list[Array]:
        """The last link of the chain: the backend's own products, in the dtype of x."""

    def linear(
        self, x: Array, weight: Array, bias: Array | None = None, *, name: str = ""
    ) -> Array:
        """x[..., in] · weight[out, in]ᵀ + bias[out], in x's dtype; `name`: the weight's."""
        return self.multiply(Product(x, (Matrix(name, weight, bias),)))[0]

    def decoded_rows(self, context: Any, x: Array) -> Any:
        """What computes whole layers of a pass over one token x[B, 1, D] of each row of a cache
        (`DecodedRows.advance`), where the backend has such; else None."""
        return None

    # -- arrays
    def to_device(self, params: Mapping[str, Any], dtype: str | None = None) -> dict[str, Array]:
        """NumPy arrays (ml_dtypes too) → backend arrays on the default device, cast to `dtype`."""

    def prepared(self, params: Params, former: Params, most_bytes: int) -> Params:
        """The same parameters with copies, of at most so many bytes, that products read faster, for
        as long as nothing is written to them; `former` again, which this gave before, if it was for
        these parameters and they are unchanged."""
        return params

    def to_numpy(self, params: Params) -> dict[str, np.ndarray]:
        """Backend arrays → NumPy arrays of the same dtype (bfloat16 as ml_dtypes)."""

    def integers(self, values: object, like: Array) -> Array:
        """Token ids or positions as a backend integer array on the device of `like`."""

    def arange(self, count: int, like: Array) -> Array:
        """[count] integers from 0, on the device of `like`."""

    def zeros(self, shape: Sequence[int], dtype: str, like: Array | None = None) -> Array:
        """An array of zeros."""

    def full(self, shape: Sequence[int], value: float, like: Array) -> Array:
        """An array of one value, in the dtype and on the device of `like`."""

    def positions(self, length: int, like: Array) -> Array:
        """[1, length] positions of `like`'s tokens in rows of one document."""
        return self.arange(length, like)[None, :]

    def cast(self, x: Array, dtype: str) -> Array:
        """x in another dtype; differentiable."""

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        """Arrays joined along an axis."""

    def known_max(self, x: Array) -> int | None:
        """Largest element if x is in host memory and not traced, else None."""

    # -- maths
    def embedding(self, table: Array, ids: Array) -> Array:
        """table[V, D], ids[B, T] → [B, T, D]."""

    def rms_norm(self, x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
        """x / rms(x) · (weight + offset) over the last axis (arXiv 1910.07467)."""
        if offset not in (0, 1):  # the kernels compute weight or 1 + weight
            weight, offset = self.cast(weight, "float32") + offset, 0
        implementation = self.requested.get("rms_norm")
        return _rms_norm(x, weight, eps, plus_one=offset == 1, implementation=implementation)

    def layer_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """(x - mean) / sqrt(variance + eps) · weight over the last axis (arXiv 1607.06450)."""

    # elementary functions of each backend, by element
    silu: Callable[[Array], Array]  # x · sigmoid(x)
    sigmoid: Callable[[Array], Array]  # 1 / (1 + e^-x)
    softplus: Callable[[Array], Array]  # log(1 + e^x)
    exp: Callable[[Array], Array]
    log1mexp: Callable[[Array], Array]  # log(1 - e^x), x < 0
    tanh: Callable[[Array], Array]
    # where(condition, x, y): gradients flow only into the selected elements
    where: Callable[..., Array]
    # topk(x, k) → (values, indices): the k largest of the last axis, descending
    topk: Callable[[Array, int], tuple[Array, Array]]
    stop_gradient: Callable[[Array], Array]  # x as a constant

    def silu_product(self, gate: Array, up: Array) -> Array:
        """silu(gate) · up, of one shape (SwiGLU, arXiv 2002.05202)."""
        return self.silu(gate) * up

    def gelu(self, x: Array, tanh: bool = False) -> Array:
        """x · Φ(x), Φ the normal distribution; `tanh`: its usual approximation (1606.08415)."""

    def softmax(self, x: Array) -> Array:
        """Over the last axis, fp32."""

    def softcap(self, x: Array, cap: float) -> Array:
        """cap · tanh(x / cap)."""
        return self.tanh(x / cap) * cap

    def take_along(self, x: Array, indices: Array) -> Array:
        """The elements of x's last axis at indices[..., k]."""

    def put_along(self, x: Array, indices: Array, value: float) -> Array:
        """x with `value` in its last axis at indices[..., k]."""

    def tokens_at(self, x: Array, at: Array) -> Array:
        """x[B or 1, T, …] at tokens at[B, N] of each row → [B, N, …]."""
        rows = self.arange(len(at), at)[:, None]
        return x[rows if len(x) > 1 else rows * 0, at]

    def logsumexp(self, x: Array) -> Array:
        """log Σ e^x over the last axis, fp32."""

    def dispatch(self, y: Array, experts_of_tokens: Array, experts: int) -> tuple[Array, Any]:
        """Rows of y[B, T, D], one per assignment in experts_of_tokens[B, T, k], sorted by expert.

        Returns (rows[M, D], the opaque plan that products and `combine` need). The rows of
        an expert keep the order of the tokens. On one device M = B·T·k.
        """

    def combine(self, rows: Array, plan: Any, gates: Array) -> Array:
        """Σ over the k rows of each token of gate · row: rows[M, D], gates[B, T, k] → [B, T, D]."""

    def weighted_bincount(self, indices: Array, weights: Array, count: int) -> Array:
        """fp32 [B, count]: sums of weights[B, N] by indices[B, N]; has no gradient."""

    def rope_angles(
        self, positions: Array, frequencies: tuple[float, ...], growth: Array | None = None
    ) -> Angles:
        """positions[B or 1, T] → (cos, sin), each fp32 [B or 1, T, 1, 2·len(frequencies)].

        growth[B, T]: frequency i of n is multiplied by growth^(-i/(n-1)) (dynamic NTK).
        """

    def rope(self, x: Array, angles: Angles) -> Array:
        """x[B, T, H, N] with pairs (i, i + N/2) rotated."""

    def attention_mask(
        self,
        like: Array,
        keys: int,
        *,
        segments: Array | None = None,
        slots: Array | None = None,
        start: int = 0,
        window: int | None = None,
        causal: bool = True,
        at: Array | None = None,
        shared: Sequence[Any] = (),
    ) -> Any:
        """The mask of `attention`, made once per forward pass; opaque.

        like[B, T, D] gives batch, queries, dtype, device. With `slots[B, T]` (a cache) query t of
        row b attends to key slots j ≤ slots[b, t]; without, keys are the row's tokens, of which
        the queries are the slice from `start` (context parallelism), and query t attends to
        j ≤ start + t in the same segment (segments[B, keys]; outputs of padding are undefined, and
        finite). at[B, T] (torch): the key that is each query's own, in place of start + t.
        shared (torch): the `SharedSlots` of rows of a cache.
        `window`: only the last `window` of these. Not `causal`: also later keys, with `window` if
        |j - start - t| < window.
        """
        settings: Any = {"start": start, "window": window, "causal": causal, "at": at}
        settings["shared"] = shared
        queries = like.shape[1] if at is None else at.shape[1]
        return attention_mask(like, queries, keys, segments=segments, slots=slots, **settings)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """q[B, T, H, N], k[B, S, K, N], v[B, S, K, P] → [B, T, H, P]; head h reads h·K // H.

        sinks[H]: one more score per head in the denominator of every query's softmax.
        """
        settings: Any = {"scale": scale, "softcap": softcap, "sinks": sinks}
        return _attention(q, k, v, mask, **settings, implementation=self.requested["attention"])

    def causal_conv(self, x: Array, weight: Array, segments: Array | None = None) -> Array:
        """Per channel, Σ_j weight[C, K-1-j] · x[B, t-j, C] over j < K within the document of t."""

    def delta_rule(
        self,
        q: Array,
        k: Array,
        v: Array,
        log_decay: Array,
        beta: Array,
        segments: Array | None = None,
        state: Array | None = None,
    ) -> tuple[Array, Array | None]:
        """The gated delta rule over whole rows (core/spec/layers.py), and the state after them.

        q, k[B, T, K, N], v[B, T, H, V], log_decay, beta[B, T, H] → [B, T, H, V] in v's dtype;
        head h reads q, k of head h·K // H. Does not scale or norm its inputs. The state is zero
        at the start of a row and wherever `segments` changes, or rows without segments continue
        from state[B, H, N, V], fp32; only then is the state after them surely made. A token with
        decay and beta 0 changes nothing.
        """

    def whole_segments(self, segments: Array) -> Array:
        """segments[B, T] of whole rows, even if a mesh splits the sequence."""
        return segments

    def cache_write(self, cache: Array, new: Array, slots: Array) -> Array:
        """cache[B, S, K, N] with new[B, T, K, N] at [b, slots[b, t]]; torch writes in place."""

    def linear_cross_entropy(
        self, hidden: Array, weight: Array, targets: Array, *, softcap: float | None = None
    ) -> tuple[Array, Array]:
        """hidden[B, T, D], weight[V, D], targets[B, T] → (nll[B, T], logsumexp[B, T]), fp32.

        At most about DEFAULT_CHUNK_BYTES of logits exist at a time; larger ones are
        recomputed in the backward pass. Targets below 0 give a loss of 0.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        implementation = self.requested["vocabulary_loss"]
        nll, lse = _linear_cross_entropy(
            flat, weight, targets.reshape(-1), softcap=softcap, implementation=implementation
        )
        return nll.reshape(targets.shape), lse.reshape(targets.shape)

    # of `exact` operations alone: drawn_losses(logits, hidden[B, T, D], targets[B, T], temperature,
    # vocabulary) → -log p(targets), fp32 [B, T], 0 of a negative target, as an engine draws;
    # logits: of hidden states [M, 1, D]
    drawn_losses: Any = None

    # -- layout and program
    def stage_input(self, embed: Callable[[], Array], layers: int) -> tuple[Array, range]:
        """The input of the layers that this process runs, and the indices of these layers.

        Without a pipeline: `embed()` and all `layers`. In a pipeline: the activations received
        from the previous stage, and this stage's layers.
        """
        if self.stage is not None:
            return self.stage.begin(embed, layers)
        return embed(), range(layers)

    def stage_output(self, x: Array, stats: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """The output of the last layer and the stats of all layers.

        In a pipeline, a stage before the last one sends both on and ends the forward pass.
        """
        return (x, stats) if self.stage is None else self.stage.end(x, stats)

    def gather(self, weights: Params, names: Mapping[str, str]) -> Params:
        """Unsharded tensors of a layer; weights: short name → array, names: → full name."""
        return weights

    def shard(self, x: Array, axes: Axes) -> Array:
        """x with a sharding constraint: its dimensions are split as the axis names say."""
        check_sizes("shard", x, axes, self.sizes)
        return x

    def relayout(self, x: Array, from_axes: Axes, to_axes: Axes) -> Array:
        """x resharded: gathered, split or exchanged (all-to-all) along mesh axes."""
        check_sizes("relayout", x, from_axes, self.sizes)
        return x

    def remat(self, function: Callable[..., Array], policy: Remat) -> Callable[..., Array]:
        """`function` that saves fewer activations for the backward pass.

        none: saves all; matmuls: only outputs of matrix products; full: only the inputs.
        """
