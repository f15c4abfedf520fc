"""Whether drafting pays at all with so many samples running (RhymeRL, section 5.4).

A step that verifies drafts computes more tokens. With few samples they cost next to nothing; with many, every token
costs, and drafts that are often rejected make the engine slower. Up to how many samples drafts pay at which acceptance
rate depends on machine and model: the table comes from the settings.

Invariants: pure; the acceptance rate is that of recent drafts, older ones count half for every HALF_LIFE tokens since;
with an empty table drafting is always allowed. While it is not, nothing is learned, and the rate stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

# Draft tokens: several steps of a full engine, so that one step says little, and a small part of an epoch.
HALF_LIFE = 10000


class OffSwitch:
    """The decision of one engine."""

    def __init__(self, limits: Sequence[tuple[float, int]]) -> None:
        """`limits`: (acceptance rate, most samples) pairs, the rates rising from 0 (`config.batch_limit_pairs`)."""
        self._limits = tuple(limits)
        # As if everything had been accepted: drafts are tried before they are judged.
        self._drafted = self._accepted = 1.0

    @property
    def acceptance(self) -> float:
        """Accepted / drafted tokens, recently; 0 to 1."""
        return self._accepted / self._drafted

    def record(self, drafted: int, accepted: int) -> None:
        """Learn what became of one draft, in tokens."""
        if self._limits:
            kept = 0.5 ** (drafted / HALF_LIFE)
            self._drafted = self._drafted * kept + drafted
            self._accepted = self._accepted * kept + accepted

    def allows(self, running: int) -> bool:
        """Whether to draft while `running` samples decode."""
        allowed = [most for rate, most in self._limits if rate <= self.acceptance]
        return not self._limits or running <= allowed[-1]
