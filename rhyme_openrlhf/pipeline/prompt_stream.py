"""The prompts of one epoch in the data loader's order: steps draw ahead from it, and replacements in between.

With dynamic filtering a step draws a new prompt for each that it filters out, when later steps have drawn theirs
already, and at the epoch's end it takes some of theirs. A checkpoint of the step therefore names, beside the data
loader's state, which prompts behind that state are used up.

Invariants: every prompt of the epoch is given once; what is named for a step's checkpoint are exactly the prompts
behind its own that it or an earlier step used, so a resumed run gives each other one once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch


@dataclass(frozen=True)
class Prompts:
    """Prompts with what belongs to them; `places`: theirs in the stream, from 0."""

    prompts: list[str] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def __add__(self, more: Prompts) -> Prompts:
        return Prompts(
            [*self.prompts, *more.prompts],
            [*self.labels, *more.labels],
            [*self.images, *more.images],
            [*self.places, *more.places],
        )


class PromptStream:
    """`loader` gives the epoch's prompts from where a run begins or goes on, one at a time; `used`: the places, counted
    from there, of those that were used before."""

    def __init__(self, loader: Iterator[Any], used: Iterable[int] = ()) -> None:
        self._loader = loader
        # The step that used each prompt out of turn.
        self._used: dict[int, int] = dict.fromkeys(used, 0)
        self.place = 0
        """How many prompts the loader has given."""
        self.exhausted = False

    def take(self, count: int) -> Prompts:
        """The next `count` prompts; fewer, or none, at the epoch's end."""
        taken = Prompts()
        while len(taken.prompts) < count and not self.exhausted:
            prompts, labels, images, self.exhausted = _collect_prompt_batch(self._loader, 1)
            if prompts and self.place not in self._used:
                taken.prompts.extend(prompts)
                taken.labels.extend(labels)
                taken.images.extend(images)
                taken.places.append(self.place)
            self.place += len(prompts)
        return taken

    def use(self, step: int, places: Iterable[int]) -> None:
        """`step` uses these prompts, which later steps drew or which were drawn for it alone."""
        for place in places:
            self._used[place] = min(step, self._used.get(place, step))

    def used(self, step: int, place: int) -> tuple[int, ...]:
        """The places, counted from `place` on, of the prompts that `step` and those before it used out of turn."""
        return tuple(sorted(at - place for at, by in self._used.items() if by <= step and at >= place))
