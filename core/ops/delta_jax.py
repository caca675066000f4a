"""Short causal convolution and the gated delta rule in JAX, in chunks and in fp32.

The formulas and names are those of delta_torch (arXiv 2406.06484 section 3, 2412.06464 section
3.3): everything is computed for all chunks at once except S ← F S + E from chunk to chunk, a
`lax.scan`. Products use full fp32 precision, because a state is a sum over the whole row.
"""

import jax
import jax.numpy as jnp

from sabia.core.ops.product import check_shared_axes

Array = jax.Array
CHUNK = 64


def _document_index(segments: Array) -> Array:
    """[B, T]: index of each token's document, the number of changes of segment before it."""
    changes = jnp.cumsum(segments[:, 1:] != segments[:, :-1], axis=1)
    return jnp.pad(changes, ((0, 0), (1, 0)))


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def causal_conv(x: Array, weight: Array, segments: Array | None = None) -> Array:
    """See Ops.causal_conv."""
    check_shared_axes("causal_conv", x=(x, "BTC"), segments=(segments, "BT"))
    length, taps = x.shape[1], weight.shape[1]
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    documents = None if segments is None else _document_index(segments)
    # out[t] = Σ_j w[K-1-j] x[t-j], one term per tap
    out = wide * weight[:, -1]
    for step in range(1, min(taps, length)):
        shifted = jnp.pad(wide[:, :-step], ((0, 0), (step, 0), (0, 0)))
        if documents is not None:
            before = jnp.pad(documents[:, :-step], ((0, 0), (step, 0)), constant_values=-1)
            shifted = shifted * (before == documents)[..., None]
        out = out + shifted * weight[:, taps - 1 - step]
    return out.astype(x.dtype)


def delta_rule(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array,
    segments: Array | None = None, state: Array | None = None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """See Ops.delta_rule."""
    of_heads = {"v": (v, "BTHV"), "log_decay": (log_decay, "BTH"), "beta": (beta, "BTH")}
    of_keys = {"q": (q, "BTKN"), "k": (k, "BTKN"), "segments": (segments, "BT")}
    check_shared_axes("delta_rule", **of_keys, **of_heads)
    batch, length, heads, size = v.shape
    dtype, groups, chunk = v.dtype, k.shape[2], min(CHUNK, length)
    padding = -length % chunk

    def chunks(x: Array) -> Array:
        """[B, T, H, X] → [n, B, K, H/K, C, X]."""
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padding), (0, 0), (0, 0)))
        x = x.reshape(batch, -1, chunk, groups, x.shape[2] // groups, x.shape[3])
        return x.transpose(1, 0, 3, 4, 2, 5)

    q, k, v = chunks(q), chunks(k), chunks(v)
    beta, log_decay = chunks(beta[..., None]), chunks(log_decay[..., None])[..., 0]
    within, from_start, to_end = _decays(log_decay, segments, padding)
    system = _matmul(k, _transposed(k)) * within * beta  # β k kᵀ ∘ D, [n, B, K, H/K, C, C]
    # [β v | β k e^g], [.., C, V + N]
    right_sides = jnp.concatenate((beta * v, (beta * from_start) * k), -1)
    solved = jax.lax.linalg.triangular_solve(
        system, right_sides, left_side=True, lower=True, unit_diagonal=True
    )
    values, from_state = solved[..., :size], solved[..., size:]  # U [.., C, V], W [.., C, N]
    moves = (_transposed(k * to_end), values, from_state, from_start[..., -1:, :])
    shape = (batch, groups, heads // groups, q.shape[-1], size)
    first = jnp.zeros(shape, jnp.float32) if state is None else state.reshape(shape)
    after, states = _chunk_states(*moves, first)
    scores = _matmul(q, _transposed(k)) * within
    # out = (q e^g) S + (q kᵀ ∘ D) (U - W S)
    out = _matmul(q * from_start, states) + _matmul(scores, values - _matmul(from_state, states))
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, size)  # [B, n·C, H, V]
    return out[:, :length].astype(dtype), after.reshape(batch, heads, *after.shape[3:])


def _decays(log_decay: Array, segments: Array | None, padding: int) -> tuple[Array, Array, Array]:
    """Decays between tokens [.., C, C], from the chunk's start and to its end [.., C, 1].

    The sums g_i - g_j are added up from token j: differences of the cumulative sums g would lose
    digits to the decays of earlier tokens, which may be of other documents.
    """
    chunk = log_decay.shape[-1]
    allowed = jnp.tri(chunk, dtype=bool)
    # log decays of the tokens after j, [n, B, K, H/K, C, C], summed up to token i: g_i - g_j
    distance = jnp.cumsum(jnp.where(jnp.tri(chunk, k=-1), log_decay[..., :, None], 0.0), -2)
    from_start, to_end = jnp.exp(jnp.cumsum(log_decay, -1)), jnp.exp(distance[..., -1, :])
    if segments is not None:
        documents = jnp.pad(_document_index(segments), ((0, 0), (0, padding)), mode="edge")
        # [n, B, 1, 1, C]
        documents = documents.reshape(len(documents), -1, chunk).swapaxes(0, 1)[:, :, None, None]
        last = documents[..., -1:]
        allowed = allowed & (documents[..., :, None] == documents[..., None, :])
        # 0 unless the token's document already ran at the end of the chunk before
        last_before = jnp.concatenate((jnp.zeros_like(last[:1]), last[:-1]))
        from_start = from_start * (documents == last_before)
        to_end = to_end * (documents == last)
    within = jnp.exp(jnp.where(allowed, distance, -jnp.inf))  # D
    return within, from_start[..., None], to_end[..., None]


def _chunk_states(
    writes: Array, values: Array, from_state: Array, total_decay: Array, first: Array
) -> tuple[Array, Array]:
    """The state after the chunks, and at the start of each, [n, B, K, H/K, N, V]."""
    # F, [.., N, N]
    factors = total_decay * jnp.eye(from_state.shape[-1]) - _matmul(writes, from_state)
    terms = _matmul(writes, values)  # E, [.., N, V]

    def step(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, term = chunk
        return _matmul(factor, state) + term, state

    after, states = jax.lax.scan(step, first, (factors, terms))
    return after, states
