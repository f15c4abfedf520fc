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

# Arguments of LLVM's prefetch: to read, into all caches, data.
READ, ALL_CACHES, DATA = 0, 3, 1


@intrinsic
def _int32_pointer(typing_context: Any, address: Any) -> Any:
    return types.CPointer(types.int32)(types.int64), _as_pointer


@intrinsic
def _int64_pointer(typing_context: Any, address: Any) -> Any:
    return types.CPointer(types.int64)(types.int64), _as_pointer


def _as_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@njit(inline="always")
def int32s_at(address: int, size: int) -> Any:
    """The int32[size] at `address`."""
    return carray(_int32_pointer(address), size)


@njit(inline="always")
def int64s_at(address: int, size: int) -> Any:
    """The int64[size] at `address`."""
    return carray(_int64_pointer(address), size)


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
    """Element `place` (not negative) of the int64 array at `address`."""
    return _element(64, True)


@intrinsic
def uint8_of(typing_context: Any, address: Any, place: Any) -> Any:
    """Element `place` (not negative) of the uint8 array at `address`."""
    return _element(8, False)


@intrinsic
def uint16_of(typing_context: Any, address: Any, place: Any) -> Any:
    """Element `place` (not negative) of the uint16 array at `address`."""
    return _element(16, False)


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
