"""Words and semaphores that threads share, against what they are for."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.speculation.shared_words import (
    SEMAPHORE_WORDS,
    let_others_run,
    post,
    put_shared_word,
    shared_word,
    take_one,
    wait_for,
)

MANY = 100_000


@njit(nogil=True)
def take_all(address: int, taken: NDArray[np.int64]) -> int:
    count = 0
    number = take_one(address)
    while number > 0:
        taken[number - 1] += 1
        count += 1
        number = take_one(address)
    return count


@njit(nogil=True)
def hand_over(first: int, second: int, word: int, times: int) -> int:
    """Wait at `first`, add one to the word, and post `second`; what the word was in the end."""
    seen = 0
    for _ in range(times):
        while wait_for(first):
            let_others_run()
        seen = shared_word(word)
        put_shared_word(word, seen + 1)
        post(second)
    return seen


def test_each_number_is_taken_once() -> None:
    word, taken = np.array([0]), np.zeros(MANY, dtype=np.int64)
    assert take_all(word.ctypes.data, taken) == 0
    word[0] = MANY
    threads = [threading.Thread(target=take_all, args=(word.ctypes.data, taken)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (taken == 1).all()


def test_threads_take_turns() -> None:
    """Each adds one when it is its turn: none of that is lost."""
    semaphores, word = np.zeros((2, SEMAPHORE_WORDS), dtype=np.int64), np.array([0])
    library = ctypes.CDLL(None)
    first, second = (one.ctypes.data for one in semaphores)
    for address in (first, second):
        assert library.sem_init(ctypes.c_void_p(address), 0, 0) == 0
    library.sem_post(ctypes.c_void_p(first))
    other = threading.Thread(target=hand_over, args=(second, first, word.ctypes.data, 1000))
    other.start()
    assert hand_over(first, second, word.ctypes.data, 1000) == 1998
    other.join()
    assert word[0] == 2000
