"""Recorded samples fed through the pipeline's own generator and controller, by engines that follow their turns.

The engines' order of turns and weights is the real one (`scheduling/turns.py`), and so is everything of ours on the
driver's side. What ends next, and how, a `Course` decides: Ray's `wait` asks it. Ray's references are `Ref`s.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace as NS
from typing import Any

import pytest
import ray

from rhyme_openrlhf.engine.calls import EngineHandle
from rhyme_openrlhf.engine.messages import TurnReport
from rhyme_openrlhf.engine_losses import EngineLosses
from rhyme_openrlhf.pipeline import controller as controllers
from rhyme_openrlhf.pipeline.batch import PromptGroup, StepEnd
from rhyme_openrlhf.pipeline.controller import Pipeline
from rhyme_openrlhf.pipeline.generator import PipelineSamplesGenerator
from rhyme_openrlhf.pipeline.outlier_watch import Outlier
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.pipeline.step_planner import StepPlanner
from rhyme_openrlhf.scheduling.turns import Begin, EngineTurns, Load, Turn
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import ROUNDS, Round
from rhyme_openrlhf.training.samples_generator import GeneratorState
from rhyme_openrlhf.training.trainer_async import GENERATOR
from tests.pipeline.made_up import Watch
from tests.ray_handles import handle_of

MOST_RUNNING = 64
# Names an outlier's sample that cannot move, so that its prompt group trains later.
NO_SAMPLE = -1


class Loader:
    """An epoch's rows (prompt, label) in order, from `at` on the first time; as upstream's, one at a time, with a
    state."""

    def __init__(self, rows: list[tuple[str, str]], at: int = 0) -> None:
        self.rows, self.begin, self.at = rows, at, at

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.rows):
            self.at += 1
            prompt, label = self.rows[self.at - 1]
            yield ["source"], [prompt], [label], [None]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "_iterator_finished": self.at == len(self.rows)}


@dataclass(eq=False)
class Ref:
    """Stands for Ray's reference to what an engine answers; of a prompt group, or of a turn's report, if it has a turn.

    `versions`: of the weights that a prompt group has had, none before it begins. `late`: its turn does not wait for it
    any more, because it is deferred.
    """

    engine: int
    value: Callable[[], Any]
    turn: int = 0
    label: str = ""
    place: int = -1
    report: bool = False
    versions: list[int] = field(default_factory=list)
    late: bool = False


class Course:
    """Decides what ends next, and how: here all goes well, in the order in which it was asked for."""

    def __init__(self) -> None:
        self.run: Any = None

    def before(self) -> None:
        """Called whenever something is awaited: what else may happen now."""

    def may_wait(self) -> bool:
        """Return whether it is right that nothing can end now."""
        return False

    def choose(self, ready: list[Ref]) -> list[Ref]:
        """Return some of what may end now, in the order in which it does."""
        return ready[:1]

    def fate(self, ref: Ref) -> Exception | None:
        """Return what a prompt group fails with when it ends, if it does."""
        return None

    def too_long(self, step: Step) -> list[int]:
        """Return the places of prompt groups that are far too long now."""
        return []


class RandomOrder(Course):
    """Ends what may end in any order, one or several at a time."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance

    def choose(self, ready: list[Ref]) -> list[Ref]:
        return self.chance.sample(ready, self.chance.randint(1, min(3, len(ready))))


class RecordedRun:
    """One run: `rows` each epoch, `samples_of(label, visit)` gives a prompt group's responses as engines give them.

    `sent` is what the trainer gets, `events` the record. `weights` is the newest version that the trainer has made.
    """

    def __init__(
        self,
        args: Any,
        settings: Any,
        loader: Loader,
        samples_of: Callable[[str, int], list[dict[str, Any]]],
        course: Course,
        engines: int = 2,
    ) -> None:
        self.course, self.samples_of = course, samples_of
        course.run = self
        self.sent: list[Any] = []
        self.events: list[Any] = []
        self.dead: set[int] = set()
        self.turns = [EngineTurns() for _ in range(engines)]
        self.extended: list[dict[tuple[int, ...], int]] = [{} for _ in range(engines)]
        self.pending: list[Ref] = []
        self.given: Counter[str] = Counter()
        self.weights = self.first = 0
        self.n = args.rollout.n_samples_per_prompt
        self.services = NS(
            settings=settings,
            history_workers=(),
            layouts=None,
            steps_per_epoch=None,
            record=lambda event, source: self.events.append(event),
            record_all=lambda events, source: self.events.extend(events),
            record_lengths=lambda step, samples: None,
            losses=EngineLosses(),
        )
        handles = [self._engine(number) for number in range(engines)]
        self.generator = PipelineSamplesGenerator(NS(args=args), loader, None, None, handles, services=self.services)
        self.generator.generate_kwargs = {"max_len": args.data.max_len}
        self.controller: Any = None

    def go(self, episode: int = 0, consumed: int = 0, state: GeneratorState | None = None) -> None:
        """Generate to the end; raises what the controller raises. `state`: of the step to go on from."""
        if state is not None:
            self.generator.restore(state)
            self.first = self.weights = state.step
            for turns in self.turns:
                turns.loaded(state.step)
        planner = StepPlanner(self.services, self.n, None, MOST_RUNNING)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("get", "put", "wait"):
                patch.setattr(ray, name, getattr(self, f"_{name}"))
            patch.setattr(controllers, "RolloutWatch", lambda *_, **__: Watch())
            patch.setattr(controllers, "OutlierWatch", lambda *_: NS(find=self._find, look_seconds=1.0))
            self.controller = Pipeline(self.generator, self.services, planner, self._send, None, list)
            self.controller.run(self.generator.draw(episode, consumed))

    def _send(self, item: Any) -> None:
        self.sent.append(item)
        if isinstance(item, StepEnd):
            self.weights = item.step

    def _find(self, step: Step) -> list[Outlier]:
        places = self.course.too_long(step)
        return [Outlier(place, step.engine_of[place], NO_SAMPLE, 99) for place in places]

    # --- engines

    def _engine(self, number: int) -> Any:
        return handle_of(EngineHandle, lambda name, *given, **named: self._call(number, name, *given, **named))

    def _call(self, engine: int, name: str, *given: Any, **named: Any) -> Ref:
        own = getattr(self, f"_{name}", None)
        if engine in self.dead or own is None:
            return Ref(engine, lambda: [] if name == "stage_intervals" else 0)
        found = own(engine, *given, **named)
        return found if isinstance(found, Ref) else Ref(engine, lambda: found)

    def _hand_turn(self, engine: int, turn: Turn, samples: int | None, traced: list[str]) -> None:
        self.turns[engine].hand(turn, samples)

    def _extend_turn(
        self, engine: int, turn: Turn, prompts: list[tuple[int, int]], samples: int, traced: list[str]
    ) -> int:
        known = self.extended[engine]
        keys = [(turn.number, *prompt) for prompt in prompts]
        if new := [key for key in keys if key not in known]:
            number, _ = self.turns[engine].extend(turn, len(new) * samples)
            known.update(dict.fromkeys(new, number))
        return known[keys[-1]]

    def _alive(self, engine: int) -> Ref:
        return Ref(engine, lambda: None)

    def _generate_in_turn(self, engine: int, number: int, place: int, **sent: Any) -> Ref:
        label, visit = sent["label"], self.given[sent["label"]]
        self.given[label] += 1
        self.turns[engine].add(number, self.n)
        ref = Ref(engine, lambda: self._responses(ref, visit), number, label, place)
        self.pending.append(ref)
        return ref

    def _turn_report(self, engine: int, number: int) -> Ref:
        report = TurnReport(0, EngineCounters(response_tokens=1))
        self.pending.append(ref := Ref(engine, lambda: report, number, report=True))
        return ref

    def _defer(self, engine: int, number: int, place: int) -> None:
        for ref in self.pending:
            if (ref.engine, ref.turn, ref.place) == (engine, number, place) and not ref.late:
                ref.late = True
                self.turns[engine].ended(number, self.n)

    def _responses(self, ref: Ref, visit: int) -> list[dict[str, Any]]:
        responses = self.samples_of(ref.label, visit)
        first, *later = ref.versions
        for response in responses:
            loads = [(version, 0) for version in later[:-1]]
            one = Round(ref.engine, first, 1, tokens=4, last_weight_version=ref.versions[-1], loads=loads)
            response[ROUNDS] = [one]
        return responses

    def advance(self) -> None:
        """Have each engine that is there begin the turns that it may begin, with the newest weights that it may use."""
        for engine, turns in enumerate(self.turns):
            if engine in self.dead:
                continue
            for version in range(self.first, self.weights + 1):
                turns.offer(version)
            self._begin_calls(engine)
            while isinstance(todo := turns.next(), Load | Begin):
                if isinstance(todo, Begin):
                    turns.begun(todo.turn)
                    self._begin_calls(engine)
                    continue
                turns.loaded(todo.version)
                for ref in self.pending:
                    if ref.engine == engine and ref.versions:
                        ref.versions.append(todo.version)

    def _begin_calls(self, engine: int) -> None:
        turns = self.turns[engine]
        for ref in self.pending:
            if turns.current and (ref.engine, ref.turn) == (engine, turns.current.number) and not ref.versions:
                ref.versions.append(turns.version)

    def may_end(self, ref: Ref) -> bool:
        """Return whether it may end now: its engine is gone, it runs, or its turn is behind it."""
        turns = self.turns[ref.engine]
        if ref.engine in self.dead:
            return True
        if not ref.report:
            return bool(ref.versions)
        current = turns.current
        waits = any(turn.number <= ref.turn for turn in turns._waiting)
        return current is not None and not waits and (turns.over or current.number > ref.turn)

    # --- Ray

    def _put(self, value: Any) -> Any:
        return value

    def _wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        calls = [ref for ref in refs if ref in self.pending]
        if not calls:
            return list(refs), []
        if not timeout:
            # Nothing more ends at the same moment.
            return [], list(refs)
        self.course.before()
        self.advance()
        ready = [ref for ref in calls if self.may_end(ref)]
        if not ready and self.course.may_wait():
            return [], list(refs)
        assert ready, f"nothing can end any more: {calls}, {[vars(turns) for turns in self.turns]}"
        chosen = self.course.choose(ready)
        return chosen, [ref for ref in refs if ref not in chosen]

    def _get(self, refs: Any, timeout: float = 0.0) -> Any:
        return [self._value(ref) for ref in refs] if isinstance(refs, list) else self._value(refs)

    def _value(self, ref: Any) -> Any:
        if not isinstance(ref, Ref):
            return ref
        if ref in self.pending:
            self.pending.remove(ref)
        if ref.engine in self.dead:
            raise ray.exceptions.RayActorError
        if ref.turn and not ref.report:
            if not ref.late:
                self.turns[ref.engine].ended(ref.turn, self.n)
            if error := self.course.fate(ref):
                raise error
        return ref.value()


def steps_of(sent: list[Any]) -> list[tuple[StepEnd, list[PromptGroup]]]:
    """Return each step that the trainer got, with its prompt groups in their order."""
    found, groups = [], []
    for item in sent:
        if isinstance(item, PromptGroup):
            groups.append(item)
        elif isinstance(item, StepEnd):
            found.append((item, groups))
            groups = []
    return found


def state_of(end: StepEnd) -> GeneratorState:
    """Return where the generator stood after a step."""
    state: GeneratorState = end.client_states[GENERATOR]
    return state
