"""A move's state machine under random faults, on faithful fakes of engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from rhyme_openrlhf.scheduling.move import (
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
from tests.examples import examples

LENGTH = 4
ROOM = 2


@dataclass
class FakeEngine:
    """The part of an engine that a move uses: samples that run or are kept stopped, and seats held."""

    alive: bool = True
    running: dict[tuple[str, int], int] = field(default_factory=dict)
    kept: dict[tuple[str, int], int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    finished: set[tuple[str, int]] = field(default_factory=set)
    # Stays that begin by a handover, and of them those that nobody has asked about since.
    expecting: set[tuple[str, int]] = field(default_factory=set)
    held_back: set[tuple[str, int]] = field(default_factory=set)

    def has_room(self) -> bool:
        return len(self.running) + len(self.kept) + len(self.held) < ROOM


@dataclass
class FakeSample:
    """The keeper's record of a sample: its stay (a new number for each engine it is handed to) and its tokens."""

    at: int | None
    stay: int = 0
    known: int = 0
    results: int = 0
    move: Move | None = None
    last_stay: int = 0
    aborted: bool = False
    # An engine did not answer an order that takes back: it counts as lost from then on.
    doubtful: bool = False

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
        # What was handed over, by stay: tokens.
        self.handed: dict[tuple[str, int], int] = {}

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
        for key in this.expecting & set(self.handed):
            self._take(this, key)
        for key in list(this.running):
            this.running[key] += 1
            if this.running[key] == LENGTH:
                del this.running[key]
                this.finished.add(key)

    def _take(self, this: FakeEngine, key: tuple[str, int]) -> None:
        this.expecting.discard(key)
        this.held.discard(key[0])
        this.running[key] = self.handed[key]

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

    @rule(
        name=samples,
        to=st.integers(0, 2),
        carrier=st.sampled_from([KV_TRANSFER, KV_TRANSFER, RECOMPUTE]),
        hands_over=st.booleans(),
    )
    def order(self, name: str, to: int, carrier: str, hands_over: bool) -> None:
        sample = self.known[name]
        if sample.at is None or sample.over:
            return
        places = [Place(i, 0, open=engine.alive) for i, engine in enumerate(self.engines)]
        try:
            moving = sample.move is not None
            move = ask(name, places[sample.at], places[to], carrier, moving=moving, hands_over=hands_over)
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
        sample.doubtful |= reply is Reply.LATE and move.step in (Step.WITHDRAW, Step.RESUME)
        sample.move = move.after(reply)
        if sample.move.over:
            self._settle(name, sample, sample.move)
            sample.move = None

    def _reply(self, name: str, sample: FakeSample, move: Move, fault: str) -> Reply:
        source, there = self.engines[move.source], self.engines[move.destination]
        here, next_one = (name, sample.stay), (name, sample.last_stay)
        if move.step in (Step.STAGE, Step.STOP, Step.TRANSFER, Step.RESUME) and not source.alive:
            return Reply.SOURCE_LOST
        at_destination = (Step.RESERVE, Step.STAGE, Step.EXPECT, Step.TRANSFER, Step.START, Step.WITHDRAW)
        if move.step in at_destination and not there.alive:
            return Reply.DESTINATION_LOST
        if fault == "never":
            return Reply.LATE
        if fault == "fail" and move.step in (Step.STAGE, Step.EXPECT, Step.TRANSFER, Step.STOP):
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
            if move.expected:
                self.handed[new] = source.kept[here]
        elif move.step is Step.EXPECT:
            if name not in there.held:
                return Reply.REFUSED
            there.expecting.add(new)
            there.held_back.add(new)
        elif move.step is Step.START:
            if new in there.held_back:
                if new in there.expecting and new in self.handed:
                    self._take(there, new)
                there.held_back.discard(new)
                if new in there.running or new in there.finished:
                    if self.handed[new] == self.known[name].known:
                        return Reply.DONE
                    there.running.pop(new, None)
                    there.finished.discard(new)
                    there.held.add(name)
                there.expecting.discard(new)
            if name not in there.held:
                return Reply.REFUSED
            there.held.discard(name)
            there.running[new] = self.known[name].known
        elif move.step is Step.WITHDRAW:
            if new in there.finished and new not in there.held_back:
                return Reply.REFUSED
            self._forget(there, new)
        elif move.step is Step.RESUME:
            if here in source.kept:
                source.running[here] = source.kept.pop(here)
            if here not in source.running:
                return Reply.GONE
        return Reply.DONE

    @staticmethod
    def _forget(there: FakeEngine, new: tuple[str, int]) -> None:
        there.running.pop(new, None)
        for those in (there.expecting, there.held_back, there.finished):
            those.discard(new)

    def _settle(self, name: str, sample: FakeSample, move: Move) -> None:
        source, there = self.engines[move.source], self.engines[move.destination]
        for cleanup in move.cleanup:
            if cleanup is Cleanup.RELEASE:
                there.held.discard(name)
                self._forget(there, (name, sample.last_stay))
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
    def one_engine_at_most_generates(self) -> None:
        for name, sample in self.known.items():
            # What is handed over is as good as running: the destination looks for it before its next step.
            there = [engine for engine in self.engines if any(key[0] == name for key in self._generating(engine))]
            assert len(there) <= 1 or sample.doubtful or sample.aborted

    def _generating(self, engine: FakeEngine) -> set[tuple[str, int]]:
        return set(engine.running) | (engine.expecting & set(self.handed))

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
            assert not engine.held and not engine.kept and not engine.expecting and not engine.held_back


TestRandomMoves = RandomMoves.TestCase
TestRandomMoves.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
