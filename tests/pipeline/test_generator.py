"""Steps are drawn ahead, and a run that goes on from any of them draws every prompt of every epoch exactly once."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace as NS
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()


from rhyme_openrlhf.engine.calls import EngineHandle
from rhyme_openrlhf.engine_losses import EngineLosses
from rhyme_openrlhf.pipeline.generator import PipelineSamplesGenerator
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.scheduling.turns import training_turn
from rhyme_openrlhf.training.samples_generator import LOADER_FINISHED, GeneratorState
from tests.examples import examples
from tests.ray_handles import handle_of
from tests.training.prompt_loader import a_loader

EPOCHS = 3


def a_generator(prompts: int, batch: int, seed: int) -> PipelineSamplesGenerator:
    """A new process's generator on upstream's data loader, seeded as an unseeded process would be: differently."""
    args = NS(
        rollout=NS(batch_size=batch, n_samples_per_prompt=2, vllm_generate_batch_size=None),
        train=NS(num_episodes=EPOCHS),
        algo=NS(advantage=NS(is_correction_level="off")),
    )
    steps = -(-prompts // batch)
    services = NS(
        losses=EngineLosses(),
        settings=NS(run=NS(reproducible=False), telemetry=NS(sample_groups=1), histospec=NS(enable=False)),
        epoch_of=lambda step: (step - 1) // steps + 1,
    )
    return PipelineSamplesGenerator(NS(args=args), a_loader(prompts, seed), None, None, [], services=services)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 11), st.integers(1, 5), st.data())
def test_a_run_that_goes_on_after_any_step_trains_every_prompt_once(
    prompts: int, batch: int, data: st.DataObject
) -> None:
    """However far ahead steps had been drawn, and also where the step had its epoch's last prompts."""
    whole = list(a_generator(prompts, batch, seed=1).draw(0, 0))
    assert [step.number for step in whole] == list(range(1, len(whole) + 1))
    for epoch in range(1, EPOCHS + 1):
        of_epoch = [prompt for step in whole if step.epoch == epoch for prompt in step.prompts]
        assert sorted(of_epoch) == sorted(f"prompt {number}" for number in range(prompts))
    killed = data.draw(st.integers(0, len(whole) - 1))
    states, generator = pickle.loads(pickle.dumps((whole[killed].client_states, whole[killed].generator)))
    resumed = a_generator(prompts, batch, seed=2)
    # As our trainers do.
    episode = states["episode"] + states["data_loader_state_dict"][LOADER_FINISHED]
    resumed.restore(generator)
    resumed.prompts_dataloader.load_state_dict(states["data_loader_state_dict"])
    after = list(resumed.draw(episode, states["total_consumed_prompts"]))
    assert [(step.number, step.epoch) for step in after] == [(step.number, step.epoch) for step in whole[killed + 1 :]]
    for epoch in range(1, EPOCHS + 1):
        once = [prompt for step in (*whole[: killed + 1], *after) if step.epoch == epoch for prompt in step.prompts]
        assert sorted(once) == sorted(f"prompt {number}" for number in range(prompts))
    assert not after or after[-1].client_states["total_consumed_prompts"] == EPOCHS * prompts


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 11), st.integers(1, 5), st.data())
def test_a_resumed_run_leaves_out_what_was_drawn_as_a_replacement(
    prompts: int, batch: int, data: st.DataObject
) -> None:
    """Steps draw replacements while the one or two behind them have drawn theirs."""
    used: list[tuple[int, list[str]]] = []
    points: list[tuple[Step, GeneratorState]] = []
    ahead: list[Step] = []
    for drawn in [*a_generator(prompts, batch, seed=1).draw(0, 0), None]:
        ahead += [drawn] if drawn is not None else []
        while len(ahead) > 2 or (drawn is None and ahead):
            step = ahead.pop(0)
            for _ in range(data.draw(st.integers(0, 2))):
                if more := step.draw_another():
                    step.add(more)
            used.append((step.epoch, step.prompts))
            points.append((step, step.generator_after([])))
    for epoch in {number for number, _ in used}:
        of_epoch = [prompt for number, more in used for prompt in more if number == epoch]
        assert sorted(of_epoch) == sorted(f"prompt {number}" for number in range(prompts))
    at = data.draw(st.integers(0, len(points) - 1))
    killed, state = points[at]
    resumed = a_generator(prompts, batch, seed=2)
    states = pickle.loads(pickle.dumps(killed.client_states))
    resumed.restore(pickle.loads(pickle.dumps(state)))
    resumed.prompts_dataloader.load_state_dict(states["data_loader_state_dict"])
    episode = states["episode"] + states["data_loader_state_dict"][LOADER_FINISHED]
    after = [(step.epoch, step.prompts) for step in resumed.draw(episode, 0)]
    for epoch in range(1, EPOCHS + 1):
        once = [prompt for number, more in [*used[: at + 1], *after] for prompt in more if number == epoch]
        assert sorted(once) == sorted(f"prompt {number}" for number in range(prompts))


def test_a_resumed_run_draws_what_was_deferred_instead_of_what_was_trained_ahead() -> None:
    first, second = list(a_generator(6, 3, seed=1).draw(0, 0))[:2]
    state = replace(first.generator, deferred=((first.prompts[2], first.labels[2], None),), used=(1,))
    resumed = a_generator(6, 3, seed=2)
    resumed.restore(pickle.loads(pickle.dumps(state)))
    resumed.prompts_dataloader.load_state_dict(first.client_states["data_loader_state_dict"])
    drawn = next(resumed.draw(0, 3))
    assert drawn.prompts == [second.prompts[0], second.prompts[2], first.prompts[2]]
    assert drawn.labels[2] == first.labels[2] and drawn.client_states["total_consumed_prompts"] == 6


def an_engine(sent: list[str]) -> Any:
    """Return the handle of an engine that keeps the names of its calls in `sent`."""

    def answer(name: str, *given: Any, **arguments: Any) -> Any:
        sent.append(name)
        if name == "extend_turn":
            return given[0].number
        return (name, arguments.get("prompt", given[0] if given else ""))

    return handle_of(EngineHandle, answer)


def test_each_engine_gets_its_part_as_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf.trainer.ppo_utils.samples_generator.ray", NS(get=lambda refs: [0 for _ in refs]))
    monkeypatch.setattr("rhyme_openrlhf.pipeline.generator.ray", NS(get=lambda refs, timeout: refs))
    generator = a_generator(4, 3, seed=1)
    names: list[list[str]] = [[], [], []]
    engines = [an_engine(sent) for sent in names]
    generator.vllm_engines = list(engines)
    drawn = Step(5, 2, ["a", "b", "c"], ["A", "B", "C"], [None] * 3, {}, GeneratorState(5))
    turn = training_turn(5, 0)
    generator.begin(drawn, turn)
    drawn.engine_of.update({0: 2, 1: 0, 2: 2})
    assert generator.place(drawn, drawn.unplaced()) == {} and drawn.unplaced() == []
    part = ["extend_turn", "get_num_unfinished_requests", "generate_in_turn"]
    assert names == [[*part, "turn_report"], [], [*part, "generate_in_turn", "turn_report"]]
    assert drawn.calls == {
        ("generate_in_turn", "b"): 1,
        ("generate_in_turn", "a"): 0,
        ("generate_in_turn", "c"): 2,
    }
    assert generator.vllm_engines == engines
