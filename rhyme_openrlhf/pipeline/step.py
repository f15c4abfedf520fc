"""A step of the streaming pipeline, from the moment its prompts are drawn until the last of them has ended: one record.

The generator draws a step's prompts from a `PromptStream`, in the data loader's order: steps draw ahead from it, and
replacements in between. A step draws a new prompt for each that is filtered out or has no reward. By then later steps
have drawn theirs, and at the epoch's end the step takes some of theirs. A checkpoint of the step therefore names which
prompts behind the data loader's state are used up, and which the next step has beside its own.

Invariants: every prompt of an epoch is given once. A step's checkpoint names exactly the prompts behind its own that
the step or an earlier one used, so a resumed run gives each other prompt once more. Engines still owe of a step what is
not `done`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch

from rhyme_openrlhf.scheduling.step_plan import StepPlacement
from rhyme_openrlhf.scheduling.turns import Turn
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.training.samples_generator import GeneratorState, Row

# The place in the stream of a prompt that a resumed run got from the step before.
NOWHERE = -1
# A prompt group: the step it was drawn for, and its place in that step.
Key = tuple[int, int]


@dataclass(frozen=True)
class Prompts:
    """Prompts with what belongs to them; `places`: theirs in the stream, from 0, or NOWHERE; `data_sets`: the name of
    each one's, "" if it is not known."""

    prompts: list[str] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    data_sets: list[str] = field(default_factory=list)

    def add(self, rows: Iterable[Row]) -> None:
        """Add prompts that are none of the stream's."""
        for prompt, label, images in rows:
            self.prompts.append(prompt)
            self.labels.append(label)
            self.images.append(images)
            self.places.append(NOWHERE)
            self.data_sets.append("")


class PromptStream:
    """The prompts of one epoch. `loader` gives them from where a run begins or goes on, one at a time; `used`: the
    places, counted from there, of those that were used before."""

    def __init__(self, loader: Iterator[Any], used: Iterable[int] = ()) -> None:
        self._loader = self._noting(loader)
        self._data_set = ""
        # The step that used each prompt out of turn.
        self._used: dict[int, int] = dict.fromkeys(used, 0)
        self.place = 0
        """How many prompts the loader has given."""
        self.exhausted = False

    def _noting(self, loader: Iterator[Any]) -> Iterator[Any]:
        """Yield what the loader gives, and note the prompt's data set, which upstream's collector leaves out."""
        for batch in loader:
            self._data_set = batch[0][0] if batch[0] else ""
            yield batch

    def take(self, count: int) -> Prompts:
        """Return the next `count` prompts; fewer, or none, at the epoch's end."""
        taken = Prompts()
        while len(taken.prompts) < count and not self.exhausted:
            prompts, labels, images, self.exhausted = _collect_prompt_batch(self._loader, 1)
            if prompts and self.place not in self._used:
                taken.prompts.extend(prompts)
                taken.labels.extend(labels)
                taken.images.extend(images)
                taken.places.append(self.place)
                taken.data_sets.append(self._data_set)
            self.place += len(prompts)
        return taken

    def use(self, step: int, places: Iterable[int]) -> None:
        """Note that `step` uses these prompts, which later steps drew or which were drawn for it alone."""
        for place in places:
            self._used[place] = min(step, self._used.get(place, step))

    def used(self, step: int, place: int) -> tuple[int, ...]:
        """Return the places, counted from `place` on, of the prompts that `step` or an earlier one used out of turn."""
        return tuple(sorted(at - place for at, by in self._used.items() if by <= step and at >= place))


@dataclass(eq=False)
class Step:
    """Training step `number`; prompt groups are known by their places in it.

    Drawn: `client_states` and `generator` are OpenRLHF's states and ours right after drawing; `stream`: where the
    prompts are from (None: nothing more can be drawn), `places`: theirs in it, `drawn`: how far it had been read then;
    `size`: how many were drawn; `data_sets`: of each prompt, or empty.

    With engines: `turn` and `placement` from the moment it is handed out; `engine_of`: the engine that has the prompt
    of each place now, or is to have it; `attempts`: how often an engine was given it; `calls` gives each call's place,
    `reports` each report's engine; `taking_part`: engines with a turn of this step.

    Ended: `done`: prompt groups that have ended or were given up; `lengths`: of the responses of those that ended;
    `deferred`: they train in the next step; `moved`: samples that were sent to another engine because they are too
    long; `filtered`: not trained on, each with another prompt at the end of the step's prompts, as far as there were
    more; `counters`: of what engines have reported.
    """

    number: int
    epoch: int
    prompts: list[str]
    labels: list[Any]
    images: list[Any]
    client_states: dict[str, Any]
    generator: GeneratorState
    stream: PromptStream | None = None
    places: list[int] = field(default_factory=list)
    drawn: int = 0
    data_sets: list[str] = field(default_factory=list)

    turn: Turn = field(init=False, repr=False)
    placement: StepPlacement = field(init=False, repr=False)
    engine_of: dict[int, int] = field(default_factory=dict)
    calls: dict[Any, int] = field(default_factory=dict)
    reports: dict[Any, int] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    taking_part: set[int] = field(default_factory=set)

    done: set[int] = field(default_factory=set)
    lengths: dict[int, list[int]] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    filtered: set[int] = field(default_factory=set)
    counters: EngineCounters = EngineCounters()

    def __post_init__(self) -> None:
        self.size = len(self.prompts)

    def key(self, place: int) -> Key:
        """Return the key of a prompt group of this step."""
        return self.number, place

    def owed(self) -> list[int]:
        """Return the places whose prompt groups have not ended."""
        return [place for place in range(len(self.prompts)) if place not in self.done]

    def unplaced(self) -> list[int]:
        """Return the places that are owed and that no engine has."""
        if len(self.done) + len(self.calls) == len(self.prompts):
            return []
        placed = {*self.calls.values(), *self.done}
        return [place for place in range(len(self.prompts)) if place not in placed]

    @property
    def pass_rate(self) -> float:
        """The percentage of its prompts that was not filtered out."""
        return 100 * (1 - len(self.filtered) / len(self.prompts))

    def draw_another(self) -> Prompts | None:
        """Return a prompt for this step, from behind all that were drawn so far; None at its epoch's end."""
        more = self.stream.take(1) if self.stream else Prompts()
        if self.stream is None or not more.prompts:
            return None
        self.stream.use(self.number, more.places)
        return more

    def add(self, more: Prompts) -> int:
        """Put a prompt that was drawn for this step at the end of its prompts; return the prompt's place."""
        self.prompts += more.prompts
        self.labels += more.labels
        self.images += more.images
        self.places += more.places
        self.data_sets += more.data_sets
        return len(self.prompts) - 1

    def row(self, place: int) -> Row:
        """Return a prompt with its label and images."""
        return self.prompts[place], self.labels[place], self.images[place]

    def generator_after(self, deferred: Sequence[int]) -> GeneratorState:
        """Return the state after the step is trained on; `deferred`: places whose prompts the next step trains on."""
        used = self.stream.used(self.number, self.drawn) if self.stream else ()
        return replace(self.generator, deferred=tuple(self.row(place) for place in deferred), used=used)
