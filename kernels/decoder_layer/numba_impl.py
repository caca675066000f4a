"""The compiled engine of sabia.kernels.decoder_layer."""

import numpy as np

from sabia.kernels.row_functions.numba_impl import logistic, rounded
from sabia.kernels.row_products.numba_impl import (
    F,
    exp,
    jit,
    matrix_vector,
    row_scores,
    row_sums,
    wide,
)


@jit
def _norm(x, weight, offset, eps, like):
    """RMSNorm of each len(weight) numbers of float32 x, in place."""
    size = weight.shape[0]
    for row in range(x.shape[0] // size if size else 0):
        part, total = x[row * size : row * size + size], F(0)
        for i in range(size):
            total += part[i] * part[i]
        r = F(1) / np.sqrt(total / F(size) + F(eps))
        for i in range(size):
            part[i] = wide(rounded(part[i] * r * (wide(weight[i]) + F(offset)), like))


@jit
def _wide_row(x):
    y = np.empty(x.shape[0], np.float32)
    for i in range(x.shape[0]):
        y[i] = wide(x[i])
    return y


@jit
def normed(x, norm, offset, eps, y):
    """See the interface."""
    for b in range(x.shape[0]):
        row = _wide_row(x[b])
        _norm(row, norm, offset, eps, x[b, 0])
        for i in range(row.shape[0]):
            y[b, i] = rounded(row[i], y[b, i])


@jit
def added(x, z, norm, offset, eps, factor):
    """See the interface."""
    for b in range(x.shape[0]):
        row, like = _wide_row(z[b]), x[b, 0]
        _norm(row, norm, offset, eps, like)
        for i in range(row.shape[0]):
            x[b, i] = rounded(wide(x[b, i]) + wide(rounded(row[i] * F(factor), like)), like)


@jit
def gated(made, out):
    """See the interface."""
    inner = out.shape[1]
    for b in range(out.shape[0]):
        for i in range(inner):
            x = wide(made[b, i])
            out[b, i] = rounded(x * logistic(x) * wide(made[b, inner + i]), out[b, i])


@jit
def _rotate(x, size, cos, sin, like):
    """Each `size` numbers of float32 x, in place."""
    half = cos.shape[0] // 2
    for row in range(x.shape[0] // size if half else 0):
        part = x[row * size : row * size + size]
        for i in range(half):
            a, b = part[i], part[half + i]
            part[i] = wide(rounded(a * cos[i] - b * sin[i], like))
            part[half + i] = wide(rounded(b * cos[half + i] + a * sin[half + i], like))


@jit
def _keep(x, slot):
    """Write float32 x to slot[K, N]."""
    for h in range(slot.shape[0]):
        for i in range(slot.shape[1]):
            slot[h, i] = rounded(x[h * slot.shape[1] + i], slot[h, i])


@jit
def heads(made, q_norm, k_norm, offset, eps, scale, cos, sin, keys, values, at, q):
    """See the interface."""
    size, own = keys.shape[3], keys.shape[2] * keys.shape[3]
    rest = q.shape[1] * q.shape[2] * q.shape[3]
    for b in range(made.shape[0]):
        like, row, flat = made[b, 0], _wide_row(made[b]), q[b].reshape(rest)
        mine, key = row[:rest], row[rest : rest + own]
        _norm(mine, q_norm, offset, eps, like)
        _norm(key, k_norm, offset, eps, like)
        _rotate(mine, size, cos[b], sin[b], like)
        _rotate(key, size, cos[b], sin[b], like)
        _keep(key, keys[b, at[b]])
        _keep(row[rest + own : rest + 2 * own], values[b, at[b]])
        for i in range(rest):
            flat[i] = mine[i] * F(scale)


@jit
def attend(q, keys, values, first, last, known, weights, out):
    """See the interface."""
    for b in range(q.shape[0]):
        begin, end = first[b], last[b] + 1
        new = max(begin, known[b])
        row_scores(q[b], keys[b], new, end, weights[b])
        for h in range(q.shape[1]):
            for g in range(q.shape[2]):
                row, total = weights[b, h, g], F(0)
                top = F(-np.inf)
                for j in range(begin, end):
                    top = max(top, row[j])
                for j in range(begin):
                    row[j] = 0
                for j in range(begin, end):
                    row[j] = exp(row[j] - top)
                for j in range(begin, end):
                    total += row[j]
                inverse = F(1) / total
                for j in range(begin, end):
                    row[j] *= inverse
        row_sums(weights[b], values[b], new, end, out[b])


@jit
def _times(weight, bias, x, out):
    made = np.empty(weight.shape[0], np.float32)
    matrix_vector(weight, x, made)
    for i in range(made.shape[0]):
        out[i] = rounded(made[i], out[i])
    for i in range(bias.shape[0]):
        out[i] = rounded(wide(out[i]) + wide(bias[i]), out[i])


@jit
def decoder_layer(x, matrices, biases, norms, numbers, cos, sin, keys, values, at, first, last):
    """See the interface."""
    eps, offset, of_heads, factor, scale = numbers
    y, size, groups = np.empty_like(x), keys.shape[3], keys.shape[2]
    normed(x, norms[0], offset, eps, y)
    inputs, end = _wide_row(y[0]), 0
    made = np.empty((1, matrices[0].shape[0] + 2 * groups * size), x.dtype)
    for n in range(3):
        begin, end = end, end + matrices[n].shape[0]
        _times(matrices[n], biases[n], inputs, made[0, begin:end])
    total = matrices[0].shape[0]
    q = np.empty((1, groups, total // (groups * size), size), np.float32)
    heads(made, norms[4], norms[5], of_heads, eps, scale, cos, sin, keys, values, at, q)
    weights = np.empty((1, groups, q.shape[2], last[0] + 1), np.float32)
    out = np.empty_like(q)
    attend(q, keys, values, first, last, first, weights, out)
    mixed = out.reshape(total)
    like = x[0, 0]
    for i in range(total):
        mixed[i] = wide(rounded(mixed[i], like))
    gate = np.empty(matrices[3].shape[0], x.dtype)
    if gate.shape[0]:
        _times(matrices[3], biases[3], inputs, gate)
        for i in range(total):
            share = wide(rounded(logistic(wide(gate[i])), like))
            mixed[i] = wide(rounded(mixed[i] * share, like))
    _times(matrices[4], biases[4], mixed, y[0])
    added(x, y, norms[1], offset, eps, factor)
    normed(x, norms[2], offset, eps, y)
    inputs, inner = _wide_row(y[0]), matrices[5].shape[0]
    both, mid = np.empty((1, 2 * inner), x.dtype), np.empty((1, inner), x.dtype)
    _times(matrices[5], biases[5], inputs, both[0, :inner])
    _times(matrices[6], biases[6], inputs, both[0, inner:])
    gated(both, mid)
    _times(matrices[7], biases[7], _wide_row(mid[0]), y[0])
    added(x, y, norms[3], offset, eps, factor)
