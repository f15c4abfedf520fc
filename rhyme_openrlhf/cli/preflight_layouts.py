"""What is checked of adaptive tensor parallelism before anything is started.

Each check raises PreflightError with one sentence: what is wrong, where, what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.latency.settings import AUTO, NONE
from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.scheduling.layouts import LayoutError
from rhyme_openrlhf.training.layouts import layout_plan, memory_sentence

# What adaptive tensor parallelism cannot go together with: whether it is asked for, and why not.
_NOT_SWITCHED: tuple[tuple[Callable[[SimpleNamespace], bool], str], ...] = (
    (
        lambda a: gpu_present(),
        "runs without GPUs only so far: two layouts on one GPU have not been tried",
    ),
    (
        lambda a: a.train.async_enable and not a.histopipe.enable,
        "goes with --train.async_enable only in the streaming pipeline (--histopipe.enable): OpenRLHF's asynchronous "
        "loop sends the next step's prompts to engines whose devices the tail uses",
    ),
    (lambda a: a.weights.transport != "buffer", "needs --weights.transport buffer, from which both layouts load"),
)


def check_layouts(args: SimpleNamespace, config: Any) -> str:
    """Whether a second layout can be, and fits; what it takes, in one sentence, "" if none is asked for."""
    if not args.tp_switch.enable:
        return ""
    for asked, reason in _NOT_SWITCHED:
        if asked(args):
            raise PreflightError(f"--tp_switch.enable {reason}")
    try:
        plan = layout_plan(args, config)
        assert plan is not None
        sentence = memory_sentence(args, config, plan)
    except LayoutError as error:
        raise PreflightError(str(error)) from error
    # Only an engine that speculates can measure its own step times.
    measured = args.histospec.enable and args.drafting.source == "history"
    for flag, profile in (
        ("--latency.profile", args.latency.profile),
        ("--tp_switch.profile", args.tp_switch.profile),
    ):
        missing = profile == NONE or (profile == AUTO and not measured)
        if missing and not args.tp_switch.samples:
            raise PreflightError(
                "--tp_switch.enable needs the step times of both layouts to compare them: give files of "
                f"`rhyme profile` as --latency.profile and --tp_switch.profile ({flag} is {profile}), or the number of "
                "samples left at which to switch as --tp_switch.samples"
            )
    return sentence
