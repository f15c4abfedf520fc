"""The file for a job: one JSON file in a folder that Ray uploads as the job's working directory.

    <data>/launch/<attempt uid>/spec.json

Invariants:

- The job's command line is constant except for the attempt's uid, so no value reaches a shell.
- The file is checked again where it is read, and all its paths are absolute.
- The file has no secret. The reporter's token goes with the job's environment (`ray_jobs.py`), because the cluster may
  see no file of the service.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rhyme_openrlhf.api.launch.earlier_runs import with_directories
from rhyme_openrlhf.api.launch.spec import NAME_PATTERN, Arguments, Fault, SpecError, check, resolved
from rhyme_openrlhf.api.launch.spec_command import to_argv

FILE = "spec.json"
UID_PATTERN = r"^[0-9a-f]{16}$"
# Ray runs this through a shell, so only the uid, 16 hexadecimal digits, is inserted.
ENTRYPOINT = "python -m rhyme_openrlhf.cli.run_spec {attempt}"


class LaunchFile(BaseModel):
    """An attempt that is ready to start. `control_url` is "" if the run does not report."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[2] = 2
    run_uid: str = Field(pattern=UID_PATTERN)
    attempt_uid: str = Field(pattern=UID_PATTERN)
    name: str = Field(pattern=NAME_PATTERN)
    arguments: Arguments
    resumes: bool
    roots: list[str]
    run_directory: str
    control_url: str

    def argv(self) -> list[str]:
        """Return the options of `rhyme train`. Raises SpecError if the arguments are not allowed."""
        roots = [Path(root) for root in self.roots]
        checked = resolved(check(self.arguments, roots, self.resumes), roots, self.resumes)
        # A run's directory has one directory of each attempt.
        argv = to_argv(with_directories(checked, Path(self.run_directory).parent.parent))
        argv += [f"--run.name={self.name}", f"--run.dir={self.run_directory}"]
        if self.resumes:
            argv.append("--ckpt.load_enable")
        if self.control_url:
            argv += [
                f"--control.url={self.control_url}",
                f"--control.run_uid={self.run_uid}",
                f"--control.attempt_uid={self.attempt_uid}",
            ]
        return argv


def read_launch_file(folder: Path, attempt_uid: str) -> LaunchFile:
    """Return the file in a job's working directory. Raises SpecError if it belongs to another attempt."""
    try:
        found = LaunchFile.model_validate_json((folder / FILE).read_bytes())
    except OSError as error:
        raise SpecError([Fault(FILE, f"cannot be read: {error.strerror}")]) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise SpecError([Fault(FILE, f"cannot be read: {where}: {first['msg']}")]) from error
    if found.attempt_uid != attempt_uid:
        raise SpecError([Fault(FILE, f"belongs to attempt {found.attempt_uid}, not to {attempt_uid}")])
    return found


def write_launch_file(data: Path, content: LaunchFile) -> Path:
    """Write the file, replacing an earlier one; return its folder."""
    folder = data / "launch" / content.attempt_uid
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder.with_suffix(".partial")
    partial.write_text(json.dumps(content.model_dump(), indent=1) + "\n")
    partial.rename(folder / FILE)
    return folder


def remove_file(data: Path, attempt_uid: str) -> None:
    """Delete the file of an ended attempt."""
    folder = data / "launch" / attempt_uid
    (folder / FILE).unlink(missing_ok=True)
    if folder.is_dir():
        folder.rmdir()
