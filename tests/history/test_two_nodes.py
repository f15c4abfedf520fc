"""Runs on a cluster of two nodes that share a file system: each node's worker finds its own prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from rhyme_openrlhf.history.earlier import Sources  # noqa: E402
from rhyme_openrlhf.history.index import DraftIndex, Piece  # noqa: E402
from rhyme_openrlhf.history.lineage import Lineage  # noqa: E402
from rhyme_openrlhf.history.store import in_store  # noqa: E402
from rhyme_openrlhf.history.worker import PromptRollout  # noqa: E402
from rhyme_openrlhf.history.workers import (  # noqa: E402
    announce,
    known_earlier,
    last_lengths,
    start_history_workers,
    stop_history_workers,
)
from rhyme_openrlhf.prompt_keys import owner, prompt_key  # noqa: E402
from rhyme_openrlhf.settings.history import HistorySettings  # noqa: E402
from tests.history.archives import TOKENIZER, about  # noqa: E402
from tests.ray_clusters import two_nodes  # noqa: E402

pytestmark = pytest.mark.slow
VOCABULARY = 1000
PROMPTS = [f"prompt {number}" for number in range(12)]
KEYS = [prompt_key(prompt) for prompt in PROMPTS]
# Processes of workers start one after the other.
LIMIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def cluster(starts_ray: None, starts_cluster: None) -> Iterator[None]:
    with two_nodes({"num_cpus": 1}):
        yield


def a_run(path: Path, store: Path) -> list[Any]:
    """The two history workers of a run at `path`, one on each node."""
    sources = Sources((), (store,), TOKENIZER, VOCABULARY, store / path.name)
    lineage = Lineage(store / path.name, about(path.name, started=len(path.name)), sources)
    workers = start_history_workers(HistorySettings(workers=2, cpus_per_worker=0.5), path, lineage=lineage)
    nodes = [worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for worker in workers]
    assert len(set(ray.get(nodes, timeout=LIMIT_SECONDS))) == 2
    return workers


def said(number: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(0, VOCABULARY, 40)]


def recorded(workers: list[Any], step: int, numbers: range) -> None:
    for number in numbers:
        rollout = PromptRollout(KEYS[number], (Piece([1, 2, 3], said(number), 1.0),), (40,))
        call = workers[owner(KEYS[number], 2)].record.remote(step, [rollout])
        ray.get(call, timeout=LIMIT_SECONDS)


def drafted(workers: list[Any], number: int) -> list[int]:
    """What the prompt's index drafts behind the beginning of a response."""
    found = ray.get(workers[owner(KEYS[number], 2)].index.remote(KEYS[number]), timeout=LIMIT_SECONDS)
    return [] if found is None else DraftIndex.from_buffer(found).draft(said(number)[:8], 7, 3, 8).tokens


def test_each_nodes_worker_finds_what_an_earlier_run_has_left(cluster: None, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert {owner(key, 2) for key in KEYS} == {0, 1}
    first = a_run(tmp_path / "one", store)
    recorded(first, 1, range(8))
    assert len(in_store(store)[0].files) == 2
    # It begins while the first goes on.
    second = a_run(tmp_path / "second", store)
    (sentence,) = known_earlier(KEYS, second, named=False)
    assert sentence.startswith("8 of 12 prompts known from run one")
    assert last_lengths(second, KEYS, LIMIT_SECONDS) == [(40,)] * 8 + [()] * 4
    announce(PROMPTS, second, 1)
    assert [drafted(second, number) for number in range(12)] == [said(number)[8:16] for number in range(8)] + [[]] * 4
    # What is finished meanwhile is there a step later.
    recorded(first, 2, range(8, 12))
    announce(PROMPTS, second, 2)
    assert [drafted(second, number) for number in range(12)] == [said(number)[8:16] for number in range(12)]
    for workers in (first, second):
        stop_history_workers(workers)
