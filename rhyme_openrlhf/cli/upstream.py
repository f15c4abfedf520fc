"""OpenRLHF's own command line, with our options beside it.

OpenRLHF 0.11.2 builds its parser and checks its arguments inside the `if __name__ == "__main__":` block of
`openrlhf/cli/train_ppo_ray.py`, and ends the block with `train(args)`. We run that very block, from the installed
package, with two names replaced: `argparse.ArgumentParser` by one that adds our options before it parses, and `train`
by one that hands the arguments back. So every flag, default, `--help` text and check is upstream's own.

Invariants: nothing is started or imported beyond what upstream's checks need; `--help` imports no training library.
Contract test: `tests/cli/test_upstream.py`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import os
import shutil
import types
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from rhyme_openrlhf.settings.config import OLD_FLAGS, SETTINGS_CLASSES
from rhyme_openrlhf.settings.options import BAD_INPUT, Parser, add_old_flags, add_options
from rhyme_openrlhf.settings.upstream_ranges import indivisible, not_a_choice, out_of_range

MODULE = "openrlhf.cli.train_ppo_ray"
HELP_ALL = "--help-all"
# Columns of the help at least: each of our flags then has one line.
WIDTH = 120

DESCRIPTION = """\
Train a language model with reinforcement learning (PPO, GRPO, REINFORCE++, RLOO, ...) on OpenRLHF, with rollouts sped
up by their own history. Takes every option of openrlhf.cli.train_ppo_ray 0.11.2, with its name, default and meaning,
and the options of ours that come first. `rhyme train --help-all` says more of each, and shows expert options too.

A first run without a GPU:   rhyme demo
Your OpenRLHF script:        replace openrlhf.cli.train_ppo_ray by rhyme_openrlhf.cli.train_ppo_ray"""


class ArgumentsError(Exception):
    """The arguments do not fit together, or OpenRLHF is not there; the message is one sentence for the user."""


def main_block() -> list[ast.stmt]:
    """Return the statements of upstream's `if __name__ == "__main__":` block.

    Raises ArgumentsError when OpenRLHF is not installed or its module has no such block.
    """
    try:
        spec = importlib.util.find_spec(MODULE)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ArgumentsError("OpenRLHF is not installed: run `rhyme doctor` to see how to install it")
    for statement in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            return statement.body
    raise ArgumentsError(f"{MODULE} has no main block: this is not the OpenRLHF version that is supported (0.11.2)")


class _OneLineEach(argparse.RawDescriptionHelpFormatter):
    """Help in wide lines, with short names for values: `--run.dir DIR`, `--[no-]move.enable`, `--ckpt.path PATH`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=37, width=max(WIDTH, shutil.get_terminal_size().columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return super()._get_default_metavar_for_optional(action).rpartition(".")[2]


class TrainParser(Parser):
    """Upstream's parser; adds our options right before it parses. `arguments` are what it parses."""

    arguments: Sequence[str] = ()

    def __init__(self) -> None:
        """Upstream makes its parser without arguments."""
        super().__init__(
            prog="rhyme train",
            usage="rhyme train [options of ours] [options of OpenRLHF]",
            description=DESCRIPTION,
            formatter_class=_OneLineEach,
            add_help=False,
            # An abbreviated flag could come to mean another one with the next release on either side.
            allow_abbrev=False,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add our options before upstream's in the help, then parse `arguments`."""
        theirs = list(self._action_groups)
        command = self.add_argument_group("Command")
        command.add_argument("-h", "--help", action="help", help="Show our options, one line each, and OpenRLHF's.")
        command.add_argument(HELP_ALL, action="help", help="Show expert options too, and all that is said of each.")
        command.add_argument(
            "--plan",
            nargs="?",
            type=float,
            const=0.0,
            metavar="GIB",
            help="Print the memory plan for GPUs of GIB GiB (default: those here), and start nothing.",
        )
        add_options(self, SETTINGS_CLASSES, brief=HELP_ALL not in self.arguments)
        ours = self._action_groups[len(theirs) :]
        self._action_groups[:] = [*ours, *theirs]
        self._optionals.title = "OpenRLHF's options"
        add_old_flags(self, OLD_FLAGS)
        found = super().parse_args(list(self.arguments), namespace)
        # Before upstream's own checks, which calculate with these numbers.
        given = {f"--{name}": value for name, value in vars(found).items()}
        if sentence := out_of_range(given) or not_a_choice(given):
            self.error(sentence)
        return found

    def error(self, message: str) -> NoReturn:
        """Say where the options are, too: there are 300 of them."""
        self.exit(BAD_INPUT, f"rhyme train: error: {message}\n(rhyme train --help-all shows every option)\n")


class _Parsed(Exception):
    """Upstream's parser is complete; ends the main block there."""


def options() -> list[argparse.Action]:
    """Return every option of upstream's own parser, without ours; default values made of the time keep their `strftime`
    form.

    Raises ArgumentsError when OpenRLHF is not installed.
    """
    actions: list[argparse.Action] = []

    class Collector(argparse.ArgumentParser):
        def __init__(self) -> None:
            super().__init__(add_help=False)

        def parse_args(self, args: Any = None, namespace: Any = None) -> NoReturn:
            actions.extend(self._actions)
            raise _Parsed

    replaced = types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": Collector})
    clock = SimpleNamespace(now=lambda: SimpleNamespace(strftime=lambda form: form))
    names = {"argparse": replaced, "os": os, "datetime": clock, "__name__": "__main__"}
    with contextlib.suppress(_Parsed):
        exec(compile(ast.Module(body=main_block(), type_ignores=[]), MODULE, "exec"), names)
    return actions


def parse(argv: Sequence[str]) -> SimpleNamespace:
    """Parse and check `argv` as upstream does; returns its nested namespace, with ours in it.

    Raises ArgumentsError with upstream's own words when one of its checks fails; exits as argparse does for unknown
    options and `--help`.
    """
    received: list[SimpleNamespace] = []
    parser = type("BoundTrainParser", (TrainParser,), {"arguments": tuple(argv)})
    replaced = types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": parser})
    names = {"argparse": replaced, "os": os, "datetime": datetime, "train": received.append, "__name__": "__main__"}
    block = ast.Module(body=main_block(), type_ignores=[])
    try:
        exec(compile(block, MODULE, "exec"), names)
    except AssertionError as error:
        raise ArgumentsError(str(error) or "a check of OpenRLHF's failed without a message") from error
    except (AttributeError, TypeError) as error:
        # Upstream's checks read options that have no default without asking whether they were given.
        raise ArgumentsError(
            "a required option is missing: give at least --actor.model_name_or_path, --data.prompt_dataset, "
            "--vllm.num_engines and a reward (--reward.remote_url or --reward.model_name_or_path)"
        ) from error
    except ImportError as error:
        raise ArgumentsError(f"--use_ms needs a package that is not installed ({error})") from error
    (args,) = received
    if sentence := indivisible(args):
        raise ArgumentsError(sentence)
    return args
