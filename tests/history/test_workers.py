"""Calls to a run's history workers: each prompt's owner is asked, and what several say adds up."""

from __future__ import annotations

from types import SimpleNamespace as NS

import pytest

pytest.importorskip("ray")

from rhyme_openrlhf.history import workers as module
from rhyme_openrlhf.history.earlier import Known
from rhyme_openrlhf.history.workers import announce, known_earlier
from rhyme_openrlhf.prompt_keys import evaluation_key, owner, prompt_key


def test_what_is_known_is_told_in_a_line_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers' shares add up, two runs of one name do not."""
    keys = [prompt_key(str(number)) for number in range(40)]
    asked: list[list[str]] = []

    def answer(share: list[str]) -> list[Known]:
        asked.append(share)
        return [Known("/a", "math", len(share), 3), Known("/b", "math", 1, 1)]

    monkeypatch.setattr(module.ray, "get", lambda answers, timeout: answers)
    workers = [NS(known_earlier=NS(remote=answer))] * 2
    assert known_earlier(keys, workers, named=False) == [
        "40 of 40 prompts known from run math, epochs 1 to 3",
        "2 of 40 prompts known from run math, one epoch",
    ]
    assert sorted(key for share in asked for key in share) == sorted(keys)
    monkeypatch.setattr(module.ray, "get", lambda answers, timeout: [[], []])
    assert known_earlier(keys, workers, named=False) == []
    assert known_earlier(keys, workers, named=True) == ["no prompt is known from the runs of --history.earlier"]


def test_prompts_are_announced_to_the_workers_that_own_them_with_the_step() -> None:
    told: list[tuple[int, list[str], int]] = []
    workers = [
        NS(prepare=NS(remote=lambda keys, step, number=number: told.append((number, keys, step))))
        for number in range(3)
    ]
    prompts = [f"prompt {number}" for number in range(40)]
    announce(prompts, workers, 7)
    assert sorted((number, step) for number, _, step in told) == [(0, 7), (1, 7), (2, 7)]
    owners = {prompt_key(prompt): owner(prompt_key(prompt), 3) for prompt in prompts}
    assert {key: number for number, keys, _ in told for key in keys} == owners
    told.clear()
    announce(prompts, workers, 7, evaluation=True)
    assert {key: number for number, keys, _ in told for key in keys} == {
        evaluation_key(key): number for key, number in owners.items()
    }
    told.clear()
    announce(prompts, [], 7)
    assert told == []
