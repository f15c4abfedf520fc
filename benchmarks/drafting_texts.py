"""Texts of the drafting benchmarks: 16 responses of 8192 tokens, synthetic ones and a recorded run's."""

from __future__ import annotations

import random

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

RESPONSES = 16
RESPONSE_TOKENS = 8192
VOCABULARY = 50000
# Tokens between two mutations on average: runs of equal text like those of recorded runs.
MUTATION_EVERY = 40
CONTEXT = HistoSpecSettings().prefix_max


def synthetic() -> list[Piece]:
    """Responses that share long runs of text, and differ every MUTATION_EVERY tokens or so."""
    rng = random.Random(5)
    base = [rng.randrange(VOCABULARY) for _ in range(RESPONSE_TOKENS)]
    context = [rng.randrange(VOCABULARY) for _ in range(CONTEXT)]
    pieces = []
    for number in range(RESPONSES):
        text = [rng.randrange(VOCABULARY) if rng.random() < 1 / MUTATION_EVERY else token for token in base]
        pieces.append(Piece(context, text, float(number % 2)))
    return pieces


def recorded(steps: list[list[Record]]) -> list[Piece]:
    """Return the longest prompt's recorded responses, several epochs one after the other, to the same length."""
    texts: dict[str, list[list[int]]] = {}
    for records in steps:
        for record in records:
            texts.setdefault(record.prompt_key, []).extend([int(t) for t in piece.tokens] for piece in record.pieces)
    longest = max(texts.values(), key=lambda found: sum(map(len, found)))
    flat = [token for text in longest for token in text]
    flat *= -(-RESPONSES * RESPONSE_TOKENS // len(flat))
    return [
        Piece(flat[:CONTEXT], flat[i * RESPONSE_TOKENS : (i + 1) * RESPONSE_TOKENS], float(i % 2))
        for i in range(RESPONSES)
    ]
