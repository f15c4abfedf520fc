"""The ledger of batches: every prompt group trains once, for any deferrals and any order of ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.deferral import BatchLedger


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 2**32), st.floats(0, 1))
def test_every_prompt_group_trains_exactly_once(sizes: list[int], seed: int, often: float) -> None:
    draw = random.Random(seed)
    ledger: BatchLedger[tuple[int, int]] = BatchLedger()
    open_groups: list[tuple[int, int]] = []
    trained: dict[int, tuple[object, ...]] = {}
    begun = deferred = 0
    sent: list[object] = []
    while len(trained) < len(sizes):
        # At most two steps are generated at a time, as one step off policy allows.
        if begun < len(sizes) and begun < len(trained) + 2:
            begun += 1
            ledger.add(begun, [(begun, place) for place in range(sizes[begun - 1])])
            open_groups += [(begun, place) for place in range(sizes[begun - 1])]
        if open_groups:
            group = draw.choice(open_groups)
            if draw.random() < often:
                deferred += ledger.defer(group[0], group)
            if draw.random() < 0.5:
                ledger.ended(group[0], group)
                open_groups.remove(group)
        # A request for a later batch gets none before the earlier one is taken.
        assert begun < len(trained) + 2 or ledger.batch(len(trained) + 2) is None
        step = len(trained) + 1
        certain = ledger.certain(step)
        # What was certain stays so, and what is new is said once.
        assert set(sent) <= set(certain)
        new = ledger.newly_certain(step)
        assert not set(new) & set(sent)
        sent += new
        assert sorted(sent) == sorted(certain) and ledger.newly_certain(step) == ()
        batch = ledger.batch(step)
        if batch is not None:
            assert set(batch) == set(sent)
            sent = []
            left, taken = ledger.swapped(step)
            assert len(left) == len(taken) and all(g[0] == step for g in left) and set(taken) <= set(batch)
            trained[len(trained) + 1] = batch
        else:
            # It never hangs: something is still being generated, or the next step may begin.
            assert open_groups or begun < min(len(sizes), len(trained) + 2)
    everything = [group for batch in trained.values() for group in batch]
    assert len(set(everything)) == len(everything) == sum(sizes)
    for step, batch in trained.items():
        assert len(batch) == sizes[step - 1]
        assert all(abs(group[0] - step) <= 1 for group in batch)  # type: ignore[index]


def test_the_first_finished_of_the_next_step_takes_its_place() -> None:
    ledger: BatchLedger[str] = BatchLedger()
    ledger.add(1, ["a", "long"])
    assert not ledger.defer(1, "long"), "the next step has not begun: there is nothing to pull"
    ledger.add(2, ["c", "d", "e"])
    ledger.ended(1, "a")
    assert ledger.batch(1) is None
    ledger.ended(2, "d")
    ledger.ended(2, "c")
    assert ledger.batch(1) is None
    assert ledger.defer(1, "long")
    assert ledger.batch(1) == ("a", "d")
    ledger.ended(2, "e")
    assert ledger.batch(2) is None
    ledger.ended(1, "long")
    assert ledger.batch(2) == ("c", "e", "long")


def test_nothing_is_deferred_out_of_the_run() -> None:
    ledger: BatchLedger[str] = BatchLedger()
    ledger.add(1, ["a"])
    assert not ledger.defer(1, "a")
    ledger.ended(1, "a")
    assert ledger.batch(1) == ("a",)
    with pytest.raises(ValueError, match="handed out before"):
        ledger.batch(1)
    with pytest.raises(ValueError, match="ended before"):
        ledger.ended(1, "a")
    with pytest.raises(ValueError, match="begun before"):
        ledger.add(1, [])


def test_nothing_is_deferred_into_another_epoch() -> None:
    ledger: BatchLedger[str] = BatchLedger()
    ledger.add(1, ["a", "b"], epoch=1)
    ledger.add(2, ["c", "d"], epoch=2)
    assert not ledger.defer(1, "a") and ledger.stays(1) == {"a", "b"}
    ledger.add(3, ["e", "f"], epoch=2)
    assert ledger.defer(2, "c")


def test_what_is_dropped_after_it_was_deferred_is_made_up_for_where_it_would_train() -> None:
    def begun() -> BatchLedger[str]:
        ledger: BatchLedger[str] = BatchLedger()
        ledger.add(1, ["a", "long"])
        ledger.add(2, ["c", "d"])
        assert ledger.defer(1, "long")
        ledger.ended(1, "a")
        ledger.ended(2, "c")
        assert ledger.batch(1) == ("a", "c")
        ledger.add(3, ["e", "f"])
        ledger.ended(2, "d")
        ledger.ended(3, "e")
        return ledger

    ledger = begun()
    ledger.drop(1, "long", "another")
    assert ledger.batch(2) is None
    ledger.ended(1, "another")
    assert ledger.batch(2) == ("d", "another")
    # Without a replacement the next step, which has not got it, takes one of the step behind.
    ledger = begun()
    ledger.drop(1, "long")
    assert ledger.batch(2) == ("d", "e")
    with pytest.raises(ValueError, match="is not of step 1"):
        ledger.drop(1, "long")


def test_what_was_promised_for_deferred_ones_and_dropped_is_not_waited_for() -> None:
    ledger: BatchLedger[str] = BatchLedger()
    ledger.add(1, ["a", "b", "c"])
    ledger.add(2, ["d", "e"])
    assert ledger.defer(1, "a") and ledger.defer(1, "b")
    ledger.ended(1, "c")
    ledger.ended(2, "d")
    ledger.drop(2, "e")
    assert ledger.batch(1) == ("c", "d")
    ledger.ended(1, "a")
    ledger.ended(1, "b")
    assert ledger.batch(2) == ("a", "b")
