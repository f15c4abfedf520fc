"""Drafts for steps that are scheduled already, against those of a scheduler that knows every token: the same.

vLLM's real schedulers, and a stand-in for the model runner that gives its tokens a step late, as vLLM's second one
does.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from hypothesis import given, settings
from hypothesis import strategies as st
from step_overhead import scheduler_of
from vllm import SamplingParams
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.drafting.gain import GainMeter
from rhyme_openrlhf.engine.patches.late_drafts import Sampled, sampled_of
from rhyme_openrlhf.engine.patches.second_runner import drafts_of
from rhyme_openrlhf.engine.requests import PROMPT_KEY
from rhyme_openrlhf.engine.scheduler import LateEngineScheduler
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.latency.profile import to_text
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.latency import formula

PROMPT, RUNNING = [1, 2, 3], 4


class Engine:
    """A scheduler and a runner that generates texts which are known beforehand."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.scheduler = scheduler_of("rules", RUNNING, 512, asynchronous=late)
        self.texts: dict[str, list[int]] = {}
        # Of a prompt that needs several steps: tokens that are still to be computed.
        self.unread: dict[str, int] = {}
        self.written: dict[str, int] = {}
        # Of each request: position and draft of each step.
        self.drafts: dict[str, list[tuple[int, list[int]]]] = {}
        # Steps that waited for the tokens of the one before.
        self.waits = 0

    def fresh(self, history: list[int]) -> None:
        """Forget earlier samples, and draft from this text."""
        drafting = self.scheduler.drafting
        drafting.use(HistoryDrafter(HistoSpecSettings(siblings=False, shared_tokens=0)))
        drafting.gain = GainMeter(0)
        drafting.source.install("p", build_index([Piece(PROMPT, history, 1.0)]))
        self.texts, self.written, self.drafts = {}, {}, {}

    def add(self, name: str, text: list[int], prompt: list[int] = PROMPT) -> None:
        """Start a sample that will have this text."""
        parameters = SamplingParams(temperature=1, max_tokens=len(text), extra_args={PROMPT_KEY: "p"})
        parameters.update_from_generation_config({}, eos_token_id=None)
        self.texts[name], self.written[name], self.drafts[name] = text, 0, []
        if prompt is not PROMPT:
            self.unread[name] = len(prompt)
        self.scheduler.add_request(Request(name, prompt, parameters, None))

    def compute(self, step: Any) -> ModelRunnerOutput:
        """Sample behind each prompt or draft as the texts say."""
        new: list[list[int]] = []
        drafts = dict(zip(step.scheduled_spec_decode_tokens, drafts_of(step).tokens(), strict=True))
        for name in step.num_scheduled_tokens:
            text, at = self.texts[name], self.written[name]
            draft = drafts.get(name, [])
            assert len(draft) == len(step.scheduled_spec_decode_tokens.get(name, []))
            if self.unread.get(name):
                self.unread[name] -= step.num_scheduled_tokens[name]
                if self.unread[name]:
                    new.append([])
                    continue
                self.unread.pop(name)
                new.append(text[:1])
                self.written[name] = 1
                continue
            assert step.num_scheduled_tokens[name] - len(draft) in (1, len(PROMPT) + at)
            if draft:
                self.drafts[name].append((at, draft))
            accepted = 0
            while accepted < len(draft) and at + accepted < len(text) and draft[accepted] == text[at + accepted]:
                accepted += 1
            # vLLM has scheduled a sample that is over once more.
            new.append((text[at : at + accepted + 1] + [0] * (accepted + 1))[: accepted + 1])
            self.written[name] = at + accepted + 1
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, new)

    def run(self) -> None:
        """Run until every sample has ended."""
        self.finish([])

    def finish(self, under_way: list[tuple[Any, ModelRunnerOutput]]) -> None:
        """Run until every sample has ended, from steps that are under way."""
        while self.scheduler.has_requests() or under_way:
            self.step(under_way)

    def step(self, under_way: list[tuple[Any, ModelRunnerOutput]]) -> None:
        """Schedule and compute a step, and take in the one before it, or in synchronous scheduling this one."""
        output = self.scheduler.schedule()
        if not output.total_num_scheduled_tokens:
            under_way.append((output, EMPTY_MODEL_RUNNER_OUTPUT))
        elif self.late:
            before = under_way[-1][1] if under_way else EMPTY_MODEL_RUNNER_OUTPUT
            step = self.scheduler.fill(output, functools.partial(self.wait_for, before))
            assert step.num_scheduled_tokens.keys() == output.num_scheduled_tokens.keys()
            # KV blocks are there for no more.
            room = output.num_scheduled_tokens
            assert all(tokens <= room[name] for name, tokens in step.num_scheduled_tokens.items())
            under_way.append((output, self.compute(step)))
        else:
            under_way.append((output, self.compute(output)))
        while len(under_way) > (1 if self.late and output.total_num_scheduled_tokens else 0):
            scheduled, result = under_way.pop(0)
            self.scheduler.update_from_output(scheduled, result)
            if not self.late:
                self.scheduler.update_draft_token_ids(DraftTokenIds(result.req_ids, [[] for _ in result.req_ids]))

    def wait_for(self, before: ModelRunnerOutput) -> Sampled:
        """Return what the step before sampled."""
        self.waits += 1
        return sampled_of(before)

    def within_texts(self) -> dict[str, list[tuple[int, list[int]]]]:
        """Return the drafts but for those behind the end of a text."""
        return {
            name: [(at, draft) for at, draft in steps if at < len(self.texts[name])]
            for name, steps in self.drafts.items()
        }


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """One with synchronous scheduling, and one whose drafts come late."""
    found = Engine(late=False), Engine(late=True)
    assert isinstance(found[1].scheduler, LateEngineScheduler)
    return found


def texts(data: st.DataObject) -> tuple[list[int], list[list[int]]]:
    """Return a history and texts that follow it in parts."""
    history = data.draw(st.lists(st.integers(10, 30), min_size=4, max_size=60))
    found = []
    for _ in range(data.draw(st.integers(1, RUNNING + 2))):
        text = history[: data.draw(st.integers(2, len(history)))]
        for place in data.draw(st.lists(st.integers(0, len(text) - 1), max_size=4)):
            text[place] = data.draw(st.integers(10, 30))
        found.append(text)
    return history, found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_drafts_and_counters_are_those_of_synchronous_scheduling(engines: Any, data: st.DataObject) -> None:
    history, samples = texts(data)
    counted = []
    for engine in engines:
        engine.fresh(history)
        before = engine.scheduler.meter.counters()
        for number, text in enumerate(samples):
            engine.add(f"sample {number}", list(text))
        engine.run()
        assert engine.written.keys() == engine.texts.keys() and not engine.scheduler.requests
        after = engine.scheduler.meter.counters()
        names = ("response_tokens", "decode_tokens", "finished_samples", "prompt_tokens", "accepted")
        counted.append({name: after[name] - before[name] for name in names})
    now, late = engines
    # All that fit at once run alike. The others wait for a seat, which is free a step later.
    assert late.within_texts() == now.within_texts()
    assert counted[1] == counted[0]


def test_room_for_drafts_keeps_no_prompt_out(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples could fill a step of 40 tokens with their room alone."""
    engine, history = engines[1], list(range(40, 90))
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 40)
    engine.fresh(history)
    under_way: list[tuple[Any, ModelRunnerOutput]] = []
    for name in ("one", "two"):
        engine.add(name, list(history))
    for _ in range(2):
        engine.step(under_way)
    engine.add("late", list(history))
    for _ in range(2):
        engine.step(under_way)
    assert engine.written["late"] and engine.written["one"] < len(history)
    engine.finish(under_way)


def test_a_long_prompt_gets_half_of_each_step(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples draft 32 tokens each, which a step of 32 tokens has no room for beside a prompt of 100."""
    history = list(range(40, 140))
    for engine in engines:
        monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 32)
        engine.fresh(history)
        under_way: list[tuple[Any, ModelRunnerOutput]] = []
        for name in ("one", "two", "three"):
            engine.add(name, list(history))
        for _ in range(3):
            engine.step(under_way)
        engine.add("late", history[:3], prompt=list(range(100)))
        steps = 0
        while not engine.written["late"]:
            engine.step(under_way)
            steps += 1
        # The first of them was full already, and 100 tokens are seven times 16 at most.
        assert steps <= 8 and engine.written["one"] < len(history)
        engine.finish(under_way)


def test_a_stopped_sample_and_new_weights_leave_the_texts_right(engines: Any) -> None:
    """Requests that end while their next step runs, and those whose tokens under way vLLM drops."""
    engine = engines[1]
    history = list(range(40, 90))
    engine.fresh(history)
    for name in ("stopped", "kept"):
        engine.add(name, list(history))
    under_way: list[tuple[Any, ModelRunnerOutput]] = []
    for _ in range(3):
        engine.step(under_way)
    engine.scheduler.finish_requests("stopped", RequestStatus.FINISHED_ABORTED)
    kept = engine.scheduler.requests["kept"]
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    # What is under way is dropped, so the model writes it again.
    engine.written["kept"] = kept.num_output_tokens
    engine.drafts["kept"].clear()
    engine.finish(under_way)
    assert all(draft == history[at : at + len(draft)] for at, draft in engine.within_texts()["kept"])
    assert sum(len(draft) for _, draft in engine.within_texts()["kept"]) > 20


def test_a_planner_decides_and_learns_by_what_is_computed(engines: Any) -> None:
    """The drafts in a step count, not the room for them."""
    engine, history = engines[1], list(range(40, 90))
    engine.fresh(history)
    assert not engine.scheduler.drafting.install_profile(to_text(formula.profile()))
    for name in ("one", "two"):
        engine.add(name, list(history))
    engine.run()
    drafted = sum(len(draft) for steps in engine.drafts.values() for _, draft in steps)
    decided = engine.scheduler.calls["take_decisions"]()
    lengths = zip(decided["running"], decided["decode_steps"], decided["draft_length"], strict=True)
    # The last step has no next one that would time it.
    assert 0 < sum(running * steps * length for running, steps, length in lengths) <= drafted


def test_dummies_fill_the_room_of_a_measured_step(engines: Any) -> None:
    engine = engines[1]
    engine.fresh([1])
    engine.scheduler.timing.force_drafts(3)
    engine.add("sample", [5] * 20)
    engine.run()
    engine.scheduler.timing.force_drafts(None)
    assert {len(draft) for at, draft in engine.within_texts()["sample"] if at < 16} == {3}
    assert {step.drafts for step in engine.scheduler.timing.take_steps()} <= {1, 2, 3}


def test_room_is_released_while_drafts_are_left_out(engines: Any) -> None:
    engine, history = engines[1], list(range(40, 90))
    engine.fresh(history)
    gain = engine.scheduler.drafting.gain = GainMeter(0.1)
    gain._switch(False)
    engine.add("sample", list(history))
    under_way: list[tuple[Any, ModelRunnerOutput]] = []
    rooms: dict[int, int] = {}
    while engine.scheduler.has_requests() or under_way:
        engine.step(under_way)
        if under_way:
            rooms[gain._asked] = len(under_way[-1][0].scheduled_spec_decode_tokens.get("sample", ()))
    # Drafts are tried in an interval (steps 32 to 35 of 40), and its room comes some steps ahead of it.
    assert {room for asked, room in rooms.items() if asked < 28} == {0}
    tried = [at for at, draft in engine.within_texts()["sample"]]
    assert tried and tried[0] == 33


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_steps_without_drafts_wait_for_no_tokens_and_later_drafts_know_them_all(
    engines: Any, data: st.DataObject
) -> None:
    """Drafts are switched off and on again while samples run; some are aborted, and weights are loaded."""
    engine, tokens = engines[1], st.integers(10, 99)
    history = data.draw(st.lists(tokens, min_size=60, max_size=90))
    others = data.draw(st.lists(st.dictionaries(st.integers(0, 59), tokens, max_size=20), min_size=1, max_size=RUNNING))
    # All that is drawn is drawn before anything runs: after how many steps what happens.
    happenings = st.sampled_from(("a switch", "a switch", "a switch", "new weights", "an abort"))
    turns = data.draw(st.lists(st.tuples(st.integers(1, 12), happenings), min_size=2, max_size=12))
    engine.fresh(history)
    gain = engine.scheduler.drafting.gain = GainMeter(0)
    for number, other in enumerate(others):
        engine.add(str(number), [other.get(place, token) for place, token in enumerate(history)])
    under_way: list[tuple[Any, ModelRunnerOutput]] = []
    drafting = True
    for steps, happening in turns:
        for step in range(steps):
            before = engine.waits
            engine.step(under_way)
            # Room is kept a step ahead, and a step with drafts may be under way still.
            assert drafting or step < 3 or engine.waits == before
        if happening == "a switch":
            drafting = not drafting
            gain._switch(drafting)
        elif happening == "an abort":
            engine.scheduler.finish_requests(list(engine.scheduler.requests)[:1], RequestStatus.FINISHED_ABORTED)
        elif not drafting:
            # (Those that draft are another test's.)
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            # What is under way is dropped, so the model writes it again.
            engine.written.update({name: one.num_output_tokens for name, one in engine.scheduler.requests.items()})
    engine.finish(under_way)
    for name, steps in engine.within_texts().items():
        for at, draft in steps:
            known = [*PROMPT, *engine.texts[name][:at]]
            # What follows the first token may come from elsewhere.
            first = draft[:1]
            assert continues(first, known, [*PROMPT, *history]) or continues(first, known, known), (name, at, draft)


def test_new_weights_while_drafts_are_left_out_leave_the_texts_right(engines: Any) -> None:
    """The first draft behind them is right: no token that was dropped is in the text, and none is missing."""
    engine, history = engines[1], list(range(40, 140))
    engine.fresh(history)
    gain = engine.scheduler.drafting.gain = GainMeter(0)
    gain._switch(False)
    engine.add("sample", list(history))
    under_way: list[tuple[Any, ModelRunnerOutput]] = []
    for step in range(20):
        engine.step(under_way)
        if step == 8:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.written["sample"] = engine.scheduler.requests["sample"].num_output_tokens
    gain._switch(True)
    engine.finish(under_way)
    drafts = engine.within_texts()["sample"]
    assert drafts and all(draft == history[at : at + len(draft)] for at, draft in drafts)


def test_the_last_step_with_drafts_counts_with_all_that_it_gave(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step behind it has no room for any (samples and prompts fill it), and so could go before that is known."""
    engine, history = engines[1], list(range(40, 140))
    engine.fresh(history)
    gain = engine.scheduler.drafting.gain = GainMeter(0)
    counted: list[int] = []
    monkeypatch.setattr(gain, "step", lambda number, running, tokens, *_: counted.append(tokens))
    engine.add("sample", list(history))
    under_way: list[tuple[Any, ModelRunnerOutput]] = []
    gave: list[int] = []
    while engine.scheduler.has_requests() or under_way:
        before = engine.written["sample"]
        engine.step(under_way)
        gave.append(engine.written["sample"] - before)
        if len(gave) == 4:
            monkeypatch.setattr(engine.scheduler.drafting, "_decode_tokens", lambda: 1)
    # The first is the prompt's, and what follows a prompt is not timed.
    assert max(gave) > 4 and gave[-10] == 1 and counted == gave[2 : len(counted) + 2]


def continues(draft: list[int], known: list[int], text: list[int]) -> bool:
    """Whether `draft` stands in `text` behind the last two tokens of `known`, as few as a source looks up."""
    places = (place for place in range(2, len(text)) if text[place - 2 : place] == known[-2:])
    return any(text[place : place + len(draft)] == draft for place in places)


def test_room_takes_no_block_that_another_sample_may_need(engines: Any) -> None:
    """With no free block left a sample keeps its drafts within the blocks that it has."""
    engine, history = engines[1], list(range(40, 90))
    engine.fresh(history)
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.add("sample", list(history))
    under_way: list[tuple[Any, ModelRunnerOutput]] = []
    engine.step(under_way)
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    request = engine.scheduler.requests["sample"]
    has = engine.scheduler.block_size * len(engine.scheduler.kv_cache_manager.get_block_ids("sample")[0])
    for _ in range(3):
        engine.step(under_way)
        assert request.num_computed_tokens <= has
    pool.free_blocks(taken)
    engine.finish(under_way)
    drafted = engine.within_texts()["sample"]
    assert all(draft == history[at : at + len(draft)] for at, draft in drafted) and drafted
