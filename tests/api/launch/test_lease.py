"""The lease on dispatching: at most one service commits, also when clocks jump and services freeze or die."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from rhyme_openrlhf.api.launch.lease import Candidate, Holder, Lease, LeaseLost, find_holder, may_take, not_dispatching
from rhyme_openrlhf.api.store.database import Database
from tests.examples import examples
from tests.stores import place_upgraded

SECONDS = 15.0
FREE = Holder("", "a", 1, 0.0, True, 3, 7)
HELD = Holder("x" * 16, "a", 1, 0.0, True, 3, 7)
LAME = Holder("x" * 16, "a", 1, 0.0, False, 3, 7)


def lease(store: Database, name: str, clock: list[float], launches: bool = True) -> Lease:
    return Lease(store, Candidate(name * 16, launches), lambda: clock[0], SECONDS)


@pytest.mark.parametrize(
    ("holder", "launches", "unchanged", "takes"),
    [
        (None, True, 0.0, True),
        (FREE, False, 0.0, True),
        (HELD, True, 14.9, False),
        (HELD, True, 15.0, True),
        (HELD, False, 15.0, True),
        (LAME, True, 0.0, True),
        (LAME, False, 14.9, False),
    ],
)
def test_who_takes_the_lease(holder: Holder | None, launches: bool, unchanged: float, takes: bool) -> None:
    assert may_take(holder, Candidate("a" * 16, launches), unchanged, SECONDS) is takes


def test_one_holds_it_until_it_ends_and_the_next_has_it_at_once(database: Database) -> None:
    clock = [100.0]
    first, second = lease(database, "a", clock), lease(database, "b", clock)
    assert (first.keep(), second.keep()) == (1, None)
    for _ in range(20):
        clock[0] += 2
        assert (first.keep(), second.keep()) == (1, None)
    with database.reading() as session:
        holder = find_holder(session)
    assert holder is not None and holder.service == "a" * 16
    assert not_dispatching(holder, "a" * 16) == ""
    assert f"process {first.me.pid} on {first.me.host}, since" in not_dispatching(holder, "b" * 16)
    first.release()
    assert second.keep() == 2
    assert first.keep() is None


def test_a_frozen_holder_that_wakes_changes_nothing(database: Database) -> None:
    clock = [100.0]
    first, second = lease(database, "a", clock), lease(database, "b", clock)
    assert (first.keep(), second.keep()) == (1, None)
    with pytest.raises(LeaseLost), first.changing(1):  # it freezes here
        for _ in range(8):
            clock[0] += 2
            # On SQLite its transaction, which is open, would hold the file.
            if not database.is_sqlite:
                second.keep()
        if database.is_sqlite:
            raise LeaseLost
    for _ in range(9):
        clock[0] += 2
        second.keep()
    with pytest.raises(LeaseLost):
        first.confirm(1)
    assert first.keep() is None and second.keep() == 2


def test_a_store_that_was_away_costs_nobody_the_lease(database: Database) -> None:
    clock = [100.0]
    first, second = lease(database, "a", clock), lease(database, "b", clock)
    assert (first.keep(), second.keep()) == (1, None)
    # Neither could ask it meanwhile, and the one without the lease is the first to ask again.
    clock[0] += 300
    assert second.keep() is None and first.keep() == 1


def test_a_service_with_a_cluster_takes_it_from_one_without(database: Database) -> None:
    clock = [100.0]
    shows, starts = lease(database, "a", clock, False), lease(database, "b", clock)
    assert shows.keep() == 1 and starts.keep() == 2
    assert shows.keep() is None and starts.keep() == 2


def test_of_many_that_ask_at_once_one_gets_it(database: Database) -> None:
    clock = [100.0]
    leases = [lease(database, name, clock) for name in "abcdef"]
    together = threading.Barrier(len(leases))

    def ask(one: Lease) -> int | None:
        together.wait(60)
        return one.keep()

    for term in (1, 2, 3):
        with ThreadPoolExecutor(len(leases)) as services:
            terms = [*services.map(ask, leases)]
        assert sorted(filter(None, terms)) == [term]
        leases[terms.index(term)].release()


def test_a_transaction_that_froze_does_not_keep_the_lease_on_postgresql(postgresql_url: str) -> None:
    stores, clock = [Database(postgresql_url) for _ in range(2)], [100.0]
    # The server ends what is idle for 2 s by its own clock, in which a busy machine must have sent the next statement.
    holder, other = (
        Lease(store, Candidate(name * 16, True), lambda: clock[0], seconds=3.0)
        for store, name in zip(stores, "ab", strict=True)
    )
    assert holder.keep() == 1
    with pytest.raises(DBAPIError), holder.changing(1) as session:
        # The row is locked, and the process stops before the end of the transaction.
        session.execute(text("UPDATE dispatch_lease SET beats = beats"))
        # Its last look asks for the row, and waits until the server has ended the transaction.
        for _ in range(3):
            assert other.keep() is None
            clock[0] += 1
        assert other.keep() == 2
    with pytest.raises(LeaseLost):
        holder.confirm(1)
    for store in stores:
        store.dispose()


HOLDER = """
import sys
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.launch.lease import Candidate, Lease
lease = Lease(Database(sys.argv[1]), Candidate("a" * 16, True))
while True:
    print(lease.keep(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.usefixtures("starts_python")
def test_the_lease_of_a_process_that_was_killed_is_taken_over(database: Database) -> None:
    url = database.engine.url.render_as_string(hide_password=False)
    command = [sys.executable, "-c", HOLDER, url]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None and holder.stdout is not None
    clock = [100.0]
    other = lease(database, "b", clock)
    # A turn of the holder at each of the other's: by real clocks, a busy machine's holder was late and lost the lease.
    for _ in range(10):
        assert holder.stdout.readline() == "1\n" and other.keep() is None
        clock[0] += SECONDS / 3
        holder.stdin.write("\n")
        holder.stdin.flush()
    assert holder.stdout.readline() == "1\n"
    holder.kill()
    holder.communicate()
    for _ in range(3):
        assert other.keep() is None
        clock[0] += SECONDS / 3
    assert other.keep() == 2


class Services(RuleBasedStateMachine):
    """Three services on one real store. Each renews, freezes, wakes and decides late, as it comes.

    Their clocks go forward each at its own rate, and jump.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory(prefix="rhyme-lease-")
        path = Path(self.folder.name) / "store.db"
        place_upgraded(path)
        self.store = Database(f"sqlite:///{path}")
        self.clocks = [[100.0], [5000.0], [0.0]]
        self.leases = [lease(self.store, name, clock) for name, clock in zip("abc", self.clocks, strict=True)]
        self.starts = 0
        self.committed: list[tuple[int, int]] = []
        # What each believes: the term of the turn that it is in, which it has not looked up again since.
        self.turns: list[int | None] = [None] * 3

    @rule(who=st.integers(0, 2), seconds=st.sampled_from([0.0, 2.0, 4.0, 7.0, 16.0, 1e6]))
    def time_passes(self, who: int, seconds: float) -> None:
        """Also for one of them alone: a clock that is wrong."""
        self.clocks[who][0] += seconds

    @rule(seconds=st.sampled_from([2.0, 4.0, 7.0]))
    def time_passes_for_all(self, seconds: float) -> None:
        for clock in self.clocks:
            clock[0] += seconds

    @rule(who=st.integers(0, 2))
    def begin_turn(self, who: int) -> None:
        self.turns[who] = self.leases[who].keep()

    @rule(who=st.integers(0, 2))
    def beat(self, who: int) -> None:
        """The other thread's; the turn in progress knows nothing of it."""
        self.leases[who].keep()

    @rule(who=st.integers(0, 2))
    def commit(self, who: int) -> None:
        self.has_committed(who)

    def has_committed(self, who: int) -> bool:
        """The end of what it decided in that turn, however long ago that was."""
        term = self.turns[who]
        if term is None:
            return False
        try:
            self.leases[who].confirm(term)
        except LeaseLost:
            self.turns[who] = None
            return False
        self.committed.append((term, who))
        return True

    @rule(order=st.permutations(range(3)))
    def all_commit(self, order: list[int]) -> None:
        assert sum([self.has_committed(who) for who in order]) <= 1

    @rule(who=st.integers(0, 2))
    def end(self, who: int) -> None:
        self.leases[who].release()

    @rule(who=st.integers(0, 2))
    def killed_and_started_again(self, who: int) -> None:
        self.starts += 1
        self.leases[who] = Lease(
            self.store, Candidate(f"{self.starts:016x}", True), lambda: self.clocks[who][0], SECONDS
        )
        self.turns[who] = None

    @invariant()
    def terms_only_grow_and_each_was_one_services(self) -> None:
        terms = [term for term, _ in self.committed]
        assert terms == sorted(terms)
        assert len(set(self.committed)) == len(set(terms))

    def teardown(self) -> None:
        self.store.dispose()
        self.folder.cleanup()


TestServices = Services.TestCase
TestServices.settings = settings(
    max_examples=examples(20), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
