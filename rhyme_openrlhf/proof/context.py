"""A text after which what is drafted is certain to be drafted, and what is sampled is open. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.proof.judgement import Scored


@dataclass(frozen=True)
class Context:
    """A text after which the model most likely says `first`, and then `second` or something else."""

    prompt: tuple[int, ...]
    first: int
    second: int
    first_probability: float
    second_probability: float

    @property
    def tells(self) -> float:
        """The share of samples that begin with `first` and go on with something else than `second`."""
        return self.first_probability * (1 - self.second_probability)


def most_telling(texts: Iterable[tuple[Sequence[int], Scored]]) -> Context | None:
    """Return the most telling place in the likeliest responses to prompts; None where each has less than two tokens."""
    found = [
        Context((*prompt, *answer.tokens[:at]), answer.tokens[at], answer.tokens[at + 1], *map(math.exp, pair))
        for prompt, answer in texts
        for at, pair in enumerate(zip(answer.log_probs, answer.log_probs[1:], strict=False))
    ]
    return max(found, key=lambda context: context.tells, default=None)
