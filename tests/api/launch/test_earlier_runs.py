"""Earlier runs of a service by their uids: offered, named in a spec, and as directories in the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.api.launch.earlier_runs import named_uids, with_directories
from rhyme_openrlhf.api.launch.job_file import LaunchFile
from rhyme_openrlhf.api.launch.offered_runs import Offered, expected_gain, offered
from rhyme_openrlhf.api.launch.spec import SpecError, check
from rhyme_openrlhf.api.launch.spec_command import from_command
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.record import EpochRow
from tests.history.archives import archive, record

UID = "0123456789abcdef"
P = "a" * 32


def spec(earlier: str) -> dict[str, Any]:
    _, arguments = from_command("rhyme demo")
    return {**arguments, "history": {"earlier": earlier}}


def job(tmp_path: Path, earlier: str, resumes: bool) -> LaunchFile:
    return LaunchFile(
        run_uid="cd" * 8, attempt_uid="ab" * 8, name="demo", arguments=spec(earlier), resumes=resumes,
        roots=[str(tmp_path)], run_directory=str(tmp_path / "data" / "runs" / ("cd" * 8) / "attempt-1"),
        control_url="",
    )  # fmt: skip


def left_responses(directory: Path, *attempts: int) -> None:
    for number in attempts:
        archive(directory / f"attempt-{number}" / "history" / "archive", record(P, 1, [1, 2]))


def test_a_uid_becomes_the_directory_of_a_run_in_the_job(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    argv = " ".join(job(tmp_path, f"{UID}, {tmp_path}/mine", resumes=False).argv()).replace("=", " ")
    assert f"--history.earlier {tmp_path}/data/runs/{UID},{tmp_path}/mine " in argv
    assert with_directories(spec("auto"), tmp_path) == spec("auto")
    assert named_uids(spec(f"/a, {UID} ,/b")) == [UID]


@pytest.mark.parametrize("value", ["0123456789ABCDEF", "0123456789abcde", "../runs", "math-7b", "", f"{UID},"])
def test_no_other_name_stands_for_a_run(tmp_path: Path, value: str) -> None:
    with pytest.raises(SpecError, match="history.earlier"):
        check(spec(value), [tmp_path])


def test_a_resumed_run_may_name_what_is_gone_and_a_new_one_may_not(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(SpecError, match="uid of a run of this service or a directory that exists"):
        job(tmp_path, gone, resumes=False).argv()
    assert any(gone in one for one in job(tmp_path, gone, resumes=True).argv())
    with pytest.raises(SpecError, match="below one of the service's roots"):
        job(tmp_path, "/nowhere", resumes=True).argv()


def test_a_run_can_be_named_and_one_that_is_not_there_is_refused(launched: Any) -> None:
    first = launched.start("first")
    body = {"command": f"rhyme demo --history.earlier {first['uid']}"}
    second = launched.operator.post("/api/v1/runs", json=body)
    assert second.status_code == 201, second.text
    assert second.json()["spec"]["arguments"]["history"]["earlier"] == first["uid"]
    launched.turn()
    launched.turn()
    place = str(launched.launching.runs_directory / first["uid"])
    assert any(place in one for one in launched.cluster.argv[second.json()["attempts"][0]["uid"]])
    refused = launched.operator.post("/api/v1/runs", json={"command": f"rhyme demo --history.earlier {UID}"})
    assert refused.status_code == 409 and f"{UID} is no run that this service started" in refused.text


def test_runs_with_the_same_data_and_model_are_offered(launched: Any) -> None:
    runs = [launched.start(f"run-{number}") for number in range(7)]
    other = launched.start("other-model", arguments={"actor": {"model_name_or_path": "Qwen/Qwen3-4B"}})
    directory = launched.launching.runs_directory
    # The last one has not generated yet, and another one's attempt has left nothing.
    for run in (*runs[:-1], other):
        left_responses(directory / run["uid"], 1)
    (directory / runs[-1]["uid"] / "attempt-1").mkdir(parents=True)
    with launched.service.database.writing() as session:
        run = find_run(session, runs[4]["uid"])
        counts = {column.name: 0 for column in EpochRow.__table__.columns}
        for epoch, tokens in ((1, 150), (2, 600)):
            values = {**counts, "run_id": run.id, "epoch": epoch, "decode_tokens": tokens, "sample_steps": 100}
            session.add(EpochRow(**values))
    with launched.service.database.reading() as session:
        found = offered(session, directory, check(spec("auto"), [launched.root]))
        new_data = {**spec("auto"), "data": {"prompt_dataset": "openai/gsm8k", "input_key": "question"}}
        none = offered(session, directory, check(new_data, [launched.root]))
    assert [one.name for one in found] == ["run-5", "run-4", "run-3", "run-2"]
    assert (found[0].tokens_per_step, found[1].tokens_per_step) == ((None, None), (1.5, 6.0))
    assert none == []
    assert expected_gain(found) == 4.0


def test_without_two_epochs_no_gain_is_expected() -> None:
    assert expected_gain([]) is None
    assert expected_gain([Offered(UID, "a", 1, (1.5, None)), Offered(UID, "b", 0, (None, None))]) is None
