"""The compiled engine of sabia.kernels.row_products: sums over the last axis, read in order."""

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from sabia.kernels.runtime.numba_jit import njit

F = np.float32
_SUMS = {"contract": True, "nsz": True, "reassoc": True}  # in any order; NaN stays NaN
jit = njit(nogil=True, boundscheck=False, fastmath=_SUMS, error_model="numpy")


@numba.extending.intrinsic
def wide(_context, x):
    """A float32, or the one that the bits of a bfloat16 are."""

    def same(_context, _builder, _signature, arguments):
        return arguments[0]

    def shifted(_context, builder, _signature, arguments):
        i32 = ir.IntType(32)
        bits = builder.shl(builder.zext(arguments[0], i32), ir.Constant(i32, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(x), same if x == types.float32 else shifted


@jit
def matrix_vector(weight, x, out):
    """See the interface."""
    for row in range(weight.shape[0]):
        total = F(0)
        for i in range(weight.shape[1]):
            total += wide(weight[row, i]) * x[i]
        out[row] = total


@jit
def row_scores(q, keys, begin, end, out):
    """out[K, G, S] = q[K, G, N] · keys[S or more, K, N] of the slots begin..end - 1."""
    for s in range(begin, end):
        for h in range(q.shape[0]):
            key = keys[s, h]
            for g in range(q.shape[1]):
                query, total = q[h, g], F(0)
                for i in range(query.shape[0]):
                    total += query[i] * wide(key[i])
                out[h, g, s] = total


@jit
def row_sums(weights, values, begin, end, out):
    """out[K, G, N] = Σ of weights[K, G, S] · values[S or more, K, N] of the slots begin..end - 1;
    four values at a time, so that sums are loaded and stored less often."""
    out[:] = 0
    fours = end - (end - begin) % 4
    for s in range(begin, fours, 4):
        for h in range(out.shape[0]):
            v0, v1 = values[s, h], values[s + 1, h]
            v2, v3 = values[s + 2, h], values[s + 3, h]
            for g in range(out.shape[1]):
                w, total = weights[h, g], out[h, g]
                w0, w1, w2, w3 = w[s], w[s + 1], w[s + 2], w[s + 3]
                for i in range(total.shape[0]):
                    left = w0 * wide(v0[i]) + w1 * wide(v1[i])
                    total[i] += left + (w2 * wide(v2[i]) + w3 * wide(v3[i]))
    for s in range(fours, end):
        for h in range(out.shape[0]):
            value = values[s, h]
            for g in range(out.shape[1]):
                weight, total = weights[h, g, s], out[h, g]
                for i in range(total.shape[0]):
                    total[i] += weight * wide(value[i])


@jit
def scores(q, keys, first, out):
    """See the interface."""
    for b in range(q.shape[0]):
        row_scores(q[b], keys[b], first[b], out.shape[3], out[b])


@jit
def weighted_sums(weights, values, first, out):
    """See the interface."""
    for b in range(out.shape[0]):
        row_sums(weights[b], values[b], first[b], weights.shape[3], out[b])


@numba.extending.intrinsic
def _power_of_two(_context, n):
    """2^n as a float32, -126 <= n <= 127."""

    def made(_context, builder, _signature, arguments):
        i32 = ir.IntType(32)
        bits = builder.shl(builder.add(arguments[0], ir.Constant(i32, 127)), ir.Constant(i32, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), made


@njit(nogil=True, boundscheck=False, fastmath={"contract": True}, error_model="numpy")
def exp(x):
    """e^x of a float32 x <= 0, within 2 units in the last place (Cephes, expf); it vectorizes."""
    x = max(x, F(-87.0))
    n = np.floor(x * F(1.44269504088896341) + F(0.5))
    r = x - n * F(0.693359375) + n * F(2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    return (p * (r * r) + r + F(1)) * _power_of_two(np.int32(n))


@jit
def _weights(query, keys, h, first, scores):
    """scores = e^(s - largest s) of the keys from the first; (largest s, their sum)."""
    top = F(-np.inf)
    for j in range(len(scores)):
        key, total = keys[first + j, h], F(0)
        for i in range(query.shape[0]):
            total += query[i] * wide(key[i])
        scores[j] = total
        top = max(top, total)
    for j in range(len(scores)):
        scores[j] = exp(scores[j] - top)
    total = F(0)
    for j in range(len(scores)):
        total += scores[j]
    return top, total


@jit
def _mix(weights, values, h, first, out):
    """out = Σ over j of weights[j] · values[first + j, h], four at a time."""
    out[:] = 0
    fours = len(weights) - len(weights) % 4
    for j in range(0, fours, 4):
        s = first + j
        v0, v1, v2, v3 = values[s, h], values[s + 1, h], values[s + 2, h], values[s + 3, h]
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(out.shape[0]):
            left = w0 * wide(v0[i]) + w1 * wide(v1[i])
            out[i] += left + (w2 * wide(v2[i]) + w3 * wide(v3[i]))
    for j in range(fours, len(weights)):
        value, weight = values[first + j, h], weights[j]
        for i in range(out.shape[0]):
            out[i] += weight * wide(value[i])


@jit
def attention(q, keys, values, first, last, out, lse):
    """See the interface."""
    buffer, group = np.empty(keys.shape[1], np.float32), q.shape[2] // keys.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                begin, count = first[b, t], last[b, t] + 1 - first[b, t]
                if count <= 0:
                    out[b, t, h], lse[b, t, h] = 0, 0
                    continue
                scores = buffer[:count]
                top, total = _weights(q[b, t, h], keys[b], h // group, begin, scores)
                _mix(scores, values[b], h // group, begin, out[b, t, h])
                inverse = F(1) / total
                for i in range(out.shape[3]):
                    out[b, t, h, i] *= inverse
                lse[b, t, h] = top + np.log(total)
