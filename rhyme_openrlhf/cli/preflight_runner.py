"""The model runner of a run's drafts: an explicit `--drafting.runner` is checked, and 'auto' is decided.

On a machine without a GPU there is one runner, so nothing is chosen or said. On GPUs drafts run on vLLM's second model
runner, asynchronously: it was the fastest on an H200 at every load, where the first one lost (docs/gpu.md). Each engine
proves there that its drafts change nothing, or generates without them (engine/actor_parts/proving.py). The first runner
is taken for what needs it alone.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.settings.config import SEEDED, RhymeSettings
from rhyme_openrlhf.settings.drafting import AUTO, V1

# The group of entry points by which vLLM finds plug-ins that change logits.
LOGITS_PLUGINS = "vllm.logits_processors"


def choose_runner(settings: RhymeSettings, on_gpus: bool) -> tuple[str, str]:
    """Return the model runner, and one sentence on how 'auto' was decided ("" where there was no choice).

    `on_gpus`: the run has GPUs, here or in its cluster. Raises PreflightError for an explicit runner that this run
    cannot have, and where drafts would leave out what a plug-in does.
    """
    if settings.histospec.enable and (plugins := sorted(one.name for one in entry_points(group=LOGITS_PLUGINS))):
        raise PreflightError(
            f"vLLM's plug-in {plugins[0]} changes logits, and vLLM loads no such plug-in in an engine with drafts: "
            "add --no-histospec.enable, or uninstall it"
        )
    asked = settings.drafting.runner
    if asked == AUTO:
        if not settings.histospec.enable or not on_gpus:
            return V1, ""
        runner, why = settings.gpu_runner
        return runner, f"--drafting.runner auto is {runner}: {why}"
    if asked != V1:
        _check(settings, on_gpus)
    return asked, ""


def _check(settings: RhymeSettings, on_gpus: bool) -> None:
    """Check that the run can have vLLM's second model runner."""
    runner = f"--drafting.runner {settings.drafting.runner}"
    if not settings.histospec.enable:
        raise PreflightError("--drafting.runner is of engines that speculate: leave --no-histospec.enable out")
    if settings.emulate.profile:
        raise PreflightError(
            f"{runner} does not go with --emulate.profile, whose steps are scheduled one after the other: leave one out"
        )
    if settings.run.reproducible:
        raise PreflightError(f"{runner} does not go with --run.reproducible: {SEEDED}")
    if not on_gpus:
        raise PreflightError(f"{runner} needs a GPU: vLLM's second model runner computes with Triton kernels")
