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
    [([], [["a", "c"], ["b", "d"]]), ([(9, 9), (1, 1), (8, 8), (10, 10)], [["a", "b"], ["c"]])],
)
def test_each_engine_is_told_its_own(
    monkeypatch: pytest.MonkeyPatch, lengths: list[Any], expected: list[list[str]]
) -> None:
    from rhyme_openrlhf.training import coming_prompts as module

    monkeypatch.setattr(module, "_sampling", lambda *_, **__: ("parameters", 64, "tokenizer"))
    engines = [Engine(), Engine()]
    generator: Any = NS(vllm_engines=engines, args=NS(rollout=NS(n_samples_per_prompt=2)))
    prompts = ["a", "b", "c", "d"]
    tell_engines(generator, prompts, lengths)
    told = [engine.told for engine in engines]
    assert all(len(one) == 1 and one[0][1:] == ("parameters", 64, "tokenizer") for one in told)
    by_engine = [one[0][0] for one in told]
    assert sorted(by_engine[0] + by_engine[1]) == prompts
    if not lengths:
        assert by_engine == expected
    else:
        # The two long ones go apart.
        assert not {"a", "d"} <= set(by_engine[0]) and not {"a", "d"} <= set(by_engine[1])
