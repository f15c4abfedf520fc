"""One engine's turns in the streaming pipeline: what it generates next, and with which weights (RhymeRL 4.2).

A turn is the engine's part of a training step, handed to it before it needs it; an evaluation is a turn too. Between
two turns the engine takes the newest weights that it may use, and waits only if it has none that are new enough.

Invariants: turns begin in the order of their numbers, one at a time, each once; weights change only between two turns,
when no sample of an earlier turn is left, and only to newer ones; a turn begins with weights from its oldest to its
newest version. So a sample of training step t that has `weights_of_step(t)` is at most one step off policy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Training step, minus weight version, minus 1 (docs/architecture.md): what a sample may have at most.
MOST_OFF_POLICY = 1


@dataclass(frozen=True)
class Turn:
    """Turn `number` of a run (ascending, not without gaps): samples of training step `step`, generated with weights
    from version `oldest` to version `newest`."""

    number: int
    step: int
    oldest: int
    newest: int


@dataclass(frozen=True)
class Load:
    """Load this weight version."""

    version: int


@dataclass(frozen=True)
class Begin:
    """Begin this turn."""

    turn: Turn


@dataclass(frozen=True)
class AwaitWeights:
    """The turn can only begin with weights of `version` or newer, and they are not there."""

    turn: Turn
    version: int


def training_turn(step: int, first_version: int) -> Turn:
    """The turn of training step `step` in a run that starts with weight version `first_version` (0, or a resumed one).

    Evaluations have the numbers in between.
    """
    return Turn(2 * step, step, max(step - 1 - MOST_OFF_POLICY, first_version), step - 1)


def step_of(number: int) -> int:
    """The training step whose turn has this number."""
    return number // 2


def evaluation_turn(version: int) -> Turn:
    """The turn of the evaluation of exactly weight version `version`.

    It stands behind step version + 1: that one's turn begins without waiting for this version.
    """
    return Turn(2 * (version + 1 + MOST_OFF_POLICY) - 1, version, version, version)


class EngineTurns:
    """What one engine has been handed, and where it stands. Told of what happens; `next` says what to do."""

    def __init__(self) -> None:
        self.version = 0
        self.current: Turn | None = None
        self._waiting: deque[Turn] = deque()
        self._open: set[int] = set()
        self._left: dict[int, int] = {}
        self._offered: set[int] = set()

    # --- what happens

    def hand(self, turn: Turn, samples: int | None) -> None:
        """A turn to come, of so many samples; None: how many is not known yet (`add`, `close`).

        Raises ValueError if it does not come behind all others.
        """
        last = self._waiting[-1] if self._waiting else self.current
        if last is not None and turn.number <= last.number:
            raise ValueError(f"turn {turn.number} was handed behind turn {last.number}")
        self._waiting.append(turn)
        self._left[turn.number] = samples or 0
        if samples is None:
            self._open.add(turn.number)

    def extend(self, turn: Turn, samples: int) -> tuple[int, bool]:
        """More samples of a training step than were handed: the number of the turn they belong to here, and whether it
        is one that the engine did not have.

        It is the step's own turn while that is to come or runs; an engine that is past it generates them in the turn it
        is in. No sample gets too old or too new by that: while a step has samples to come there are no weights of it,
        so whatever an engine has in a later turn may be had by this one.
        """
        current = self.current
        if current is not None and turn.number <= current.number:
            self._left[current.number] += samples
            return current.number, False
        if turn.number in self._left:
            self._left[turn.number] += samples
            return turn.number, False
        self._waiting = deque(sorted((*self._waiting, turn), key=lambda other: other.number))
        self._left[turn.number] = samples
        return turn.number, True

    def add(self, number: int, samples: int) -> None:
        """Samples of a turn came. Raises ValueError for a turn that is unknown or over."""
        if number not in self._left:
            raise ValueError(f"samples of turn {number} came, which is not the engine's, or over")
        if number in self._open:
            self._left[number] += samples

    def close(self, number: int) -> None:
        """All samples have come of a turn of which it was not known how many there would be."""
        self._open.discard(number)

    def ended(self, number: int, samples: int = 1) -> None:
        """Samples of the turn need the engine no more."""
        if number in self._left:
            self._left[number] -= samples

    def offer(self, version: int) -> None:
        """Weights of this version can be loaded."""
        self._offered.add(version)

    def loaded(self, version: int) -> None:
        """The engine has weights of this version now; older ones are of no use any more."""
        self.version = version
        self._offered = {other for other in self._offered if other > version}

    def begun(self, turn: Turn) -> None:
        """The engine is in this turn now. Raises ValueError for another turn or weights than `next` said."""
        if self.next() != Begin(turn):
            raise ValueError(f"turn {turn.number} cannot begin now with weight version {self.version}")
        if self.current is not None:
            del self._left[self.current.number]
        self.current = self._waiting.popleft()

    # --- what follows

    @property
    def over(self) -> bool:
        """Whether the engine is in no turn: the current one has ended, or there was none yet."""
        current = self.current
        return current is None or (current.number not in self._open and not self._left[current.number])

    def is_behind(self, number: int) -> bool:
        """Whether turn `number` is over here or is the current one, and none behind it has begun."""
        current = -1 if self.current is None else self.current.number
        return current <= number and (current == number or (self.over and not self._has_waiting(number)))

    def _has_waiting(self, number: int) -> bool:
        return any(turn.number <= number for turn in self._waiting)

    def next(self) -> Load | Begin | AwaitWeights | None:
        """What to do now; None: nothing but wait for samples to end, or for a turn to be handed."""
        if not self.over or not self._waiting:
            return None
        turn = self._waiting[0]
        usable = [version for version in self._offered if self.version < version <= turn.newest]
        best = max(usable, default=self.version)
        if best < turn.oldest:
            return AwaitWeights(turn, turn.oldest)
        return Begin(turn) if best == self.version else Load(best)
