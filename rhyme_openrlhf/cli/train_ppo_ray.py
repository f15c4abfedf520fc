"""`rhyme train`, and `python -m rhyme_openrlhf.cli.train_ppo_ray`: OpenRLHF's command with our flags beside its own."""

from __future__ import annotations

import os
import sys
from functools import partial
from types import SimpleNamespace

from rhyme_openrlhf.cli import train_arguments
from rhyme_openrlhf.cli.console import refuse
from rhyme_openrlhf.cli.train_arguments import BadInputError
from rhyme_openrlhf.garbage import kept_for_good
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.run import model_shape, resources
from rhyme_openrlhf.telemetry.control_connection import TokenError, read_token
from rhyme_openrlhf.telemetry.run_directory import TOKEN_VARIABLE

_refuse = partial(refuse, "rhyme train")


def main(argv: list[str]) -> int:
    """Check `argv`, then train. Returns the exit code: 2 for bad input, before anything was started."""
    try:
        args, settings = train_arguments.parse(argv)
        if settings.control.url:
            read_token(settings.control.token_file, os.environ.get(TOKEN_VARIABLE, ""))
    except (BadInputError, TokenError) as error:
        return _refuse(error)

    if args.plan is not None:
        return _print_plan(args)

    # Imported only now: --help and argument errors must not wait for torch and Ray.
    from rhyme_openrlhf.cli import preflight_gpus

    said: list[str] = []
    try:
        # They import torch, Transformers and what reads data.
        with kept_for_good():
            checked = train_arguments.checked(args, settings, said.append)
        slow = preflight_gpus.check_gpus(args, checked.on_gpus)
    except (BadInputError, preflight_gpus.PreflightError) as error:
        return _refuse(error)
    found = checked.found
    for sentence in [*said, *found.said, *filter(None, [slow])]:
        print(sentence)

    from rhyme_openrlhf.run.directory_lock import DirectoryLockError, held
    from rhyme_openrlhf.run.launch import LaunchError, run_training
    from rhyme_openrlhf.telemetry.run_directory import RunDirectoryError
    from rhyme_openrlhf.training.resume import ResumeError

    try:
        command = ["rhyme", "train", *argv]
        saved_to = {"--ckpt.path": args.ckpt.path, "--ckpt.output_dir": args.ckpt.output_dir}
        with held(saved_to, checked.settings.run.name) as unlocked:
            for sentence in unlocked:
                print(sentence)
            return run_training(
                args, checked.settings, found.prompts, found.layouts, checked.on_gpus, command, found.ancestors
            )
    except (DirectoryLockError, LaunchError, ResumeError, RunDirectoryError) as error:
        return _refuse(error)


def _print_plan(args: SimpleNamespace) -> int:
    """Print the memory plan; 2 with one sentence where there is none, or the run does not fit."""
    shapes = model_shape.shapes_of(args)
    if shapes is None:
        return _refuse(resources.no_shape(args.actor.model_name_or_path))
    size = int(args.plan * 2**30) if args.plan else nvidia.smallest_memory(nvidia.read())
    found = resources.plan(shapes, resources.layout_of(args), size)
    print(resources.as_text(found))
    return _refuse(found.problem) if found.problem else 0


if __name__ == "__main__":
    from rhyme_openrlhf.cli.main import main as rhyme

    sys.exit(rhyme(["train", *sys.argv[1:]]))
