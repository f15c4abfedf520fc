"""The part of the scheduler that ends rehearsals, and keeps their texts as drafts for the real samples of the prompt.

A rehearsal is a request whose text only serves to draft from (scheduling/rehearsal.py). Its text goes to the draft
source as one of the prompt's siblings, whole or as far as it came.

Invariants: the moment a real request is there, no rehearsal is left, so none takes part in a decode step that is
scheduled later. A text is dropped when the last real sample of its prompt has ended here. Rehearsals have no drafts.
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
        self._rehearsals: dict[str, Any] = {}
        # Of each real request its prompt ("" without one), and the real requests of each prompt.
        self._real: dict[str, str] = {}
        self._left: Counter[str] = Counter()

    def end_rehearsals(self) -> None:
        """End all rehearsals, and keep their texts."""
        if self._rehearsals:
            self._scheduler.finish_requests(list(self._rehearsals), RequestStatus.FINISHED_ABORTED)

    def forget_rehearsed(self, prompt_keys: list[str]) -> None:
        """Drop the texts of prompts that have no real request here."""
        for key in prompt_keys:
            if not self._left[key]:
                self._drafting.source.forget_rehearsed(key)

    def added(self, request: Any) -> None:
        name, arguments = request.request_id, extra_arguments(request)
        if REHEARSED_PROMPT in arguments:
            self._rehearsals[name] = request
            if self._real:
                self.end_rehearsals()
            return
        key = self._real[name] = arguments.get(PROMPT_KEY) or ""
        self._left[key] += 1
        self.end_rehearsals()

    def freed(self, request_id: str) -> None:
        rehearsal = self._rehearsals.pop(request_id, None)
        if rehearsal is not None:
            key = extra_arguments(rehearsal)[REHEARSED_PROMPT]
            self._drafting.source.rehearsed(key, rehearsal.all_token_ids[:], rehearsal.num_prompt_tokens)
            return
        key = self._real.pop(request_id)
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
            self._drafting.source.forget_rehearsed(key)
