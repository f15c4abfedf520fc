"""Similarity: the share of an epoch's response tokens that the epoch before has for the same prompt. Pure.

The routine is RhymeRL's (section 5.1): the last three tokens are looked up in the prompt's responses of the epoch
before. The identical continuation there is accepted; where there is none, one token is generated. Where several places
match, the longest continuation counts (the paper leaves that open).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rhyme_openrlhf.history.index import Piece

PREFIX = 3


@dataclass
class Similarity:
    """The tokens that responses share with those of the epoch before."""

    tokens: int = 0
    accepted: int = 0
    shares: list[float] = field(default_factory=list)
    """The share of each response's tokens that were accepted."""
    hits: Counter[int] = field(default_factory=Counter)
    """Accepted stretches by their length."""

    @property
    def share(self) -> float:
        """Accepted tokens of all tokens."""
        return self.accepted / max(1, self.tokens)

    def add(self, responses: Sequence[Sequence[int]], earlier: Sequence[Sequence[int]]) -> None:
        """Add a prompt's responses of one epoch, held against those of the epoch before. Both as token ids."""
        places: dict[tuple[int, ...], list[tuple[Sequence[int], int]]] = defaultdict(list)
        for text in earlier:
            for end in range(PREFIX, len(text)):
                places[tuple(text[end - PREFIX : end])].append((text, end))
        for response in responses:
            if not response:
                continue
            stretches = _accepted_stretches(response, places)
            self.tokens += len(response)
            self.accepted += sum(stretches)
            self.shares.append(sum(stretches) / len(response))
            self.hits.update(stretches)


def responses(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the responses of a record as token ids."""
    return [np.asarray(piece.tokens).tolist() for piece in pieces]


def _accepted_stretches(
    response: Sequence[int], places: dict[tuple[int, ...], list[tuple[Sequence[int], int]]]
) -> list[int]:
    """Return the lengths of what the routine accepts of `response`, in order."""
    accepted = []
    at = PREFIX
    while at < len(response):
        longest = 0
        for text, end in places.get(tuple(response[at - PREFIX : at]), ()):
            same, most = 0, min(len(response) - at, len(text) - end)
            while same < most and text[end + same] == response[at + same]:
                same += 1
            longest = max(longest, same)
        if longest:
            accepted.append(longest)
        at += max(1, longest)
    return accepted
