"""The controller with engines of a tail layout, on made-up engines."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.engine.messages import TurnReport
from rhyme_openrlhf.pipeline.batch import StepEnd
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.telemetry.events import EngineStep
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from tests.pipeline.made_up import Gone, Ref, a_pipeline, by_chance, drawn_steps


def test_engines_of_a_tail_layout_get_no_prompts_and_tell_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance(monkeypatch, 2)
    sent: list[Any] = []
    controller, generator, recorded = a_pipeline(sent.append, layouts=LayoutPlan(1, 1, (Tail(1, 2),)))
    reports = iter([TurnReport(0, EngineCounters(response_tokens=7)), *[TurnReport(0, EngineCounters())] * 9])
    generator.vllm_engines[1].__dict__["report_since"] = NS(remote=lambda: Ref(next(reports)))
    placed = set()
    place = generator.place

    def noting(step: Step, places: Any) -> dict[int, Exception]:
        placed.update(step.engine_of.values())
        return place(step, places)

    monkeypatch.setattr(generator, "place", noting)
    controller.run(iter(drawn_steps([2, 3], 0)))
    assert placed == {0} and sum(isinstance(item, StepEnd) for item in sent) == 2
    # Nothing is recorded of the step in which it did nothing.
    steps = [event for event in recorded if isinstance(event, EngineStep) and event.engine == 1]
    assert [(event.step, event.counters.response_tokens) for event in steps] == [(1, 7)]
    # Without one that prompts go to, the run ends.
    generator.vllm_engines[0] = Gone(0, "it is dead")  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="all engines that prompts go to are gone"):
        controller.run(iter(drawn_steps([2], 2)))
