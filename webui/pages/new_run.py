"""The page `/runs/new`: choose the settings of a run, check them, start it.

The form is filled from a template, from a run to clone, or from a pasted command. The API's own check
(`api/launch/spec.py`) validates the form at every change. The panel beside the form lists every error, else the
command, the GPUs and the estimates. It also lists the differences to the template or the cloned run.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from pydantic import Field
from sqlalchemy import select

from rhyme_openrlhf.api.access.launching import LaunchingDep
from rhyme_openrlhf.api.http.problems import FieldError, ProblemError
from rhyme_openrlhf.api.launch import actions as launches
from rhyme_openrlhf.api.launch.actions import LaunchConflict, Launching
from rhyme_openrlhf.api.launch.earlier_runs import with_directories
from rhyme_openrlhf.api.launch.fit import Gpus, lack, proposals
from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable
from rhyme_openrlhf.api.launch.schema import options, replaced
from rhyme_openrlhf.api.launch.spec import (
    NAME_PATTERN,
    Arguments,
    Fault,
    Given,
    SpecError,
    check,
    gpu_shares,
    gpus_needed,
    merged,
    value_of,
)
from rhyme_openrlhf.api.launch.spec_command import Command, from_command, to_argv, to_command
from rhyme_openrlhf.api.launch.sweep import MOST_OPTIONS, Draws, DrawSeed, WrittenValues, configurations
from rhyme_openrlhf.api.read.runs import names_around
from rhyme_openrlhf.api.store.bounds import Body, UidText
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import NAME_LENGTH, Experiment
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.webui.new_run.estimates import NO_SHAPE, earlier_runs, gain, lengths_for, memory, shapes_of
from rhyme_openrlhf.webui.new_run.form import differences, run_form
from rhyme_openrlhf.webui.new_run.templates import templates
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep
from rhyme_openrlhf.webui.site import text

router = APIRouter(include_in_schema=False)
# Random bytes of an idempotency key, enough to make each page's key unique.
KEY_BYTES = 16
# Most experiment names that the field offers.
EXPERIMENTS = 200
DEFAULT_TEMPLATE = "demo"


class Asked(Body):
    """The form's values that are not at their default, and the run from which they were cloned.

    `options`, `count` and `seed` make it a sweep, as in `POST /api/v1/sweeps`.
    """

    arguments: Given = {}
    options: Annotated[dict[str, WrittenValues], Field(max_length=MOST_OPTIONS)] = {}
    count: Draws | None = None
    seed: DrawSeed = 0
    clone: UidText | None = None

    def checked(self, roots: Sequence[Path]) -> list[Arguments]:
        """Return the checked arguments of each run. Raises SpecError."""
        if not self.options:
            return [check(self.arguments, roots)]
        return [one.arguments for one in configurations(self.arguments, self.options, self.count, self.seed, roots)]


class Typed(Asked):
    """The form's content, and the template it started from."""

    name: Annotated[str, Field(max_length=NAME_LENGTH)] = ""
    template: Annotated[str, Field(max_length=50)] = ""


class Pasted(Body):
    """A command to fill the form from."""

    command: Command


@dataclass(frozen=True)
class Filled:
    """The initial content of the form, and a notice about it.

    `template`, `clone`: its starting point, both "" after a pasted command. `base`: keys of the options that a cloned
    run sets.
    """

    name: str
    arguments: Arguments
    experiment: str = ""
    notice: str = ""
    template: str = ""
    clone: str = ""
    base: tuple[str, ...] = ()


@router.get("/runs/new")
def new_run_page(
    page: PageDep,
    launching: LaunchingDep,
    template: Annotated[str, Query(max_length=50)] = DEFAULT_TEMPLATE,
    clone: UidText | None = None,
) -> HTMLResponse:
    """Render the form, filled from a template or from a run."""
    _for_operators(page)
    known = templates(launching.roots)
    if clone is not None:
        filled = _from_run(page, clone)
    else:
        chosen = known.get(template)
        if chosen is None:
            raise ProblemError(404, f"there is no template of this name; choose one of: {', '.join(known)}")
        filled = Filled(chosen.name, chosen.arguments, notice=chosen.needs, template=template)
    with page.service.database.reading() as session:
        experiments = list(session.scalars(select(Experiment.name).order_by(Experiment.name).limit(EXPERIMENTS)))
    return page.render(
        "new_run.html",
        templates=list(known.values()),
        chosen="" if clone else template,
        experiments=experiments,
        key=secrets.token_hex(KEY_BYTES),
        **_form(filled, launching),
        **_panel(Typed(name=filled.name, arguments=filled.arguments), launching),
        differences=(),
    )


@router.post("/ui/new-run/form")
def filled_form(page: PageDep, body: Pasted, launching: LaunchingDep) -> HTMLResponse:
    """Render the form, filled from a pasted command; unknown options and invalid values respond 422."""
    _for_operators(page)
    try:
        name, arguments = from_command(body.command)
    except SpecError as error:
        errors = [FieldError(field=f"body.{fault.field}", message=fault.message) for fault in error.faults]
        raise ProblemError(422, "the command is not valid; correct the options below", errors=errors) from error
    kept, notice = _settable(arguments)
    filled = Filled(name or "run", kept, notice=notice)
    return page.render("parts/new_run_form.html", **_form(filled, launching))


@router.post("/ui/new-run/estimate")
def estimates(page: PageDep, body: Asked, launching: LaunchingDep) -> HTMLResponse:
    """Render what would make the form's run, or a sweep's first, fit; and the simulated gain of drafts."""
    _for_operators(page)
    try:
        arguments = body.checked(launching.roots)[0]
    except SpecError as error:
        errors = [FieldError(field=f"body.{fault.field}", message=fault.message) for fault in error.faults]
        raise ProblemError(422, "estimates need a form without errors", errors=errors) from error
    with page.service.database.reading() as session:
        lengths = lengths_for(arguments, session, find_run(session, body.clone) if body.clone else None)
        earlier = earlier_runs(arguments, session, launching.runs_directory)
    gpus = Gpus(_gpus_there(launching), nvidia.smallest_memory(nvidia.read()))
    shapes = shapes_of(arguments)
    return page.render(
        "parts/new_run_estimates.html",
        lack=lack(arguments, shapes, gpus),
        proposals=proposals(arguments, shapes, gpus),
        gain=gain(arguments, lengths, launching.roots),
        earlier=earlier,
    )


@router.post("/ui/new-run/panel")
def checked_panel(page: PageDep, body: Typed, launching: LaunchingDep) -> HTMLResponse:
    """Render the errors of the form, or the command and the GPUs if there are none; and what it changes."""
    _for_operators(page)
    base = _base(page, body, launching)
    return page.render(
        "parts/new_run_panel.html",
        **_panel(body, launching),
        differences=() if base is None else differences(base, body.arguments),
        start_point="cloned run" if body.clone else "template",
    )


def _base(page: Page, body: Typed, launching: Launching) -> Arguments | None:
    """Return the options of the form's starting point; None if it has none."""
    if body.clone is not None:
        return _from_run(page, body.clone).arguments
    template = templates(launching.roots).get(body.template)
    return None if template is None else template.arguments


def _gpus_there(launching: Launching) -> int | None:
    """Return the cluster's GPUs; None without a cluster, or if it does not respond."""
    if launching.launcher is None:
        return None
    try:
        return launching.launcher.gpus()
    except ClusterUnreachable:
        return None


def _for_operators(page: Page) -> None:
    if not page.may_act:
        raise ProblemError(403, "a viewer may not start runs; sign in with an operator's token")


def _from_run(page: Page, uid: str) -> Filled:
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        experiment, _ = names_around(session, run)
        try:
            arguments = launches.arguments_of(run)
        except (LaunchConflict, SpecError) as error:
            raise ProblemError(409, f"this run cannot be cloned: {error}") from error
        name = launches.clone_name(session, run)
    base = tuple(f"{group}.{option}" for group, values in arguments.items() for option in values)
    notice = ""
    places = {"path", "output_dir"} & set(arguments.get("ckpt", {}))
    if places:
        kept = {option: value for option, value in arguments["ckpt"].items() if option not in places}
        arguments = {**arguments, "ckpt": kept}
        notice = "This run writes its checkpoints to a folder of its own, not to that of the cloned run."
    return Filled(name, arguments, experiment or "", notice, clone=uid, base=base)


def _settable(arguments: Arguments) -> tuple[Arguments, str]:
    """Return the arguments that a spec may set, and sentences about the others."""
    kept: Arguments = {}
    dropped, said = [], []
    for group, values in arguments.items():
        for name, value in values.items():
            if instead := replaced(group, name):
                said.append(f"--{group}.{name} is ignored: {instead}")
            elif options()[group, name].refused:
                dropped.append(options()[group, name].flag)
            else:
                kept.setdefault(group, {})[name] = value
    if dropped:
        flags = ", ".join(dropped)
        said.append(f"Left out, because the service sets these options itself or does not allow them: {flags}")
    return kept, " ".join(said)


def _form(filled: Filled, launching: Launching) -> dict[str, Any]:
    return {
        "filled": filled,
        "form": run_form(filled.arguments),
        "roots": [str(root) for root in launching.roots],
    }


def _panel(form: Typed, launching: Launching) -> dict[str, Any]:
    faults: list[Fault] = []
    if not re.fullmatch(NAME_PATTERN, form.name):
        faults.append(Fault("name", "must be a short name of letters, digits, '.', '_' and '-'"))
    runs: list[Arguments] = []
    try:
        runs = form.checked(launching.roots)
    except SpecError as error:
        faults += error.faults
    return {
        "faults": _shown(faults),
        "command": "" if faults else _command(form, with_directories(runs[0], launching.runs_directory)),
        "plan": None if faults else _plan(runs[0]),
        "runs": len(runs),
        "is_sweep": bool(form.options),
        "why_not": "" if launching.launcher is not None else launching.why_not,
    }


def _command(form: Typed, first: Arguments) -> str:
    """Return the command for a shell; `first`: the arguments of the only run, or of a sweep's first."""
    if not form.options:
        return to_command(form.name, first)
    shared = merged(first, {})
    for key in form.options:
        group, _, name = key.partition(".")
        shared.get(group, {}).pop(name, None)
    words = ["rhyme", "runs", "sweep", "--name", form.name]
    words += [word for key, values in form.options.items() for word in ("--vary", f"{key}={values}")]
    if form.count is not None:
        words += ["--count", str(form.count), "--seed", str(form.seed)]
    return shlex.join([*words, "--", "rhyme", "train", *to_argv(shared)])


def _shown(faults: Sequence[Fault]) -> list[dict[str, str]]:
    """Return each fault with the key of its field ("" if it has none) and its flag or name."""
    found = []
    for fault in faults:
        key = fault.field.removeprefix("arguments.").removeprefix("options.")
        group, _, name = key.partition(".")
        option = options().get((group, name))
        place = "options" if fault.field.startswith("options.") else key
        has_field = option is not None or place in ("name", "options", "count")
        found.append(
            {"key": place if has_field else "", "title": option.flag if option else key, "message": fault.message}
        )
    return found


def _plan(arguments: Arguments) -> dict[str, Any]:
    """Describe the layout of the run in words; `arguments` are checked."""
    shapes = shapes_of(arguments)
    samples = value_of(arguments, "rollout", "batch_size") * value_of(arguments, "rollout", "n_samples_per_prompt")
    engines, parallel = value_of(arguments, "vllm", "num_engines"), value_of(arguments, "vllm", "tensor_parallel_size")
    updates = -(-samples // value_of(arguments, "train", "batch_size")) * value_of(arguments, "train", "max_epochs")
    return {
        "gpus": gpus_needed(arguments),
        "shares": [(_models(share.models, engines, parallel), share.gpus) for share in gpu_shares(arguments)],
        "facts": [
            ("Samples per step", text.number(samples)),
            ("Samples per engine", text.number(samples / engines)),
            ("Optimizer steps per step", text.number(updates)),
        ],
        "memory": None if shapes is None else memory(arguments, shapes),
        "no_memory": NO_SHAPE,
    }


def _models(models: Sequence[str], engines: int, parallel: int) -> str:
    words = []
    for model in models:
        word = model
        if model == "engines":
            word = text.counted(engines, "engine") + (f" of {parallel} GPUs" if parallel > 1 else "")
        words.append(word)
    return " + ".join(words) + (" in turns" if len(models) > 1 else "")
