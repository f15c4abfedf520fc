"""Arrays by their addresses, inside compiled code.

One compiled call drafts for all samples of a step, and each has buffers of its own; a list of arrays would cost a
Python object a sample. Invariant, which the caller keeps: an address handed to compiled code belongs to an array that
lives, and has at least as many elements as are asked for.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Bytes that are looked at together.
TOGETHER = 32
# Arguments of LLVM's prefetch: to read, into all caches, data.
READ, ALL_CACHES, DATA = 0, 3, 1


def _as_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


def _pointer_to(kind: Any) -> Any:
    """What makes an address a pointer to elements of this kind."""

    def typed(typing_context: Any, address: Any) -> Any:
        return types.CPointer(kind)(types.int64), _as_pointer

    return intrinsic(typed)


_int32_pointer, _int64_pointer = _pointer_to(types.int32), _pointer_to(types.int64)
_float32_pointer, _float64_pointer = _pointer_to(types.float32), _pointer_to(types.float64)


@njit(inline="always")
def int32s_at(address: int, size: int) -> Any:
    """The int32[size] at `address`."""
    return carray(_int32_pointer(address), size)


@njit(inline="always")
def int64s_at(address: int, size: int) -> Any:
    """The int64[size] at `address`; `size` may be a shape."""
    return carray(_int64_pointer(address), size)


@njit(inline="always")
def float32s_at(address: int, size: int) -> Any:
    """The float32[size] at `address`."""
    return carray(_float32_pointer(address), size)


@njit(inline="always")
def float64s_at(address: int, size: int) -> Any:
    """The float64[size] at `address`."""
    return carray(_float64_pointer(address), size)


def _element(bits: int, signed: bool) -> Any:
    """What reads element `place` of the integers at `address`: an array's index may be negative, and is asked."""

    def read(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
        found = builder.load(builder.gep(pointer, [arguments[1]], source_etype=ir.IntType(bits)))
        if bits == 64:
            return found
        return (builder.sext if signed else builder.zext)(found, ir.IntType(64))

    return types.int64(types.int64, types.int64), read


@intrinsic
def int32_of(typing_context: Any, address: Any, place: Any) -> Any:
    """Element `place` (not negative) of the int32 array at `address`."""
    return _element(32, True)


@intrinsic
def int64_of(typing_context: Any, address: Any, place: Any) -> Any:
    """Element `place` of the int64s at `address`."""
    return _element(64, True)


@intrinsic
def uint8_of(typing_context: Any, address: Any, place: Any) -> Any:
    """Element `place` (not negative) of the uint8 array at `address`."""
    return _element(8, False)


@intrinsic
def uint16_of(typing_context: Any, address: Any, place: Any) -> Any:
    """Element `place` (not negative) of the uint16 array at `address`."""
    return _element(16, False)


def _put(bits: int) -> Any:
    """What writes element `place` of the integers at `address`."""

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
        value = arguments[2] if bits == 64 else builder.trunc(arguments[2], ir.IntType(bits))
        builder.store(value, builder.gep(pointer, [arguments[1]], source_etype=ir.IntType(bits)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), write


@intrinsic
def put_int32(typing_context: Any, address: Any, place: Any, value: Any) -> Any:
    """Write element `place` (not negative) of the int32 array at `address`."""
    return _put(32)


@intrinsic
def put_int64(typing_context: Any, address: Any, place: Any, value: Any) -> Any:
    """Write element `place` (not negative) of the int64 array at `address`."""
    return _put(64)


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Bring what is at `address` into the caches, without waiting for it. Any address will do."""

    def ask(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [pointer, number(READ), number(ALL_CACHES), number(DATA)])
        return context.get_dummy_value()

    return types.void(types.int64), ask


def _bytes(builder: Any, address: Any) -> Any:
    """The TOGETHER bytes from `address` on, as a vector."""
    lanes = ir.VectorType(ir.IntType(8), TOGETHER)
    return builder.load(builder.inttoptr(address, lanes.as_pointer()), typ=lanes, align=1)


@intrinsic
def least_byte(typing_context: Any, address: Any, bits: Any) -> Any:
    """The least of those of the TOGETHER bytes from `address` on whose bits are set in `bits`; 255: none is less."""

    def find(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        there = _bytes(builder, arguments[0])
        asked = builder.bitcast(
            builder.trunc(arguments[1], ir.IntType(TOGETHER)), ir.VectorType(ir.IntType(1), TOGETHER)
        )
        greatest = ir.Constant(there.type, [ir.Constant(ir.IntType(8), 255)] * TOGETHER)
        kind = ir.FunctionType(ir.IntType(8), [there.type])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.umin.v{TOGETHER}i8")
        return builder.zext(builder.call(reduce, [builder.select(asked, there, greatest)]), ir.IntType(64))

    return types.int64(types.int64, types.int64), find


@intrinsic
def bytes_at_least(typing_context: Any, address: Any, least: Any) -> Any:
    """Which of the TOGETHER bytes from `address` on are at least `least` (0 to 255): bit i of the i-th."""

    def compare(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8)
        there = _bytes(builder, arguments[0])
        lanes = there.type
        one = builder.insert_element(
            ir.Constant(lanes, ir.Undefined), builder.trunc(arguments[1], byte), ir.IntType(32)(0)
        )
        all_same = builder.shuffle_vector(
            one, ir.Constant(lanes, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), TOGETHER), None)
        )
        bits = builder.bitcast(builder.icmp_unsigned(">=", there, all_same), ir.IntType(TOGETHER))
        return builder.zext(bits, ir.IntType(64))

    return types.int64(types.int64, types.int64), compare


@intrinsic
def trailing_zeros(typing_context: Any, bits: Any) -> Any:
    """Zero bits below the lowest one of `bits`; 64 where there is none."""

    def count(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.int64), count


@intrinsic
def leading_zeros(typing_context: Any, bits: Any) -> Any:
    """Zero bits above the highest one of `bits`; 64 where there is none."""

    def count(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.int64), count
