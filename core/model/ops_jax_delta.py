"""Short causal convolution and the gated delta rule in JAX, chunked and in fp32.

The formulas are those of ops_torch_delta (arXiv 2406.06484 section 3, 2412.06464 section 3.3):
everything is computed for all chunks at once except S ← F S + E from chunk to chunk, a
`lax.scan`. Products ask for full fp32 precision, because a state sums over the whole row.
"""

import jax
import jax.numpy as jnp

Array = jax.Array
CHUNK = 64


def _runs(segments: Array) -> Array:
    """[B, T]: how often the segment has changed so far."""
    changes = jnp.cumsum(segments[:, 1:] != segments[:, :-1], axis=1)
    return jnp.pad(changes, ((0, 0), (1, 0)))


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def causal_conv(x: Array, weight: Array, segments: Array | None = None) -> Array:
    """See Ops.causal_conv."""
    length, taps = x.shape[1], weight.shape[1]
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    runs = None if segments is None else _runs(segments)
    out = wide * weight[:, -1]
    for step in range(1, min(taps, length)):
        delayed = jnp.pad(wide[:, :-step], ((0, 0), (step, 0), (0, 0)))
        if runs is not None:
            before = jnp.pad(runs[:, :-step], ((0, 0), (step, 0)), constant_values=-1)
            delayed = delayed * (before == runs)[..., None]
        out = out + delayed * weight[:, taps - 1 - step]
    return out.astype(x.dtype)


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    segments: Array | None = None,
) -> Array:
    """See Ops.delta_rule."""
    batch, length, heads, size = v.shape
    dtype, groups, chunk = v.dtype, k.shape[2], min(CHUNK, length)
    spare = -length % chunk

    def chunks(x: Array) -> Array:
        """[B, T, H, X] → [n, B, K, H/K, C, X]."""
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, spare), (0, 0), (0, 0)))
        x = x.reshape(batch, -1, chunk, groups, x.shape[2] // groups, x.shape[3])
        return x.transpose(1, 0, 3, 4, 2, 5)

    q, k, v = chunks(q), chunks(k), chunks(v)
    beta, sums = chunks(beta[..., None]), jnp.cumsum(chunks(log_decay[..., None])[..., 0], -1)
    within, entering, leaving = _decays(sums, segments, spare)
    system = _matmul(k, _transposed(k)) * within * beta
    sides = jnp.concatenate((beta * v, (beta * entering) * k), -1)
    solved = jax.lax.linalg.triangular_solve(
        system, sides, left_side=True, lower=True, unit_diagonal=True
    )
    values, reads = solved[..., :size], solved[..., size:]
    states = _states(_transposed(k * leaving), values, reads, entering[..., -1:, :])
    scores = _matmul(q, _transposed(k)) * within
    out = _matmul(q * entering, states) + _matmul(scores, values - _matmul(reads, states))
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, size)
    return out[:, :length].astype(dtype)


def _decays(sums: Array, segments: Array | None, spare: int) -> tuple[Array, Array, Array]:
    """Decay between tokens [.., C, C], from the chunk's entry and to its end [.., C, 1]."""
    chunk = sums.shape[-1]
    allowed = jnp.tri(chunk, dtype=bool)
    entering, leaving = jnp.exp(sums), jnp.exp(sums[..., -1:] - sums)
    if segments is not None:
        runs = jnp.pad(_runs(segments), ((0, 0), (0, spare)), mode="edge")
        runs = runs.reshape(len(runs), -1, chunk).swapaxes(0, 1)[:, :, None, None]
        last = runs[..., -1:]
        allowed = allowed & (runs[..., :, None] == runs[..., None, :])
        entering = entering * (runs == jnp.concatenate((jnp.zeros_like(last[:1]), last[:-1])))
        leaving = leaving * (runs == last)
    distance = sums[..., :, None] - sums[..., None, :]
    within = jnp.exp(jnp.where(allowed, distance, -jnp.inf))
    return within, entering[..., None], leaving[..., None]


def _states(writes: Array, values: Array, reads: Array, kept: Array) -> Array:
    """The state that enters each chunk, [n, B, K, H/K, N, V]."""
    factors = kept * jnp.eye(reads.shape[-1]) - _matmul(writes, reads)
    terms = _matmul(writes, values)

    def step(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, term = chunk
        return _matmul(factor, state) + term, state

    return jax.lax.scan(step, jnp.zeros_like(terms[0]), (factors, terms))[1]
