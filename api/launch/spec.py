"""The specification of a run, checked field by field before anything starts.

A spec is a name and `arguments`: {group: {option: value}}, with the options of OpenRLHF and ours from `schema.py`.

Invariants:

- `check` finds all faults at once, each with its field and the allowed values.
- A valid spec names no path outside the service's roots, no secret, and no option that the service sets itself.
- Missing options keep their default in the version that runs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from rhyme_openrlhf.api.launch import spec_paths
from rhyme_openrlhf.api.launch.schema import TypedOption, options, replaced
from rhyme_openrlhf.api.store.json_values import check_json
from rhyme_openrlhf.run.resources import Share, required_gpus, shares
from rhyme_openrlhf.settings.config import SETTINGS_CLASSES
from rhyme_openrlhf.settings.options import SettingsError, did_you_mean, from_mapping

Arguments = dict[str, dict[str, Any]]

# The name becomes a part of directory names and is printed in terminals.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
EXAMPLE: Arguments = {
    "actor": {"model_name_or_path": "Qwen/Qwen3-4B", "adam.lr": 1e-6},
    "data": {"prompt_dataset": "openai/gsm8k", "input_key": "question"},
    "reward": {"remote_url": "/srv/rewards/gsm8k.py"},
    "vllm": {"num_engines": 4},
    "histospec": {"window_max": 32},
}
# Arguments in a request.
Given = Annotated[
    Arguments,
    AfterValidator(check_json),
    Field(description="Options by group and name; GET /api/v1/schema lists them.", examples=[EXAMPLE]),
]
# Estimators whose baseline comes from the prompt's other samples (openrlhf/cli/train_ppo_ray.py, after its parser).
_GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
# Most faults in a list; a spec with more is a wrong file.
MAX_FAULTS = 100


@dataclass(frozen=True)
class Fault:
    """A fault of one field: "arguments.actor.adam.lr", one sentence, and the allowed values in words or ""."""

    field: str
    message: str
    allowed: str = ""


class SpecError(ValueError):
    """An invalid spec; `faults` has the reasons, field by field."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(f"{fault.field}: {fault.message}" for fault in faults))
        self.faults = list(faults)


class RunSpec(BaseModel):
    """A run as requested."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        default="run",
        pattern=NAME_PATTERN,
        description="Short name: letters, digits, '.', '_' and '-'.",
        examples=["grpo-gsm8k"],
    )
    experiment: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = Field(
        default=None, description="Name of its experiment, which is created if new."
    )
    notes: str = Field(default="", max_length=20_000)
    tags: list[Annotated[str, StringConstraints(min_length=1, max_length=100)]] = Field(
        default_factory=list, max_length=50
    )
    arguments: Arguments = Field(
        default_factory=dict,
        description="Options by group and name, as GET /api/v1/schema lists them; missing options have their default.",
        examples=[EXAMPLE],
    )


def check(arguments: Mapping[str, Any], roots: Sequence[Path], resumes: bool = False) -> Arguments:
    """Return `arguments` in normal form, without old options. Raises SpecError with all faults.

    `resumes`: they are those of a run that goes on (`spec_paths.checked`).
    """
    faults: list[Fault] = []
    normal: Arguments = {}
    for group, values in arguments.items():
        for name, value in values.items():
            if len(faults) == MAX_FAULTS:
                raise SpecError(faults)
            if replaced(group, name):
                continue
            option = options().get((group, name))
            if option is None:
                faults.append(_unknown(group, name))
                continue
            fault = _fault(option, value, roots, resumes)
            if fault is not None:
                faults.append(fault)
            elif not _says_nothing(option, value):
                normal.setdefault(group, {})[name] = normal_value(option, value)
    if faults:
        raise SpecError(faults[:MAX_FAULTS])
    check_tied(normal)
    return normal


def check_tied(arguments: Arguments) -> None:
    """Check what ties several options together; each option alone is in normal form. Raises SpecError."""
    if faults := [*_tied(arguments), *_needed(arguments)]:
        raise SpecError(faults[:MAX_FAULTS])


def resolved(arguments: Arguments, roots: Sequence[Path], resumes: bool = False) -> Arguments:
    """Return checked `arguments` with all symbolic links in paths resolved, so that no link can be changed later.

    `resumes` has the same meaning as in `check`.
    """

    def one(option: TypedOption, value: Any) -> Any:
        return spec_paths.checked(option, value, roots, resumes) if option.path else value

    return {
        group: {name: one(options()[group, name], value) for name, value in values.items()}
        for group, values in arguments.items()
    }


def merged(base: Arguments, edits: Mapping[str, Mapping[str, Any]]) -> Arguments:
    """Return `base` with `edits` applied; an edit of None resets an option to its default."""
    result = {group: dict(values) for group, values in base.items()}
    for group, values in edits.items():
        for name, value in values.items():
            if value is None:
                result.get(group, {}).pop(name, None)
            else:
                result.setdefault(group, {})[name] = value
    return {group: values for group, values in result.items() if values}


def value_of(arguments: Arguments, group: str, name: str) -> Any:
    """Return an option's value, its default if it is not given."""
    return arguments.get(group, {}).get(name, options()[group, name].default)


def gpus_needed(arguments: Arguments) -> int:
    """Return the GPUs that a run of checked `arguments` requests from Ray."""
    return required_gpus(upstream_arguments(arguments))


def gpu_shares(arguments: Arguments) -> list[Share]:
    """Return how the models of a run of checked `arguments` share these GPUs."""
    return shares(upstream_arguments(arguments))


def _unknown(group: str, name: str) -> Fault:
    known = sorted(other for at, other in options() if at == group)
    # A client may send a key of any length.
    named = f"{group[:100]}.{name[:100]}"
    field = f"arguments.{named}"
    hint = did_you_mean(named, map(".".join, options()))
    if not known:
        groups = sorted({at for at, _ in options()})
        return Fault(field, f"there is no such group of options{hint}; the groups are: {', '.join(groups)}")
    return Fault(field, f"there is no such option{hint}; the group has: {', '.join(known)}")


def _fault(option: TypedOption, value: Any, roots: Sequence[Path], resumes: bool) -> Fault | None:
    if option.refused:
        return Fault(option.field, f"cannot be given: {option.refused}")
    wrong = option.check(value)
    if wrong is None and option.path:
        try:
            spec_paths.checked(option, value, roots, resumes)
        except spec_paths.PathRefused as error:
            wrong = str(error)
    return Fault(option.field, wrong, option.allowed) if wrong else None


def _says_nothing(option: TypedOption, value: Any) -> bool:
    """Return True for a switch of upstream that is off and cannot be switched off."""
    return option.type == "bool" and value is False and option.off_flag is None


def normal_value(option: TypedOption, value: Any) -> Any:
    """Return a checked value in normal form: whole numbers of a float option become floats."""
    if option.type != "float":
        return value
    return [float(item) for item in value] if isinstance(value, list) else float(value)


def _tied(arguments: Arguments) -> list[Fault]:
    """Return the faults of our options that depend on several options."""
    faults = []
    for cls in SETTINGS_CLASSES:
        try:
            from_mapping(cls, arguments.get(cls.group, {}))
        except SettingsError as error:
            named = re.search(rf"--{cls.group}\.(\w+)", str(error))
            field = f"arguments.{cls.group}.{named[1]}" if named else f"arguments.{cls.group}"
            faults.append(Fault(field, str(error)))
    return faults


def _needed(arguments: Arguments) -> list[Fault]:
    """Return the faults that upstream would only report after the job has started, if they can be found now."""
    args = upstream_arguments(arguments)
    faults = []
    for field, given in {
        "arguments.actor.model_name_or_path": args.actor.model_name_or_path,
        "arguments.data.prompt_dataset": args.data.prompt_dataset,
    }.items():
        if not given:
            faults.append(Fault(field, "is required"))
    if not args.vllm.num_engines or args.vllm.num_engines < 1:
        faults.append(Fault("arguments.vllm.num_engines", "must be at least 1: engines generate the rollouts"))
    if not (args.reward.remote_url or args.reward.model_name_or_path or args.train.agent_func_path):
        message = "a reward is required: set this option, reward.model_name_or_path or train.agent_func_path"
        faults.append(Fault("arguments.reward.remote_url", message))
    estimator = args.algo.advantage.estimator
    if estimator in _GROUP_ESTIMATORS and args.rollout.n_samples_per_prompt < 2:
        message = f"must be at least 2 with algo.advantage.estimator {estimator}"
        faults.append(Fault("arguments.rollout.n_samples_per_prompt", message))
    if args.train.partial_rollout_enable and not args.train.async_enable:
        faults.append(Fault("arguments.train.partial_rollout_enable", "requires train.async_enable"))
    return faults


def upstream_arguments(arguments: Arguments) -> SimpleNamespace:
    """Return upstream's nested arguments with defaults and derived values, as far as they affect GPUs."""
    args = _copied(_defaults())
    for group, values in arguments.items():
        for name, value in values.items():
            *path, last = name.split(".")
            setattr(functools.reduce(getattr, path, getattr(args, group)), last, value)
    if args.train.agent_func_path:
        args.reward.remote_url = "agent"
    if args.algo.advantage.estimator != "gae":
        args.critic.model_name_or_path = None
    elif args.critic.model_name_or_path is None:
        args.critic.model_name_or_path = args.actor.model_name_or_path
    return args


@functools.cache
def _defaults() -> SimpleNamespace:
    args = SimpleNamespace()
    for (group, name), option in options().items():
        node = args
        *path, last = group, *name.split(".")
        for part in path:
            node = vars(node).setdefault(part, SimpleNamespace())
        setattr(node, last, option.default)
    return args


def _copied(node: SimpleNamespace) -> SimpleNamespace:
    """Return a copy with namespaces of its own; their values are shared, and never changed."""
    values = vars(node).items()
    return SimpleNamespace(**{name: _copied(at) if isinstance(at, SimpleNamespace) else at for name, at in values})
