"""Conversion of a spec to a command line and back: for pasted commands, and for the command of a job.

Invariant: for checked arguments, `from_argv(to_argv(arguments)) == arguments`, and OpenRLHF's own parser reads the same
values from `to_argv(arguments)`.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Annotated, Any, NoReturn

from pydantic import Field

from rhyme_openrlhf.api.launch.schema import TypedOption, by_flag, options
from rhyme_openrlhf.api.launch.spec import MAX_FAULTS, NAME_PATTERN, Arguments, Fault, SpecError
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.embedded.demo import demo_arguments
from rhyme_openrlhf.platform import nvidia
from rhyme_openrlhf.settings.config import OLD_FLAGS
from rhyme_openrlhf.settings.options import did_you_mean

TRAIN_MODULES = ("openrlhf.cli.train_ppo_ray", "rhyme_openrlhf.cli.train_ppo_ray")
# Far above any real command; the time of shlex is proportional to the length.
MAX_COMMAND = 100_000
Command = Annotated[str, Field(min_length=1, max_length=MAX_COMMAND, pattern=NO_NUL)]
COMMANDS = "'rhyme train ...', 'rhyme demo ...' or 'python -m openrlhf.cli.train_ppo_ray ...'"


def to_argv(arguments: Arguments) -> list[str]:
    """Return the options of `rhyme train` for checked `arguments`."""
    argv: list[str] = []
    for group, values in arguments.items():
        for name, value in values.items():
            argv.extend(_words(options()[group, name], value))
    return argv


def to_command(name: str, arguments: Arguments) -> str:
    """Return the command for a shell."""
    return shlex.join(["rhyme", "train", "--run.name", name, *to_argv(arguments)])


def from_command(command: str) -> tuple[str | None, Arguments]:
    """Return name (None if not given) and arguments of a pasted command; only their types are checked.

    Raises SpecError.
    """
    if len(command) > MAX_COMMAND:
        raise SpecError([Fault("command", f"must have at most {MAX_COMMAND} characters")])
    try:
        # shlex would keep the newline of a continued line as a word.
        words = shlex.split(command.replace("\\\r\n", " ").replace("\\\n", " "))
    except ValueError as error:
        raise SpecError([Fault("command", f"cannot be parsed as a shell command: {error}")]) from error
    return from_argv(_options_of(words))


def demo_argv() -> list[str]:
    """Return the demo's options, placed on the GPUs of the service's machine, as `rhyme demo` does there.

    A remote cluster is not asked: it may be away, and options that fit the GPUs of one machine run on more GPUs too.
    """
    return demo_arguments(len(nvidia.read().gpus))


def from_argv(argv: Sequence[str]) -> tuple[str | None, Arguments]:
    """Return name (None if not given) and arguments from options of `rhyme train`, old ones too. Raises SpecError."""
    found, unknown = _parser().parse_known_args(list(argv))
    faults = [_unknown(word) for word in unknown[:MAX_FAULTS]]
    name = None
    arguments: Arguments = {}
    for flag, text in vars(found).items():
        if flag in OLD_FLAGS:
            group, _, option_name = flag.removeprefix("--").partition(".")
            arguments.setdefault(group, {})[option_name] = text
            continue
        option = by_flag()[flag]
        if option.flag == "--run.name":
            name = text
            if not re.fullmatch(NAME_PATTERN, text):
                faults.append(Fault("name", "must be a short name of letters, digits, '.', '_' and '-'"))
            continue
        try:
            arguments.setdefault(option.group, {})[option.name] = _value(option, text)
        except ValueError:
            faults.append(Fault(option.field, f"must be {option.allowed}", option.allowed))
    if faults:
        raise SpecError(faults)
    return name, arguments


def _unknown(word: str) -> Fault:
    flag = word.partition("=")[0]
    hint = did_you_mean(flag, by_flag()) if flag.startswith("-") else ""
    return Fault("command", f"there is no option {word[:100]!r}{hint}")


def _words(option: TypedOption, value: Any) -> Iterator[str]:
    if option.type == "bool":
        flag = option.flag if value else option.off_flag
        # A switch that is off and has no flag for that is left out.
        if flag:
            yield flag
    elif option.items is None:
        # With "=", a text that begins with "-" is still a value.
        yield f"{option.flag}={value!r}" if option.type == "float" else f"{option.flag}={value}"
    else:
        yield option.flag
        yield from (_item(option, item) for item in value)


def _item(option: TypedOption, item: Any) -> str:
    # Written without an exponent, because argparse takes "-1e-05" for an option.
    return format(Decimal(repr(item)), "f") if option.type == "float" else str(item)


def _value(option: TypedOption, text: Any) -> Any:
    """Convert the text of an option to its value. Raises ValueError."""
    if isinstance(text, list):
        return [_one(option, item) for item in text]
    return text if option.type == "bool" else _one(option, text)


def _one(option: TypedOption, text: str) -> Any:
    if option.type == "int":
        return int(text)
    return float(text) if option.type == "float" else text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SpecError([Fault("command", message)])


def _parser() -> _Parser:
    """Return a parser that accepts every option as text, so that all errors are found instead of the first only."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, usage="")
    for option in options().values():
        if option.type == "bool":
            parser.add_argument(option.flag, dest=option.flag, action="store_true")
            if option.off_flag:
                parser.add_argument(option.off_flag, dest=option.flag, action="store_false")
        elif option.items is None:
            parser.add_argument(option.flag, dest=option.flag)
        else:
            least, most = option.items
            counts: int | str = least if least == most else "+" if least else "*"
            parser.add_argument(option.flag, dest=option.flag, nargs=counts)
    for flag in OLD_FLAGS:
        parser.add_argument(flag, dest=flag)
    return parser


def _options_of(words: list[str]) -> list[str]:
    """Return the words after the program's name, preceded by the demo's own options for the demo.

    Raises SpecError for another program.
    """
    if words[:3] == ["ray", "job", "submit"] and "--" in words:
        words = words[words.index("--") + 1 :]
    program = PurePosixPath(words[0]).name if words else ""
    if program == "rhyme" and words[1:2] == ["train"]:
        return words[2:]
    if program == "rhyme" and words[1:2] == ["demo"]:
        return [*demo_argv(), *words[2:]]
    if program.startswith("python") and words[1:2] == ["-m"] and words[2:3] and words[2] in TRAIN_MODULES:
        return words[3:]
    raise SpecError([Fault("command", f"must begin with {COMMANDS}")])
