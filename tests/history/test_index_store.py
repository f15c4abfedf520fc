"""Indexes within a limit of memory: what leaves, what comes back, what a disk that fails costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rhyme_openrlhf.history.index_store import IndexStore
from tests.examples import examples

SIZE = 1000


def index(number: int, size: int = SIZE) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def equal(found: NDArray[np.uint8] | None, number: int) -> bool:
    return found is not None and found.tobytes() == index(number).tobytes()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> IndexStore:
    return IndexStore(tmp_path / "spilled", 3 * SIZE, said.append)


def resident(store: IndexStore, count: int = 10) -> list[int]:
    return [number for number in range(count) if store.resident(str(number)) is not None]


def test_what_was_recorded_last_leaves_memory_first_and_comes_back(store: IndexStore, said: list[str]) -> None:
    for number in range(5):
        store.put(str(number), index(number))
    # The next epoch is far, 0 to 2 come first.
    assert resident(store) == [0, 1, 2]
    state = store.state()
    assert (state.resident, state.spilled, state.resident_bytes) == (3, 2, 3 * SIZE)
    assert 0 < state.spilled_bytes < 2.5 * SIZE
    assert equal(store.bring("4"), 4)
    # 2 made room: of those in memory it was recorded last.
    assert resident(store) == [0, 1, 4]
    assert all(equal(store.bring(str(number)), number) for number in range(5))
    assert said == []


def test_what_is_brought_stays_while_others_come(store: IndexStore) -> None:
    for number in range(6):
        store.put(str(number), index(number))
    assert equal(store.bring("5"), 5) and equal(store.bring("4"), 4)
    store.put("6", index(6))
    assert {4, 5} < set(resident(store))


def test_a_new_version_replaces_memory_and_file(store: IndexStore, tmp_path: Path) -> None:
    for number in range(5):
        store.put(str(number), index(number))
    store.put("4", index(40))
    assert store.bring("4").tobytes() == index(40).tobytes()  # type: ignore[union-attr]
    store.drop("4")
    assert store.bring("4") is None and store.resident("4") is None
    assert [path.name for path in (tmp_path / "spilled").iterdir()] == ["3.index"] or resident(store) == [0, 1]


def test_what_is_larger_than_all_memory_is_on_the_disk_and_is_given_out(tmp_path: Path) -> None:
    store = IndexStore(tmp_path / "spilled", SIZE - 1, print)
    store.put("0", index(0))
    assert resident(store) == []
    assert equal(store.bring("0"), 0)
    assert store.state().resident_bytes == 0


def test_a_lower_limit_sends_out_what_is_over(store: IndexStore) -> None:
    for number in range(3):
        store.put(str(number), index(number))
    store.set_limit(SIZE)
    assert resident(store) == [0]
    assert all(equal(store.bring(str(number)), number) for number in range(3))


def test_a_full_disk_is_said_once_and_costs_only_the_index(store: IndexStore, tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "spilled").write_text("a file where the directory should be")
    for number in range(6):
        store.put(str(number), index(number))
    assert len(said) == 1 and "cannot write draft indexes to" in said[0]
    assert resident(store) == [0, 1, 2]
    assert store.bring("5") is None
    assert store.state().spilled == 0


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"torn")])
def test_a_damaged_file_is_forgotten(store: IndexStore, tmp_path: Path, damage: object) -> None:
    for number in range(4):
        store.put(str(number), index(number))
    damage(tmp_path / "spilled" / "3.index")  # type: ignore[operator]
    assert store.bring("3") is None
    assert store.state().spilled == 0


def test_an_earlier_life_s_files_are_removed_and_so_are_ours(store: IndexStore, tmp_path: Path) -> None:
    for number in range(4):
        store.put(str(number), index(number))
    again = IndexStore(tmp_path / "spilled", 3 * SIZE, print)
    assert again.bring("3") is None and not (tmp_path / "spilled").exists()
    again.put("9", index(9, 4 * SIZE))
    again.close()
    assert not (tmp_path / "spilled").exists()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "bring", "drop", "limit"]), st.integers(0, 7), st.integers(0, 4)), max_size=40
    )
)
def test_whatever_happens_an_index_is_the_last_one_put_and_memory_stays_within_the_limit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    store = IndexStore(tmp_path_factory.mktemp("store"), 3 * SIZE, pytest.fail)
    limit = 3 * SIZE
    last: dict[str, bytes] = {}
    for seed, (what, number, size) in enumerate(steps):
        key = str(number)
        if what == "put":
            made = index(seed, size * SIZE // 2)
            store.put(key, made)
            last[key] = made.tobytes()
        elif what == "drop":
            store.drop(key)
            last.pop(key, None)
        elif what == "limit":
            limit = size * SIZE
            store.set_limit(limit)
        else:
            found = store.bring(key)
            assert (None if found is None else found.tobytes()) == last.get(key)
        state = store.state()
        assert state.resident_bytes <= limit
        assert state.resident + state.spilled == len(last)


def test_what_is_needed_at_once_pushes_others_out(store: IndexStore) -> None:
    for number in range(4):
        store.put(str(number), index(number))
    store.put("4", index(4), soon=True)
    assert resident(store) == [0, 1, 4]
    assert all(equal(store.bring(str(number)), number) for number in range(5))


def test_with_room_for_half_of_the_prompts_half_are_in_memory_when_their_turn_comes(tmp_path: Path) -> None:
    """Epochs in random order. Least recently used first would find x (1 - y) >= 1/2 of them, x, y uniform: 15 %."""
    prompts, epochs = 60, 6
    store = IndexStore(tmp_path / "spilled", prompts // 2 * SIZE, pytest.fail)
    order = np.random.default_rng(0)
    found = 0
    for epoch in range(epochs):
        for number in order.permutation(prompts):
            key = str(number)
            found += store.resident(key) is not None
            store.bring(key)
            store.put(key, index(1000 * epoch + number))
    assert 0.4 < found / (prompts * (epochs - 1)) < 0.6
