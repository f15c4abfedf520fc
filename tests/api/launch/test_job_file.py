"""The file that a job gets: checked by its reader, without secrets, and with no value on a command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rhyme_openrlhf
from rhyme_openrlhf.api.launch.job_file import (
    ENTRYPOINT,
    FILE,
    LaunchFile,
    read_launch_file,
    remove_file,
    write_launch_file,
)
from rhyme_openrlhf.api.launch.spec import SpecError
from rhyme_openrlhf.api.launch.spec_command import from_command

ATTEMPT = "ab" * 8


def launch_file(tmp_path: Path, **changes: object) -> LaunchFile:
    _, arguments = from_command("rhyme demo")
    arguments["ckpt"] = {"path": str(tmp_path / "checkpoints" / "x")}
    values: dict[str, object] = {
        "run_uid": "cd" * 8,
        "attempt_uid": ATTEMPT,
        "name": "demo",
        "arguments": arguments,
        "resumes": False,
        "roots": [str(tmp_path)],
        "run_directory": str(tmp_path / "runs" / "x"),
        "control_url": "http://127.0.0.1:8420",
    }
    return LaunchFile(**{**values, **changes})  # type: ignore[arg-type]


def test_the_round_trip_and_what_the_run_gets(tmp_path: Path) -> None:
    content = launch_file(tmp_path, resumes=True)
    folder = write_launch_file(tmp_path, content)
    assert [path.name for path in folder.iterdir()] == [FILE]
    write_launch_file(tmp_path, content)
    assert read_launch_file(folder, ATTEMPT) == content
    argv = content.argv()
    assert f"--run.dir={tmp_path}/runs/x" in argv and "--ckpt.load_enable" in argv
    assert f"--control.attempt_uid={ATTEMPT}" in argv and "--run.name=demo" in argv


def test_rhyme_train_takes_what_it_gets(tmp_path: Path) -> None:
    pytest.importorskip("openrlhf")
    from rhyme_openrlhf.cli import upstream
    from rhyme_openrlhf.settings.config import RhymeSettings

    args = upstream.parse(launch_file(tmp_path, resumes=True).argv())
    settings = RhymeSettings.from_namespace(args)
    assert args.ckpt.load_enable and args.vllm.num_engines == 2
    assert (settings.run.name, settings.control.attempt_uid) == ("demo", ATTEMPT)


def test_it_is_checked_again_where_it_is_read(tmp_path: Path) -> None:
    folder = write_launch_file(tmp_path, launch_file(tmp_path))
    with pytest.raises(SpecError, match="belongs to attempt"):
        read_launch_file(folder, "ee" * 8)
    content = json.loads((folder / FILE).read_text())
    content["arguments"]["reward"]["remote_url"] = "/etc/evil.py"
    (folder / FILE).write_text(json.dumps(content))
    with pytest.raises(SpecError, match="below one of the service's roots"):
        read_launch_file(folder, ATTEMPT).argv()
    (folder / FILE).write_text("{")
    with pytest.raises(SpecError, match="cannot be read"):
        read_launch_file(folder, ATTEMPT)


def test_the_file_goes_with_its_folder(tmp_path: Path) -> None:
    folder = write_launch_file(tmp_path, launch_file(tmp_path))
    remove_file(tmp_path, ATTEMPT)
    remove_file(tmp_path, ATTEMPT)
    assert not folder.exists()


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("arguments", [[], [ATTEMPT], [ATTEMPT, "more"], ["../x"]])
def test_the_entrypoint_refuses_what_is_no_attempt_without_the_training_stack(
    tmp_path: Path, arguments: list[str]
) -> None:
    module = ENTRYPOINT.split()[2]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(rhyme_openrlhf.__file__).parents[2])},
    )
    assert done.returncode == 2, done.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "ray", "vllm", "openrlhf"}
