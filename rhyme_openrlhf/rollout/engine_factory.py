"""Stands where OpenRLHF creates its engine actors, and adds our keyword arguments to each.

Upstream's `create_vllm_engines` writes `RolloutRayActor.options(...).remote(**arguments)` and leaves no way to pass
more. So its own function decides every engine argument, for training runs and for `rhyme verify` alike. Checked
against OpenRLHF 0.11.2 `trainer/ray/vllm_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rhyme_openrlhf.config import RhymeSettings
from rhyme_openrlhf.rollout.engine import RhymeRolloutActor  # first: installs the shims where needed

import ray  # isort: skip

RolloutActor = ray.remote(RhymeRolloutActor)


class EngineFactory:
    """Makes a run's engines, numbered from 0.

    `actor` is the Ray actor class to make them of; `started` is told each engine's number and handle.
    """

    def __init__(
        self,
        settings: RhymeSettings,
        history_workers: Sequence[Any],
        seed: int,
        actor: Any = RolloutActor,
        started: Callable[[int, Any], None] = lambda index, engine: None,
    ) -> None:
        self._settings = settings
        self._history_workers = list(history_workers)
        self._seed = seed
        self._actor = actor
        self._started = started
        self._made = 0
        self._options: dict[str, Any] = {}
        self._more: dict[str, Any] = {}

    def use(self, settings: RhymeSettings, arguments: dict[str, Any] | None = None) -> None:
        """The next engines are made with these settings, and these arguments of vLLM's in place of upstream's."""
        self._settings, self._more = settings, arguments or {}

    def options(self, **options: Any) -> EngineFactory:
        """Remember Ray's options for the next engine."""
        self._options = options
        return self

    def remote(self, **arguments: Any) -> Any:
        """Start the next engine."""
        index, self._made = self._made, self._made + 1
        engine = self._actor.options(**self._options).remote(
            rhyme=self._settings,
            run_seed=self._seed,
            index=index,
            history_workers=self._history_workers,
            **{**arguments, **self._more},
        )
        self._started(index, engine)
        return engine
