"""Which prompt groups a step trains on, when one whose sample is too long may train a step later (RhymeRL 6.3), or is
filtered out.

A prompt group trains whole. If one of its samples is deferred, the prompt group trains in the next step, and the prompt
group of that next step that is finished first is pulled forward in its place: so every step trains on as many as it
drew. A deferred one is then at most two steps off policy, all others at most one. A prompt group that is filtered out
(dropped) is replaced in its own step, or where there is nothing to replace it, pulled forward in the same way
within the epoch.

Invariants: every prompt group that is not dropped trains exactly once, in its own step, one later (deferred) or one
earlier (pulled); none is deferred twice or pulled and deferred; a step's batch is as large as the step, or if prompt
groups were dropped and not replaced, as large as what the next step of the epoch can give makes it, which keeps one; in
the last step of an epoch nothing is deferred, because each epoch trains its own prompts; a deferral that would leave a
step without enough prompt groups to pull is refused.
"""

from __future__ import annotations

import itertools
import sys
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
        """How many of its own may still be pulled, now or when they have ended."""
        return len(self.own) - len(self.deferred) - len(self.pulled)


class BatchLedger(Generic[PromptGroup]):
    """The batches of a run, as prompt groups end. A prompt group is any key that no other step has."""

    def __init__(self, steps: int | None, done: int = 0) -> None:
        """`steps`: of the whole run, counted from 1 (None: the last one is the one that has none behind it); `done`:
        those that a resumed run has behind it."""
        self._last = sys.maxsize if steps is None else steps
        self._handed_out = done
        self._steps: dict[int, _Step[PromptGroup]] = {}

    def add(self, step: int, prompt_groups: Iterable[PromptGroup], epoch: int = 0) -> None:
        """The step's generation begins with these. Raises ValueError if it did before."""
        if step in self._steps:
            raise ValueError(f"step {step} has begun before")
        self._steps[step] = _Step(set(prompt_groups), epoch)

    def ended(self, step: int, prompt_group: PromptGroup) -> None:
        """All samples of one of the step's own prompt groups are finished (a deferred one too). Raises ValueError."""
        own = self._steps[step]
        if prompt_group not in own.own or prompt_group in own.ended:
            raise ValueError(f"{prompt_group!r} is not of step {step}, or ended before")
        own.ended[prompt_group] = None
        (own.late if prompt_group in own.deferred else own.staying)[prompt_group] = None
        if step - 1 in self._steps:
            self._pull(step - 1)

    def drop(self, step: int, prompt_group: PromptGroup, instead: PromptGroup | None = None) -> None:
        """One of the step's own will not train at all; `instead`: what is generated for the step in its place.

        Raises ValueError for one that ended, or trains elsewhere, and for a step whose batch was handed out.
        """
        if step <= self._handed_out:
            raise ValueError(f"the batch of step {step} was handed out before")
        own = self._steps[step]
        elsewhere = prompt_group in own.deferred or prompt_group in own.pulled
        if prompt_group not in own.own or elsewhere or prompt_group in own.ended:
            raise ValueError(f"{prompt_group!r} is not of step {step}, or cannot be dropped any more")
        own.own.remove(prompt_group)
        if instead is None:
            own.short += 1
            self._pull(step)
        else:
            own.own.add(instead)

    def stays(self, step: int) -> set[PromptGroup]:
        """Those of the step's own that train in it, as far as can be said."""
        own = self._steps[step]
        return own.own - own.deferred - own.pulled.keys()

    def defer(self, step: int, prompt_group: PromptGroup) -> bool:
        """Whether the prompt group trains in the next step from now on; False: it stays, as if nothing was asked."""
        own, following = self._steps[step], self._steps.get(step + 1)
        if prompt_group in own.deferred:
            return True
        if step >= self._last or following is None or prompt_group in own.pulled or prompt_group in own.ended:
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
        """What is finished and will be in the step's batch whatever comes, once the step before has its own."""
        return tuple(itertools.chain.from_iterable(self._certain(step)))

    def newly_certain(self, step: int) -> tuple[PromptGroup, ...]:
        """What `certain` has by now, and had not when this was last asked: asked whenever one ends, it goes through no
        whole step."""
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
        """The step's own, the next one's that were pulled, and the late ones of the step before. Once the step before
        has its batch, all only grow; before that there are none."""
        own, before, following = (self._steps.get(number) for number in (step, step - 1, step + 1))
        if own is None or step > self._handed_out + 1:
            return ()
        return own.staying, following.pulled if following else {}, before.late if before else {}

    def swapped(self, step: int) -> tuple[tuple[PromptGroup, ...], tuple[PromptGroup, ...]]:
        """What the step's batch leaves to the next, and what it took of the next one's own: as many; once it is handed
        out."""
        own, following = self._steps[step], self._steps.get(step + 1)
        return tuple(own.deferred), tuple(following.pulled) if following else ()

    def batch(self, step: int) -> tuple[PromptGroup, ...] | None:
        """The prompt groups that the step trains on, once all are finished and the step before has its own; else None.

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
        if self._owed_by_next(step) > 0 or len(own.pulled) < late or (before is not None and len(before.late) < late):
            return None
        order = self.certain(step)
        self._handed_out = step
        # Nobody asks for older ones any more.
        self._steps.pop(step - 1, None)
        return order

    def _owed_by_next(self, step: int) -> int:
        """How many prompt groups the next step has still to give: for each deferred one, and within an epoch for each
        that was dropped, if one of its own is left."""
        own, following = self._steps[step], self._steps.get(step + 1)
        if following is None:
            return len(own.deferred)
        owed = len(own.deferred) - len(following.pulled)
        if not own.short or following.epoch != own.epoch:
            return owed
        return min(owed + own.short, max(owed, following.can_give - 1))

    def _pull(self, step: int) -> None:
        """What the step lacks is replaced by what ended first in the next."""
        following = self._steps.get(step + 1)
        if following is None or step <= self._handed_out:
            return
        for candidate in following.ended:
            if self._owed_by_next(step) <= 0:
                return
            if candidate not in following.pulled and candidate not in following.deferred:
                following.pulled[candidate] = None
                del following.staying[candidate]
