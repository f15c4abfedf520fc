"""The state machine of one move: an unfinished sample goes on at another engine as if nothing had happened. Pure.

A move takes steps, one at a time. Each is an order to one or both engines, and its reply says how the move goes on:

    ASKED --reserve--> RESERVED --stage--> STAGING --stop--> STOPPED --transfer--> TRANSFERRED --start--> RUNNING
                       RESERVED ------stop (recompute)-----> STOPPED ----------start--------------------> RUNNING

The source stages while it goes on generating. It keeps the stopped sample (tokens and KV blocks) until the destination
reports that it runs. So until then every fault has an answer that loses nothing.

A move that *hands over* has one step more, `expect`, between `stage` and `stop`: the destination gets the request and
waits. The source then stops and writes the rest beside the staged blocks, in one piece. With that piece the destination
goes on between two of its steps, without another order; `start` only queries whether it has. The source writes after
its last step for the sample, and the writing decides which of the two may generate while `stop` is not answered. So a
`stop` that may have been followed is undone at the destination first, then at the source.

Invariants:
- `may_generate` names the one engine that may generate for the sample, none while it is on the way.
- A reservation is taken up by the sample or released by `cleanup`.
- A move ends in one of ENDED after any sequence of replies.
- The source resumes only a sample that the destination does not have (any more).

Faults and their answers:

- *Destination out of memory*, or without a free seat: it refuses the reservation. Cancelled; the source never stopped.
- *Destination dies* before `stop`: cancelled, the source never stopped. After it, until it is known to run there: the
  source resumes, cancelled. Later it is an engine that died with running samples, which is no matter of this move.
- *Source dies* before the reservation stands: lost; the sample's keeper restarts it anywhere from the tokens it last
  heard of. Before `stop` is replied: the destination recomputes those tokens. After: it has the exact tokens, and
  recomputes them unless the KV cache has arrived. When the source was to resume: lost.
- *The sample finishes, or is aborted by its caller, while it moves*: cancelled, the reservation is released.
- *The KV cache cannot be carried* (the sample was preempted, the buffer is torn or finds no room, the layouts differ):
  recomputed at the destination.
- *A reply does not come in time*, or an order fails half-way: it is unknown whether the order was followed, so the
  opposite is ordered: `withdraw` after `start` and after a `stop` that hands over, `resume` after `stop`. An engine
  that does not answer that either counts as lost. Its later output for the sample is dropped (the keeper numbers a
  sample's stays).
- *The mover is stopped*: as if the answer to its last order had not come in time, but it begins nothing more.
- *Ordered twice*, *to the engine it is on*, or *while weights load*: refused, and nothing was begun.
- *Between weight versions*: refused too, unless the policy allows it. Then the move is a recompute, because a KV block
  of one version is never used by another.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum

from rhyme_openrlhf.settings.moves import KV_TRANSFER, RECOMPUTE


class Phase(StrEnum):
    """The phase of a move."""

    ASKED = "asked"
    RESERVED = "reserved"
    STAGING = "staging"
    STOPPED = "stopped"
    TRANSFERRED = "transferred"
    RUNNING = "running"
    """Over: the destination runs it, carried as chosen."""
    RECOMPUTED = "recomputed"
    """Over: the destination runs it, but its KV cache had to be recomputed there."""
    CANCELLED = "cancelled"
    """Over: the sample runs on at the source, or it has ended."""
    LOST = "lost"
    """Over: no engine has it. Its keeper restarts it."""


# The destination has the sample.
MOVED = frozenset({Phase.RUNNING, Phase.RECOMPUTED})
ENDED = MOVED | {Phase.CANCELLED, Phase.LOST}


class Step(StrEnum):
    """The next order of a move. Every order is safe to give twice."""

    RESERVE = "reserve"
    """Destination: hold blocks for the sample, by reference, and a seat in the batch."""
    STAGE = "stage"
    """Both: copy the full blocks, while the source goes on."""
    EXPECT = "expect"
    """Destination: take the request, and begin when the source hands the sample over. Without it, START begins it."""
    STOP = "stop"
    """Source: generate no more for it, keep it whole, say its tokens, and copy the rest of its blocks out."""
    TRANSFER = "transfer"
    """Look at what the source copied of the rest when it stopped. (No order of its own: that would take a step.) Where
    it does not hand over by itself (between nodes), bring that to the destination."""
    START = "start"
    """Destination: copy the rest in, and go on with it."""
    WITHDRAW = "withdraw"
    """Destination: end it, if it has it; refused if it has finished there."""
    RESUME = "resume"
    """Source: go on with it, as if nothing had been asked."""


class Reply(StrEnum):
    """The result of an order."""

    DONE = "done"
    REFUSED = "refused"
    """The engine answers that it did not do it."""
    RECOMPUTING = "recomputing"
    """To the order to start: it runs there, but what was carried did not get in, so it is computed again."""
    FAILED = "failed"
    """Something went wrong half-way; both engines are well."""
    GONE = "gone"
    """The source has no such unfinished sample."""
    LATE = "late"
    """No answer in time: done or not."""
    SOURCE_LOST = "source_lost"
    DESTINATION_LOST = "destination_lost"
    ENDED = "ended"
    """The caller aborted the sample."""
    GIVEN_UP = "given_up"
    """The caller ends the move: the sample goes on where it is. The order of `step` may have been carried out."""


class Cleanup(StrEnum):
    """The orders left when a move is over. None changes which engine generates; all are safe to give twice."""

    RELEASE = "release"
    """Destination: give the reservation up, and end the sample, if either is there."""
    DISCARD = "discard"
    """Source: forget the sample, if it has it."""


class MoveRefused(ValueError):
    """A move that must not begin; the message says why."""


class NotYet(MoveRefused):
    """One that may begin later: engines are at different weights, or one loads them."""


@dataclass(frozen=True)
class Move:
    """One move: where it is, and what to order next (`step`, None when it is over).

    `carrier` is how the KV cache gets there as things stand now; `asked_carrier` how it was meant to. `reason`: one
    sentence if it did not go as meant. `source_lost`, `destination_lost`: which engines have failed on the way.
    `hands_over`: the destination is to expect it; `expected`: it does.
    """

    sample: str
    source: int
    destination: int
    asked_carrier: str
    carrier: str
    phase: Phase = Phase.ASKED
    step: Step | None = Step.RESERVE
    reason: str = ""
    cleanup: tuple[Cleanup, ...] = field(default=())
    source_lost: bool = False
    destination_lost: bool = False
    sample_ended: bool = False
    hands_over: bool = False
    expected: bool = False

    @property
    def over(self) -> bool:
        """The move has ended: only `cleanup` is left to do."""
        return self.phase in ENDED

    @property
    def may_generate(self) -> int | None:
        """The one engine that may generate for the sample now, None if there is none.

        From the order to start on it is the destination, from the order to resume on the source: what they do before
        their reply is known counts too. While a source stops that hands over it is the source until it has.
        """
        if self.phase in MOVED:
            return self.destination
        if self.phase is Phase.CANCELLED:
            return None if self.sample_ended else self.source
        if self.phase is Phase.LOST:
            return None
        if self.step in (Step.START, Step.WITHDRAW):
            return self.destination
        if self.step is Step.TRANSFER:
            return self.destination if self.expected else None
        return self.source

    def after(self, reply: Reply, reason: str = "") -> Move:
        """Return the move after the reply to `step`; `reason` is kept if the move does not go on as planned.

        Raises ValueError if the move is over.
        """
        if self.step is None:
            raise ValueError(f"the move of sample {self.sample} is over ({self.phase}) and takes no reply")
        told = self if reply is Reply.DONE else dataclasses.replace(self, reason=self.reason or reason)
        if reply is Reply.SOURCE_LOST:
            told = dataclasses.replace(told, source_lost=True)
        if reply is Reply.DESTINATION_LOST:
            told = dataclasses.replace(told, destination_lost=True)
        if reply is Reply.ENDED:
            ended = dataclasses.replace(told, sample_ended=True)
            return ended._over(Phase.CANCELLED, Cleanup.RELEASE, Cleanup.DISCARD)
        if reply is Reply.GIVEN_UP:
            return told._given_up()
        return _NEXT[self.step](told, reply)

    # --- after each step

    def _given_up(self) -> Move:
        if self.step in (Step.RESERVE, Step.STAGE, Step.EXPECT):
            return self._cancelled()
        if self.step is Step.START or (self.expected and self.step is not Step.RESUME):
            return dataclasses.replace(self, step=Step.WITHDRAW)
        return self if self.step is Step.WITHDRAW else self._resuming()

    def _reserved(self, reply: Reply) -> Move:
        if reply is Reply.DONE:
            step = Step.STAGE if self.carrier == KV_TRANSFER else Step.STOP
            return self._at(Phase.RESERVED, step)
        if reply is Reply.SOURCE_LOST:
            return self._lost()
        return self._cancelled(sample_ended=reply is Reply.GONE)

    def _staged(self, reply: Reply) -> Move:
        if reply is Reply.DONE:
            return self._at(Phase.STAGING, Step.EXPECT if self.hands_over else Step.STOP)
        if reply is Reply.SOURCE_LOST:
            return self._recomputing(Step.START)
        if reply is Reply.DESTINATION_LOST:
            return self._cancelled()
        if reply is Reply.GONE:
            return self._cancelled(sample_ended=True)
        return self._recomputing(Step.STOP)

    def _expecting(self, reply: Reply) -> Move:
        if reply is Reply.SOURCE_LOST:
            return self._recomputing(Step.START)
        if reply is Reply.DESTINATION_LOST:
            return self._cancelled()
        if reply is Reply.GONE:
            return self._cancelled(sample_ended=True)
        # A destination that may expect it all the same waits for nothing: the source is not told to hand over.
        return dataclasses.replace(self, step=Step.STOP, expected=reply is Reply.DONE)

    def _stopped(self, reply: Reply) -> Move:
        if reply is Reply.DONE:
            return self._at(Phase.STOPPED, Step.TRANSFER if self.carrier == KV_TRANSFER else Step.START)
        if reply is Reply.SOURCE_LOST:
            return self._recomputing(Step.START)
        if reply is Reply.GONE:
            return self._cancelled(sample_ended=True)
        if reply in (Reply.LATE, Reply.FAILED):
            return dataclasses.replace(self, step=Step.WITHDRAW) if self.expected else self._resuming()
        return self._cancelled()

    def _transferred(self, reply: Reply) -> Move:
        if reply is Reply.DONE:
            return self._at(Phase.TRANSFERRED, Step.START)
        if reply is Reply.DESTINATION_LOST:
            return self._resuming()
        return self._recomputing(Step.START)

    def _started(self, reply: Reply) -> Move:
        if reply is Reply.DONE:
            return self._arrived()
        if reply is Reply.RECOMPUTING:
            return self._recomputing(Step.START)._arrived()
        if reply in (Reply.LATE, Reply.FAILED):
            return dataclasses.replace(self, step=Step.WITHDRAW)
        return self._resuming()

    def _withdrawn(self, reply: Reply) -> Move:
        if reply is Reply.REFUSED:
            # It got there after all, and has finished.
            return self._arrived()
        return self._resuming()

    def _resumed(self, reply: Reply) -> Move:
        if reply is Reply.DONE:
            return self._cancelled()
        if reply is Reply.GONE:
            return self._cancelled(sample_ended=True)
        return self._lost()

    # --- where they lead

    def _at(self, phase: Phase, step: Step) -> Move:
        return dataclasses.replace(self, phase=phase, step=step)

    def _recomputing(self, step: Step) -> Move:
        return dataclasses.replace(self, carrier=RECOMPUTE, step=step)

    def _resuming(self) -> Move:
        if self.source_lost:
            return self._lost()
        return dataclasses.replace(self, step=Step.RESUME)

    def _arrived(self) -> Move:
        as_meant = self.carrier == self.asked_carrier and not self.source_lost
        return self._over(Phase.RUNNING if as_meant else Phase.RECOMPUTED, Cleanup.DISCARD)

    def _cancelled(self, sample_ended: bool = False) -> Move:
        return dataclasses.replace(self, sample_ended=sample_ended)._over(Phase.CANCELLED, Cleanup.RELEASE)

    def _lost(self) -> Move:
        # To engines that only did not answer, too: they may come back.
        return self._over(Phase.LOST, Cleanup.RELEASE, Cleanup.DISCARD)

    def _over(self, phase: Phase, *cleanup: Cleanup) -> Move:
        gone = {Cleanup.RELEASE: self.destination_lost, Cleanup.DISCARD: self.source_lost}
        return dataclasses.replace(self, phase=phase, step=None, cleanup=tuple(c for c in cleanup if not gone[c]))


_NEXT = {
    Step.RESERVE: Move._reserved,
    Step.STAGE: Move._staged,
    Step.EXPECT: Move._expecting,
    Step.STOP: Move._stopped,
    Step.TRANSFER: Move._transferred,
    Step.START: Move._started,
    Step.WITHDRAW: Move._withdrawn,
    Step.RESUME: Move._resumed,
}


@dataclass(frozen=True)
class Place:
    """An engine as far as a move asks: its number, its weight version, and whether it takes part now."""

    engine: int
    weight_version: int
    open: bool = True
    """False while it loads weights, is paused for that, or is gone."""


def ask(
    sample: str,
    source: Place,
    destination: Place,
    carrier: str,
    *,
    moving: bool = False,
    hands_over: bool = False,
) -> Move:
    """Begin a move. `moving`: the sample is being moved already; `hands_over`: if its KV cache is carried, the source
    hands it over by itself.

    Raises MoveRefused, with one sentence, when it must not begin.
    """
    if moving:
        raise MoveRefused(f"sample {sample} is being moved already")
    if source.engine == destination.engine:
        raise MoveRefused(f"sample {sample} is on engine {source.engine} already")
    for place in (source, destination):
        if not place.open:
            raise NotYet(f"sample {sample} cannot move: engine {place.engine} loads weights or is gone")
    if source.weight_version != destination.weight_version:
        raise NotYet(
            f"sample {sample} cannot move: engine {source.engine} has weight version {source.weight_version}, "
            f"engine {destination.engine} has {destination.weight_version}"
        )
    return Move(sample, source.engine, destination.engine, carrier, carrier, hands_over=hands_over)
