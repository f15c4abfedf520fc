"""A move's state machine: its faults one by one, and random ones on two faithful fakes of engines."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from rhyme_openrlhf.scheduling.move import (
    ENDED,
    KV_TRANSFER,
    RECOMPUTE,
    Cleanup,
    Move,
    MoveRefused,
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
    with pytest.raises(MoveRefused, match="engine 0 has weight version 4, engine 1 has 5"):
        ask("s", HERE, Place(1, 5), KV_TRANSFER)
    with pytest.raises(MoveRefused, match="engine 1 loads weights or is gone"):
        ask("s", HERE, Place(1, 4, open=False), KV_TRANSFER)
    assert ask("s", HERE, Place(1, 5), KV_TRANSFER, across_versions=True).carrier == RECOMPUTE


def test_a_move_that_is_over_takes_no_reply() -> None:
    with pytest.raises(ValueError, match="the move of sample s is over"):
        moved(Reply.REFUSED).after(DONE)


LENGTH = 4
ROOM = 2


@dataclass
class FakeEngine:
    """As much of an engine as a move meets: samples that run or are kept stopped, and seats held."""

    alive: bool = True
    running: dict[tuple[str, int], int] = field(default_factory=dict)
    kept: dict[tuple[str, int], int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    finished: set[tuple[str, int]] = field(default_factory=set)

    def has_room(self) -> bool:
        return len(self.running) + len(self.kept) + len(self.held) < ROOM


@dataclass
class FakeSample:
    """What the keeper of a sample knows: its stay (a new number for each engine it is handed to) and its tokens."""

    at: int | None
    stay: int = 0
    known: int = 0
    results: int = 0
    move: Move | None = None
    last_stay: int = 0
    aborted: bool = False

    @property
    def over(self) -> bool:
        return self.aborted or self.results > 0

    def new_stay(self) -> int:
        """A number that no engine has had for this sample: an engine that counts as lost may still run an old one."""
        self.last_stay += 1
        return self.last_stay


class RandomMoves(RuleBasedStateMachine):
    """Three engines that die, answer late or refuse; every sample must finish exactly once and leave nothing behind.

    Engine 2 never dies, so that there is always somewhere to go on.
    """

    samples = Bundle("samples")

    def __init__(self) -> None:
        super().__init__()
        self.engines = [FakeEngine() for _ in range(3)]
        self.known: dict[str, FakeSample] = {}

    @rule(target=samples, engine=st.integers(0, 2))
    def arrive(self, engine: int) -> str:
        name = f"s{len(self.known)}"
        at = engine if self.engines[engine].alive and self.engines[engine].has_room() else None
        self.known[name] = FakeSample(at)
        if at is not None:
            self.engines[at].running[name, 0] = 0
        return name

    @rule(engine=st.integers(0, 2))
    def generate(self, engine: int) -> None:
        this = self.engines[engine]
        for key in list(this.running):
            this.running[key] += 1
            if this.running[key] == LENGTH:
                del this.running[key]
                this.finished.add(key)

    @rule()
    def hear(self) -> None:
        """The keepers hear of tokens and results, each only from its sample's present stay."""
        for name, sample in self.known.items():
            if sample.at is None:
                continue
            engine = self.engines[sample.at]
            key = (name, sample.stay)
            if not engine.alive:
                if sample.move is None:
                    sample.at = None
                continue
            sample.known = max(sample.known, engine.running.get(key, 0))
            if key in engine.finished:
                engine.finished.discard(key)
                sample.results += 1
                sample.at = None

    @rule(name=samples, to=st.integers(0, 2), carrier=st.sampled_from([KV_TRANSFER, RECOMPUTE]))
    def order(self, name: str, to: int, carrier: str) -> None:
        sample = self.known[name]
        if sample.at is None or sample.over:
            return
        places = [Place(i, 0, open=engine.alive) for i, engine in enumerate(self.engines)]
        try:
            move = ask(name, places[sample.at], places[to], carrier, moving=sample.move is not None)
        except MoveRefused:
            assert sample.move or to == sample.at or not (places[to].open and places[sample.at].open)
            return
        sample.move = move
        sample.new_stay()

    @rule(engine=st.integers(0, 1))
    def die(self, engine: int) -> None:
        self.engines[engine] = FakeEngine(alive=False)

    @rule(engine=st.integers(0, 1))
    def come_back(self, engine: int) -> None:
        if not self.engines[engine].alive and not any(s.move for s in self.known.values()):
            self.hear()
            self.engines[engine] = FakeEngine()

    @rule(name=samples)
    def abort(self, name: str) -> None:
        sample = self.known[name]
        sample.aborted = True
        if sample.move is not None:
            self._settle(name, sample, sample.move.after(Reply.ENDED))
            sample.move = None
        if sample.at is not None:
            self.engines[sample.at].running.pop((name, sample.stay), None)
            sample.at = None

    @rule(name=samples, fault=st.sampled_from(["", "", "", "late", "never", "fail"]))
    def advance(self, name: str, fault: str) -> None:
        sample = self.known[name]
        if sample.move is not None:
            self._advance(name, sample, fault)

    def _advance(self, name: str, sample: FakeSample, fault: str) -> None:
        move = sample.move
        assert move is not None and move.step is not None
        reply = self._reply(name, sample, move, fault)
        sample.move = move.after(reply)
        if sample.move.over:
            self._settle(name, sample, sample.move)
            sample.move = None

    def _reply(self, name: str, sample: FakeSample, move: Move, fault: str) -> Reply:
        source, there = self.engines[move.source], self.engines[move.destination]
        here, next_one = (name, sample.stay), (name, sample.last_stay)
        if move.step in (Step.STAGE, Step.STOP, Step.TRANSFER, Step.RESUME) and not source.alive:
            return Reply.SOURCE_LOST
        if move.step in (Step.RESERVE, Step.STAGE, Step.TRANSFER, Step.START, Step.WITHDRAW) and not there.alive:
            return Reply.DESTINATION_LOST
        if fault == "never":
            return Reply.LATE
        if fault == "fail" and move.step in (Step.STAGE, Step.TRANSFER, Step.STOP):
            return Reply.FAILED
        done = self._do(name, move, source, there, here, next_one)
        return Reply.LATE if fault == "late" else done

    def _do(
        self, name: str, move: Move, source: FakeEngine, there: FakeEngine, here: tuple[str, int], new: tuple[str, int]
    ) -> Reply:
        if move.step is Step.RESERVE:
            if not there.has_room():
                return Reply.REFUSED
            there.held.add(name)
        elif move.step is Step.STAGE:
            if here not in source.running:
                return Reply.GONE
        elif move.step is Step.STOP:
            if here in source.running:
                source.kept[here] = source.running.pop(here)
            if here not in source.kept:
                return Reply.GONE
            self.known[name].known = source.kept[here]
        elif move.step is Step.START:
            if name not in there.held:
                return Reply.REFUSED
            there.held.discard(name)
            there.running[new] = self.known[name].known
        elif move.step is Step.WITHDRAW:
            if new in there.finished:
                return Reply.REFUSED
            there.running.pop(new, None)
        elif move.step is Step.RESUME:
            if here in source.kept:
                source.running[here] = source.kept.pop(here)
            if here not in source.running:
                return Reply.GONE
        return Reply.DONE

    def _settle(self, name: str, sample: FakeSample, move: Move) -> None:
        source, there = self.engines[move.source], self.engines[move.destination]
        for cleanup in move.cleanup:
            if cleanup is Cleanup.RELEASE:
                there.held.discard(name)
                there.running.pop((name, sample.last_stay), None)
            else:
                source.kept.pop((name, sample.stay), None)
                source.running.pop((name, sample.stay), None)
        if move.phase in (Phase.RUNNING, Phase.RECOMPUTED):
            sample.at, sample.stay = move.destination, sample.last_stay
        elif move.phase is Phase.LOST:
            sample.at = None

    @rule()
    @precondition(lambda self: any(s.at is None and not s.over for s in self.known.values()))
    def restart(self) -> None:
        """The keepers restart what is nowhere, at the engine that lives."""
        for name, sample in self.known.items():
            if sample.at is None and not sample.over and sample.move is None:
                sample.stay, sample.at = sample.new_stay(), 2
                self.engines[2].running[name, sample.stay] = sample.known

    @invariant()
    def nobody_finishes_twice(self) -> None:
        assert all(sample.results <= 1 for sample in self.known.values())

    @invariant()
    def only_the_one_that_may_is_heard(self) -> None:
        for name, sample in self.known.items():
            if sample.move is not None and sample.move.may_generate is None:
                assert not any((name, sample.stay) in engine.running for engine in self.engines)

    @invariant()
    def seats_are_held_only_for_moves_under_way(self) -> None:
        for engine in self.engines:
            assert all(self.known[name].move is not None for name in engine.held)

    def teardown(self) -> None:
        """Without more faults every sample comes to its end, and nothing is left anywhere."""
        for _ in range(50):
            for name, sample in self.known.items():
                while sample.move is not None:
                    self._advance(name, sample, "")
            self.hear()
            self.restart()
            for engine in range(3):
                self.generate(engine)
        for sample in self.known.values():
            assert sample.results == 1 or sample.aborted
        for engine in self.engines:
            assert not engine.held and not engine.kept


TestRandomMoves = RandomMoves.TestCase
TestRandomMoves.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


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
