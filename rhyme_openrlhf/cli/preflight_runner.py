"""The model runner of a run's drafts: an explicit `--drafting.runner` is checked, and 'auto' is decided.

On a machine without a GPU there is one runner, so nothing is chosen or said.

The second model runner (V2) is taken where `rhyme verify` has passed with it. The record's entry must be of these
versions and this device. Its proofs must be of this architecture, tensor-parallel size and weight transport. The number
format does not count: equality is checked in float32 wherever that fits, and a run is in bfloat16. If this machine has
measured two runners or more, the fastest of them is taken. Otherwise V2 with asynchronous scheduling goes before V2,
because it was the faster one on an H200 (docs/gpu.md). Layouts that take turns need V1.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.platform import gpu_present, nvidia
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import AUTO, HISTORY, V1, V2, V2_ASYNC
from rhyme_openrlhf.verify import record
from rhyme_openrlhf.verify.record import Engines, Entry

# What a runner must have proved, beside that weights arrive in it.
LOSSLESS = ("lossless-greedy", "lossless-sampled")
TP_SWITCH = "--tp_switch.enable"
TRY = "rhyme verify --drafting.runner v2-async"
# With a model of 1.4 B parameters and 1 to 512 running samples (benchmarks/data/speed-by-load-h200.json).
SEEN = "on an H200 drafts were 1.3 to 2.7 times as fast with it"


def choose_runner(args: SimpleNamespace, architecture: str, settings: RhymeSettings) -> tuple[str, str]:
    """Return the model runner, and one sentence on how 'auto' was decided ("" where there was no choice).

    Raises PreflightError for an explicit runner that this run cannot have.
    """
    asked = settings.drafting.runner
    if asked == AUTO:
        if not settings.histospec.enable or not gpu_present():
            return V1, ""
        runner, why = _decided(args, architecture, settings)
        return runner, f"--drafting.runner auto is {runner}, because {why}"
    if asked != V1:
        _check(settings)
    return asked, ""


def _decided(args: SimpleNamespace, architecture: str, settings: RhymeSettings) -> tuple[str, str]:
    if settings.drafting.source != HISTORY:
        return V1, f"drafts of --drafting.source {settings.drafting.source} can be cut there alone"
    if settings.tp_switch.enable:
        return V1, f"layouts take turns there alone ({TP_SWITCH})"
    if settings.emulate.profile:
        return V1, "steps on another machine's clock are scheduled one after the other (--emulate.profile)"
    if settings.run.reproducible:
        return V1, "a reproducible run is resumed on the runner that it began with (--run.reproducible)"
    if os.environ.get("RAY_ADDRESS"):
        return V1, "engines of a cluster (RAY_ADDRESS) may run on other machines than the one that was verified"
    names = {gpu.name for gpu in nvidia.read().gpus}
    if len(names) != 1:
        return V1, f"`rhyme verify` knows one kind of GPU, and this machine has {len(names)}"
    entry = record.entry_of(record.read(record.path()), names.pop(), record.installed())
    return choose(entry, architecture, args.vllm.tensor_parallel_size, settings.weight_transport)


def _check(settings: RhymeSettings) -> None:
    """Check that the run can have vLLM's second model runner."""
    runner = f"--drafting.runner {settings.drafting.runner}"
    if not settings.histospec.enable:
        raise PreflightError("--drafting.runner is of engines that speculate: leave --no-histospec.enable out")
    if settings.tp_switch.enable:
        raise PreflightError(f"{runner} goes with no TP switches: leave {TP_SWITCH} out, or the runner")
    if settings.emulate.profile and settings.drafting.runner == V2_ASYNC:
        raise PreflightError(
            f"{runner} does not go with --emulate.profile, whose steps are scheduled one after the other: take "
            "--drafting.runner v2"
        )
    if not gpu_present():
        raise PreflightError(f"{runner} needs a GPU: vLLM's second model runner computes with Triton kernels")


def choose(entry: Entry, architecture: str, ranks: int, transport: str) -> tuple[str, str]:
    """Return the runner, and the reason as a clause."""
    needed = (*LOSSLESS, f"weights-{transport}")
    proved: dict[str, str] = {}
    for runner in (V2_ASYNC, V2):
        names = [Engines(runner, architecture, ranks).proof(name) for name in needed]
        if all(name in entry.proofs for name in names):
            proved[runner] = max(entry.proofs[name] for name in names)
    if not proved:
        missing = f"`rhyme verify` has not passed with another for {architecture} here"
        return V1, f"{missing} (run `{TRY}` with these options: {SEEN})"
    speeds = {runner: entry.speeds.get(str(Engines(runner, architecture, ranks))) for runner in (V1, *proved)}
    measured = {runner: speed for runner, speed in speeds.items() if speed is not None}
    if len(measured) > 1:
        ordered = sorted(measured, key=lambda runner: -measured[runner])
        figures = ", ".join(f"{runner} {measured[runner]:.2f} times" for runner in ordered)
        return ordered[0], f"of those verified here it was the fastest ({figures} an engine without drafts)"
    runner = next(iter(proved))
    return runner, f"`rhyme verify` has passed with it for {architecture} on {proved[runner][:10]}"
