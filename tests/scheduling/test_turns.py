"""Engines' turns: order, weights, and the bound on off-policyness, for any timing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.turns import (
    MOST_OFF_POLICY,
    AwaitWeights,
    Begin,
    EngineTurns,
    Load,
    Turn,
    evaluation_turn,
    step_of,
    training_turn,
)


def handed(turns: EngineTurns, turn: Turn, samples: int = 1) -> None:
    turns.hand(turn, samples)


def test_an_engine_goes_on_with_old_weights_where_it_may_and_waits_where_it_may_not() -> None:
    turns = EngineTurns()
    for step in (1, 2, 3):
        handed(turns, training_turn(step, 0))
    turns.begun(training_turn(1, 0))
    assert turns.next() is None
    turns.ended(2)
    assert turns.next() == Begin(training_turn(2, 0))
    turns.begun(training_turn(2, 0))
    turns.ended(4)
    assert turns.next() == AwaitWeights(training_turn(3, 0), 1)
    turns.offer(1)
    turns.offer(2)
    assert turns.next() == Load(2)
    turns.loaded(2)
    assert turns.next() == Begin(training_turn(3, 0))


def test_samples_that_come_late_join_the_turn_that_may_generate_them() -> None:
    turns = EngineTurns()
    # Still to come, or running: it is longer.
    turns.hand(training_turn(1, 0), 1)
    assert turns.extend(training_turn(1, 0), 1) == (2, False)
    turns.begun(training_turn(1, 0))
    assert turns.extend(training_turn(1, 0), 1) == (2, False)
    turns.ended(2, 2)
    assert not turns.over
    turns.ended(2)
    # Over: it goes on.
    assert turns.over and turns.extend(training_turn(1, 0), 1) == (2, False) and not turns.over
    turns.ended(2)
    # The engine had no part in step 2, but has one in step 3: 2 comes first.
    turns.hand(training_turn(3, 0), 1)
    assert turns.extend(training_turn(2, 0), 4) == (4, True)
    assert turns.next() == Begin(training_turn(2, 0))
    turns.begun(training_turn(2, 0))
    turns.ended(4, 4)
    turns.offer(1)
    turns.loaded(1)
    turns.begun(training_turn(3, 0))
    # Past step 2: in the turn of step 3, whose weights step 2 may have too.
    assert turns.extend(training_turn(2, 0), 1) == (6, False)
    turns.ended(6, 2)
    assert turns.over


def test_a_turn_is_over_when_it_is_closed_and_its_samples_have_ended() -> None:
    turns = EngineTurns()
    evaluation = evaluation_turn(0)
    turns.hand(evaluation, None)
    turns.begun(evaluation)
    turns.add(evaluation.number, 2)
    turns.ended(evaluation.number, 2)
    assert not turns.over  # more may be sent
    turns.close(evaluation.number)
    assert turns.over


def test_an_evaluation_is_of_exactly_its_weights_and_stands_behind_the_step_that_does_not_wait_for_them() -> None:
    evaluation = evaluation_turn(3)
    assert (evaluation.oldest, evaluation.newest) == (3, 3)
    assert training_turn(4, 0).number < evaluation.number < training_turn(5, 0).number
    assert training_turn(4, 0).oldest < 3 <= training_turn(5, 0).oldest


def test_a_resumed_run_generates_nothing_with_weights_from_before_it() -> None:
    assert [training_turn(step, 6).oldest for step in (7, 8, 9)] == [6, 6, 7]


def test_turns_come_in_order() -> None:
    turns = EngineTurns()
    turns.hand(training_turn(2, 0), 4)
    with pytest.raises(ValueError, match="behind"):
        turns.hand(training_turn(1, 0), 4)
    with pytest.raises(ValueError, match="not the engine's"):
        turns.add(training_turn(3, 0).number, 1)


@given(st.data())
def test_whatever_the_timing_every_turn_runs_once_in_order_within_the_bound(data: st.DataObject) -> None:
    """Engines end turns, and the trainer trains complete steps, in any order that can be."""
    engines = [EngineTurns() for _ in range(data.draw(st.integers(1, 3)))]
    steps = data.draw(st.integers(1, 6))
    first = data.draw(st.integers(0, 2))
    ran: list[list[int]] = [[] for _ in engines]
    taken_out = [{step for step in range(steps) if data.draw(st.booleans())} for _ in engines]
    trained = given_out = first
    for turns in engines:
        turns.offer(first)
    while trained < first + steps:
        while given_out < min(trained + 1 + MOST_OFF_POLICY, first + steps):
            given_out += 1
            for turns, skipped in zip(engines, taken_out, strict=True):
                if given_out - first - 1 not in skipped:
                    handed(turns, training_turn(given_out, first))
        movable = [number for number, turns in enumerate(engines) if isinstance(turns.next(), (Load, Begin))]
        running = [number for number, turns in enumerate(engines) if not turns.over]
        done = all(
            trained - first in skipped or trained + 1 in [step for step in steps_ran[: len(steps_ran) - (not t.over)]]
            for t, skipped, steps_ran in zip(engines, taken_out, ran, strict=True)
        )
        choices = [("move", n) for n in movable] + [("end", n) for n in running] + ([("train", 0)] if done else [])
        assert choices, "the pipeline stands still"
        what, number = data.draw(st.sampled_from(choices))
        turns = engines[number]
        if what == "train":
            trained += 1
            for one in engines:
                one.offer(trained)
        elif what == "end":
            assert turns.current is not None
            turns.ended(turns.current.number)
        else:
            action = turns.next()
            if isinstance(action, Load):
                assert action.version > turns.version
                turns.loaded(action.version)
            else:
                assert isinstance(action, Begin)
                turns.begun(action.turn)
                assert 0 <= action.turn.step - turns.version - 1 <= MOST_OFF_POLICY
                ran[number].append(action.turn.step)
    for steps_ran, skipped in zip(ran, taken_out, strict=True):
        assert steps_ran == [first + 1 + step for step in range(steps) if step not in skipped]


def test_what_is_behind_a_turn() -> None:
    one, two, three = (training_turn(step, 0) for step in (1, 2, 3))
    turns = EngineTurns()
    # Handed nothing yet, it begins nothing that is owed to the turn.
    assert turns.is_behind(two.number)
    handed(turns, one)
    assert not turns.is_behind(two.number) and not turns.is_behind(one.number)
    turns.begun(one)
    assert turns.is_behind(one.number)
    # The turn before it still runs.
    assert not turns.is_behind(two.number)
    handed(turns, three)
    turns.ended(one.number)
    # It has no part in this one, and waits for weights of the next.
    assert turns.is_behind(one.number) and turns.is_behind(two.number) and not turns.is_behind(three.number)
    turns.offer(1)
    turns.loaded(1)
    turns.begun(three)
    assert not turns.is_behind(two.number) and turns.is_behind(three.number)
    assert [step_of(turn.number) for turn in (one, two, three)] == [1, 2, 3]
