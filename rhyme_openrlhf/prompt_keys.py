"""Names of prompts and their rounds, and each prompt's history worker.

Each round of a conversation has a history of its own. A round starts much like the same round of other samples and
unlike another round, although the tokens before it (the chat template's words) are the same. The first round's key is
the prompt's.

Invariants:

- A prompt's key is the same in every process, run and Python version; so is its owner.
- Growing from n to n + 1 workers moves prompts only to the new worker, about one in n + 1.
- All rounds of a prompt have one owner, in training and in evaluations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

# 128 bits: two of a billion prompts share a key with a probability below 1e-20.
KEY_BYTES = 16
# Constants of the generator in jump consistent hashing (Lamping and Veach 2014, arXiv:1406.2294, figure 1).
JUMP_MULTIPLIER = 2862933555777941757
JUMP_RANGE = 1 << 31
HASH_MASK = (1 << 64) - 1
# Not a hexadecimal digit, and fit for the name of a file.
ROUND_MARK = "-"
# Behind a prompt's key, before a round's number. The owner does not depend on it.
EVALUATION = f"{ROUND_MARK}e"


def prompt_key(prompt: str, datasource: str = "") -> str:
    """Return the key (32 hexadecimal digits) of a prompt's text within its data source."""
    source = datasource.encode("utf-8", "surrogatepass")
    # The length in front keeps ("ab", "c") and ("a", "bc") apart.
    text = len(source).to_bytes(8, "little") + source + prompt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=KEY_BYTES).hexdigest()


def round_key(key: str, number: int) -> str:
    """Return the key of a prompt's round `number`, counted from 0."""
    return f"{key}{ROUND_MARK}{number}" if number else key


def evaluation_key(key: str) -> str:
    """Return the key of the same prompt's history in evaluations, which training's history never sees."""
    return f"{key}{EVALUATION}"


def is_evaluation(key: str) -> bool:
    """Return whether a prompt's or round's key is of the history in evaluations."""
    return EVALUATION in key


def training_key(key: str) -> str:
    """Return the key of the same prompt or round in training."""
    return key.replace(EVALUATION, "", 1)


def first_round(key: str) -> str:
    """Return the key of the first round of the conversation that a round's key is of."""
    prompt, _, _ = key.partition(ROUND_MARK)
    return evaluation_key(prompt) if is_evaluation(key) else prompt


def rounds(key: str, known: Callable[[str], bool]) -> Iterator[str]:
    """Yield the keys of a prompt's rounds, from the first on, as long as they are `known`."""
    number = 0
    while known(round_key(key, number)):
        yield round_key(key, number)
        number += 1


def owner(key: str, workers: int) -> int:
    """Return the history worker, from 0 to `workers` - 1, that keeps the prompt of this key (or round's key).

    Jump consistent hashing (Lamping and Veach 2014). Raises ValueError for fewer than one worker.
    """
    if workers < 1:
        raise ValueError(f"there must be at least one history worker, got {workers}")
    prompt, _, _ = key.partition(ROUND_MARK)
    state = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little")
    worker, following = 0, 0
    while following < workers:
        worker = following
        state = (state * JUMP_MULTIPLIER + 1) & HASH_MASK
        following = (worker + 1) * JUMP_RANGE // ((state >> 33) + 1)
    return worker
