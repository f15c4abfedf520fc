"""Copies of a run in MLflow and in W&B's offline format, made by `rhyme runs export` and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runs.running_service import Rhyme


def test_a_run_is_copied_to_mlflow_once(rhyme: Rhyme, reported: str, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    target = f"sqlite:///{tmp_path / 'mlflow.db'}"
    code, out, err = rhyme("export", reported, "--to", "mlflow", "--output", target)
    assert code == 0 and "trial: 4 steps copied to experiment rhyme, run " in out, err
    tracker = MlflowClient(target)
    run = tracker.get_run(out.split()[-1])
    assert (run.info.run_name, run.info.status) == ("trial", "FINISHED")
    assert run.info.end_time > run.info.start_time > 1e12
    losses = tracker.get_metric_history(run.info.run_id, "policy_loss")
    assert [(one.step, one.value) for one in losses] == [(step, 0.1) for step in range(1, 5)]
    rates = tracker.get_metric_history(run.info.run_id, "acceptance_rate")
    assert [one.value for one in rates] == [0.75] * 4 and rates[0].timestamp > 1e12
    assert run.data.params["control.run_uid"] == reported
    code, _, err = rhyme("export", reported, "--to", "mlflow", "--output", target)
    assert code == 1 and "has this run already" in err and len(err.splitlines()) == 1


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format behind a head of 7 bytes, whole records alone."""
    place, block = 7, 32768
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        assert kind == 1
        yield content[place + 7 : place + 7 + length]
        place += 7 + length


def test_a_run_is_copied_to_a_folder_that_wandb_syncs(rhyme: Rhyme, reported: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    code, out, err = rhyme("export", reported, "--to", "wandb-offline", "--output", str(tmp_path))
    assert code == 0 and "trial: 4 steps copied to " in out, err
    (path,) = Path(out.split()[-1]).glob("run-*.wandb")
    history, settings, name = [], {}, ""
    for data in wandb_records(path.read_bytes()):
        found = wandb_internal_pb2.Record()
        found.ParseFromString(data)
        if found.HasField("run"):
            name = name or found.run.display_name
            settings |= {one.key: json.loads(one.value_json) for one in found.run.config.update}
        if found.HasField("history"):
            history.append(
                {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in found.history.item}
            )
    assert name == "trial" and settings["control.run_uid"] == reported
    assert [row["policy_loss"] for row in history] == [0.1] * 4
    assert [row["_step"] for row in history] == [1, 2, 3, 4] and history[-1]["acceptance_rate"] == 0.75
