"""Between engines of other tensor-parallel sizes: moves, whose KV blocks are resharded over heads, and switches."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.kv.buffer import PREFIX
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE, Phase
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.moves import AUTO, MoveSettings
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings
from rhyme_openrlhf.shared_files import SHARED_MEMORY, owned_prefix
from rhyme_openrlhf.telemetry.events import Event, LayoutSwitched, SampleMoved
from tests.moves.engines import TIMEOUT_S, Engines, LocalEngine, a_home, grown_to, prompt, request, variables
from tests.moves.steered_engines import DyingEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unlike(starts_engine: None) -> Iterator[Engines]:
    """One engine of one rank and one of two, started one after the other: their threads are bound by a variable."""
    engines = []
    with variables():
        for ranks in (1, 2):
            engines.append(LocalEngine(len(engines), ranks))
            assert engines[-1].raw
    yield Engines(engines)
    for engine in engines:
        engine.stop()


def test_a_sample_goes_from_one_rank_to_two_and_back(unlike: Engines, tmp_path: Path) -> None:
    asked = request(list(range(10, 60)) * 2, max_tokens=300)

    async def unmoved(keeper: SampleKeeper, mover: Mover) -> Any:
        return await keeper.generate(asked, 0)

    async def moved(keeper: SampleKeeper, mover: Mover) -> Any:
        running = asyncio.create_task(keeper.generate(asked, 0))
        for tokens, to in ((60, 1), (160, 0)):
            record = await mover.move(await grown_to(keeper, tokens), to, "tp_switch")
            assert record.move.phase is Phase.RUNNING, record.move.reason
        return await running

    expected, _ = unlike.run(unmoved, tmp_path)
    output, last = unlike.run(moved, tmp_path)
    assert last == 0
    assert list(output.outputs[0].token_ids) == list(expected.outputs[0].token_ids)
    for engine in unlike.engines:
        assert engine.scheduler("rooms") == [] and engine.scheduler("read_counters")["kv_cache"] == 0


async def comes_back(engines: list[LocalEngine]) -> None:
    """Wait until the engine of one rank has its KV cache again, as it has before the next step's prompts."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=1)
    await asyncio.wait_for(engines[0].call("generate", list(range(20)), asked), TIMEOUT_S)


class OfManyLengths:
    """An agent that only asks; each sample of a prompt for `more` tokens more than the last one."""

    def __init__(self, more: int) -> None:
        self._more = more
        self._of: Counter[str] = Counter()

    async def execute(self, prompt: str, sampling_params: Any, llm_engine: Any, **_: Any) -> dict[str, Any]:
        self._of[prompt] += 1
        parameters = sampling_params.clone()
        parameters.max_tokens = self._more * self._of[prompt]
        output = await llm_engine.generate([*range(10, 30), self._of[prompt]], parameters)
        return {"prompt": prompt, "reward": 1.0, "scores": 1.0, "answer": list(output.outputs[0].token_ids)}


@pytest.mark.parametrize(("both_awake", "carrier"), [(True, AUTO), (False, KV_TRANSFER), (False, RECOMPUTE)])
def test_the_last_samples_go_on_with_more_tensor_parallelism(unlike: Engines, both_awake: bool, carrier: str) -> None:
    """The tail of each step goes to the engine of two ranks, and the prompts of the next one to the other again.

    Also where KV caches take turns: what is in one is gone when it sleeps.
    """
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
    samples, left = 7, 3

    async def generate(enable: bool) -> tuple[list[Any], list[Event], list[dict[str, Any]]]:
        settings = dataclasses.replace(
            RhymeSettings(),
            move=MoveSettings(news_s=0.02, carrier=carrier),
            tp_switch=TpSwitchSettings(enable=enable, samples=left, status_s=0.05),
        )
        events: list[Event] = []
        plan = LayoutPlan(1, 1, (Tail(1, 2),), both_awake=both_awake)
        if enable and not both_awake:
            await unlike.engines[1].call("sleep_kv")
        home = a_home(unlike.engines, settings, OfManyLengths(60), events.append, plan)
        await home.open()
        answers = []
        for step in (1, 2):
            home.begin_step(step, samples)
            answers += await home.generate_responses(0, **prompt(f"p{step}", parameters, 600, samples))
        if enable and not both_awake:
            await comes_back(unlike.engines)
            await unlike.engines[1].call("wake_kv")
        home.close()
        return answers, events, [engine.now("rollout_report", 0.0, 4e9)["intervals"] for engine in unlike.engines]

    def run(enable: bool) -> tuple[list[Any], list[Event], list[Any]]:
        return asyncio.run(asyncio.wait_for(generate(enable), TIMEOUT_S))

    expected, nothing, _ = run(False)
    assert nothing == []
    answers, events, timelines = run(True)
    assert [one["answer"] for one in answers] == [one["answer"] for one in expected]
    switches = [event for event in events if isinstance(event, LayoutSwitched)]
    assert [(event.step, event.from_tp, event.to_tp) for event in switches] == [(1, 1, 2), (2, 1, 2)]
    moves = [event for event in events if isinstance(event, SampleMoved)]
    assert {(m.source_engine, m.destination_engine, m.cause, m.outcome) for m in moves} == {
        (0, 1, "tp_switch", "moved")
    }
    assert {move.carrier for move in moves} == {carrier if carrier != AUTO else KV_TRANSFER}
    assert all(1 <= event.samples <= left and event.seconds > 0 for event in switches)
    assert sum(event.samples for event in switches) == len(moves)
    # The engine of two ranks waits for nobody: while it has no sample, its devices are the other's.
    assert {interval.state for interval in timelines[1]} == {"switch", "generate"}
    for engine in unlike.engines:
        assert engine.scheduler("rooms") == [] and engine.scheduler("read_counters")["kv_cache"] == 0


@pytest.mark.parametrize(
    ("moment", "dies"),
    [("sample has gone on", "tail"), ("sample is handed over to it", "tail"), ("sample is handed over", "aligned")],
)
def test_an_engine_killed_in_the_middle_of_a_switch_takes_no_sample_with_it(
    unlike: Engines, monkeypatch: pytest.MonkeyPatch, moment: str, dies: str
) -> None:
    """What was at it, or on its way there, goes on at the others, to the same end."""
    from vllm import SamplingParams

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    parameters = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
    one, two = unlike.engines
    if dies == "tail":
        plan, engines = LayoutPlan(1, 1, (Tail(1, 2),)), [one, LocalEngine(1, 2, DyingEngine)]
    else:
        plan, engines = LayoutPlan(2, 1, (Tail(1, 2),)), [one, LocalEngine(1, 1, DyingEngine), two]
        # It reports by its number, which is another one here.
        monkeypatch.setattr(two.raw, "index", 2)
    victim, samples = engines[1], 6 * plan.engines

    async def generate(enable: bool) -> tuple[list[Any], list[Event]]:
        settings = dataclasses.replace(
            RhymeSettings(),
            # No drafts, so that there is time for a look between one sample's end and the next one's.
            histospec=HistoSpecSettings(enable=False),
            move=MoveSettings(news_s=0.02),
            tp_switch=TpSwitchSettings(enable=enable, samples=samples // 2, status_s=0.1),
        )
        events: list[Event] = []
        home = a_home(engines, settings, OfManyLengths(95), events.append, plan)
        await home.open()
        home.begin_step(1, samples)
        answers = await asyncio.gather(
            *(
                home.generate_responses(engine, **prompt(f"p{engine}", parameters, 600, 6))
                for engine in range(plan.engines)
            )
        )
        home.close()
        return [one["answer"] for part in answers for one in part], events

    def run(enable: bool) -> tuple[list[Any], list[Event]]:
        return asyncio.run(asyncio.wait_for(generate(enable), TIMEOUT_S))

    try:
        assert victim.raw
        expected, _ = run(False)
        victim.scheduler("die_at", moment)
        answers, events = run(True)
        assert answers == expected
    finally:
        victim.stop()
    tried = [event for event in events if isinstance(event, SampleMoved) and event.cause == "tp_switch"]
    assert tried and not (dies == "tail" and any(event.outcome == "moved" for event in tried))
    if dies == "aligned":
        assert any(event.outcome == "recomputed" for event in tried)
    # The order to tidy up is given before a sample is answered, or with it.
    for engine in engines:
        if engine is not victim:
            assert engine.scheduler("rooms") == [] and engine.scheduler("read_counters")["kv_cache"] == 0
    assert not list(SHARED_MEMORY.glob(f"{owned_prefix(PREFIX)}*"))
