"""The compiled engine of sabia.kernels.panel_products, with vectors of 16 numbers."""

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.np.arrayobj import make_array

from sabia.kernels.panel_products.interface import PANEL
from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.memory_numba import in_all

WIDTH, ROWS = 16, 8  # of vectors, and rows: three vectors of each are 24 sums of 32 registers
CHUNK = 128  # rows that stay in the second cache while all panels are read
FETCHES = 3  # for each input

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _BYTE = ir.VectorType(_F32, WIDTH), ir.IntType(8)
jit = njit(nogil=True, boundscheck=False, error_model="numpy")


def _function(builder, name, result, arguments):
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _address(context, builder, array, value):
    """The address of an array's data, and the bytes from one row to the next."""
    parts = make_array(array)(context, builder, value)
    return builder.ptrtoint(parts.data, _I64), cgutils.unpack_tuple(builder, parts.strides)[0]


def _loaded(builder, address, is_bf16):
    """The 16 numbers at an address."""
    kind = ir.VectorType(_I16, WIDTH) if is_bf16 else _VECTOR
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 2 if is_bf16 else 4
    if not is_bf16:
        return loaded
    wide = ir.VectorType(_I32, WIDTH)
    shift = ir.Constant(wide, [ir.Constant(_I32, 16)] * WIDTH)
    return builder.bitcast(builder.shl(builder.zext(loaded, wide), shift), _VECTOR)


def _repeated(builder, address):
    """The number at an address, 16 times."""
    number = builder.load(builder.inttoptr(address, _F32.as_pointer()))
    return in_all(builder, number, _VECTOR)


@numba.extending.intrinsic
def _block(_context, x, panel, out, adds, ahead, step):
    """out[ROWS, PANEL] = x[ROWS, I] · panel[I, PANEL] or, with `adds`, += that; meanwhile what is
    at the address `ahead`, `step` bytes for each input, is fetched into the second cache."""
    is_bf16 = panel.dtype == types.uint16

    def made(context, b, signature, arguments):
        def number(n):
            return ir.Constant(_I64, n)

        (rows, row_step), (weights, weight_step), (results, out_step) = (
            _address(context, b, *both)
            for both in zip(signature.args[:3], arguments[:3], strict=True)
        )
        adds, ahead, step = arguments[3:]
        inputs = cgutils.unpack_tuple(b, make_array(panel)(context, b, arguments[1]).shape)[0]
        fused = _function(b, f"llvm.fma.v{WIDTH}f32", _VECTOR, [_VECTOR] * 3)
        fetch = _function(b, "llvm.prefetch.p0", ir.VoidType(), [_BYTE.as_pointer(), *[_I32] * 3])
        begin, loop = b.block, b.append_basic_block("loop")
        end = b.append_basic_block("end")
        b.branch(loop)
        b.position_at_end(loop)
        i, zero = b.phi(_I64), ir.Constant(_VECTOR, [ir.Constant(_F32, 0.0)] * WIDTH)
        vectors = range(PANEL // WIDTH)
        sums = [[b.phi(_VECTOR) for _ in vectors] for _ in range(ROWS)]
        at, wide = b.add(weights, b.mul(i, weight_step)), WIDTH * panel.dtype.bitwidth // 8
        read = [_loaded(b, b.add(at, number(v * wide)), is_bf16) for v in vectors]
        for n in range(FETCHES):
            part = b.sdiv(b.mul(step, number(n)), number(FETCHES))
            where = b.add(b.add(ahead, b.mul(i, step)), part)
            how = (ir.Constant(_I32, flag) for flag in (0, 2, 1))  # to read, second cache, data
            b.call(fetch, [b.inttoptr(where, _BYTE.as_pointer()), *how])
        totals = []
        for r, mine in enumerate(sums):
            at = b.add(b.add(rows, b.mul(row_step, number(r))), b.mul(i, number(4)))
            one = _repeated(b, at)
            totals.append([b.call(fused, [one, w, s]) for w, s in zip(read, mine, strict=True)])
            for before, after in zip(mine, totals[-1], strict=True):
                before.add_incoming(zero, begin)
                before.add_incoming(after, loop)
        following = b.add(i, number(1))
        i.add_incoming(number(0), begin)
        i.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, inputs), loop, end)
        b.position_at_end(end)
        with b.if_else(b.icmp_signed("!=", adds, number(0))) as branches:
            for branch, is_sum in zip(branches, (True, False), strict=True):
                with branch:
                    for r, mine in enumerate(totals):
                        for v, total in enumerate(mine):
                            at = b.add(b.add(results, b.mul(out_step, number(r))),
                                       number(v * WIDTH * 4))  # fmt: skip
                            whole = b.fadd(_loaded(b, at, False), total) if is_sum else total
                            b.store(whole, b.inttoptr(at, _VECTOR.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(x, panel, out, types.int64, types.int64, types.int64), made


@jit
def fill(panels, weight, first):
    """See the interface."""
    size, end = panels.shape[2], first + weight.shape[0]
    for p in range(first // size, -(-end // size)):
        begin, stop = max(first, p * size), min(end, (p + 1) * size)
        for i in range(weight.shape[1]):
            for o in range(begin, stop):
                panels[p, i, o - p * size] = weight[o - first, i]


@numba.extending.register_jitable
def _one_panel(x, panel, out, ahead, depth):
    """out[M, PANEL or fewer] of at least ROWS rows; the last ROWS are computed in any case, some of
    them again. ahead: the panel to be fetched."""
    inputs, outputs, blocks = x.shape[1], out.shape[1], -(-x.shape[0] // ROWS)
    spare = np.empty((ROWS, PANEL), np.float32)
    step = panel.strides[0] // blocks  # bytes that a block fetches for each input
    for number in range(blocks):
        row = min(number * ROWS, x.shape[0] - ROWS)
        result = out[row : row + ROWS] if outputs == PANEL else spare
        for start in range(0, inputs, depth):
            end = min(start + depth, inputs)
            where = ahead.ctypes.data + (number * inputs + start) * step
            _block(x[row : row + ROWS, start:end], panel[start:end], result, start, where, step)
        if outputs < PANEL:
            for r in range(ROWS):
                for o in range(outputs):
                    out[row + r, o] = spare[r, o]


@jit
def _product(x, panels, out, depth):
    for begin in range(0, x.shape[0], CHUNK):
        first = max(0, min(begin, x.shape[0] - ROWS))
        rows, results = x[first : begin + CHUNK], out[first : begin + CHUNK]
        for p in range(panels.shape[0]):
            some = results[:, p * PANEL : (p + 1) * PANEL]
            _one_panel(rows, panels[p], some, panels[min(p + 1, len(panels) - 1)], depth)


def product(x, panels, out, depth):
    """See the interface."""
    if len(x) >= ROWS:
        _product(x, panels, out, depth)
        return
    rows = np.zeros((ROWS, x.shape[1]), np.float32)
    rows[: len(x)] = x
    results = np.empty((ROWS, out.shape[1]), np.float32)
    _product(rows, panels, results, depth)
    out[:] = results[: len(x)]
