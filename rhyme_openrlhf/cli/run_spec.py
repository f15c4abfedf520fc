"""`python -m rhyme_openrlhf.cli.run_spec ATTEMPT`: what Ray runs for an attempt that the control plane started.

Reads the attempt's file from the working directory, checks it again, and is `rhyme train` from there on. Nothing but
the attempt's uid comes by the command line, because Ray runs it through a shell.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rhyme_openrlhf.api.launch.job_file import read_launch_file
from rhyme_openrlhf.api.launch.spec import SpecError
from rhyme_openrlhf.api.launch.spec_paths import PathRefused
from rhyme_openrlhf.cli.console import refuse
from rhyme_openrlhf.settings.options import BAD_INPUT


def main(argv: list[str]) -> int:
    """Run the attempt; returns the exit code of `rhyme train`, or 2 for a file that may not be run."""
    if len(argv) != 1:
        print("usage: python -m rhyme_openrlhf.cli.run_spec ATTEMPT", file=sys.stderr)
        return BAD_INPUT
    try:
        arguments = read_launch_file(Path.cwd(), argv[0]).argv()
    except (SpecError, PathRefused) as error:
        return refuse("rhyme train", f"the run cannot be started: {error}")
    # Only now: a bad file is refused without the training stack.
    from rhyme_openrlhf.cli import train_ppo_ray
    from rhyme_openrlhf.cli.main import put_venv_programs_on_path

    put_venv_programs_on_path()
    return train_ppo_ray.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
