"""Estimates for a new run from its checked arguments: memory per GPU, the gain of drafts, and that of earlier runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from rhyme_openrlhf.api.launch import gain_estimate
from rhyme_openrlhf.api.launch.gain_estimate import Estimate, Lengths, Rollout, known_profile
from rhyme_openrlhf.api.launch.offered_runs import Offered, expected_gain, offered
from rhyme_openrlhf.api.launch.spec import Arguments, upstream_arguments, value_of
from rhyme_openrlhf.api.launch.spec_paths import PathRefused
from rhyme_openrlhf.api.read.curves import curves
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.drafting_core import CoreMissing
from rhyme_openrlhf.latency.profile import Profile, ProfileError
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.run import resources
from rhyme_openrlhf.run.model_shape import Shapes, read_shapes
from rhyme_openrlhf.run.resources import GpuPlan
from rhyme_openrlhf.settings.history import AUTO, NONE
from rhyme_openrlhf.settings.latency import NONE as NO_TIMES
from rhyme_openrlhf.webui.site import text

NO_SHAPE = (
    "No memory plan: the service cannot read the model's config.json, or does not know this kind of model. It reads "
    "models in a folder below --serve.roots and models that were downloaded from the hub before."
)
NO_PROFILE = (
    "No profile of this model with this tensor-parallel size exists here. `rhyme profile` measures one; a run's "
    "first start measures a quick one (--latency.profile)."
)
NO_DRAFTS = "Drafts are switched off (--histospec.enable): there is no gain to simulate."
# Steps at the end of a cloned run from which its current response lengths are taken.
RECENT_STEPS = 50


@dataclass(frozen=True)
class GpuView:
    """A GPU of the run in words: the models on it, the memory it needs, its parts, and any problem."""

    name: str
    least: str
    parts: tuple[tuple[str, str], ...]
    problem: str


@dataclass(frozen=True)
class MemoryView:
    """A memory plan in words."""

    parameters: int
    gpus: tuple[GpuView, ...]
    nodes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class GainView:
    """A simulated gain in words, or `problem`: the reason why there is none."""

    problem: str = ""
    ratio: str = ""
    without_drafts: str = ""
    with_drafts: str = ""
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class EarlierView:
    """Earlier runs with the same data and model: which are drafted from, in words, and the expected gain or ""."""

    runs: tuple[Offered, ...]
    words: str
    gain: str


def earlier_runs(arguments: Arguments, session: Session, runs_directory: Path) -> EarlierView | None:
    """Return the earlier runs of a new run; None if it has no drafts from history. `arguments` are checked."""
    if not value_of(arguments, "histospec", "enable"):
        return None
    runs = offered(session, runs_directory, arguments)
    chosen, names = value_of(arguments, "history", "earlier"), {run.uid: run.name for run in runs}
    used = runs
    if chosen == NONE or (chosen == AUTO and value_of(arguments, "run", "reproducible")):
        why = "none" if chosen == NONE else "auto, which is none in a reproducible run"
        words, used = f"The run drafts from none of them: --history.earlier is {why}.", []
    elif chosen == AUTO:
        words = "The run drafts from the newest ones by itself."
    else:
        used = [run for run in runs if run.uid in chosen]
        shown = ", ".join(names.get(part, part) for part in chosen.split(","))
        words = f"The run drafts from {shown} alone."
    gain = expected_gain(used)
    return EarlierView(tuple(runs), words, "" if gain is None else text.ratio(gain))


def shapes_of(arguments: Arguments) -> Shapes | None:
    """Return the shapes of the run's models, or None if the policy's is unknown; `arguments` are checked."""
    return read_shapes(*(value_of(arguments, model, "model_name_or_path") for model in ("actor", "critic", "reward")))


def memory(arguments: Arguments, shapes: Shapes) -> MemoryView:
    """Return the memory plan of checked arguments, compared with the GPUs of the service's machine if it has any."""
    layout = resources.layout_of(upstream_arguments(arguments))
    found = resources.plan(shapes, layout, nvidia.smallest_memory(nvidia.read()))
    return MemoryView(
        parameters=shapes.policy.parameters,
        gpus=tuple(_gpu(gpu) for gpu in found.gpus),
        nodes=tuple((f"{need.what}, each {need.where}", text.memory(need.size)) for need in found.nodes),
    )


def _gpu(gpu: GpuPlan) -> GpuView:
    several = len(gpu.share.models) > 1
    parts = [(f"{part.owner}: {part.what}" if several else part.what, text.memory(part.size)) for part in gpu.parts]
    parts += [(name, "not known: no config.json here") for name in gpu.unknown]
    if gpu.samples is not None:
        parts.append(("samples of full length that fit the KV cache", text.number(gpu.samples, 0)))
    if gpu.size is not None:
        parts.append(("memory of the GPUs here", text.memory(gpu.size)))
    least = "none is large enough" if math.isinf(gpu.least) else f"{text.memory(gpu.least)} or more"
    return GpuView(gpu.name, least, tuple(parts), gpu.problem[:1].upper() + gpu.problem[1:])


def gain(arguments: Arguments, lengths: Lengths, roots: Sequence[Path]) -> GainView:
    """Simulate the gain of drafts within a second; `arguments` are checked."""
    if not value_of(arguments, "histospec", "enable"):
        return GainView(NO_DRAFTS)
    shapes, parallel = shapes_of(arguments), value_of(arguments, "vllm", "tensor_parallel_size")
    try:
        named = value_of(arguments, "emulate", "profile") or value_of(arguments, "latency", "profile")
        profile = known_profile(named, shapes.policy if shapes else None, parallel, roots)
        if profile is None:
            return GainView(NO_PROFILE)
        planned = value_of(arguments, "latency", "profile") != NO_TIMES and not value_of(
            arguments, "run", "reproducible"
        )
        rollout = Rollout(
            engines=value_of(arguments, "vllm", "num_engines"),
            tensor_parallel=parallel,
            prompts=value_of(arguments, "rollout", "batch_size"),
            samples=value_of(arguments, "rollout", "n_samples_per_prompt"),
            speculation="budget" if planned else "window",
        )
        found = gain_estimate.estimate(rollout, lengths, profile)
    except (ProfileError, PathRefused, CoreMissing, ValueError) as error:
        return GainView(f"It cannot be simulated: {error}.")
    return _view(found, rollout, lengths, profile)


def lengths_for(arguments: Arguments, session: Session, clone_of: Run | None) -> Lengths:
    """Return the response lengths of the cloned run's latest steps, else assumed lengths."""
    longest = value_of(arguments, "rollout", "max_new_tokens") or value_of(arguments, "data", "max_len")
    if clone_of is not None:
        first = max(0, clone_of.step - RECENT_STEPS + 1)
        found = curves(session, clone_of.uid, ["length_median", "length_p95"], first, INT32, RECENT_STEPS)
        medians, p95s = ([value for value in curve.values if value is not None] for curve in found)
        if medians and p95s:
            of = (sum(medians) / len(medians), sum(p95s) / len(p95s))
            return Lengths(*of, longest, f"from the run {clone_of.name}")
    return gain_estimate.assumed_lengths(longest)


def _view(found: Estimate, rollout: Rollout, lengths: Lengths, profile: Profile) -> GainView:
    subject = profile.subject
    part = f"{text.counted(found.engines, 'engine')}, {text.counted(found.prompts, 'prompt')} a step"
    whole = (found.engines, found.prompts) == (rollout.engines, rollout.prompts)
    return GainView(
        ratio=text.ratio(found.ratio),
        without_drafts=text.duration(found.without_seconds),
        with_drafts=text.duration(found.with_seconds),
        facts=(
            ("Step times", f"{subject.hardware}, {subject.dtype} ({profile.origin})"),
            (
                "Response lengths",
                f"{lengths.source}: half up to {text.number(lengths.median, 0)} tokens, 95 % up to "
                f"{text.number(lengths.p95, 0)}",
            ),
            ("Acceptance rate", "as RhymeRL reports it"),
            ("Tokens per sample and step", text.number(found.tokens_per_step)),
            ("Simulated", part if whole else f"{part}: a part of the run"),
        ),
    )
