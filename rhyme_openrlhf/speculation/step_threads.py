"""Threads that help a process's engine with drafting (`step_parts.py`), and the words they share with it.

They are started once, sleep in compiled code and never need the interpreter's lock: waking one costs the step some
microseconds, starting one would cost more than it saves. They end with the process.

Invariants: there are no more threads, with the one that asks, than cores that it may use (an engine of vLLM's CPU build
is bound to its own). In a process that was forked there are none, and the steps are done without.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading

import numpy as np

from rhyme_openrlhf.speculation.shared_words import WORD_BYTES
from rhyme_openrlhf.speculation.slabs import aligned
from rhyme_openrlhf.speculation.step_parts import ENDING, SEMAPHORE, SHARED_WORDS, help_out


class StepThreads:
    """So many threads beside the one that asks."""

    def __init__(self, helpers: int) -> None:
        """Compiles what they do, or loads it from Numba's cache."""
        self._words = aligned(WORD_BYTES * SHARED_WORDS).view(np.int64)
        self._words[:] = 0
        self.address = self._words.ctypes.data
        self.helpers = helpers
        self._semaphore = ctypes.c_void_p(self.address + WORD_BYTES * SEMAPHORE)
        self._library = ctypes.CDLL(None)
        # It fails for a number that is too large only.
        self._library.sem_init(self._semaphore, 0, 0)
        self._threads = [
            threading.Thread(target=help_out, args=(self.address,), name=f"drafting-{number}", daemon=True)
            for number in range(helpers)
        ]
        if helpers:
            # Compiled by this thread, because no step waits for theirs.
            self._words[ENDING] = 1
            help_out(self.address)
            self._words[ENDING] = 0
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let the threads end, and wait for that."""
        self.helpers = 0
        self._words[ENDING] = 1
        for _ in self._threads:
            self._library.sem_post(self._semaphore)
        for thread in self._threads:
            thread.join()


def step_threads(threads: int) -> StepThreads:
    """This process's, for at most so many threads with the one that asks."""
    return _of_process(min(threads, len(os.sched_getaffinity(0))) - 1)


@functools.cache
def _of_process(helpers: int) -> StepThreads:
    return StepThreads(helpers)
