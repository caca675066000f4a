"""The compiled engine of sabia.kernels.row_functions."""

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from sabia.kernels.row_products.numba_impl import exp, jit, wide

F = np.float32
PART = 32  # rows whose sum is added to a total at once


@numba.extending.intrinsic
def rounded(_context, x, like):
    """A float32 in the dtype of `like`: itself, or bits of the nearest bfloat16, ties to even."""

    def same(_context, _builder, _signature, arguments):
        return arguments[0]

    def bits(_context, builder, _signature, arguments):
        i32, i16 = ir.IntType(32), ir.IntType(16)
        whole = builder.bitcast(arguments[0], i32)
        odd = builder.and_(builder.lshr(whole, ir.Constant(i32, 16)), ir.Constant(i32, 1))
        near = builder.add(whole, builder.add(odd, ir.Constant(i32, 0x7FFF)))
        none = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        kept = builder.select(none, ir.Constant(i32, 0x7FC00000), near)
        return builder.trunc(builder.lshr(kept, ir.Constant(i32, 16)), i16)

    return like(types.float32, like), same if like == types.float32 else bits


@jit
def rms_norm(x, weight, eps, y, inverse):
    """See the interface."""
    size = x.shape[1]
    for row in range(x.shape[0]):
        total = F(0)
        for i in range(size):
            value = wide(x[row, i])
            total += value * value
        r = F(1) / np.sqrt(total / F(size) + F(eps))
        inverse[row] = r
        for i in range(size):
            y[row, i] = rounded(wide(x[row, i]) * r * weight[i], y[row, i])


@jit
def rms_norm_gradient(grad, x, weight, inverse, dx, dw):
    """See the interface."""
    size = x.shape[1]
    part = np.zeros(size, np.float32)
    for row in range(x.shape[0]):
        r, mean = inverse[row], F(0)
        for i in range(size):
            product = wide(grad[row, i]) * (wide(x[row, i]) * r)
            part[i] += product
            mean += product * weight[i]
        mean /= F(size)
        for i in range(size):
            unit = wide(x[row, i]) * r
            made = r * (wide(grad[row, i]) * weight[i] - unit * mean)
            dx[row, i] = rounded(made, dx[row, i])
        if row % PART == PART - 1 or row == x.shape[0] - 1:
            for i in range(size):
                dw[i] += part[i]
                part[i] = 0


@jit
def logistic(x):
    """1 / (1 + e^-x) of a float32 x."""
    small = exp(-abs(x))
    return (F(1) if x >= 0 else small) / (F(1) + small)


@jit
def silu_product(gate, up, out):
    """See the interface."""
    for i in range(gate.shape[0]):
        x = wide(gate[i])
        out[i] = rounded(x * logistic(x) * wide(up[i]), out[i])


@jit
def silu_product_gradient(grad, gate, up, d_gate, d_up):
    """See the interface."""
    for i in range(gate.shape[0]):
        g, x = wide(grad[i]), wide(gate[i])
        s = logistic(x)
        made = g * wide(up[i]) * s * (F(1) + x * (F(1) - s))
        d_gate[i] = rounded(made, d_gate[i])
        d_up[i] = rounded(g * x * s, d_up[i])


@jit
def rotate(x, cos, sin, sign, y):
    """See the interface."""
    half, sign = x.shape[3] // 2, F(sign)
    for b in range(x.shape[0]):
        row = b if cos.shape[0] > 1 else 0
        for t in range(x.shape[1]):
            c, s = cos[row, t, 0], sin[row, t, 0]
            for h in range(x.shape[2]):
                source, made = x[b, t, h], y[b, t, h]
                for i in range(half):
                    first, second = wide(source[i]), wide(source[half + i])
                    up, down = sign * s[half + i], sign * s[i]
                    made[i] = rounded(first * c[i] - second * down, made[i])
                    made[half + i] = rounded(second * c[half + i] + first * up, made[half + i])


@jit
def _share(x):
    """tanh(x)"""
    small = exp(F(-2) * abs(x))
    share = (F(1) - small) / (F(1) + small)
    return share if x >= 0 else -share


@numba.extending.intrinsic
def _order(_context, x):
    """An int32 for each float32, in the same order; or that float32 for an int32."""

    def made(_context, builder, _signature, arguments):
        i32 = ir.IntType(32)
        bits = builder.bitcast(arguments[0], i32)
        low = builder.and_(builder.ashr(bits, ir.Constant(i32, 31)), ir.Constant(i32, 0x7FFFFFFF))
        given = ir.FloatType() if x == types.int32 else i32
        return builder.bitcast(builder.xor(bits, low), given)

    return (types.float32 if x == types.int32 else types.int32)(x), made


@jit
def _largest(values, cap):
    """The largest z; the largest score is found among integers, which vectorizes."""
    most = np.int32(-(2**31))
    for j in range(values.shape[0]):
        most = max(most, _order(wide(values[j])))
    top = _order(most)
    return top if cap == 0 else cap * _share(top / cap)


@jit
def log_sums(scores, cap, lse):
    """See the interface."""
    cap = F(cap)
    for row in range(scores.shape[0]):
        values, total = scores[row], F(0)
        top = _largest(values, cap)
        if cap == 0:
            for j in range(values.shape[0]):
                total += exp(wide(values[j]) - top)
        else:
            for j in range(values.shape[0]):
                total += exp(cap * _share(wide(values[j]) / cap) - top)
        lse[row] = top + np.log(total)


@jit
def softmax_gradient(scores, targets, cap, lse):
    """See the interface."""
    cap, made = F(cap), np.empty(scores.shape[1], np.float32)
    for row in range(scores.shape[0]):
        values, target, total = scores[row], targets[row], F(0)
        top = _largest(values, cap)
        if cap == 0:
            for j in range(values.shape[0]):
                made[j] = exp(wide(values[j]) - top)
                total += made[j]
        else:
            for j in range(values.shape[0]):
                made[j] = exp(cap * _share(wide(values[j]) / cap) - top)
                total += made[j]
        lse[row] = top + np.log(total)
        inverse = F(1) / total
        if target >= 0:
            made[target] -= total
        if cap == 0:
            for j in range(values.shape[0]):
                values[j] = rounded(made[j] * inverse, values[j])
        else:
            for j in range(values.shape[0]):
                part = _share(wide(values[j]) / cap)
                values[j] = rounded(made[j] * inverse * (F(1) - part * part), values[j])


@jit
def attention_weights(scores, bias, start, causal, scale, weights, lse):
    """See the interface."""
    scale, masked, keys = F(scale), bias.shape[0] > 0, scores.shape[3]
    for b in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            for t in range(scores.shape[2]):
                seen = min(keys, start + t + 1) if causal else keys
                s, p, top, total = scores[b, h, t], weights[b, h, t], F(-np.inf), F(0)
                if masked:
                    hidden = bias[b, start + t]
                    for j in range(seen):
                        s[j] = s[j] if hidden[j] == F(0) else F(-np.inf)
                for j in range(seen):
                    top = max(top, s[j])
                if top == F(-np.inf):
                    p[:] = 0
                    lse[b, h, t] = 0
                    continue
                top *= scale
                for j in range(seen):
                    s[j] = exp(s[j] * scale - top)
                for j in range(seen):
                    total += s[j]
                inverse = F(1) / total
                for j in range(seen):
                    p[j] = rounded(s[j] * inverse, p[j])
                p[seen:] = 0
                lse[b, h, t] = top + np.log(total)


@jit
def attention_gradient(
    scores, products, lse, grad, out, bias, start, causal, scale, weights, d_scores
):
    """See the interface."""
    scale, masked, keys = F(scale), bias.shape[0] > 0, scores.shape[3]
    for b in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            for t in range(scores.shape[2]):
                at = start + t
                seen = min(keys, at + 1) if causal else keys
                g, o, whole, inner = grad[b, at, h], out[b, at, h], lse[b, h, at], F(0)
                for i in range(g.shape[0]):
                    inner += wide(g[i]) * wide(o[i])
                s, d = scores[b, h, t], products[b, h, t]
                p, ds = weights[b, h, t], d_scores[b, h, t]
                for j in range(seen):
                    x = s[j] * scale - whole
                    share = exp(F(0) if x > F(0) else x)
                    p[j] = rounded(share, p[j])
                    ds[j] = rounded((d[j] - inner) * share * scale, ds[j])
                p[seen:] = 0
                ds[seen:] = 0
                if masked:
                    hidden = bias[b, at]
                    for j in range(seen):
                        p[j] = p[j] if hidden[j] == F(0) else 0
                        ds[j] = ds[j] if hidden[j] == F(0) else 0
