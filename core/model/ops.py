"""All operations that a backend provides to the forward pass, as a Protocol.

`ops_torch` and `ops_jax` are modules with exactly these functions; `forward` uses nothing else, so
it has no backend branches. Arrays are the backend's own; both support `+ - * @`, slicing,
`.shape`, `.dtype`, `.reshape`. Letters: B batch, T queries, S key slots, D width, H query heads,
K key-value heads, N head dim, V vocabulary. Reductions (norms, softmax, losses) run in fp32
whatever the dtype of their inputs.

A caller may pass `forward` another object with these attributes: meshes, precisions and adapters
are such wrappers. `gather`, `shard`, `relayout` and the `name` of a product exist for them: on one
device the first three return their input. On a mesh arrays are either global (JAX) or this
process's shards (torch); the axis names say which dimensions are sharded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

Array = Any
Params = Mapping[str, Array]
Remat = Literal["none", "full", "matmuls"]
Angles = tuple[Array, Array]
Axes = tuple[str | None, ...]
FORWARD_DTYPES = ("float32", "bfloat16", "float16")


def dtype_name(x: Array) -> str:
    """Name of an array's dtype, in either backend."""
    return str(x.dtype).removeprefix("torch.")


class Ops(Protocol):
    """What `load_ops` returns."""

    name: str

    # -- arrays
    def to_device(self, params: Mapping[str, Any], dtype: str | None = None) -> dict[str, Array]:
        """NumPy arrays (ml_dtypes too) → backend arrays on the default device, cast to `dtype`."""

    def to_numpy(self, params: Params) -> dict[str, Any]:
        """Backend arrays → NumPy arrays of the same dtype (bfloat16 as ml_dtypes)."""

    def integers(self, values: Any, like: Array) -> Array:
        """Token ids or positions as a backend integer array on the device of `like`."""

    def arange(self, count: int, like: Array) -> Array:
        """[count] integers from 0, on the device of `like`."""

    def zeros(self, shape: Sequence[int], dtype: str, like: Array | None = None) -> Array:
        """An array of zeros."""

    def full(self, shape: Sequence[int], value: float, like: Array) -> Array:
        """An array of one value, in the dtype and on the device of `like`."""

    def positions(self, length: int, like: Array) -> Array:
        """[1, length] positions of `like`'s tokens in rows of one document."""

    def cast(self, x: Array, dtype: str) -> Array:
        """x in another dtype; differentiable."""

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        """Arrays joined along an axis."""

    def known_max(self, x: Array) -> int | None:
        """Largest element if x is in host memory and not traced, else None."""

    # -- maths
    def embedding(self, table: Array, ids: Array) -> Array:
        """table[V, D], ids[B, T] → [B, T, D]."""

    def linear(
        self, x: Array, weight: Array, bias: Array | None = None, *, name: str = ""
    ) -> Array:
        """x[..., in] · weight[out, in]ᵀ + bias[out], in x's dtype; `name`: the weight's."""

    def rms_norm(self, x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
        """x / rms(x) · (weight + offset) over the last axis (arXiv 1910.07467)."""

    def layer_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """(x - mean) / sqrt(variance + eps) · weight over the last axis (arXiv 1607.06450)."""

    def silu(self, x: Array) -> Array:
        """x · sigmoid(x)."""

    def sigmoid(self, x: Array) -> Array:
        """1 / (1 + e^-x)."""

    def softplus(self, x: Array) -> Array:
        """log(1 + e^x)."""

    def gelu(self, x: Array, tanh: bool = False) -> Array:
        """x · Φ(x), Φ the normal distribution; `tanh`: its usual approximation (1606.08415)."""

    def exp(self, x: Array) -> Array:
        """e to the power of x."""

    def where(self, condition: Array, x: Array | float, y: Array | float) -> Array:
        """x where the condition holds, else y; gradients flow only into the selected elements."""

    def stop_gradient(self, x: Array) -> Array:
        """x as a constant."""

    def softmax(self, x: Array) -> Array:
        """Over the last axis, fp32."""

    def softcap(self, x: Array, cap: float) -> Array:
        """cap · tanh(x / cap)."""

    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """The k largest of the last axis, descending: (values, indices)."""

    def take_along(self, x: Array, indices: Array) -> Array:
        """The elements of x's last axis at indices[..., k]."""

    def logsumexp(self, x: Array) -> Array:
        """log Σ e^x over the last axis, fp32."""

    def dispatch(self, y: Array, experts_of_tokens: Array, experts: int) -> tuple[Array, Any]:
        """Rows of y[B, T, D], one per assignment in experts_of_tokens[B, T, k], sorted by expert.

        Returns (rows[M, D], the opaque plan that `grouped_matmul` and `combine` need). The rows of
        an expert keep the order of the tokens. On one device M = B·T·k.
        """

    def grouped_matmul(
        self, rows: Array, weight: Array, plan: Any, bias: Array | None = None, *, name: str = ""
    ) -> Array:
        """rows[M, in] of each expert e · weight[e, out, in]ᵀ + bias[e, out], in rows' dtype."""

    def biased(self, rows: Array, plan: Any, bias: Array | None) -> Array:
        """rows[M, out] + bias[e, out] of each row's expert e, in rows' dtype."""

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
    ) -> Any:
        """The mask of `attention`, made once per forward pass; opaque.

        like[B, T, D] gives batch, queries, dtype, device. With `slots[B, T]` (a cache) query t of
        row b attends to key slots j ≤ slots[b, t]; without, keys are the row's tokens, of which
        the queries are the slice from `start` (context parallelism), and query t attends to
        j ≤ start + t in the same segment (segments[B, keys]; outputs of padding are undefined, and
        finite). `window`: only the last `window` of these. Not `causal`: also later keys, with
        `window` if |j - start - t| < window.
        """

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Any,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """q[B, T, H, N], k[B, S, K, N], v[B, S, K, P] → [B, T, H, P]; head h reads h·K // H.

        sinks[H]: one more score per head in the denominator of every query's softmax.
        """

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
    ) -> Array:
        """The gated delta rule over whole rows (core/spec/delta.py), its state in fp32.

        q, k[B, T, K, N], v[B, T, H, V], log_decay, beta[B, T, H] → [B, T, H, V] in v's dtype;
        head h reads q, k of head h·K // H. Does not scale or norm its inputs. The state is zero
        at the start of a row and wherever `segments` changes.
        """

    def whole_segments(self, segments: Array) -> Array:
        """segments[B, T] of whole rows, even if a mesh splits the sequence."""

    def cache_write(self, cache: Array, new: Array, slots: Array) -> Array:
        """cache[B, S, K, N] with new[B, T, K, N] at [b, slots[b, t]]; torch writes in place."""

    def linear_cross_entropy(
        self, hidden: Array, weight: Array, targets: Array, *, softcap: float | None = None
    ) -> tuple[Array, Array]:
        """hidden[B, T, D], weight[V, D], targets[B, T] → (nll[B, T], logsumexp[B, T]), fp32.

        At most about DEFAULT_CHUNK_BYTES of logits exist at a time; larger ones are
        recomputed in the backward pass. Targets below 0 give a loss of 0.
        """

    # -- layout and program
    def stage_input(self, embed: Callable[[], Array], layers: int) -> tuple[Array, range]:
        """The input of the layers that this process runs, and the indices of these layers.

        Without a pipeline: `embed()` and all `layers`. In a pipeline: the activations received
        from the previous stage, and this stage's layers.
        """

    def stage_output(self, x: Array, stats: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """The output of the last layer and the stats of all layers.

        In a pipeline, a stage before the last one sends both on and ends the forward pass.
        """

    def gather(self, weights: Params, names: Mapping[str, str]) -> Params:
        """Unsharded tensors of a layer; weights: short name → array, names: → full name."""

    def shard(self, x: Array, axes: Axes) -> Array:
        """x with a sharding constraint: its dimensions are split as the axis names say."""

    def relayout(self, x: Array, from_axes: Axes, to_axes: Axes) -> Array:
        """x resharded: gathered, split or exchanged (all-to-all) along mesh axes."""

    def remat(self, function: Callable[..., Array], policy: Remat) -> Callable[..., Array]:
        """`function` that saves fewer activations for the backward pass.

        none: saves all; matmuls: only outputs of matrix products; full: only the inputs.
        """


class WrappedOps:
    """The operations of `base`, except those that a subclass overrides."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)
