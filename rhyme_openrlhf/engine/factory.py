"""Stands where OpenRLHF creates its engine actors, adds our keyword arguments to each, and says which parts it has.

Upstream's `create_vllm_engines` writes `RolloutRayActor.options(...).remote(**arguments)` and leaves no way to pass
more. So its own function decides every engine argument, for training runs and for `rhyme verify` alike. Checked
against OpenRLHF 0.11.2 `trainer/ray/vllm_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rhyme_openrlhf.engine.actor import RhymeRolloutActor  # first: installs the shims where needed
from rhyme_openrlhf.settings.config import RhymeSettings

import ray  # isort: skip

from rhyme_openrlhf.engine.actor_parts.answers import Answers
from rhyme_openrlhf.engine.actor_parts.devices import Devices
from rhyme_openrlhf.engine.actor_parts.measuring import Measuring
from rhyme_openrlhf.engine.actor_parts.moves import Moves
from rhyme_openrlhf.engine.actor_parts.part import Engine, Part
from rhyme_openrlhf.engine.actor_parts.proving import Proving
from rhyme_openrlhf.engine.actor_parts.turns import Turns
from rhyme_openrlhf.engine.calls import AnswerCalls, DeviceCalls, MeasuringCalls, ProofCalls, SampleCalls, TurnCalls

# Every sample that an engine generates, and every prompt that waits for its turn, is a call; Ray's own limit is 1000.
CALLS_AT_ONCE = 1_000_000
# An engine of several GPUs has none itself: its ranks are other actors. Ray 2.55 hides all GPUs from such an actor
# (_private/utils.py, set_visible_accelerator_ids) unless told not to, and it would take its machine for one without.
SEES_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def parts_of(engine: Engine) -> dict[type, Part]:
    """Return the parts of a run's engine, as its settings ask for them, by the calls that each answers."""
    rhyme = engine.rhyme
    parts: dict[type, Part] = {MeasuringCalls: Measuring(engine), ProofCalls: Proving(engine)}
    turns = Turns(engine) if rhyme.histopipe.enable else None
    if turns is not None:
        parts[TurnCalls] = turns
    if rhyme.samples_move:
        parts[SampleCalls] = Moves(engine, turns)
        parts[DeviceCalls] = Devices(engine) if turns is None else Devices(engine, turns.is_tail)
    return parts


def parts_of_checked(engine: Engine) -> dict[type, Part]:
    """Return the parts of an engine that checks drive: it answers requests in token ids."""
    proving = Proving(engine, at_start=False)
    return {MeasuringCalls: Measuring(engine), ProofCalls: proving, AnswerCalls: Answers(engine)}


def parts_of_measured(engine: Engine) -> dict[type, Part]:
    """Return the parts of an engine that `rhyme profile` measures: one for checks, whose contexts are filled."""
    return parts_of_checked(engine) | {MeasuringCalls: Measuring(engine, fills=True)}


def actor_class(settings: RhymeSettings) -> Any:
    """Return the Ray actor class of a run's engines.

    Ray's own limit is 1,000 calls: what asks how far the samples are would wait behind the samples.
    """
    return ray.remote(max_concurrency=CALLS_AT_ONCE)(RhymeRolloutActor)


class EngineFactory:
    """Makes a run's engines, numbered from 0.

    `actor` is the Ray actor class to make them of, and `parts` what each has; `started` is told each engine's number
    and handle; `on_gpus`: the run has GPUs.
    """

    def __init__(
        self,
        settings: RhymeSettings,
        history_workers: Sequence[Any],
        seed: int,
        actor: Any = None,
        started: Callable[[int, Any], None] = lambda index, engine: None,
        on_gpus: bool = False,
        parts: Callable[[Engine], dict[type, Part]] = parts_of,
    ) -> None:
        self._settings = settings
        self._history_workers = list(history_workers)
        self._seed = seed
        self._actor = actor_class(settings) if actor is None else actor
        self._parts = parts
        self._started = started
        self._on_gpus = on_gpus
        self._made = 0
        self._options: dict[str, Any] = {}
        self._more: dict[str, Any] = {}

    def use(self, settings: RhymeSettings, arguments: dict[str, Any] | None = None) -> None:
        """Make the next engines with these settings, and with these vLLM arguments in place of upstream's."""
        self._settings, self._more = settings, arguments or {}

    def options(self, **options: Any) -> EngineFactory:
        """Remember Ray's options for the next engine."""
        self._options = options
        return self

    def remote(self, **arguments: Any) -> Any:
        """Start the next engine."""
        index, self._made = self._made, self._made + 1
        options = self._options
        if self._on_gpus and not options.get("num_gpus"):
            options = {**options, "runtime_env": {"env_vars": SEES_GPUS}}
        engine = self._actor.options(**options).remote(
            rhyme=self._settings,
            run_seed=self._seed,
            index=index,
            history_workers=self._history_workers,
            parts=self._parts,
            **{**arguments, **self._more},
        )
        self._started(index, engine)
        return engine
