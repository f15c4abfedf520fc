"""A run's failure, or the wish that the run stops: how each reaches the driver, and is said in one sentence."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray

# What shells report for a process that SIGTERM ended.
TERMINATED_CODE = 128 + signal.SIGTERM


# What a dead actor, a limit or a user's reward function raises in a trainer that waits for it.
FAULTS = (ray.exceptions.RayError, RuntimeError, OSError, ValueError)


class StopRequested(Exception):
    """Raised by a trainer between two steps when the run directory has a stop request; nothing is wrong.

    What can be saved is saved by then. Not one of FAULTS, but Ray wraps it into an error that is: ask
    `is_stop_request` first.
    """


# What the record says of a run that ended because it was asked to. Its exit code is 0: it did what it was told.
STOPPED_ON_REQUEST = "stopped on request"


# The same of one that SIGTERM ended; its exit code is TERMINATED_CODE, in time or not.
TERMINATED_IN_ORDER = "ended by SIGTERM after its step"
TERMINATED = "ended by SIGTERM"


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread (run/termination.py). Not an Exception: nothing upstream may swallow it.

    Ray's waits end for a KeyboardInterrupt alone, and raise a plain one then. For any other exception of a signal
    handler they go on, and look for signals no more. Seen with Ray 2.55.0.
    """


@contextmanager
def unmasked_interruptions() -> Iterator[None]:
    """Let an interruption out as itself that C code turned into a SystemError.

    A signal that comes while Ray's core hands results over leaves its exception set behind a call that returns
    normally; Python then raises a SystemError ("returned a result with an exception set") with the real one as its
    cause. Seen with Ray 2.55.0.
    """
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, (Interrupted, KeyboardInterrupt)):
            raise error.__cause__ from None
        raise


def is_stop_request(error: BaseException) -> bool:
    """Return whether `error` is a trainer's StopRequested, in however many actors' wrappings."""
    return isinstance(_innermost(error), StopRequested)


def is_out_of_reach(error: BaseException) -> bool:
    """Return whether an actor was not reached, whose node may be lost: Ray does not know yet."""
    return isinstance(_innermost(error), ray.exceptions.ActorUnavailableError)


def _innermost(error: BaseException) -> BaseException:
    cause: BaseException = error
    while isinstance(cause, ray.exceptions.RayTaskError) and cause.cause is not None and cause.cause is not cause:
        cause = cause.cause
    return cause


def one_sentence(error: BaseException) -> str:
    """Return the innermost cause in one line: type and message."""
    cause = _innermost(error)
    lines = str(cause).strip().splitlines()
    # A RayTaskError's text is a traceback that ends with the message.
    return f"{type(cause).__name__}: {lines[-1].strip() if lines else 'no message'}"
