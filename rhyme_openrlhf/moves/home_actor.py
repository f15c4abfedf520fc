"""The home of samples as a Ray actor, and what stands for an engine where OpenRLHF sends it prompts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.moves.home import SampleHome  # first: installs the shims where needed
from rhyme_openrlhf.settings.config import RhymeSettings

import ray  # isort: skip

from rhyme_openrlhf.engine.port import RayEngine
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.telemetry.events import Event

SOURCE = "home"
# One call for each prompt waits in it at the same time; Ray's own limit would be 1000.
CALLS_AT_ONCE = 1_000_000


class PlainHomeActor(SampleHome):
    """`engines`: handles of MovableEngine actors; `recorder`: the run's, which is told without waiting."""

    def __init__(
        self,
        engines: list[Any],
        rhyme: RhymeSettings,
        run_seed: int,
        agent: str | None,
        reward: Any,
        recorder: Any,
        plan: LayoutPlan | None = None,
    ) -> None:
        ports = {number: RayEngine(number, handle) for number, handle in enumerate(engines)}

        def record(event: Event) -> None:
            recorder.write.remote(event, SOURCE, time.time())

        node = ray.get_runtime_context().get_node_id()
        super().__init__(ports, rhyme, run_seed, agent, reward, record, plan, node)


# On the caller's node, and not counted: it waits for engines and reward functions.
HomeActor = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(PlainHomeActor)


def door(home: Any, engine: int) -> Any:
    """As much of an engine's handle as OpenRLHF's dispatch uses; behind it is the home."""

    def generate_responses(**arguments: Any) -> Any:
        return home.generate_responses.remote(engine, **arguments)

    def unfinished() -> Any:
        return home.unfinished.remote(engine)

    return SimpleNamespace(
        generate_responses=SimpleNamespace(remote=generate_responses),
        get_num_unfinished_requests=SimpleNamespace(remote=unfinished),
    )
