"""Make command-line options of a settings dataclass, and a dataclass of options.

Invariants:

- An option exists exactly where a dataclass field declares it with `option()`; its flag is `--<group>.<field>`.
- A value is checked when the dataclass is built, by the command line, the API and tests alike.
- An error names the flag and the allowed range.
- Imports stay within the standard library, so the control plane works on a machine without a training stack.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

OPTION = "option"
BAD_INPUT = 2
# Last words of names of numbers with a unit.
UNITS = ("s", "mb", "gb")
# Below this a name is another word rather than the same one with a slip.
LIKENESS = 0.7
# The time that a comparison takes grows with the square of the length; no name of an option is longer.
LONGEST_NAME = 100
# Kind of an option's text. Code that checks, records or shows the text treats it by its kind.
# - plain: words that name no file and hold no secret
# - secret: for the running process only (`settings/redaction.py`)
# - url: an address; a password in it is a secret
# - model: a model directory, or a model of the hub
# - data: data files, directories or data sets of the hub
# - reward: Python files or addresses of reward servers
# - agent: a Python file
# - output: a directory that is written
# - file: a file that is read
# - profile: a file that is read, or the word auto or none
# - profiles: several of these, with commas between them
# - runs: directories that are read, with commas between them, or the word auto or none
PathKind = Literal["model", "data", "reward", "agent", "output", "file", "profile", "profiles", "runs"]
TextKind = Literal["plain", "secret", "url"] | PathKind
S = TypeVar("S", bound="Settings")


class SettingsError(ValueError):
    """A setting is out of its allowed range; the message names the flag, the range and the value."""


@dataclass(frozen=True)
class Option:
    """Declaration of a field's flag: teaching sentences, and the allowed values (None: any).

    The first sentence says on one line what the flag does. `kind` says what the text names; None where the value is
    no free text. `expert`: few users set the option, so short help and the web form fold it away.
    """

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | None = None
    kind: TextKind | None = None
    expert: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        return self.help.partition(". ")[0].removesuffix(".") + "."

    def allowed(self) -> str:
        """Return the allowed values in words, as errors and `--help` show them."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"from {shown_number(self.low)} to {shown_number(self.high)}"
        if self.low is not None:
            return f"at least {shown_number(self.low)}"
        return "any value"


def shown_number(number: float) -> str:
    """Return a number as a person writes it: whole ones with all their digits, without an exponent."""
    return f"{number:.0f}" if number == int(number) else f"{number:g}"


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    kind: TextKind | None = None,
    expert: bool = False,
) -> Any:
    """Return a dataclass field that is also a command-line option.

    Raises TypeError for a free text without `kind`, and for a `kind` of anything else.
    """
    is_free_text = isinstance(default, str) and choices is None
    if is_free_text and kind is None:
        raise TypeError(f"an option that takes any text needs a kind, because it may name a path or a secret: {help}")
    if kind is not None and not is_free_text:
        raise TypeError(f"only an option that takes any text has a kind, not this one: {help}")
    return dataclasses.field(default=default, metadata={OPTION: Option(help, low, high, choices, kind, expert)})


@dataclass(frozen=True)
class Settings:
    """Base of every settings dataclass: checks each field's type and range when built.

    Subclasses set `group` (the flag prefix) and `title` (one line for `--help`), and may override `check` for rules
    that tie two fields together.
    """

    group: ClassVar[str]
    title: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_field(field, getattr(self, field.name))
        self.check()

    def check(self) -> None:
        """Rules that tie fields together. Raises SettingsError."""

    @classmethod
    def flag(cls, field_name: str) -> str:
        """Return the command-line flag of a field, e.g. `--histospec.window_max`."""
        return f"--{cls.group}.{field_name}"

    def _check_field(self, field: dataclasses.Field[Any], value: Any) -> None:
        rule: Option = field.metadata[OPTION]
        expected = type(field.default)
        # An int is a fine float; a bool is never a fine int.
        fits = isinstance(value, (int, float)) if expected is float else isinstance(value, expected)
        if not fits or (isinstance(value, bool) and expected is not bool):
            raise SettingsError(f"{self.flag(field.name)} must be {expected.__name__}, got {value!r}")
        if rule.choices and value not in rule.choices:
            raise SettingsError(f"{self.flag(field.name)} must be {rule.allowed()}, got {value!r}")
        too_low = rule.low is not None and value < rule.low
        too_high = rule.high is not None and value > rule.high
        if too_low or too_high:
            raise SettingsError(f"{self.flag(field.name)} must be {rule.allowed()}, got {value!r}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with the known name that is nearest to `given`, or "" where none is near.

    The only option whose last part was given is the nearest one: `--serve.port` for `--port`.
    """
    names = list(known)
    near = [name for name in names if given.startswith("--") and name.endswith(f".{given[2:]}")]
    if len(near) != 1:
        near = difflib.get_close_matches(given[:LONGEST_NAME], names, n=1, cutoff=LIKENESS)
    return f" (did you mean {near[0]}?)" if near else ""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, which names the nearest option or command where one is unknown."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, or exit with BAD_INPUT."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = (word.partition("=")[0] for word in unknown if word.startswith("-"))
            hint = next(filter(None, (did_you_mean(flag, _flags(self)) for flag in flags)), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        """Exit with one sentence instead of the usage, which may have 300 options."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield every option of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)


def add_options(parser: argparse.ArgumentParser, classes: Iterable[type[Settings]], brief: bool = False) -> None:
    """Add every option of `classes` to `parser`, one titled argument group per class.

    `brief`: the help shows one sentence a flag, and leaves expert options out.
    """
    for cls in classes:
        group = parser.add_argument_group(f"{cls.title.removesuffix('.')} (--{cls.group}.*)")
        for field in dataclasses.fields(cls):
            rule: Option = field.metadata[OPTION]
            keywords: dict[str, Any] = {"default": field.default, "help": _help(rule, field.default, brief)}
            if isinstance(field.default, bool):
                keywords["action"] = argparse.BooleanOptionalAction
            else:
                keywords["type"] = type(field.default)
                keywords["choices"] = rule.choices
                keywords["metavar"] = _placeholder(field)
            group.add_argument(cls.flag(field.name), **keywords)


def add_old_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Let `parser` take flags of an earlier version, with a value each, and print what to do instead.

    `flags`: a sentence for each flag. Help shows none of the flags.
    """
    hidden: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag, sentence in flags.items():
        parser.add_argument(flag, action=_Ignored, sentence=sentence, **hidden)


class _Ignored(argparse.Action):
    """Prints what to do instead of an old flag."""

    def __init__(self, sentence: str, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._sentence = sentence

    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, _values: Any, flag: str | None = None) -> None:
        print(f"{parser.prog}: {flag} is ignored: {self._sentence}", file=sys.stderr)


def _placeholder(field: dataclasses.Field[Any]) -> str:
    """Return what help shows for a value: DIR of `dir`, GB of `memory_gb`, N of a number without a unit."""
    word = field.name.rpartition("_")[2]
    return word.upper() if isinstance(field.default, str) or word in UNITS else "N"


def _help(rule: Option, default: Any, brief: bool) -> str:
    if brief and rule.expert:
        return argparse.SUPPRESS
    parts = [rule.summary if brief else rule.help]
    if not brief and (rule.low is not None or rule.choices):
        parts.append(f"Allowed: {rule.allowed()}.")
    if isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = shown_number(default) if isinstance(default, float) else str(default) or "none"
    parts.append(f"Default: {shown}.")
    return " ".join(parts).replace("%", "%%")


def from_mapping(cls: type[S], values: Mapping[str, Any]) -> S:
    """Build `cls` from a flat mapping of field names; unknown names raise SettingsError."""
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise SettingsError(f"--{cls.group}.{unknown[0]} is no option{hint}; there are: {', '.join(sorted(known))}")
    return cls(**values)
