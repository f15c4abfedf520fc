"""The carrier of a sample's KV cache to another engine, KV transfer or recompute, and its cost. Pure.

The cost is the seconds from the sample's stop at the source to its first token elsewhere. Live and simulated runs both
use this file, and both teach it what their moves took.

- **KV transfer** (PAT 4.3, equation 2, in two stages as RLHFSpec 6.2) copies all but the last blocks while the sample
  runs on. So the wait does not depend on its context. It is the rest of the destination's step under way, and its first
  step with the sample; between two nodes also the way of the last blocks.
- **Recompute** (PAT equations 3 and 4) waits for the destination's step under way, and for a prefill of the whole
  context beside its decoding samples.

Each also has a part that no model knows: messages, copies, an engine that prefills slower beside others. It is learnt
from the moves that were made. Contexts of each power of two are learnt apart, because predictions for long contexts are
off by other factors.

Invariants:
- What was never measured is not predicted (None).
- The median of several observations counts, so a move that met a stall does little.
- The carrier chosen is the cheaper one of those predicted. Where nothing is known, the KV cache is sent.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.transfer_model import NotMeasured, TransferModel
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE
from rhyme_openrlhf.settings.moves import AUTO

# Moves that are remembered, of each size of context: so few that what has changed is soon known.
REMEMBERED = 9
# Of a step under way when an order comes: half is still to go, in the mean.
UNDER_WAY = 0.5


@dataclass(frozen=True)
class Destination:
    """The engine a sample goes to: seconds of its decode steps, 0 if it runs nothing; of one with the sample; and the
    tokens that one step computes at most. `near`: it is on the node that the sample leaves.
    """

    step_s: float
    next_step_s: float
    step_tokens: int
    near: bool = True

    @classmethod
    def predicted(
        cls,
        predictor: Predictor,
        running: int,
        held: int,
        context: int,
        drafts_each: float,
        step_tokens: int,
        near: bool = True,
    ) -> Destination:
        """Return an engine as a sample with `context` tokens would find it.

        `running`: the samples that decode there; `held`: tokens of context of all its samples; `drafts_each`: draft
        tokens of one sample in a decode step.
        """
        now = predictor.step_seconds(running, held, round(running * drafts_each)) if running else 0.0
        after = predictor.step_seconds(running + 1, held + context, round((running + 1) * drafts_each))
        return cls(now, after, step_tokens, near)


class MoveCosts:
    """The costs of one run. `transfer`: the profile's, for prefills; None: recompute is predicted once it was seen."""

    def __init__(self, transfer: TransferModel | None = None) -> None:
        self.transfer = transfer
        # By size of context: seconds beyond the steps of a KV transfer, within a node (True) and between two; the
        # logarithm of real over profiled prefill.
        self._extra_s: dict[bool, dict[int, deque[float]]] = {True: {}, False: {}}
        self._slower: dict[int, deque[float]] = {}

    def choose(self, asked: str, context: int, destination: Destination | None) -> tuple[str, float | None]:
        """Return the carrier of a sample with `context` tokens, and what is predicted of it.

        `asked`: a carrier, or AUTO for the cheaper one; `destination`: None where it is not known.
        """
        carrier = KV_TRANSFER if asked == AUTO else asked
        if destination is None:
            return carrier, None
        if asked == AUTO:
            carrier = self.cheaper(context, destination) or carrier
        return carrier, self.predicted(carrier, context, destination)

    def predicted(self, carrier: str, context: int, destination: Destination) -> float | None:
        """Seconds without a token, of a sample with `context` tokens; None if that is not known."""
        if carrier == KV_TRANSFER:
            extra = nearest(self._extra_s[destination.near], context)
            return None if extra is None else extra + self._steps(destination)
        profiled = self._prefill(context, destination)
        if profiled is None:
            return None
        return UNDER_WAY * destination.step_s + profiled * math.exp(nearest(self._slower, context) or 0.0)

    def cheaper(self, context: int, destination: Destination) -> str | None:
        """Return the carrier with the lower prediction; KV transfer if only its cost is unknown, None if both are."""
        sent, again = (self.predicted(carrier, context, destination) for carrier in (KV_TRANSFER, RECOMPUTE))
        if again is None:
            return None if sent is None else KV_TRANSFER
        if sent is None:
            # Before the first transfer: as if it cost no more than its steps.
            sent = self._steps(destination)
        return KV_TRANSFER if sent <= again else RECOMPUTE

    def learn(self, carrier: str, context: int, destination: Destination, seconds: float) -> None:
        """Learn from a move by this carrier, in which the sample had no token for `seconds`."""
        if carrier == KV_TRANSFER:
            # A sample can meet a step's end at once: never below nothing.
            _remember(self._extra_s[destination.near], context, max(seconds - self._steps(destination), 0.0))
            return
        profiled = self._prefill(context, destination)
        if profiled is None:
            return
        real = max(seconds - UNDER_WAY * destination.step_s, 0.1 * seconds)
        _remember(self._slower, context, math.log(real / profiled))

    @staticmethod
    def _steps(destination: Destination) -> float:
        return UNDER_WAY * destination.step_s + destination.next_step_s

    def _prefill(self, context: int, destination: Destination) -> float | None:
        if self.transfer is None or context < 1:
            return None
        try:
            seconds = self.transfer.prefill_seconds([context])
        except NotMeasured:
            return None
        # Its chunks share their steps with those that decode there.
        chunks = -(-context // max(destination.step_tokens, 1))
        return max(seconds + chunks * destination.step_s, 1e-6)


def _remember(known: dict[int, deque[float]], context: int, value: float) -> None:
    known.setdefault(context.bit_length(), deque(maxlen=REMEMBERED)).append(value)


def nearest(known: Mapping[int, Sequence[float]], context: int) -> float | None:
    """Return the lower median of what is known of contexts of this size, or else of the nearest size; None for nothing.

    Of two sizes that are equally near, the larger one counts.
    """
    if not known:
        return None
    size = context.bit_length()
    return statistics.median_low(known[min(known, key=lambda other: (abs(other - size), -other))])
