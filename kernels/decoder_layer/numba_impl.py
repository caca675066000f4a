"""The compiled engine of sabia.kernels.decoder_layer."""

import numpy as np

from sabia.kernels.row_functions.numba_impl import logistic, rounded
from sabia.kernels.row_products.numba_impl import (
    F,
    exp,
    jit,
    matrix_vector,
    scores,
    weighted_sums,
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
def _inputs(x, norm, offset, eps):
    y = np.empty(x.shape[0], np.float32)
    for i in range(x.shape[0]):
        y[i] = wide(x[i])
    _norm(y, norm, offset, eps, x[0])
    return y


@jit
def _times(weight, bias, x, like):
    out = np.empty(weight.shape[0], np.float32)
    matrix_vector(weight, x, out)
    for i in range(out.shape[0]):
        out[i] = wide(rounded(out[i], like))
    for i in range(bias.shape[0]):
        out[i] = wide(rounded(out[i] + wide(bias[i]), like))
    return out


@jit
def _add(x, y, norm, offset, eps, factor):
    like = x[0]
    _norm(y, norm, offset, eps, like)
    for i in range(x.shape[0]):
        x[i] = rounded(wide(x[i]) + wide(rounded(y[i] * F(factor), like)), like)


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
def _attend(q, keys, values, scale, like):
    """Softmax attention of float32 q[H·N] over keys and values[S, K, N]."""
    slots, heads, size = keys.shape
    group = q.shape[0] // (heads * size)
    for i in range(q.shape[0]):
        q[i] *= F(scale)
    weights = np.empty((1, heads, group, slots), np.float32)
    out = np.empty((1, heads, group, size), np.float32)
    shape = (1, slots, heads, size)
    scores(q.reshape(out.shape), keys.reshape(shape), weights)
    for row in weights.reshape(heads * group, slots):
        top, total = F(-np.inf), F(0)
        for j in range(slots):
            top = max(top, row[j])
        for j in range(slots):
            row[j] = exp(row[j] - top)
            total += row[j]
        inverse = F(1) / total
        for j in range(slots):
            row[j] *= inverse
    weighted_sums(weights, values.reshape(shape), out)
    flat = out.reshape(heads * group * size)
    for i in range(flat.shape[0]):
        flat[i] = wide(rounded(flat[i], like))
    return flat


@jit
def decoder_layer(x, matrices, vectors, numbers, cos, sin, keys, values, at, first, last):
    """See the interface."""
    like, size = x[0], keys.shape[2]
    eps, offset, of_heads, factor, scale = numbers
    y = _inputs(x, vectors[8], offset, eps)
    q, k = _times(matrices[0], vectors[0], y, like), _times(matrices[1], vectors[1], y, like)
    v = _times(matrices[2], vectors[2], y, like)
    _norm(q, vectors[12], of_heads, eps, like)
    _norm(k, vectors[13], of_heads, eps, like)
    _rotate(q, size, cos, sin, like)
    _rotate(k, size, cos, sin, like)
    _keep(k, keys[at])
    _keep(v, values[at])
    made = _attend(q, keys[first : last + 1], values[first : last + 1], scale, like)
    if matrices[3].shape[0]:
        gate = _times(matrices[3], vectors[3], y, like)
        for i in range(gate.shape[0]):
            made[i] = wide(rounded(made[i] * wide(rounded(logistic(gate[i]), like)), like))
    _add(x, _times(matrices[4], vectors[4], made, like), vectors[9], offset, eps, factor)
    y = _inputs(x, vectors[10], offset, eps)
    gate, up = _times(matrices[5], vectors[5], y, like), _times(matrices[6], vectors[6], y, like)
    for i in range(gate.shape[0]):
        gate[i] = wide(rounded(gate[i] * logistic(gate[i]) * up[i], like))
    _add(x, _times(matrices[7], vectors[7], gate, like), vectors[11], offset, eps, factor)
