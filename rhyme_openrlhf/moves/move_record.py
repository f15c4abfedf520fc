"""What is known of a move before it begins and when it is over."""

from __future__ import annotations

from dataclasses import dataclass

from rhyme_openrlhf.scheduling.move import Move
from rhyme_openrlhf.scheduling.move_costs import Destination


@dataclass(frozen=True)
class Choice:
    """How a sample is to be carried; the downtime that is expected of it, and on which grounds (None: not known)."""

    carrier: str
    predicted: float | None = None
    destination: Destination | None = None


@dataclass(frozen=True)
class MoveRecord:
    """A move that is over. `seconds`: all of it; `tokens`: of context.

    `downtime`: seconds from the stop at the source to the first token elsewhere (or to the order to resume), None where
    that is not known. `group`: as in SampleRequest.
    """

    move: Move
    cause: str
    seconds: float
    downtime: float | None
    tokens: int
    choice: Choice
    group: tuple[int, int] | None = None
