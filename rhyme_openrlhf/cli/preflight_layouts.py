"""Checks of adaptive tensor parallelism before anything is started.

Each check raises PreflightError with one sentence: what is wrong, where, what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.run.resources import ENGINES, SHARES, shares
from rhyme_openrlhf.scheduling.layouts import LayoutError, LayoutPlan
from rhyme_openrlhf.settings.latency import AUTO, NONE
from rhyme_openrlhf.settings.tp_switch import TURNS, tail_profiles, tail_sizes
from rhyme_openrlhf.settings.weights import OPENRLHF
from rhyme_openrlhf.training.layouts import planned_layouts

# What adaptive tensor parallelism cannot go together with: whether it is asked for, and why not.
_NOT_SWITCHED: tuple[tuple[Callable[[SimpleNamespace], bool], str], ...] = (
    (
        lambda a: a.train.async_enable and not a.histopipe.enable,
        "goes with --train.async_enable only in the streaming pipeline (--histopipe.enable): OpenRLHF's asynchronous "
        "loop sends the next step's prompts to engines whose devices the tail uses",
    ),
    (lambda a: a.weights.transport == OPENRLHF, "needs --weights.transport buffer, from which all layouts load"),
)
# And what its KV caches in turns cannot.
_NOT_IN_TURNS: tuple[tuple[Callable[[SimpleNamespace], bool], str], ...] = (
    (lambda a: a.vllm.enable_sleep, "--vllm.enable_sleep, which wakes all engines at once"),
    (lambda a: a.histopipe.enable, "--histopipe.enable, whose engines begin their next step by themselves"),
)


def check_layouts(args: SimpleNamespace, config: Any, on_gpus: bool) -> tuple[LayoutPlan | None, str]:
    """Check that the further layouts are possible and fit; return them and a sentence on their memory, or None and "".

    The returned plan is the one that is started, because free memory differs from one reading to the next.
    """
    if not args.tp_switch.enable:
        return None, ""
    for asked, reason in _NOT_SWITCHED:
        if asked(args):
            raise PreflightError(f"--tp_switch.enable {reason}")
    try:
        plan, planned = planned_layouts(args, config, on_gpus)
    except LayoutError as error:
        raise PreflightError(str(error)) from error
    _check_shared(args, len(plan.sizes))
    if not plan.both_awake:
        _check_turns(args, "" if args.tp_switch.kv_caches == TURNS else f"{planned[0]}; ")
    _check_step_times(args)
    return plan, "\n".join(planned)


def _check_turns(args: SimpleNamespace, said: str) -> None:
    for asked, what in _NOT_IN_TURNS:
        if asked(args):
            raise PreflightError(
                f"{said}--tp_switch.enable with KV caches in turns does not go with {what}: let them fit together "
                "(lower --tp_switch.kv_cache_mb and --tp_switch.aligned_kv_cache_mb), or leave one of the two out"
            )


def _check_shared(args: SimpleNamespace, layouts: int) -> None:
    """Check that all actors on an engine's device find a share of it; otherwise Ray would wait for ever."""
    share = next(share for share in shares(args) if ENGINES in share.models)
    others = [model for model in share.models if model != ENGINES]
    if len(others) + layouts > SHARES:
        raise PreflightError(
            f"--tp_switch.enable: a GPU has room for {SHARES} processes, and these would be {len(others) + layouts}: "
            f"engines of {layouts} layouts, {', '.join(others)}; name fewer --tp_switch.sizes, or leave out "
            "--train.colocate_all"
        )


def _check_step_times(args: SimpleNamespace) -> None:
    # Only an engine that speculates can measure its own step times.
    measured = args.histospec.enable and args.drafting.source == "history"
    sizes = tail_sizes(args.tp_switch.size, args.tp_switch.sizes)
    for flag, named in (
        ("--latency.profile", (args.latency.profile,)),
        ("--tp_switch.profile", tail_profiles(args.tp_switch.profile, len(sizes))),
    ):
        for profile in named:
            if (profile == NONE or (profile == AUTO and not measured)) and not args.tp_switch.samples:
                raise PreflightError(
                    f"--tp_switch.enable needs step times of all layouts ({flag} is {profile}): give files of "
                    "`rhyme profile` as --latency.profile and --tp_switch.profile, or switch by --tp_switch.samples"
                )
