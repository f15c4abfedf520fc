"""RhymeRL's figures of a run: epochs held against each other, and a page of a recorded run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rhymerl_figures import by_epoch, page, recorded_steps, row, similarity, table, throughput

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import Record

RECORDED = Path(__file__).parents[1] / "data" / "recorded_run.jsonl"


def test_an_epoch_is_held_against_the_one_before_it() -> None:
    def record(step: int, key: str, *tokens: int) -> Record:
        return Record(key, step, (Piece([], list(tokens), 1.0),))

    epochs = by_epoch(
        [record(1, "p", 1, 2, 3, 4, 5), record(2, "p", 1, 2, 3, 4, 6), record(2, "new", 7, 8), record(3, "p", 1)],
        {1: 1, 2: 2},
    )
    assert list(epochs) == [1, 2]
    found = similarity(epochs)
    assert list(found) == [2]
    assert (found[2].tokens, found[2].accepted, found[2].shares) == (5, 1, [0.2])
    shown = row(found[2])
    assert shown["accepted"] == 0.2
    assert shown["responses_by_share"] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert shown["hits_by_length"][0] == shown["hit_tokens_by_length"][0] == 1


def test_a_recorded_run_as_page_and_table(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(RECORDED.read_bytes())
    steps = recorded_steps(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert all(0 <= step["speculation"] <= 1 for step in steps)
    assert steps[0]["acceptance"] is None and 0 < steps[-1]["acceptance"] < 1
    speeds = throughput(steps, steps[:3])
    assert speeds["without drafts"] == pytest.approx(speeds["with drafts"][:3])
    assert speeds["without drafts"][0] == 1
    pieces = (Piece([], [1, 2, 3, 4, 5], 1.0),)
    same = similarity({1: [Record("p", 1, pieces)], 2: [Record("p", 2, pieces)]})
    results = {
        "run": "<run>", "similarity": {epoch: row(found) for epoch, found in same.items()}, "steps": steps,
        "throughput": speeds,
    }  # fmt: skip
    drawn = page(results)
    assert drawn.count('class="plotly-graph-div"') == 5
    assert "<h1>RhymeRL's figures of &lt;run&gt;</h1>".replace("'", "&#x27;") in drawn
    assert 'src="http' not in drawn
    assert "epoch 2: 40.0% found" in table(results)
    assert "step 1 (epoch 1): speculation 0%, acceptance -" in table(results)
