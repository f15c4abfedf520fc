"""One engine's turns in the streaming pipeline: what it generates next, and with which weights (RhymeRL 4.2).

A turn is the engine's part of a training step, handed to it before it needs it; an evaluation is a turn too. Between
two turns the engine takes the newest weights that it may use, and waits only if it has none that are new enough.

Invariants:
- Turns begin in the order of their numbers, one at a time, each once.
- Weights change only between two turns, when no sample of an earlier turn is left, and only to newer ones.
- A turn begins with weights from its oldest to its newest version. So a sample is at most one step off policy.
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
    """Return the turn of a training step in a run that starts with weight version `first_version` (0, or resumed).

    Evaluations have the numbers in between.
    """
    return Turn(2 * step, step, max(step - 1 - MOST_OFF_POLICY, first_version), step - 1)


def step_of(number: int) -> int:
    """Return the training step whose turn has this number."""
    return number // 2


def evaluation_turn(version: int) -> Turn:
    """Return the turn of the evaluation of exactly weight version `version`.

    It stands behind step version + 1: that one's turn begins without waiting for this version.
    """
    return Turn(2 * (version + 1 + MOST_OFF_POLICY) - 1, version, version, version)


class EngineTurns:
    """The turns of one engine: those handed to it and the current one. `next` says what to do."""

    def __init__(self) -> None:
        self.version = 0
        self.current: Turn | None = None
        self._waiting: deque[Turn] = deque()
        self._open: set[int] = set()
        self._left: dict[int, int] = {}
        self._offered: set[int] = set()

    # --- what happens

    def hand(self, turn: Turn, samples: int | None) -> None:
        """Add a turn of this many samples; None: the number is not known yet (`add`, `close`).

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
        """Add samples to a training step. Return the number of their turn here, and whether the engine did not have it.

        They belong to the step's own turn while it is waiting or runs. An engine that is past it generates them in its
        current turn. No sample gets too old or too new. While a step has samples to come, there are no weights of it,
        so the weights of the later turn are allowed.
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
        """Note that samples of a turn came. Raises ValueError for a turn that is unknown or over."""
        if number not in self._left:
            raise ValueError(f"samples of turn {number} came, which is not the engine's, or over")
        if number in self._open:
            self._left[number] += samples

    def close(self, number: int) -> None:
        """Note that all samples of a turn of unknown size have come."""
        self._open.discard(number)

    def ended(self, number: int, samples: int = 1) -> None:
        """Note that samples of the turn no longer need the engine."""
        if number in self._left:
            self._left[number] -= samples

    def offer(self, version: int) -> None:
        """Note that weights of this version can be loaded."""
        self._offered.add(version)

    def loaded(self, version: int) -> None:
        """Note that the engine has weights of this version, and forget older ones."""
        self.version = version
        self._offered = {other for other in self._offered if other > version}

    def begun(self, turn: Turn) -> None:
        """Note that the engine begins this turn. Raises ValueError for another turn or weights than `next` said."""
        if self.next() != Begin(turn):
            raise ValueError(f"turn {turn.number} cannot begin now with weight version {self.version}")
        if self.current is not None:
            del self._left[self.current.number]
        self.current = self._waiting.popleft()

    # --- what follows

    @property
    def over(self) -> bool:
        """The engine is in no turn: the current one has ended, or there was none yet."""
        current = self.current
        return current is None or (current.number not in self._open and not self._left[current.number])

    def is_behind(self, number: int) -> bool:
        """Return whether turn `number` is over here or is the current one, and none behind it has begun."""
        current = -1 if self.current is None else self.current.number
        return current <= number and (current == number or (self.over and not self._has_waiting(number)))

    def _has_waiting(self, number: int) -> bool:
        return any(turn.number <= number for turn in self._waiting)

    def next(self) -> Load | Begin | AwaitWeights | None:
        """Return what to do now; None: wait for samples to end, or for a turn to be handed."""
        if not self.over or not self._waiting:
            return None
        turn = self._waiting[0]
        usable = [version for version in self._offered if self.version < version <= turn.newest]
        best = max(usable, default=self.version)
        if best < turn.oldest:
            return AwaitWeights(turn, turn.oldest)
        return Begin(turn) if best == self.version else Load(best)
