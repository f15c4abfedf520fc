"""`rhyme history`: what is listed, what is deleted, and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhyme_openrlhf.cli import history
from rhyme_openrlhf.history.archive import ArchiveWriter
from rhyme_openrlhf.history.store import archives_in
from rhyme_openrlhf.prompt_keys import evaluation_key
from tests.history.archives import LIMIT, about, archive, record

P, Q = "a" * 32, "b" * 32


def test_runs_of_a_directory_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive(
        tmp_path / "one" / "history" / "archive", record(P, 1, [1]), record(Q, 1, [1]), record(P, 2, [1]), run="one"
    )
    archive(tmp_path / "two" / "history" / "archive", run="[bold]\x1b[2Jtwo", started=2)
    assert history.main(["list", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    two, one = (next(line for line in shown if f"{name}/history" in line) for name in ("two", "one"))
    assert [cell.strip() for cell in one.split("│")][1:4] == ["one", "2", "2"]
    assert "[bold]" in two and "\x1b" not in two
    assert shown.index(two) < shown.index(one)


def test_similarity_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs are a prompt's rollouts in the order of their steps; evaluations do not count."""
    evaluated = [record(evaluation_key(P), step, [1, 2, 3, 4]) for step in (3, 4)]
    trained = record(P, 7, [1, 2, 3, 4, 5, 0, 0, 0], [9, 9]), record(P, 2, [1, 2, 3, 4, 5]), record(Q, 3, [1, 2, 3, 4])
    archive(tmp_path / "one" / "history" / "archive", *trained, *evaluated, run="one")
    assert history.main(["similarity", str(tmp_path)]) == 0
    first, scale = capsys.readouterr().out.splitlines()
    assert first == "one, epoch 2: 20% of 10 response tokens (2 responses) continue as in epoch 1"
    assert "84 to 91 %" in scale


def test_one_epoch_has_no_similarity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive(tmp_path, record(P, 1, [1, 2, 3, 4]), record(Q, 2, [1, 2, 3, 4]))
    assert history.main(["similarity", str(tmp_path)]) == 2
    assert "no prompt of these runs was answered in two epochs" in capsys.readouterr().err


def test_the_oldest_are_deleted_until_the_rest_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        archive(tmp_path / str(number), record(P, 1, list(range(100)) * 9), run=f"run-{number}", started=number)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("kept")
    size = sum(archives_in(tmp_path / "0")[0].sizes.values())
    assert history.main(["prune", str(tmp_path), "--keep-gb", f"{2.5 * size / 1e9:.12f}"]) == 0
    assert [one.about.run for one in archives_in(tmp_path)] == ["run-3", "run-2"]
    assert (tmp_path / "other" / "file").read_text() == "kept"
    assert "deleted run-1" in capsys.readouterr().out
    assert history.main(["prune", str(tmp_path), "--keep-gb", "0"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_only_the_archive_of_a_run_is_deleted(tmp_path: Path) -> None:
    archive(tmp_path / "one" / "history" / "archive", record(P, 1, [1]))
    (tmp_path / "one" / "events.jsonl").write_text("")
    (tmp_path / "one" / "history" / "worker-0.journal").write_text("")
    assert history.main(["prune", str(tmp_path / "one"), "--keep-gb", "0"]) == 0
    left = {str(path.relative_to(tmp_path / "one")) for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert left == {"events.jsonl", "history/worker-0.journal"}


@pytest.mark.parametrize("size", ["-1", "nan", "inf", "much"])
def test_an_impossible_size_deletes_nothing(tmp_path: Path, size: str) -> None:
    archive(tmp_path / "a", record(P, 1, [1]))
    with pytest.raises(SystemExit, match="2"):
        history.main(["prune", str(tmp_path), "--keep-gb", size])
    assert len(archives_in(tmp_path)) == 1


def test_a_directory_without_responses_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert history.main(["list", str(tmp_path)]) == 2
    assert "no run directory, checkpoint or store with responses" in capsys.readouterr().err


def test_a_checkpoint_is_listed_and_never_deleted(tmp_path: Path) -> None:
    """Its history can be read like an archive, but it is what a run goes on from."""
    checkpoint = tmp_path / "_rhyme" / "global_step2"
    archive(checkpoint, record(P, 1, [1]))
    (checkpoint / "worker-0.responses").rename(checkpoint / "history-0-of-1")
    (checkpoint / "run.json").unlink()
    (checkpoint / "state.json").write_text('{"tokenizer": "the tokenizer"}')
    assert history.main(["list", str(checkpoint)]) == 0
    assert history.main(["prune", str(checkpoint), "--keep-gb", "0"]) == 0
    assert sorted(path.name for path in checkpoint.iterdir()) == ["history-0-of-1", "state.json"]


def test_a_run_that_goes_on_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    going = ArchiveWriter(tmp_path / "going", about("going"), 0, LIMIT)
    archive(tmp_path / "over", record(P, 1, [1]), run="over")
    assert history.main(["prune", str(tmp_path), "--keep-gb", "0"]) == 0
    assert [one.about.run for one in archives_in(tmp_path)] == ["going"]
    assert "kept going, which is going on" in capsys.readouterr().out
    going.close()
    assert history.main(["prune", str(tmp_path), "--keep-gb", "0"]) == 0
    assert list(tmp_path.iterdir()) == []
