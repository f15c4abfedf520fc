"""A move's state machine: its faults one by one."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.scheduling.move import (
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


DONE = Reply.DONE


def moved(*replies: Reply, carrier: str = KV_TRANSFER, hands_over: bool = False) -> Move:
    move = ask("s", HERE, THERE, carrier, hands_over=hands_over)
    for reply in replies:
        move = move.after(reply, "why")
    return move


# The steps of a move without faults, and who may generate at each.
COURSES = [
    (KV_TRANSFER, False, [Step.RESERVE, Step.STAGE, Step.STOP, Step.TRANSFER, Step.START], [0, 0, 0, None, 1]),
    (KV_TRANSFER, True, [*Step][:6], [0, 0, 0, 0, 1, 1]),
    # What computes again hands nothing over.
    *((RECOMPUTE, hands_over, [Step.RESERVE, Step.STOP, Step.START], [0, 0, 1]) for hands_over in (False, True)),
]


@pytest.mark.parametrize(("carrier", "hands_over", "steps", "generates"), COURSES)
def test_a_move_takes_its_steps_and_an_abort_at_any_leaves_nothing(
    carrier: str, hands_over: bool, steps: list[Step], generates: list[int | None]
) -> None:
    move = moved(carrier=carrier, hands_over=hands_over)
    for step, engine in zip(steps, generates, strict=True):
        assert (move.step, move.may_generate, move.over) == (step, engine, False)
        aborted = move.after(Reply.ENDED)
        assert (aborted.phase, aborted.may_generate, set(aborted.cleanup)) == (Phase.CANCELLED, None, set(Cleanup))
        move = move.after(DONE)
    assert (move.phase, move.may_generate, move.cleanup, move.reason) == (Phase.RUNNING, 1, (Cleanup.DISCARD,), "")
    with pytest.raises(ValueError, match="the move of sample s is over"):
        move.after(DONE)


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
    answered(moved(*replies, hands_over=True), replies, phase, generates, step)


def answered(move: Move, replies: list[Reply], phase: Phase, generates: int | None, step: Step | None) -> None:
    assert (move.phase, move.may_generate, move.step, move.reason) == (phase, generates, step, "why")
    # Nothing is ordered of an engine that is gone.
    gone = {Cleanup.RELEASE: Reply.DESTINATION_LOST, Cleanup.DISCARD: Reply.SOURCE_LOST}
    assert not [order for order in move.cleanup if gone[order] in replies]


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
    answered(moved(*replies), replies, phase, generates, step)


def test_what_must_not_begin_is_refused() -> None:
    with pytest.raises(MoveRefused, match="sample s is being moved already"):
        ask("s", HERE, THERE, KV_TRANSFER, moving=True)
    with pytest.raises(MoveRefused, match="sample s is on engine 0 already"):
        ask("s", HERE, HERE, KV_TRANSFER)
    for version in (3, 5):
        with pytest.raises(NotYet, match=f"engine 0 has weight version 4, engine 1 has {version}"):
            ask("s", HERE, Place(1, version), KV_TRANSFER)
    with pytest.raises(NotYet, match="engine 1 loads weights or is gone"):
        ask("s", HERE, Place(1, 4, open=False), KV_TRANSFER)
