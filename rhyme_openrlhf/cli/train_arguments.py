"""Options of `rhyme train`, parsed and checked, for that command and for those that only start engines.

Invariant: when `checked` returns, nothing has been started; every mistake is reported in one sentence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rhyme_openrlhf.cli import upstream
from rhyme_openrlhf.cli.paths import RelativePathError, make_absolute
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.options import SettingsError

if TYPE_CHECKING:
    from rhyme_openrlhf.cli.preflight import Checked


class BadInputError(Exception):
    """The options cannot work; one sentence."""


@dataclass(frozen=True)
class TrainArguments:
    """Upstream's nested arguments, adapted to this machine; our settings; whether the run has GPUs; what was found."""

    args: SimpleNamespace
    settings: RhymeSettings
    on_gpus: bool
    found: Checked


def check(argv: list[str], say: Callable[[str], None]) -> TrainArguments:
    """Return the arguments of `argv`, for a command that only starts engines; the rest as `parse` and `checked`."""
    parsed = parse(argv)
    # vLLM tells of its imports otherwise, between the lines of progress.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return checked(*parsed, say)


def parse(argv: list[str]) -> tuple[SimpleNamespace, RhymeSettings]:
    """Return upstream's nested arguments and our settings, before torch and Ray are imported. Raises BadInputError."""
    try:
        args = upstream.parse(argv)
        make_absolute(args, os.environ)
        return args, RhymeSettings.from_namespace(args)
    except (upstream.ArgumentsError, RelativePathError, SettingsError) as error:
        raise BadInputError(str(error)) from error


def checked(args: SimpleNamespace, settings: RhymeSettings, say: Callable[[str], None]) -> TrainArguments:
    """Return checked arguments; call `say` with each substitution for a missing GPU. Raises BadInputError."""
    from rhyme_openrlhf.cli import preflight
    from rhyme_openrlhf.platform import PlatformError, gpu_present, run_has_gpus, shims

    try:
        if not gpu_present():
            shims.install()
        on_gpus = run_has_gpus()
        if not on_gpus:
            from rhyme_openrlhf.platform.cpu_arguments import adapt_arguments

            for change in adapt_arguments(args):
                say(change)
        found = preflight.check(args, on_gpus)
        settings = settings.with_transport(on_gpus, lora=args.ds.lora.rank > 0).with_runner(args.drafting.runner)
    except (PlatformError, preflight.PreflightError) as error:
        raise BadInputError(str(error)) from error
    return TrainArguments(args, settings, on_gpus, found)
