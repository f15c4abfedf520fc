"""The prompts that come next are those that the data loader then gives, and seeing them changes nothing."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("openrlhf")

from rhyme_openrlhf.training.coming_prompts import coming_prompts, tell_engines
from rhyme_openrlhf.training.reproducible import random_state
from tests.training.prompt_loader import a_loader


def drawn(iterator: Any, count: int) -> list[str]:
    rows = [next(iterator, None) for _ in range(count)]
    return [row[1][0] for row in rows if row is not None]


@pytest.mark.parametrize("before", [1, 5, 9, 12])
def test_they_are_what_is_drawn_next(before: int) -> None:
    loader = a_loader(12, seed=3)
    iterator = iter(loader)
    drawn(iterator, before)
    coming = coming_prompts(loader, 4)
    assert coming == drawn(iterator, 4)
    assert len(coming) == min(4, 12 - before)


def test_seeing_them_changes_neither_what_is_drawn_nor_any_state() -> None:
    seen, unseen = ([], []), ([], [])
    for look, (prompts, states) in ((True, seen), (False, unseen)):
        loader = a_loader(12, seed=3)
        for _ in range(3):
            iterator = iter(loader)
            while row := drawn(iterator, 3):
                prompts += row
                if look:
                    coming_prompts(loader, 3)
                states.append((str(loader.state_dict()), str(random_state())))
    assert seen == unseen


def test_before_its_first_prompt_a_loader_is_left_alone() -> None:
    loader = a_loader(12, seed=3)
    before = str(random_state())
    assert coming_prompts(loader, 4) == []
    assert str(random_state()) == before


class Engine:
    """Takes what comes next."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.expect_prompts = NS(remote=lambda *arguments: self.told.append(arguments))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([], [["a", "c"], ["b", "d"]]), ([(), (), (), ()], [["a", "c"], ["b", "d"]])],
)
def test_without_history_each_engine_is_told_its_own_in_turn(lengths: list[Any], expected: list[list[str]]) -> None:
    assert told(lengths) == expected


def test_with_history_long_ones_go_apart() -> None:
    first, second = told([(9, 9), (1, 1), (8, 8), (10, 10)])
    assert sorted(first + second) == ["a", "b", "c", "d"]
    assert not {"a", "d"} <= set(first) and not {"a", "d"} <= set(second)


def told(lengths: list[Any]) -> list[list[str]]:
    engines = [Engine(), Engine()]
    tell_engines(engines, ["a", "b", "c", "d"], lengths, 2)
    assert all(len(engine.told) == 1 for engine in engines)
    return [engine.told[0][0] for engine in engines]
