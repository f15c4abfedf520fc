"""The part of the scheduler that ends rehearsals, and drops their texts when nobody can draft from them any more.

A rehearsal is a request whose text only serves to draft from (scheduling/rehearsal.py). `drafting` enters its text
while it grows, and keeps it when the rehearsal ends, whole or as far as it came.

Invariants: the moment a real request is there, no rehearsal is left, so no later decode step has one. A text is dropped
when the last real sample of its prompt has ended here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.request import RequestStatus

from rhyme_openrlhf.engine.calls import SchedulerRehearsal
from rhyme_openrlhf.engine.requests import PROMPT_KEY, REHEARSED_PROMPT
from rhyme_openrlhf.engine.scheduler_parts import Part
from rhyme_openrlhf.engine.scheduler_parts.drafting import Drafting
from rhyme_openrlhf.engine.scheduler_parts.meter import extra_arguments


class Rehearsals(Part):
    """The rehearsals of one engine."""

    calls = SchedulerRehearsal

    def __init__(self, scheduler: Any, drafting: Drafting) -> None:
        self._scheduler = scheduler
        self._drafting = drafting
        self._rehearsals: set[str] = set()
        # The prompt of each real request ("" without one), and the number of real requests of each prompt.
        self._real: dict[str, str] = {}
        self._left: Counter[str] = Counter()

    def end_rehearsals(self) -> None:
        """End all rehearsals; their texts stay."""
        if self._rehearsals:
            self._scheduler.finish_requests(list(self._rehearsals), RequestStatus.FINISHED_ABORTED)

    def forget_rehearsed(self, prompt_keys: list[str]) -> None:
        """Drop the texts of those of these prompts that have no real request here."""
        for key in prompt_keys:
            if not self._left[key]:
                self._drafting.source.forget_kept(key)

    def added(self, request: Any) -> None:
        name, arguments = request.request_id, extra_arguments(request)
        if REHEARSED_PROMPT in arguments:
            self._rehearsals.add(name)
            if self._real:
                self.end_rehearsals()
            return
        key = self._real[name] = arguments.get(PROMPT_KEY) or ""
        self._left[key] += 1
        self.end_rehearsals()

    def freed(self, request_id: str) -> None:
        if request_id in self._rehearsals:
            self._rehearsals.discard(request_id)
            return
        key = self._real.pop(request_id)
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
            self._drafting.source.forget_kept(key)
