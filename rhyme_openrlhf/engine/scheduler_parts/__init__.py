"""Parts of the scheduler plug-in: the process of vLLM's engine core, one decode step after the other.

The scheduler (engine/scheduler.py) overrides vLLM's methods and calls those of `Part` for each of its parts in turn, in
the order in which a decode step meets them. Each of them does nothing unless a part says otherwise.

Read in this order:

1. `meter` counts what steps did: counters, traces of drafts, figures of an engine's status.
2. `clock` says how long decode steps take, or makes them as long as a profile says.
3. `drafting` asks the source for drafts (`drafting/`), keeps them within a step, and learns what drafts gain.
4. `rehearsal` ends rehearsals and keeps their texts as drafts.
5. `moves` stops, keeps and takes up samples that go from engine to engine.

Invariant: a part changes nothing in vLLM's scheduling unless it was asked to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from rhyme_openrlhf.drafting.source import Verified


class DecodeStep(NamedTuple):
    """A timed step: samples, tokens of context in all before it, draft tokens verified in all, seconds."""

    running: int
    context: int
    drafts: int
    seconds: float


class Part:
    """One concern of the scheduler; a part says what it does with what it is told."""

    calls: ClassVar[type | None] = None
    """The methods that the engine's actor may call: a protocol of engine/calls.py."""

    def takes(self, request: Any) -> bool:
        """Return whether the part adds this new request to the scheduler by itself, now or later."""
        return False

    def added(self, request: Any) -> None:
        """Hear of a new request that vLLM's scheduler has taken in."""

    def before_schedule(self) -> None:
        """Act before a decode step is scheduled."""

    def is_timed(self) -> bool:
        """Return whether the part asks how long the decode step takes that is scheduled now."""
        return False

    def scheduled(self, output: Any, before: DecodeStep | None) -> None:
        """Hear of a scheduled decode step (vLLM's SchedulerOutput), and of the one before it if that was timed."""

    def computing(self) -> None:
        """Act while the forward pass of the scheduled step runs: on a GPU that delays nothing."""

    def verified(self, drafts: Verified) -> None:
        """Hear of the drafts that a step verified, while their requests are known."""

    def finished_step(self, output: Any, results: Any) -> None:
        """Hear of a step whose results vLLM has taken in: its SchedulerOutput, and EngineCoreOutputs by client."""

    def sampled(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Hear of the tokens that a step sampled, when vLLM has freed the requests that have ended."""

    def freed(self, request_id: str) -> None:
        """Hear of a request that has ended or was aborted."""

    def finishes(self, request_ids: Iterable[str] | None) -> None:
        """Hear that vLLM's scheduler is told to end these requests, known to it or not; None: all."""

    def resets(self, running: bool) -> None:
        """Hear that the prefix cache is emptied, because there are new weights; `running`: of running requests too."""

    def looks_out(self) -> bool:
        """Return whether an engine without requests has something to schedule all the same; may wait a moment."""
        return False
