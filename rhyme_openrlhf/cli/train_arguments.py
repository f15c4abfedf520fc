"""Options of `rhyme train`, checked as `rhyme train` checks them, for commands that only start engines with them.

Invariant: when `check` returns, nothing has been started; every mistake is reported in one sentence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from rhyme_openrlhf.cli import upstream
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.options import SettingsError


class BadInputError(Exception):
    """The options cannot work; one sentence."""


@dataclass(frozen=True)
class TrainArguments:
    """Upstream's nested arguments, adapted to this machine; our settings; whether the run has GPUs."""

    args: SimpleNamespace
    settings: RhymeSettings
    on_gpus: bool


def check(argv: list[str], say: Callable[[str], None]) -> TrainArguments:
    """Return the arguments of `argv`; call `say` with each substitution for a missing GPU. Raises BadInputError."""
    try:
        args = upstream.parse(argv)
        settings = RhymeSettings.from_namespace(args)
    except (upstream.ArgumentsError, SettingsError) as error:
        raise BadInputError(str(error)) from error
    # vLLM tells of its imports otherwise, between the lines of progress.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
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
        preflight.check(args, on_gpus)
        settings = settings.with_transport(on_gpus, lora=args.ds.lora.rank > 0)
    except (PlatformError, preflight.PreflightError) as error:
        raise BadInputError(str(error)) from error
    return TrainArguments(args, settings, on_gpus)
