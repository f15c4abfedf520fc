"""The form of a new run: every option of `api/launch/schema.py`, grouped, with its value. Pure.

Invariants: every option that a spec may set is in the form exactly once, so a new option appears without a change here.
An empty field leaves its option at the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rhyme_openrlhf.api.launch.schema import TypedOption, options
from rhyme_openrlhf.api.launch.spec import Arguments
from rhyme_openrlhf.settings.features import GOALS, Feature
from rhyme_openrlhf.webui.new_run.option_words import explained
from rhyme_openrlhf.webui.site.text import written

Kind = Literal["switch", "choice", "line", "block"]

# Options that most runs set, in the order in which users think of them.
ESSENTIALS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Model, data and reward",
        (
            "--actor.model_name_or_path",
            "--data.prompt_dataset",
            "--data.input_key",
            "--data.label_key",
            "--data.apply_chat_template",
            "--reward.remote_url",
            "--reward.model_name_or_path",
            "--train.agent_func_path",
        ),
    ),
    (
        "Rollout",
        (
            "--rollout.batch_size",
            "--rollout.n_samples_per_prompt",
            "--rollout.max_new_tokens",
            "--data.max_len",
            "--rollout.temperature",
        ),
    ),
    (
        "Training",
        (
            "--algo.advantage.estimator",
            "--algo.kl.init_coef",
            "--actor.adam.lr",
            "--train.batch_size",
            "--train.num_episodes",
            "--train.seed",
        ),
    ),
    (
        "Machines",
        (
            "--actor.num_nodes",
            "--actor.num_gpus_per_node",
            "--vllm.num_engines",
            "--vllm.tensor_parallel_size",
            "--vllm.gpu_memory_utilization",
        ),
    ),
)
_TITLES = {
    "rollout": "Rollout",
    "vllm": "Engines (vLLM)",
    "data": "Data",
    "train": "Training",
    "algo": "Algorithm",
    "actor": "Policy model",
    "critic": "Critic",
    "ref": "Reference model",
    "reward": "Reward",
    "ds": "Memory and speed of the trainer (DeepSpeed)",
    "eval": "Evaluation",
    "ckpt": "Checkpoints",
    "logger": "Logging",
    "dispatch": "Which engine each prompt goes to",
    "engine": "Size of an engine",
    "latency": "Step times (latency model)",
    "emulate": "Emulation",
    "limits": "Limits",
    "telemetry": "Telemetry",
    "run": "Run record",
    "weights": "Weights from trainer to engines",
    "cpu": "Without a GPU",
}
# Options whose value may contain line breaks.
_BLOCKS = ("--data.input_template",)


@dataclass(frozen=True)
class Field:
    """One option as a field of the form.

    `text`: its value as typed, "" for the default. `on`, `off` and `is_on` belong to switches.
    """

    option: TypedOption
    kind: Kind
    text: str
    default: str
    help: str
    changed: bool
    on: Any = True
    off: Any = False
    is_on: bool = False

    @property
    def key(self) -> str:
        """The option's name in the API's errors without the prefix; unique in the form."""
        return f"{self.option.group}.{self.option.name}"


@dataclass(frozen=True)
class Section:
    """Fields under one heading; `name` is unique in the form."""

    name: str
    title: str
    fields: tuple[Field, ...]

    @property
    def changed(self) -> int:
        """Number of fields that are not at their default."""
        return sum(field.changed for field in self.fields)


@dataclass(frozen=True)
class FeatureView:
    """A feature as the form shows it."""

    name: str
    title: str
    sentence: str
    switch: Field
    settings: tuple[Field, ...]


@dataclass(frozen=True)
class GoalView:
    """A goal of a user, with the features that serve it."""

    title: str
    features: tuple[FeatureView, ...]


@dataclass(frozen=True)
class RunForm:
    """The whole form."""

    essentials: tuple[Section, ...]
    goals: tuple[GoalView, ...]
    more: tuple[Section, ...]

    def fields(self) -> Iterator[Field]:
        """Yield every field in the order of the page."""
        for section in self.essentials:
            yield from section.fields
        for goal in self.goals:
            for feature in goal.features:
                yield feature.switch
                yield from feature.settings
        for section in self.more:
            yield from section.fields


def run_form(arguments: Arguments) -> RunForm:
    """Return the form filled with these arguments.

    Arguments without an option are not shown, because the caller has checked them.
    """
    left = {option.flag: option for option in options().values() if not option.refused}

    def take(flags: Sequence[str]) -> tuple[Field, ...]:
        return tuple(_field(left.pop(flag), arguments) for flag in flags if flag in left)

    def switch(feature: Feature) -> Field:
        return _switch(left.pop(feature.flag), arguments)

    # A feature's switch may lie in a group that another feature folds away: take all switches first.
    switches = {feature.flag: switch(feature) for goal in GOALS for feature in goal.features}

    def view(feature: Feature) -> FeatureView:
        in_groups = (flag for flag, option in list(left.items()) if option.group in feature.groups)
        name = feature.flag.removeprefix("--").replace(".", "-")
        settings = take([*feature.flags, *in_groups])
        return FeatureView(name, feature.name, feature.sentence, switches[feature.flag], settings)

    goals = [GoalView(goal.name, tuple(view(feature) for feature in goal.features)) for goal in GOALS]
    essentials = [Section(f"essential-{i}", title, take(flags)) for i, (title, flags) in enumerate(ESSENTIALS)]
    known = list(_TITLES)
    groups = sorted({option.group for option in left.values()}, key=lambda name: _place(known, name))
    more = [
        Section(name, _TITLES.get(name, name.capitalize()), take([f for f, o in list(left.items()) if o.group == name]))
        for name in groups
    ]
    return RunForm(tuple(essentials), tuple(goals), tuple(more))


def _place(known: Sequence[str], name: str) -> tuple[int, str]:
    return (known.index(name) if name in known else len(known)), name


def _field(option: TypedOption, arguments: Mapping[str, Mapping[str, Any]]) -> Field:
    if option.type == "bool":
        return _switch(option, arguments)
    value = arguments.get(option.group, {}).get(option.name, option.default)
    changed = value != option.default
    kind: Kind = "choice" if option.choices and option.items is None else "line"
    if option.flag in _BLOCKS:
        kind = "block"
    text = written(value) if changed else ""
    return Field(option, kind, text, written(option.default), explained(option), changed)


def _switch(option: TypedOption, arguments: Mapping[str, Mapping[str, Any]]) -> Field:
    value = arguments.get(option.group, {}).get(option.name, option.default)
    default = "on" if option.default else "off"
    return Field(option, "switch", "", default, explained(option), value != option.default, is_on=bool(value))


UNSET = "not set"


@dataclass(frozen=True)
class Difference:
    """An option with another value than at the starting point; `key` is its field's."""

    key: str
    was: str
    now: str


def differences(
    base: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Mapping[str, Any]]
) -> tuple[Difference, ...]:
    """Return the options that differ, in the schema's order; an option that is not given has its default."""
    found = []
    for (group, name), option in options().items():
        was = base.get(group, {}).get(name, option.default)
        now = arguments.get(group, {}).get(name, option.default)
        # A list is a tuple where it is a default.
        if (list(was) if isinstance(was, tuple) else was) != (list(now) if isinstance(now, tuple) else now):
            found.append(Difference(f"{group}.{name}", written(was) or UNSET, written(now) or UNSET))
    return tuple(found)
