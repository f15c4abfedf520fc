"""A spec as a command line and back: what people paste, and what a job runs.

Invariant: for checked arguments, `from_argv(to_argv(arguments)) == arguments`, and OpenRLHF's own parser reads the
same values out of `to_argv(arguments)`.
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
# Far above any real command; shlex takes time in proportion.
MAX_COMMAND = 100_000
Command = Annotated[str, Field(min_length=1, max_length=MAX_COMMAND, pattern=NO_NUL)]
COMMANDS = "'rhyme train ...', 'rhyme demo ...' or 'python -m openrlhf.cli.train_ppo_ray ...'"


def to_argv(arguments: Arguments) -> list[str]:
    """The options of `rhyme train` that say the same as checked `arguments`."""
    argv: list[str] = []
    for group, values in arguments.items():
        for name, value in values.items():
            argv.extend(_words(options()[group, name], value))
    return argv


def to_command(name: str, arguments: Arguments) -> str:
    """The command for a shell."""
    return shlex.join(["rhyme", "train", "--run.name", name, *to_argv(arguments)])


def from_command(command: str) -> tuple[str | None, Arguments]:
    """Name (None: not given) and arguments of a pasted command. Not checked beyond their types.

    Raises SpecError.
    """
    if len(command) > MAX_COMMAND:
        raise SpecError([Fault("command", f"must have at most {MAX_COMMAND} characters")])
    try:
        # shlex keeps the newline of a continued line as a word of its own.
        words = shlex.split(command.replace("\\\r\n", " ").replace("\\\n", " "))
    except ValueError as error:
        raise SpecError([Fault("command", f"cannot be read as a shell would: {error}")]) from error
    return from_argv(_options_of(words))


def demo_argv() -> list[str]:
    """Return the demo's options, placed on the GPUs of the service's machine, as `rhyme demo` does there.

    A cluster elsewhere is not asked: it may be away, and what fits the GPUs of one machine runs on more of them too.
    """
    return demo_arguments(len(nvidia.read().gpus))


def from_argv(argv: Sequence[str]) -> tuple[str | None, Arguments]:
    """Name (None: not given) and arguments of the options of `rhyme train`, old ones too. Raises SpecError."""
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
            faults.append(Fault(option.field, f"must be {option.allowed()}", option.allowed()))
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
        # A switch that is off and has no other flag is not said at all.
        if flag:
            yield flag
    elif option.items is None:
        # With "=" also a text that begins with "-" is a value.
        yield f"{option.flag}={value!r}" if option.type == "float" else f"{option.flag}={value}"
    else:
        yield option.flag
        yield from (_item(option, item) for item in value)


def _item(option: TypedOption, item: Any) -> str:
    # Without an exponent: argparse takes "-1e-05" for an option.
    return format(Decimal(repr(item)), "f") if option.type == "float" else str(item)


def _value(option: TypedOption, text: Any) -> Any:
    """Raises ValueError."""
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
    """Takes every option as text, so that all that is wrong is found, and not the first only."""
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
    """What follows the program's name; for the demo its own options first. Raises SpecError for another program."""
    if words[:3] == ["ray", "job", "submit"] and "--" in words:
        words = words[words.index("--") + 1 :]
    program = PurePosixPath(words[0]).name if words else ""
    if program == "rhyme" and words[1:2] == ["train"]:
        return words[2:]
    if program == "rhyme" and words[1:2] == ["demo"]:
        return [*demo_argv(), *words[2:]]
    if program.startswith("python") and words[1:2] == ["-m"] and words[2:3] and words[2] in TRAIN_MODULES:
        return words[3:]
    raise SpecError([Fault("command", f"must be {COMMANDS}, and nothing before it")])
