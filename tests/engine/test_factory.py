"""Engines as a run makes them: their numbers, and what each gets."""

from __future__ import annotations

from typing import Any

import pytest

from rhyme_openrlhf.engine.factory import SEES_GPUS, EngineFactory
from rhyme_openrlhf.settings.config import RhymeSettings


class Made:
    """Stands for the Ray actor class; keeps what each engine was made with."""

    def __init__(self) -> None:
        self.engines: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def options(self, **options: Any) -> Made:
        self._options = options
        return self

    def remote(self, **arguments: Any) -> str:
        self.engines.append((self._options, arguments))
        return f"engine {len(self.engines) - 1}"


@pytest.mark.parametrize(
    ("on_gpus", "own_gpus", "sees"), [(True, 0, True), (True, 0.2, False), (False, 0, False), (False, 1, False)]
)
def test_an_engine_whose_workers_have_the_gpus_sees_them(on_gpus: bool, own_gpus: float, sees: bool) -> None:
    made, told = Made(), []
    factory = EngineFactory(
        RhymeSettings(), [], 7, made, lambda index, engine: told.append((index, engine)), on_gpus=on_gpus
    )
    factory.options(num_cpus=1, num_gpus=own_gpus).remote(model="m", seed=1)
    factory.use(RhymeSettings(), {"seed": 2})
    factory.remote(model="m", seed=1)
    options = {"num_cpus": 1, "num_gpus": own_gpus}
    if sees:
        options["runtime_env"] = {"env_vars": SEES_GPUS}
    assert [given for given, _ in made.engines] == [options] * 2
    named = ("index", "run_seed", "model", "seed")
    assert [[given[name] for name in named] for _, given in made.engines] == [[0, 7, "m", 1], [1, 7, "m", 2]]
    assert told == [(0, "engine 0"), (1, "engine 1")]
