"""The prompt groups that a step trains on, if some are deferred to the next step (RhymeRL 6.3) or filtered out.

A prompt group trains whole. If one of its samples is deferred, the prompt group trains in the next step. The prompt
group of the next step that finishes first is pulled forward in its place, so every step trains on as many as it drew. A
deferred prompt group is at most two steps off policy, all others at most one. A prompt group that is filtered out or
has no reward (dropped) is replaced in its own step. Without a replacement, one of the same epoch is pulled forward.

Invariants:
- Every prompt group that is not dropped trains exactly once: in its own step, one later (deferred) or one earlier
  (pulled).
- None is deferred twice, or pulled and deferred.
- A batch is as large as its step. If prompt groups were dropped without a replacement, it is as large as the next step
  of the epoch can make it. That step keeps one, unless all of it was promised for deferred ones.
- In the last step of an epoch nothing is deferred, because each epoch trains its own prompts.
- A deferral that would leave a step without enough prompt groups to pull is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PromptGroup = TypeVar("PromptGroup", bound=Hashable)


@dataclass
class _Step(Generic[PromptGroup]):
    own: set[PromptGroup]
    epoch: int = 0
    short: int = 0  # of its own, dropped and not replaced
    # In the order in which they ended, each; steps have tens of thousands.
    ended: dict[PromptGroup, None] = field(default_factory=dict)
    staying: dict[PromptGroup, None] = field(default_factory=dict)  # of those that ended: they train in this step
    pulled: dict[PromptGroup, None] = field(default_factory=dict)  # of this step's own, by the step before
    late: dict[PromptGroup, None] = field(default_factory=dict)  # deferred ones that ended
    deferred: set[PromptGroup] = field(default_factory=set)
    said: tuple[int, int, int] = (0, 0, 0)  # how many of each part of `certain` were said to be new

    @property
    def can_give(self) -> int:
        """The number of its own prompt groups that may still be pulled, now or when they have ended."""
        return len(self.own) - len(self.deferred) - len(self.pulled)


class BatchLedger(Generic[PromptGroup]):
    """The batches of a run, as prompt groups end. A prompt group is any key that no other step has."""

    def __init__(self, done: int = 0) -> None:
        """`done`: steps that a resumed run has behind it. The run's last step is the one that has none behind it."""
        self._handed_out = done
        self._steps: dict[int, _Step[PromptGroup]] = {}

    def add(self, step: int, prompt_groups: Iterable[PromptGroup], epoch: int = 0) -> None:
        """Begin a step's generation with these prompt groups. Raises ValueError if it began before."""
        if step in self._steps:
            raise ValueError(f"step {step} has begun before")
        self._steps[step] = _Step(set(prompt_groups), epoch)

    def ended(self, step: int, prompt_group: PromptGroup) -> None:
        """Note that one of the step's own prompt groups, deferred or not, is finished. Raises ValueError."""
        own = self._steps[step]
        if prompt_group not in own.own or prompt_group in own.ended:
            raise ValueError(f"{prompt_group!r} is not of step {step}, or ended before")
        own.ended[prompt_group] = None
        (own.late if prompt_group in own.deferred else own.staying)[prompt_group] = None
        if step - 1 in self._steps:
            self._pull(step - 1)

    def drop(self, step: int, prompt_group: PromptGroup, instead: PromptGroup | None = None) -> None:
        """Drop one of the step's own prompt groups from training; `instead`, its replacement, trains where it would.

        Raises ValueError for one that ended, and for one whose batch was handed out.
        """
        own = self._steps.get(step)
        if own is None or prompt_group not in own.own or prompt_group in own.ended:
            raise ValueError(f"{prompt_group!r} is not of step {step}, or cannot be dropped any more")
        deferred = prompt_group in own.deferred
        if step <= self._handed_out and not deferred:
            raise ValueError(f"the batch of step {step} was handed out before")
        own.own.remove(prompt_group)
        own.deferred.discard(prompt_group)
        if instead is not None:
            own.own.add(instead)
            if deferred:
                own.deferred.add(instead)
            return
        # A batch that was handed out is whole: it has pulled for what was deferred, so the next one lacks it.
        lacks = step if step > self._handed_out else step + 1
        self._steps[lacks].short += 1
        self._pull(lacks)

    def stays(self, step: int) -> set[PromptGroup]:
        """Return the step's own prompt groups that train in it, as far as is known."""
        own = self._steps[step]
        return own.own - own.deferred - own.pulled.keys()

    def defer(self, step: int, prompt_group: PromptGroup) -> bool:
        """Defer a prompt group to the next step. Return False if that is refused; then nothing has changed."""
        own, following = self._steps[step], self._steps.get(step + 1)
        if prompt_group in own.deferred:
            return True
        if following is None or prompt_group in own.ended:
            return False
        if own.epoch != following.epoch:
            return False
        owed_to_us = len(own.deferred) - len(following.pulled)
        before = self._steps.get(step - 1)
        owed_by_us = len(before.deferred) - len(own.pulled) if before else 0
        if following.can_give <= owed_to_us or own.can_give <= owed_by_us:
            return False
        own.deferred.add(prompt_group)
        self._pull(step)
        return True

    def certain(self, step: int) -> tuple[PromptGroup, ...]:
        """Return the finished prompt groups of the coming batch; none until the step before has its batch."""
        return tuple(itertools.chain.from_iterable(self._certain(step)))

    def newly_certain(self, step: int) -> tuple[PromptGroup, ...]:
        """Return what `certain` has gained since the last call, without going through a whole step."""
        parts = self._certain(step)
        if not parts:
            return ()
        own = self._steps[step]
        new = (
            list(itertools.islice(reversed(part), len(part) - said))[::-1]
            for part, said in zip(parts, own.said, strict=True)
        )
        found = tuple(itertools.chain.from_iterable(new))
        own.said = len(parts[0]), len(parts[1]), len(parts[2])
        return found

    def _certain(self, step: int) -> tuple[dict[PromptGroup, None], ...]:
        """Return three parts: the step's own, those pulled from the next step, and the late ones of the step before.

        They are empty until the step before has its batch; from then on they only grow.
        """
        own, before, following = (self._steps.get(number) for number in (step, step - 1, step + 1))
        if own is None or step > self._handed_out + 1:
            return ()
        return own.staying, following.pulled if following else {}, before.late if before else {}

    def swapped(self, step: int) -> tuple[tuple[PromptGroup, ...], tuple[PromptGroup, ...]]:
        """Return the prompt groups that the handed-out batch left to the next step, and those it pulled from it.

        It pulled more than it left where some of its own were dropped without a replacement.
        """
        own, following = self._steps[step], self._steps.get(step + 1)
        return tuple(own.deferred), tuple(following.pulled) if following else ()

    def batch(self, step: int) -> tuple[PromptGroup, ...] | None:
        """Return the step's batch; None until all of it is finished and the step before has its batch.

        Handed out once: after that the step's batch is fixed. Raises ValueError if it was handed out before.
        """
        if step <= self._handed_out:
            raise ValueError(f"the batch of step {step} was handed out before")
        own = self._steps.get(step)
        # A step that is finished before the one before it may still have to give one of its own.
        if own is None or step > self._handed_out + 1:
            return None
        if len(own.staying) < len(own.own) - len(own.deferred) - len(own.pulled):
            # Asked whenever a prompt group ends: most times this is the answer.
            return None
        before = self._steps.get(step - 1)
        late = len(before.deferred) if before else 0
        if self._owed_by_next(step) > 0 or (before is not None and len(before.late) < late):
            return None
        order = self.certain(step)
        self._handed_out = step
        # Nobody asks for older ones any more.
        self._steps.pop(step - 1, None)
        return order

    def _owed_by_next(self, step: int) -> int:
        """Return how many prompt groups the next step still has to give.

        It gives one for each deferred one, as far as it has any. Within an epoch it also gives one for each dropped
        one, while it keeps one.
        """
        own, following = self._steps[step], self._steps.get(step + 1)
        if following is None:
            return len(own.deferred)
        owed = min(len(own.deferred) - len(following.pulled), following.can_give)
        if not own.short or following.epoch != own.epoch:
            return owed
        return min(owed + own.short, max(owed, following.can_give - 1))

    def _pull(self, step: int) -> None:
        """Replace what the step lacks by what ended first in the next step."""
        following = self._steps.get(step + 1)
        if following is None or step <= self._handed_out:
            return
        for candidate in following.ended:
            if self._owed_by_next(step) <= 0:
                return
            if candidate not in following.pulled and candidate not in following.deferred:
                following.pulled[candidate] = None
                del following.staying[candidate]
