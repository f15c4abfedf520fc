"""The schema of a run's options, OpenRLHF's and ours, with types. The API and the web form are made from it.

OpenRLHF's options come from `settings/upstream_options.json`, written by scripts/write_upstream_schema.py, because
importing upstream's parser requires torch. Ours come from the settings dataclasses. Invariant: an option has exactly
one (group, name), and its flag is `--<group>.<name>`. Two of upstream's options have no group; they cannot be set.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, computed_field

import rhyme_openrlhf
from rhyme_openrlhf.settings.config import OLD_FLAGS, SETTINGS_CLASSES
from rhyme_openrlhf.settings.options import OPTION, Option, PathKind, TextKind
from rhyme_openrlhf.settings.upstream_kinds import UPSTREAM_KINDS

UPSTREAM_FILE = Path(rhyme_openrlhf.__file__).parent / "settings/upstream_options.json"

ValueType = Literal["bool", "int", "float", "str"]
_PATH_KINDS: tuple[PathKind, ...] = get_args(PathKind)
# Longer than any option's value; --data.input_template is the longest.
MAX_TEXT = 10_000
MAX_ITEMS = 1_000
# The largest integer that a database and a browser's JSON hold exactly.
MAX_INTEGER = 2**53

_TYPE_OF_JSON: dict[str, ValueType] = {"boolean": "bool", "integer": "int", "number": "float", "string": "str"}
_TYPE_OF_PYTHON: dict[type, ValueType] = {bool: "bool", int: "int", float: "float", str: "str"}
TYPE_WORDS: dict[str, str] = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}

# Options that a spec may not set, and the reason. The service sets those of the first kind itself.
_SERVER = "the service sets it"
_SECRET = "a spec is stored and shown, so it must not contain a secret"
_REFUSED = {
    "--run.dir": _SERVER,
    "--run.name": "the spec's name sets it",
    "--openrlhf.local_rank": "it is for launchers that start one process per GPU; here Ray starts them",
    "--openrlhf.use_ms": "it downloads models and data from another hub, whose code would run unchecked",
}
_REFUSED_GROUPS = {"control": _SERVER}

# Upstream also accepts the name of a kernel repository here, and then runs code from the hub.
_FEWER_CHOICES = {"--ds.attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3")}
# Upstream's parser accepts any number. With lower values, its runs end in a traceback, and GPUs cannot be counted.
_MODELS = ("actor", "critic", "ref", "reward")
_LOWEST = {
    **{f"--{model}.num_nodes": 0 for model in _MODELS},
    **{f"--{model}.num_gpus_per_node": 0 for model in _MODELS},
    "--vllm.num_engines": 1,
    "--vllm.tensor_parallel_size": 1,
    "--rollout.batch_size": 1,
    "--rollout.n_samples_per_prompt": 1,
    "--rollout.micro_batch_size": 1,
    "--train.batch_size": 1,
    "--train.micro_batch_size": 1,
    "--train.num_episodes": 1,
}


class TypedOption(BaseModel):
    """An option of a run, as the API and the form show it. `kind`: the meaning of a text; None if it is no free text.

    `off_flag`: the flag that switches a bool off.
    """

    model_config = ConfigDict(frozen=True)

    source: str = Field(description="openrlhf or rhyme.")
    group: str
    name: str
    flag: str
    type: ValueType = Field(description="bool, int, float or str; with `items`, the type of each value.")
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    low: float | None = None
    high: float | None = None
    items: tuple[int, int | None] | None = Field(
        default=None, description="Least and most values of a list; null for one value."
    )
    off_flag: str | None = None
    kind: TextKind | None = Field(default=None, exclude=True)
    refused: str = Field(default="", description="Reason why a spec may not set it; empty if it may.")
    expert: bool = Field(default=False, description="True if few users set it: forms fold it away.")

    @computed_field(description="Kind of file or directory that it names; null if none.")  # type: ignore[prop-decorator]
    @property
    def path(self) -> PathKind | None:
        """The kind of file or directory that the option names, or None."""
        return self.kind if self.kind in _PATH_KINDS else None

    @property
    def field(self) -> str:
        """The option's place in a spec, as errors name it."""
        return f"arguments.{self.group}.{self.name}"

    @computed_field(description="The allowed values in words.")  # type: ignore[prop-decorator]
    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.type in ("int", "float") and (self.low is not None or self.high is not None):
            return f"{TYPE_WORDS[self.type]} {Option('', self.low, self.high).allowed()}"
        one = f"one of {', '.join(self.choices)}" if self.choices else TYPE_WORDS[self.type]
        if self.items is None:
            return one
        least, most = self.items
        count = f"{least}" if least == most else f"at least {least}"
        return f"a list of {count} values, each {one}"

    def check(self, value: Any) -> str | None:
        """Return the error of `value` in one clause, or None."""
        if self.items is None:
            return self._check_one(value)
        least, most = self.items
        if not isinstance(value, list) or not least <= len(value) <= (MAX_ITEMS if most is None else most):
            return f"must be {self.allowed}"
        return next(filter(None, map(self._check_one, value)), None)

    def _check_one(self, value: Any) -> str | None:
        if not _fits(value, self.type):
            return f"must be {self.allowed}"
        if isinstance(value, str):
            if len(value) > MAX_TEXT or "\0" in value or _has_surrogates(value):
                return f"must be at most {MAX_TEXT} characters of valid text"
            if self.items is not None and value.startswith("-"):
                return "must not begin with '-', which begins an option on a command line"
        if self.choices and value not in self.choices:
            return f"must be {self.allowed}"
        if self.low is not None and value < self.low or self.high is not None and value > self.high:
            return f"must be {self.allowed}"
        return None


def _fits(value: Any, wanted: ValueType) -> bool:
    if wanted == "bool" or isinstance(value, bool):
        return wanted == "bool" and isinstance(value, bool)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return False
    if wanted == "int":
        return isinstance(value, int)
    if wanted == "float":
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, str)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


@functools.cache
def options() -> dict[tuple[str, str], TypedOption]:
    """Return every option by (group, name), upstream's first, in the order of its parser."""
    found = {(option.group, option.name): option for option in (*_upstream(), *_ours())}
    return found


@functools.cache
def by_flag() -> dict[str, TypedOption]:
    """Return every option by its flags."""
    flags = {option.flag: option for option in options().values()}
    return flags | {option.off_flag: option for option in options().values() if option.off_flag}


def replaced(group: str, name: str) -> str:
    """Return what to do instead of an option of the version before this one; "" for every other name.

    Specs and commands may have such an option, and nothing reads it.
    """
    return OLD_FLAGS.get(f"--{group}.{name}", "")


def upstream_version() -> str:
    """Return the OpenRLHF version of the schema."""
    return str(json.loads(UPSTREAM_FILE.read_text())["x-openrlhf-version"])


def _upstream() -> list[TypedOption]:
    found = []
    for group, content in json.loads(UPSTREAM_FILE.read_text())["properties"].items():
        for name, said in content["properties"].items():
            item = said.get("items", said)
            many = (said.get("minItems", 0), said.get("maxItems")) if said["type"] == "array" else None
            flag = said["x-flag"]
            choices = _FEWER_CHOICES.get(flag) or (tuple(item["enum"]) if "enum" in item else None)
            found.append(
                TypedOption(
                    source="openrlhf",
                    group=group,
                    name=name,
                    flag=flag,
                    type=_TYPE_OF_JSON[item["type"]],
                    default=said["default"],
                    help=said["description"],
                    choices=choices,
                    low=_LOWEST.get(flag),
                    items=many,
                    off_flag=said.get("x-off-flag"),
                    kind=UPSTREAM_KINDS.get(flag),
                    refused=_refused(group, name, UPSTREAM_KINDS.get(flag)),
                )
            )
    return found


def _ours() -> list[TypedOption]:
    found = []
    for cls in SETTINGS_CLASSES:
        for field in dataclasses.fields(cls):
            rule: Option = field.metadata[OPTION]
            kind = _TYPE_OF_PYTHON[type(field.default)]
            found.append(
                TypedOption(
                    source="rhyme",
                    group=cls.group,
                    name=field.name,
                    flag=cls.flag(field.name),
                    type=kind,
                    default=field.default,
                    help=rule.help,
                    choices=rule.choices,
                    low=rule.low,
                    high=rule.high,
                    off_flag=f"--no-{cls.group}.{field.name}" if kind == "bool" else None,
                    kind=rule.kind,
                    refused=_refused(cls.group, field.name, rule.kind),
                    expert=rule.expert,
                )
            )
    return found


def _refused(group: str, name: str, kind: TextKind | None) -> str:
    if kind == "secret":
        return _SECRET
    return _REFUSED_GROUPS.get(group) or _REFUSED.get(f"--{group}.{name}", "")
