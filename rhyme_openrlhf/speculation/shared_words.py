"""Words of memory that several threads read and write, and semaphores, inside compiled code.

The same calls that C has for it: atomic instructions, and POSIX semaphores of the C library, which a thread waits for
without the interpreter's lock. What one thread wrote before it puts a word, another reads after it saw that word.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WORD_BYTES = 8
# Bytes of a semaphore (`sem_t` of glibc and musl, 64 bits), in words.
SEMAPHORE_WORDS = 4


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def take_one(typing_context: Any, address: Any) -> Any:
    """The word at `address`, which becomes one less: each thread that asks sees another number."""

    def take(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("sub", _pointer(builder, arguments[0]), ir.IntType(64)(1), "acq_rel")

    return types.int64(types.int64), take


@intrinsic
def write_same(typing_context: Any, address: Any) -> Any:
    """Write the word at `address` without changing it, whoever else writes it."""

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Adding zero would be compiled to reading.
        zero = ir.IntType(64)(0)
        builder.cmpxchg(_pointer(builder, arguments[0]), zero, zero, "monotonic", "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64), write


@intrinsic
def shared_word(typing_context: Any, address: Any) -> Any:
    """The word at `address`, as it is now."""

    def load(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(builder, arguments[0])
        return builder.load_atomic(pointer, "acquire", WORD_BYTES, typ=ir.IntType(64))

    return types.int64(types.int64), load


@intrinsic
def put_shared_word(typing_context: Any, address: Any, value: Any) -> Any:
    """Write the word at `address`."""

    def store(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "release", WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), store


def _call(name: str, *arguments: Any) -> Any:
    """Signature and code of an intrinsic that is one function of the C library, which returns an int."""

    def make(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [value.type for value in values])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    return types.int32(*arguments), make


@intrinsic
def wait_for(typing_context: Any, semaphore: Any) -> Any:
    """Sleep until the semaphore at an address is posted (0), or a signal came (-1)."""
    return _call("sem_wait", types.int64)


@intrinsic
def post(typing_context: Any, semaphore: Any) -> Any:
    """Wake one thread that waits for the semaphore at an address, or the next one that will."""
    return _call("sem_post", types.int64)


@intrinsic
def let_others_run(typing_context: Any) -> Any:
    """Let another thread have this core, if one waits for it."""
    return _call("sched_yield")
