"""Python's lists of ints, read and made inside compiled code by the functions of Python's C API.

vLLM keeps a sample's tokens in such a list and wants its draft as one; made in Python, the lists of a step cost as much
as drafting. Invariants, which the caller keeps: the interpreter's lock is held, so compiled code that calls this is
never entered as `nogil`; an address is `id()` of an object that lives, and is a list where a list is asked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray


@intrinsic
def list_length(typing_context: Any, address: Any) -> Any:
    """How many items the list has."""

    def ask(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        python = context.get_python_api(builder)
        return python.list_size(builder.inttoptr(arguments[0], python.pyobj))

    return types.int64(types.int64), ask


@intrinsic
def item_of(typing_context: Any, address: Any, place: Any) -> Any:
    """The address of item `place` of the list, which goes on owning it."""

    def ask(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        python = context.get_python_api(builder)
        found = python.list_getitem(builder.inttoptr(arguments[0], python.pyobj), arguments[1])
        return builder.ptrtoint(found, ir.IntType(64))

    return types.int64(types.int64, types.int64), ask


@intrinsic
def int_of(typing_context: Any, address: Any) -> Any:
    """The value of the int."""

    def ask(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        python = context.get_python_api(builder)
        return python.long_as_longlong(builder.inttoptr(arguments[0], python.pyobj))

    return types.int64(types.int64), ask


@intrinsic
def new_list(typing_context: Any, owner: Any, place: Any, size: Any) -> Any:
    """Put a new list of `size` items, to be filled at once, at `place` of the list `owner`; returns its address."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        python = context.get_python_api(builder)
        made = python.list_new(arguments[2])
        python.list_setitem(builder.inttoptr(arguments[0], python.pyobj), arguments[1], made)
        return builder.ptrtoint(made, ir.IntType(64))

    return types.int64(types.int64, types.int64, types.int64), make


@intrinsic
def put_int(typing_context: Any, address: Any, place: Any, value: Any) -> Any:
    """Put an int with this value at `place` of the list."""

    def put(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        python = context.get_python_api(builder)
        made = python.long_from_longlong(arguments[2])
        python.list_setitem(builder.inttoptr(arguments[0], python.pyobj), arguments[1], made)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), put


@njit(cache=True)
def _split(flat: NDArray[Any], lengths: NDArray[Any], parts: int) -> None:
    begin = 0
    for number in range(lengths.size):
        size = lengths[number]
        part = new_list(parts, number, size)
        for place in range(size):
            put_int(part, place, flat[begin + place])
        begin += size


def split(flat: NDArray[Any], lengths: NDArray[Any]) -> list[list[int]]:
    """`flat` in parts of these lengths."""
    parts: list[Any] = [None] * lengths.size
    _split(flat, lengths, id(parts))
    return parts
