"""Which steps are planned anew, where planning every one would take too much of short steps.

To judge proposals, learn from the last ones and choose takes the processor about a tenth of a millisecond with few
samples running: nothing of a step of 50 ms, several percent of one of 4. What is known changes little from one step to
the next, so that a plan holds for some steps, as many as planning is too dear for.

Invariants: pure; where clearly more or fewer samples run than were planned for, it is planned anew; planned are always
some steps in a row, because a step is timed from its planning to that of the next one. Of the others some are timed
too: planned ones take longer, and come just where samples begin or end, so that they say little of the usual step.
"""

from __future__ import annotations

# Of the time, for planning: a quarter of the hundredth that choosing drafts may cost in all. Timing what was planned
# and cutting by a plan that holds come on top, and a step of few samples is to be no slower than without a plan.
PLANNING_SHARE = 0.0025
PLANNED_IN_A_ROW = 2
# So that what changes is noticed in a quarter of a second of the shortest steps there are.
MOST_HELD = 48
# A plan is by the probability of tokens, which is right for about as many samples: in a large batch one comes or goes
# every few steps. A batch of fewer than these is planned anew each time.
ALIKE = 8
# Timing a step costs some 25 us: a thousandth of the shortest ones if it is done for every fourth.
TIMED_EVERY = 4


class PlanTurns:
    """Of one engine. One caller at a time."""

    def __init__(self) -> None:
        self._running = 0
        self._in_a_row = 0
        self._spent = 0.0
        self._left = 0

    def holds(self, running: int) -> bool:
        """Whether the next step, of so many samples, goes by the last plan."""
        if abs(running - self._running) * ALIKE > self._running:
            self._running, self._in_a_row, self._spent, self._left = running, 0, 0.0, 0
        if not self._left:
            if not self._in_a_row:
                self._running = running
            return False
        self._left -= 1
        return True

    @property
    def goes_on(self) -> bool:
        """Whether the plan by which the next step goes is to hold for the one after it, too."""
        return self._left > 0

    @property
    def times(self) -> bool:
        """Whether the next step, by a plan that holds, is timed."""
        return self._left % TIMED_EVERY == 0

    def planned(self, seconds: float, step_seconds: float, most_held: int) -> None:
        """A step that takes `step_seconds` was planned in `seconds`, both above 0; its plan may hold for as many."""
        self._in_a_row += 1
        self._spent += seconds
        if self._in_a_row == PLANNED_IN_A_ROW:
            steps = round(self._spent / (PLANNING_SHARE * step_seconds))
            self._in_a_row, self._spent = 0, 0.0
            self._left = min(max(steps - PLANNED_IN_A_ROW, 0), MOST_HELD, most_held)
