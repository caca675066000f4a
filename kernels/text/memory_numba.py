"""Loads and stores in byte buffers for compiled kernels: no bounds check, no negative indices.

NumPy indexing in numba tests every signed index for negative values; in a loop over single bytes
that takes a large part of the time. Callers must stay inside the buffer.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _pointer(context, builder, kind, array, index):
    """To array[index] of a uint8 array, which may be given by its address."""
    if isinstance(kind, types.Integer):
        data = builder.inttoptr(array, ir.IntType(8).as_pointer())
    else:
        data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def byte_at(typing_context, array, index):
    """array[index] of a contiguous uint8 array, or of the one at an address, as int64."""

    def generate(context, builder, signature, arguments):
        byte = builder.load(_pointer(context, builder, signature.args[0], *arguments))
        return builder.zext(byte, ir.IntType(64))

    return types.int64(array, types.int64), generate


@intrinsic
def word_at(typing_context, array, index):
    """Eight bytes of a contiguous uint8 array, or of the one at an address, at any index, as a
    little-endian uint64."""

    def generate(context, builder, signature, arguments):
        address = _pointer(context, builder, signature.args[0], *arguments)
        word = builder.load(builder.bitcast(address, ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(array, types.int64), generate


@intrinsic
def int_at(typing_context, address, index):
    """The int32 number `index` of the contiguous array at an address, as int64."""

    def generate(context, builder, signature, arguments):
        data = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.sext(builder.load(builder.gep(data, [arguments[1]])), ir.IntType(64))

    return types.int64(address, types.int64), generate


@intrinsic
def set_bits(typing_context, word):
    """The number of bits that are set in a uint64, as int64."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def trailing_zeros(typing_context, word):
    """Zero bits below the lowest set bit of a uint64, as int64; 64 of zero."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def equal_bytes(typing_context, array, index, byte, case):
    """uint64: bit i tells whether array[index + i] | case is `byte`, for 64 bytes of a uint8 array;
    case: bits that are not compared, 0 or 0x20 (of ASCII letters)."""

    def generate(context, builder, signature, arguments):
        block = _block(context, builder, signature, arguments)
        wanted, mask = (
            in_all(builder, builder.trunc(value, ir.IntType(8)), block.type)
            for value in arguments[2:]
        )
        equal = builder.icmp_unsigned("==", builder.or_(block, mask), wanted)
        return builder.bitcast(equal, ir.IntType(64))

    return types.uint64(array, types.int64, types.int64, types.int64), generate


@intrinsic
def bytes_between(typing_context, array, index, least, most):
    """uint64: bit i tells whether array[index + i] is from `least` to `most`, for 64 bytes of a
    uint8 array."""

    def generate(context, builder, signature, arguments):
        block = _block(context, builder, signature, arguments)
        low, high = (builder.trunc(value, ir.IntType(8)) for value in arguments[2:])
        inside = _between(builder, block, low, high)
        return builder.bitcast(inside, ir.IntType(64))

    return types.uint64(array, types.int64, types.int64, types.int64), generate


@intrinsic
def copy_lower(typing_context, source, index, target, start):
    """Copy 64 bytes of a uint8 array, source[index:], to target[start:], A to Z as a to z; returns
    uint64: bit i tells whether source[index + i] is not ASCII."""

    def generate(context, builder, signature, arguments):
        block, byte = _block(context, builder, signature, arguments), ir.IntType(8)
        kind, to = block.type, context.make_array(signature.args[2])(context, builder, arguments[2])
        upper = _between(builder, block, ir.Constant(byte, 0x41), ir.Constant(byte, 0x5A))
        case = builder.shl(builder.zext(upper, kind), ir.Constant(kind, [5] * 64))
        address = builder.bitcast(builder.gep(to.data, [arguments[3]]), kind.as_pointer())
        builder.store(builder.or_(block, case), address, align=1)
        other = builder.icmp_signed("<", block, ir.Constant(kind, [0] * 64))
        return builder.bitcast(other, ir.IntType(64))

    return types.uint64(source, types.int64, target, types.int64), generate


def _between(builder, block, low, high):
    """For each byte of a vector, whether it is from `low` to `high`."""
    first = in_all(builder, low, block.type)
    span = in_all(builder, builder.sub(high, low), block.type)
    return builder.icmp_unsigned("<=", builder.sub(block, first), span)


@intrinsic
def flagged(typing_context, array, index, bits):
    """uint64: bit i tells whether array[index + i] has one of `bits`, for 64 entries of a uint16
    array."""

    def generate(context, builder, signature, arguments):
        block = _block(context, builder, signature, arguments, bits_each=16)
        mask = in_all(builder, builder.trunc(arguments[2], ir.IntType(16)), block.type)
        zero = ir.Constant(block.type, [0] * 64)
        some = builder.icmp_unsigned("!=", builder.and_(block, mask), zero)
        return builder.bitcast(some, ir.IntType(64))

    return types.uint64(array, types.int64, types.int64), generate


def _block(context, builder, signature, arguments, bits_each=8):
    """64 entries of the array that is the first argument, from the second on."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    kind = ir.VectorType(ir.IntType(bits_each), 64)
    address = builder.bitcast(builder.gep(data, [arguments[1]]), kind.as_pointer())
    return builder.load(address, align=bits_each // 8)


def in_all(builder, value, kind):
    """A vector of equal entries."""
    empty, number = ir.Constant(kind, ir.Undefined), ir.IntType(32)
    first = builder.insert_element(empty, value, ir.Constant(number, 0))
    order = ir.Constant(ir.VectorType(number, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, empty, order)
