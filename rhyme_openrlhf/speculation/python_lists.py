"""Python's lists of ints, and attributes of its objects, read and made inside compiled code.

vLLM keeps a sample's tokens in such a list and wants its draft as one; made in Python, the lists of a step cost as much
as drafting. Lists are read where CPython has them (`listobject.h`, the same since version 3.0), so that they can be
fetched ahead of time like all other memory (`addresses.prefetch`); the rest goes through Python's C API.

Invariants, which the caller keeps: the interpreter's lock is held, so compiled code that calls this is never entered as
`nogil`; an address is `id()` of an object that lives, and is of the type that is asked for. Where the thread that holds
the lock waits for other threads, these may read lists and ints (of the type `int` itself: only those are asked nothing
that runs Python), and nothing else.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import int64_of, prefetch, put_int64

# As CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 1887220376

# A list, in words: two that all objects have (the second is the type's address), how many items it has, and the address
# of its items, which are addresses.
TYPE, SIZE, ITEMS = 1, 2, 3
ADDRESS_BYTES = 8


@njit(cache=True)
def list_length(address: int) -> int:
    """How many items the list has."""
    return int64_of(address, SIZE)


@njit(cache=True)
def item_of(address: int, place: int) -> int:
    """The address of item `place` of the list, which goes on owning it."""
    return int64_of(int64_of(address, ITEMS), place)


@njit(cache=True)
def type_of(address: int) -> int:
    """The address of the object's type."""
    return int64_of(address, TYPE)


@njit(cache=True)
def foresee_items(address: int, place: int) -> None:
    """Fetch the addresses of a list's items, the line with that of item `place` and the next."""
    items = int64_of(address, ITEMS) + ADDRESS_BYTES * place
    prefetch(items)
    prefetch(items + 64)


def _call(result: Any, *arguments: Any, name: str) -> Any:
    """Signature and code of an intrinsic that is one function of the C API: int64 for each address, `long` and size."""

    def make(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType() if result is types.void else word, [word] * len(arguments))
        function = context.get_python_api(builder)._get_function(kind, name)
        found = builder.call(function, values)
        return context.get_dummy_value() if result is types.void else found

    return result(*arguments), make


@intrinsic
def int_of(typing_context: Any, address: Any) -> Any:
    """The value of the int."""
    return _call(types.int64, types.int64, name="PyLong_AsLong")


@intrinsic
def new_int(typing_context: Any, value: Any) -> Any:
    """The address of an int with this value, owned by the caller."""
    return _call(types.int64, types.int64, name="PyLong_FromLong")


@intrinsic
def new_list(typing_context: Any, size: Any) -> Any:
    """The address of a list of `size` items, to be filled at once, owned by the caller."""
    return _call(types.int64, types.int64, name="PyList_New")


@intrinsic
def get_attribute(typing_context: Any, address: Any, name: Any) -> Any:
    """The address of the attribute with that name (the address of a str), owned by the caller."""
    return _call(types.int64, types.int64, types.int64, name="PyObject_GetAttr")


@intrinsic
def set_attribute(typing_context: Any, address: Any, name: Any, value: Any) -> Any:
    """Set the attribute with that name; the caller goes on owning the value."""
    return _call(types.int32, types.int64, types.int64, types.int64, name="PyObject_SetAttr")


@intrinsic
def dict_item(typing_context: Any, address: Any, key: Any) -> Any:
    """The address of the value of `key` in the dict, which goes on owning it; 0: there is none."""
    return _call(types.int64, types.int64, types.int64, name="PyDict_GetItem")


@intrinsic
def give_up(typing_context: Any, address: Any) -> Any:
    """No longer own the object."""
    return _call(types.void, types.int64, name="Py_DecRef")


@njit(cache=True)
def int_list(flat: NDArray[Any], begin: int, size: int) -> int:
    """A list of `size` ints of `flat` from `begin` on, owned by the caller."""
    made = new_list(size)
    if size:
        items = int64_of(made, ITEMS)
        for place in range(size):
            put_int64(items, place, new_int(flat[begin + place]))
    return made


@njit(cache=True)
def _split(flat: NDArray[Any], lengths: NDArray[Any], parts: int) -> None:
    """Replace the items of `parts` (the address of a list of Nones) by lists."""
    items = int64_of(parts, ITEMS)
    begin = 0
    for number in range(lengths.size):
        size = lengths[number]
        none = int64_of(items, number)
        put_int64(items, number, int_list(flat, begin, size))
        give_up(none)
        begin += size


def split(flat: NDArray[Any], lengths: NDArray[Any]) -> list[list[int]]:
    """`flat` in parts of these lengths."""
    parts: list[Any] = [None] * lengths.size
    _split(flat, lengths, id(parts))
    return parts
