"""Threads that help with drafting: as many as there are cores for, and they end when they are told to."""

from __future__ import annotations

import os
import threading

import pytest

from rhyme_openrlhf.speculation.step_threads import StepThreads, step_threads


@pytest.mark.parametrize(("threads", "cores", "helpers"), [(1, 8, 0), (2, 8, 1), (4, 2, 1), (4, 1, 0)])
def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, helpers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    found = step_threads(threads)
    assert found.helpers == helpers
    assert step_threads(threads) is found


def test_threads_sleep_until_they_are_ended() -> None:
    before = threading.active_count()
    threads = StepThreads(3)
    assert threading.active_count() == before + 3
    threads.end()
    assert threading.active_count() == before
    assert not threads.helpers
