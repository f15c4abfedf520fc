"""A move's state machine: its faults one by one."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.scheduling.move import (
    ENDED,
    KV_TRANSFER,
    RECOMPUTE,
    Cleanup,
    Move,
    MoveRefused,
    NotYet,
    Phase,
    Place,
    Reply,
    Step,
    ask,
)

HERE, THERE = Place(0, 4), Place(1, 4)


def moved(*replies: Reply, carrier: str = KV_TRANSFER) -> Move:
    move = ask("s", HERE, THERE, carrier)
    for reply in replies:
        move = move.after(reply, "why")
    return move


DONE = Reply.DONE


def test_a_transfer_takes_every_step() -> None:
    move, steps, phases = ask("s", HERE, THERE, KV_TRANSFER), [], []
    while not move.over:
        steps.append(move.step)
        phases.append(move.phase)
        move = move.after(DONE)
    assert steps == [Step.RESERVE, Step.STAGE, Step.STOP, Step.TRANSFER, Step.START]
    assert phases == [Phase.ASKED, Phase.RESERVED, Phase.STAGING, Phase.STOPPED, Phase.TRANSFERRED]
    assert (move.phase, move.may_generate, move.cleanup, move.reason) == (Phase.RUNNING, 1, (Cleanup.DISCARD,), "")


def handed(*replies: Reply) -> Move:
    move = ask("s", HERE, THERE, KV_TRANSFER, hands_over=True)
    for reply in replies:
        move = move.after(reply, "why")
    return move


def test_a_handover_expects_before_it_stops() -> None:
    move, steps, may = handed(), [], []
    while not move.over:
        steps.append(move.step)
        may.append(move.may_generate)
        move = move.after(DONE)
    assert steps == [Step.RESERVE, Step.STAGE, Step.EXPECT, Step.STOP, Step.TRANSFER, Step.START]
    assert may == [0, 0, 0, 0, 1, 1]
    assert (move.phase, move.may_generate, move.cleanup) == (Phase.RUNNING, 1, (Cleanup.DISCARD,))
    # What computes again hands nothing over.
    assert ask("s", HERE, THERE, RECOMPUTE, hands_over=True).after(DONE).step is Step.STOP


TO_STOP = [DONE, DONE, DONE]


@pytest.mark.parametrize(
    ("replies", "phase", "generates", "step"),
    [
        # The destination does not expect it: as without.
        ([DONE, DONE, Reply.REFUSED], Phase.STAGING, 0, Step.STOP),
        ([DONE, DONE, Reply.LATE, Reply.LATE], Phase.STAGING, 0, Step.RESUME),
        ([DONE, DONE, Reply.FAILED, DONE, DONE, DONE], Phase.RUNNING, 1, None),
        ([DONE, DONE, Reply.DESTINATION_LOST], Phase.CANCELLED, 0, None),
        ([DONE, DONE, Reply.SOURCE_LOST, DONE], Phase.RECOMPUTED, 1, None),
        ([DONE, DONE, Reply.GONE], Phase.CANCELLED, None, None),
        # Handed over or not: taken back there before the source resumes.
        ([*TO_STOP, Reply.LATE], Phase.STAGING, 1, Step.WITHDRAW),
        ([*TO_STOP, Reply.FAILED, DONE], Phase.STAGING, 0, Step.RESUME),
        ([*TO_STOP, Reply.LATE, Reply.DESTINATION_LOST], Phase.STAGING, 0, Step.RESUME),
        ([*TO_STOP, Reply.LATE, DONE, DONE], Phase.CANCELLED, 0, None),
        ([*TO_STOP, Reply.LATE, DONE, Reply.SOURCE_LOST], Phase.LOST, None, None),
        # The source dies with its last order: the destination has it, or begins from what is known.
        ([*TO_STOP, Reply.SOURCE_LOST], Phase.STAGING, 1, Step.START),
        ([*TO_STOP, Reply.SOURCE_LOST, DONE], Phase.RECOMPUTED, 1, None),
        # It was over there.
        ([*TO_STOP, Reply.GONE], Phase.CANCELLED, None, None),
        ([*TO_STOP, DONE, Reply.DESTINATION_LOST], Phase.STOPPED, 0, Step.RESUME),
        ([*TO_STOP, DONE, DONE, Reply.REFUSED], Phase.TRANSFERRED, 0, Step.RESUME),
        ([*TO_STOP, DONE, DONE, Reply.RECOMPUTING], Phase.RECOMPUTED, 1, None),
    ],
)
def test_each_fault_of_a_handover_has_its_answer(
    replies: list[Reply], phase: Phase, generates: int | None, step: Step | None
) -> None:
    move = handed(*replies)
    assert (move.phase, move.may_generate, move.step) == (phase, generates, step)
    assert move.reason == "why"


@pytest.mark.parametrize("done", range(6))
def test_an_abort_while_it_is_handed_over_leaves_nothing_anywhere(done: int) -> None:
    move = handed(*[DONE] * done, Reply.ENDED)
    assert move.phase is Phase.CANCELLED and move.may_generate is None
    assert set(move.cleanup) == set(Cleanup)


def test_a_recompute_copies_nothing() -> None:
    move, steps = ask("s", HERE, THERE, RECOMPUTE), []
    while not move.over:
        steps.append(move.step)
        move = move.after(DONE)
    assert steps == [Step.RESERVE, Step.STOP, Step.START]
    assert move.phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("replies", "phase", "generates", "step"),
    [
        # Destination out of memory, or dead, before the source stopped.
        ([Reply.REFUSED], Phase.CANCELLED, 0, None),
        ([Reply.DESTINATION_LOST], Phase.CANCELLED, 0, None),
        ([DONE, Reply.DESTINATION_LOST], Phase.CANCELLED, 0, None),
        # Destination dead afterwards: the source resumes.
        ([DONE, DONE, DONE, Reply.DESTINATION_LOST], Phase.STOPPED, 0, Step.RESUME),
        ([DONE, DONE, DONE, DONE, Reply.DESTINATION_LOST], Phase.TRANSFERRED, 0, Step.RESUME),
        ([DONE, DONE, DONE, DONE, Reply.DESTINATION_LOST, DONE], Phase.CANCELLED, 0, None),
        ([DONE, DONE, DONE, DONE, Reply.DESTINATION_LOST, Reply.SOURCE_LOST], Phase.LOST, None, None),
        # Source dead: the destination recomputes.
        ([Reply.SOURCE_LOST], Phase.LOST, None, None),
        ([DONE, Reply.SOURCE_LOST, DONE], Phase.RECOMPUTED, 1, None),
        ([DONE, DONE, Reply.SOURCE_LOST, DONE], Phase.RECOMPUTED, 1, None),
        ([DONE, DONE, DONE, Reply.SOURCE_LOST, DONE], Phase.RECOMPUTED, 1, None),
        ([DONE, DONE, DONE, Reply.SOURCE_LOST, Reply.DESTINATION_LOST], Phase.LOST, None, None),
        ([DONE, DONE, Reply.SOURCE_LOST, Reply.DESTINATION_LOST], Phase.LOST, None, None),
        # The sample has ended at the source.
        ([DONE, Reply.GONE], Phase.CANCELLED, None, None),
        ([DONE, DONE, Reply.GONE], Phase.CANCELLED, None, None),
        # The cache cannot be carried.
        ([DONE, Reply.FAILED, DONE, DONE], Phase.RECOMPUTED, 1, None),
        ([DONE, DONE, DONE, Reply.FAILED, DONE], Phase.RECOMPUTED, 1, None),
        # Late answers.
        ([Reply.LATE], Phase.CANCELLED, 0, None),
        ([DONE, DONE, Reply.LATE], Phase.STAGING, 0, Step.RESUME),
        ([DONE, DONE, Reply.LATE, Reply.GONE], Phase.CANCELLED, None, None),
        ([DONE, DONE, DONE, DONE, Reply.LATE], Phase.TRANSFERRED, 1, Step.WITHDRAW),
        ([DONE, DONE, DONE, DONE, Reply.LATE, DONE, DONE], Phase.CANCELLED, 0, None),
        ([DONE, DONE, DONE, DONE, Reply.LATE, Reply.REFUSED], Phase.RUNNING, 1, None),
        ([DONE, DONE, DONE, DONE, Reply.LATE, Reply.LATE, DONE], Phase.CANCELLED, 0, None),
        ([DONE, DONE, DONE, DONE, Reply.LATE, Reply.LATE, Reply.LATE], Phase.LOST, None, None),
        ([DONE, DONE, DONE, DONE, Reply.FAILED], Phase.TRANSFERRED, 1, Step.WITHDRAW),
        # No room left when it was to start after all.
        ([DONE, DONE, DONE, DONE, Reply.REFUSED, DONE], Phase.CANCELLED, 0, None),
    ],
)
def test_each_fault_has_its_answer(
    replies: list[Reply], phase: Phase, generates: int | None, step: Step | None
) -> None:
    move = moved(*replies)
    assert (move.phase, move.may_generate, move.step) == (phase, generates, step)
    assert move.reason == "why"


@pytest.mark.parametrize("done", range(5))
def test_an_abort_at_any_step_leaves_nothing_anywhere(done: int) -> None:
    move = moved(*[DONE] * done, Reply.ENDED)
    assert move.phase is Phase.CANCELLED and move.may_generate is None
    assert set(move.cleanup) == set(Cleanup)


def test_what_must_not_begin_is_refused() -> None:
    with pytest.raises(MoveRefused, match="sample s is being moved already"):
        ask("s", HERE, THERE, KV_TRANSFER, moving=True)
    with pytest.raises(MoveRefused, match="sample s is on engine 0 already"):
        ask("s", HERE, HERE, KV_TRANSFER)
    with pytest.raises(NotYet, match="engine 0 has weight version 4, engine 1 has 5"):
        ask("s", HERE, Place(1, 5), KV_TRANSFER)
    with pytest.raises(NotYet, match="engine 1 loads weights or is gone"):
        ask("s", HERE, Place(1, 4, open=False), KV_TRANSFER)


def test_a_move_that_is_over_takes_no_reply() -> None:
    with pytest.raises(ValueError, match="the move of sample s is over"):
        moved(Reply.REFUSED).after(DONE)


def test_every_phase_is_reached_by_some_fault() -> None:
    """The table of faults above must not have lost a case."""
    seen, todo = {Phase.ASKED}, [ask("s", HERE, THERE, KV_TRANSFER)]
    found: set[Move] = set()
    while todo:
        move = todo.pop()
        for reply in Reply:
            after = move.after(reply)
            seen.add(after.phase)
            if not after.over and after not in found:
                found.add(after)
                todo.append(after)
    assert seen == set(Phase) and set(Phase) >= ENDED
    # Steps only ever lead forward: no move goes round in circles.
    assert len(found) < 40
