"""Checks that a run can write where it is told to, before anything is started."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

from rhyme_openrlhf.cli.preflight_models import PreflightError


def check_outputs(args: SimpleNamespace) -> None:
    """Raise PreflightError where a run's directory, its checkpoints, its model or its logs cannot be written."""
    for flag, path in (
        ("--run.dir", args.run.dir),
        ("--ckpt.path", args.ckpt.path),
        ("--ckpt.output_dir", args.ckpt.output_dir),
        ("--logger.tensorboard_dir", args.logger.tensorboard_dir),
    ):
        if path:
            _check_directory(flag, Path(path))


def _check_directory(flag: str, path: Path) -> None:
    """Try to write a file into the directory, or where it would be made."""
    there = path.absolute()
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            raise PreflightError(f"{flag}: {there} is not a directory")
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise PreflightError(f"{flag}: {path} cannot be written ({error.strerror or error})") from error
