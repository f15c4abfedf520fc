"""Arrays by their addresses, inside compiled code.

One compiled call drafts for all samples of a step, and each has buffers of its own; a list of arrays would cost a
Python object a sample. Invariant, which the caller keeps: an address handed to compiled code belongs to an array that
lives, and has at least as many elements as are asked for.
"""

from __future__ import annotations

from typing import Any

from numba import carray, njit, types
from numba.extending import intrinsic


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
