"""Room for drafts in a GPU engine's step, by the engine's size; and graphs for all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine import rows


def sizes(samples: int, drafts: int, step_tokens: int = 2048) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=samples, max_num_batched_tokens=step_tokens),
        num_speculative_tokens=drafts,
    )


def test_rows_of_a_gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows.most_rows(sizes(128, 32)) is None
    monkeypatch.setattr(rows, "gpu_present", lambda: True)
    # Eight for each sample, as far as memory is worth it.
    assert rows.most_rows(sizes(128, 32)) == 1024
    assert rows.most_rows(sizes(400, 32)) == 2048
    # With few samples what a graph has by default, but no more than all samples with whole drafts.
    assert rows.most_rows(sizes(16, 32)) == 512
    assert rows.most_rows(sizes(4, 32)) == 4 * 33
    # A draft token for each of very many; and never more than a step computes.
    assert rows.most_rows(sizes(1500, 32, 8192)) == 3000
    assert rows.most_rows(sizes(128, 32, 600)) == 600


def test_graphs_reach_all_rows_that_drafts_may_fill() -> None:
    assert rows.graph_sizes(100)[-1] == 512 == rows.graph_sizes(512)[-1]
    found = rows.graph_sizes(2048)
    assert found == sorted(set(found)) and found[:5] == [1, 2, 4, 8, 16] and found[-1] == 2048
    # Padding is little: at most 7 tokens up to 256, and a sixteenth, then an eighth beyond.
    assert all(above - size <= max(8, size // 8) for size, above in zip(found[2:], found[3:], strict=False))
    assert rows.graph_sizes(1000)[-2:] == [960, 1000]
