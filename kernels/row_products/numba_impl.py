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
def scores(q, keys, out):
    """See the interface."""
    for b in range(q.shape[0]):
        for s in range(out.shape[3]):
            for h in range(q.shape[1]):
                key = keys[b, s, h]
                for g in range(q.shape[2]):
                    query, total = q[b, h, g], F(0)
                    for i in range(query.shape[0]):
                        total += query[i] * wide(key[i])
                    out[b, h, g, s] = total


@jit
def weighted_sums(weights, values, out):
    """See the interface; four values at a time, so that sums are loaded and stored less often."""
    slots = weights.shape[3]
    fours = slots - slots % 4
    for b in range(out.shape[0]):
        out[b] = 0
        for s in range(0, fours, 4):
            for h in range(out.shape[1]):
                v0, v1 = values[b, s, h], values[b, s + 1, h]
                v2, v3 = values[b, s + 2, h], values[b, s + 3, h]
                for g in range(out.shape[2]):
                    w, total = weights[b, h, g], out[b, h, g]
                    w0, w1, w2, w3 = w[s], w[s + 1], w[s + 2], w[s + 3]
                    for i in range(total.shape[0]):
                        left = w0 * wide(v0[i]) + w1 * wide(v1[i])
                        total[i] += left + (w2 * wide(v2[i]) + w3 * wide(v3[i]))
        for s in range(fours, slots):
            for h in range(out.shape[1]):
                value = values[b, s, h]
                for g in range(out.shape[2]):
                    weight, total = weights[b, h, g, s], out[b, h, g]
                    for i in range(total.shape[0]):
                        total[i] += weight * wide(value[i])
