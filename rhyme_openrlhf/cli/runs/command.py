"""`rhyme runs`: the commands of the control plane's client, and their options."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rhyme_openrlhf.cli.runs import actions, views
from rhyme_openrlhf.cli.runs.actions import UsageError
from rhyme_openrlhf.client import AccessError, Client, ClientError, UnreachableError, access, exchange
from rhyme_openrlhf.client.trackers import TRACKERS
from rhyme_openrlhf.settings.options import Parser
from rhyme_openrlhf.telemetry.wording import without_controls

if TYPE_CHECKING:
    from rhyme_openrlhf.api.settings import ServeSettings

INTERRUPTED_CODE = 130
REFUSED, BAD_INPUT, UNREACHABLE, NO_ACCESS = 1, 2, 3, 4
# Of a token's name (api/store/models.py).
NAME_LENGTH = 200

EPILOG = """\
a first time:
  rhyme serve --local                          start a control plane here (prints a sign-in link)
  rhyme runs login                             paste the link, or press Enter where the service is on this machine
  rhyme runs start -- rhyme demo               start a run there
  rhyme runs logs -f last                      watch it

A RUN is its id, the beginning of the id, its name, or `last` for the newest one.

where to: --server, else RHYME_CONTROL_URL, else the address last signed in to, else http://127.0.0.1:8420
token:    --token-file, else RHYME_CONTROL_TOKEN, else what `rhyme runs login` kept for that address

exit codes: 0 done, 1 refused (unknown run, wrong status, bad values), 2 wrong usage,
            3 no control plane answers, 4 the token is missing or refused"""

Action = Callable[[Client, argparse.Namespace], int]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each command's `action` is in its defaults."""
    parser = Parser(
        prog="rhyme runs",
        description="Start, see and stop runs on a control plane (rhyme serve).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _list(commands)
    _views(commands)
    one = add_command(commands, "show", actions.show, "everything about one run", "rhyme runs show last")
    _run(one)
    _start(commands)
    _sweep(commands)
    stopping = add_command(
        commands,
        "stop",
        actions.stop,
        "end a run after its current step, with a checkpoint",
        "rhyme runs stop last --wait\n  rhyme runs stop --experiment lr",
    )
    stopping.add_argument("run", nargs="?", metavar="RUN", help="id, beginning of the id, name, or 'last'")
    stopping.add_argument("--experiment", metavar="NAME", help="all its runs that have not ended, such as a sweep's")
    stopping.add_argument("--wait", action="store_true", help="return when it has ended")
    resuming = add_command(
        commands, "resume", actions.resume, "go on with a run from its last checkpoint", "rhyme runs resume math-7b -f"
    )
    _run(resuming)
    resuming.add_argument("--key", metavar="KEY", help="the same key again resumes it only once (scripts)")
    _follow(resuming)
    _clone(commands)
    _edit(commands)
    _logs(commands)
    comparing = add_command(
        commands, "compare", actions.compare, "figures of runs side by side", "rhyme runs compare baseline last"
    )
    comparing.add_argument("run", nargs="+", metavar="RUN", help="2 to 8 runs; ratios are to the first")
    comparing.add_argument("--points", type=int, default=500, metavar="N", help="with --json: points of each curve")
    grouping = add_command(
        commands,
        "groups",
        actions.groups,
        "an experiment's runs that are equal but for their seed, with mean and standard deviation over the seeds",
        "rhyme runs groups lr\n  rhyme runs groups lr --metric reward --metric policy_loss",
    )
    grouping.add_argument("experiment", metavar="EXPERIMENT", help="its name")
    grouping.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="of these (repeat; default: reward and tokens_per_second)",
    )
    grouping.add_argument("--points", type=int, default=0, metavar="N", help="with --json: points of each mean curve")
    _files(commands)
    _export(commands)
    importing = add_command(
        commands,
        "import",
        actions.import_run,
        "bring in a run directory that lies on the control plane's machine",
        "rhyme runs import runs/20261121-math-7b",
    )
    importing.add_argument("directory", metavar="RUN_DIRECTORY", help="its path there")
    _access(commands)
    keeping = add_command(
        commands,
        "login",
        None,
        "keep an access token for an address",
        "rhyme runs login\n  rhyme runs login https://rhyme.example.org < token-file",
    )
    keeping.add_argument("address", nargs="?", default="", metavar="URL", help="then it asks for the token alone")
    return parser


def main(argv: list[str]) -> int:
    """Run one command; its exit code."""
    args = build_parser().parse_args(argv)
    return perform(args, "rhyme runs")


def perform(args: argparse.Namespace, command: str) -> int:
    """Run the action of parsed arguments of `command`; its exit code."""
    try:
        if args.action is None:
            return login(args.address)
        with Client(args.server, token_file=args.token_file) as client:
            return int(args.action(client, args))
    except ClientError as error:
        print(f"{command}: {without_controls(' '.join(str(error).split()))}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED_CODE


def exit_code(error: ClientError) -> int:
    """Return the exit code of an error."""
    kinds = ((UsageError, BAD_INPUT), (AccessError, NO_ACCESS), (UnreachableError, UNREACHABLE))
    return next((code for kind, code in kinds if isinstance(error, kind)), REFUSED)


def login(address: str) -> int:
    """Ask for a sign-in link, or for the token of `address`, and keep a token once the server has said that it is one.

    The code of a link is exchanged for a token. Where nothing is given and the database of this machine's service can
    be written, the code comes from there. Raises AccessError, ClientError.
    """
    if access.split_link(address)[1]:
        # Other users of this machine see it there, and the shell keeps it.
        raise UsageError("give no token on the command line: `rhyme runs login` asks for the link")
    local = _local_settings(address)
    asked = f"access token for {address}" if address else "link that `rhyme serve` printed"
    if local is not None:
        asked += " (nothing: a token from the database of this machine's service)"
    given = (getpass.getpass(f"{asked}: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    found, secret = access.split_link(given)
    if not secret:
        found, secret = "", given
    if not secret and local is not None:
        found, secret = _local_code(local)
    signed_in = access.Access(access.checked_url(found or address), access.checked_token(secret))
    if secret.startswith(access.CODE_START):
        signed_in = exchange(signed_in.url, secret, f"rhyme runs on {socket.gethostname()}"[:NAME_LENGTH])
    with Client(signed_in.url, signed_in.token) as client:
        who = client.whoami()
    path = access.keep(signed_in, os.environ)
    name = without_controls(who["name"])
    print(f"signed in to {signed_in.url} as {name} ({who['role']}); kept in {path}")
    return 0


def _local_settings(address: str) -> ServeSettings | None:
    """Return the settings of this machine's service if its database may be written and `address` is its own, or ""."""
    try:
        from rhyme_openrlhf.api.access.local_link import kept_address, store_file
        from rhyme_openrlhf.api.settings import ServeSettings
    except ModuleNotFoundError:  # an environment without the `server` extra
        return None
    settings = ServeSettings()
    file = store_file(settings)
    if (
        file is None
        or not os.access(file, os.R_OK | os.W_OK)
        or address.rstrip("/") not in ("", kept_address(settings))
    ):
        return None
    return settings


def _local_code(settings: ServeSettings) -> tuple[str, str]:
    """Return address and code of this machine's service, from its database. Raises AccessError."""
    from rhyme_openrlhf.api.access.local_link import kept_address, new_code
    from rhyme_openrlhf.api.store.database import DatabaseError

    url = kept_address(settings)
    print(f"no link was given: making a token for {url} from the database in {settings.data_path()}")
    try:
        return url, new_code(settings)
    except DatabaseError as error:
        raise AccessError(str(error)) from error


def add_command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    action: Action | None,
    help: str,
    example: str,
) -> argparse.ArgumentParser:
    """Add a command with the options that all of them have."""
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the server's JSON instead of a table")
    parser.add_argument("--server", default="", metavar="URL", help="address of the control plane")
    parser.add_argument("--token-file", default="", metavar="FILE", help="file with the access token")
    parser.set_defaults(action=action)
    return parser


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="id, beginning of the id, name, or 'last'")


def _follow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="show what it does until it ends")


def _list(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "list",
        views.list_runs,
        "the runs, newest first",
        "rhyme runs list --filter 'reward > 0.5 and config.actor.adam.lr = 1e-6' --sort metric.policy_loss\n"
        "  rhyme runs list --view good",
    )
    parser.add_argument("--view", metavar="NAME", help="as this saved view; options given beside it come first")
    views.add_list_options(parser)
    parser.add_argument("--limit", type=count, default=50, metavar="N", help="at most this many (default: 50)")


def _views(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "views", help="saved views of the list", description="Filters, order and columns of the list under a name."
    )
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    add_command(kinds, "list", views.list_views, "your views, and those for everyone", "rhyme runs views list")
    saving = add_command(
        kinds,
        "save",
        views.save,
        "save what `rhyme runs list` shows with these options",
        "rhyme runs views save good --filter 'reward > 0.5' --column config.actor.adam.lr --sort reward --everyone",
    )
    saving.add_argument("name", metavar="NAME", help="of the view")
    views.add_list_options(saving)
    saving.add_argument("--everyone", action="store_true", help="for everyone (operators)")
    saving.add_argument("--replace", action="store_true", help="replace a view of this name")
    renaming = add_command(
        kinds, "rename", views.rename, "give a view another name", "rhyme runs views rename good better"
    )
    renaming.add_argument("name", metavar="NAME", help="of the view")
    renaming.add_argument("new_name", metavar="NEW_NAME", help="its new name")
    removing = add_command(kinds, "delete", views.delete, "delete a view", "rhyme runs views delete good")
    removing.add_argument("name", metavar="NAME", help="of the view")


def _start(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "start",
        actions.start,
        "start a run there, from a command or a file",
        "rhyme runs start --name trial -f -- rhyme demo --train.num_episodes 2\n  rhyme runs start --file spec.json",
    )
    parser.add_argument("--file", metavar="FILE", help="JSON with name and arguments by group ('-': standard input)")
    _described(parser)
    _set(parser)
    parser.add_argument("--key", metavar="KEY", help="the same key again starts no second run (scripts)")
    _follow(parser)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command line, as you have it"
    )


def _sweep(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "sweep",
        actions.sweep,
        "start runs that differ in some options, as one experiment",
        "rhyme runs sweep --name lr --vary actor.adam.lr=1e-6,3e-6 --vary train.seed=1,2,3 -- rhyme demo\n"
        "  rhyme runs sweep --name lr --vary actor.adam.lr=log:1e-7..1e-5 --count 20 -- rhyme demo",
    )
    parser.add_argument("--name", required=True, help="of the experiment; its runs are called by it and a number")
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="GROUP.OPTION=VALUES",
        help="values V1,V2,... of an option; with --count also a range LOW..HIGH or log:LOW..HIGH (repeat for several)",
    )
    parser.add_argument("--count", type=count, metavar="N", help="N random draws; without it every combination")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random draws (default: 0)")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="of all runs (repeat for several)")
    parser.add_argument("--notes", default="", metavar="TEXT", help="of all its runs")
    parser.add_argument("--key", default="", metavar="KEY", help="the same key again starts it only once (scripts)")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what all of them have in common"
    )


def _clone(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "clone",
        actions.clone,
        "start a run with another one's settings, some of them changed",
        "rhyme runs clone last --name wide --set histospec.window_max=64 --unset actor.adam.lr",
    )
    _run(parser)
    _described(parser)
    _set(parser)
    parser.add_argument(
        "--unset", action="append", default=[], metavar="GROUP.OPTION", help="back to the default (repeat for several)"
    )
    _follow(parser)


def _edit(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "edit",
        actions.edit,
        "change a run's name, notes, tags or experiment",
        "rhyme runs edit last --tag baseline --notes 'window of 32'\n  rhyme runs edit last --experiment ''",
    )
    _run(parser)
    parser.add_argument("--name", metavar="NAME", help="the new name")
    parser.add_argument("--notes", metavar="TEXT", help="the new notes")
    parser.add_argument("--experiment", metavar="NAME", help="an existing experiment, or '' for none")
    parser.add_argument("--tag", action="append", metavar="TAG", help="add a tag (repeat for several)")
    parser.add_argument("--untag", action="append", metavar="TAG", help="remove a tag (repeat for several)")
    hiding = add_command(
        commands, "archive", actions.archive, "hide a run from the list, or show it again", "rhyme runs archive last"
    )
    _run(hiding)
    hiding.add_argument("--undo", action="store_true", help="show it in the list again")
    removing = add_command(
        commands,
        "delete",
        actions.delete,
        "delete an archived run with everything it reported; its run directory stays",
        "rhyme runs delete trial --yes",
    )
    _run(removing)
    removing.add_argument("--yes", action="store_true", help="delete it without asking")


def _described(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", metavar="NAME", help="short name of the run")
    parser.add_argument("--experiment", metavar="NAME", help="the experiment it belongs to")
    parser.add_argument("--tag", action="append", metavar="TAG", help="a word to find it by (repeat for several)")
    parser.add_argument("--notes", metavar="TEXT", help="what it is for")


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="GROUP.OPTION=VALUE",
        help="change a setting; lists are JSON (repeat for several)",
    )


def _logs(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "logs",
        actions.logs,
        "what a run does, as `rhyme train` prints it; or one of its log files",
        "rhyme runs logs -f last\n  rhyme runs logs last --list\n  rhyme runs logs last --file driver.log --tail 50",
    )
    _run(parser)
    _follow(parser)
    parser.add_argument("--tail", type=count, default=200, metavar="N", help="begin with the last N lines (200)")
    parser.add_argument("--list", action="store_true", help="which log files there are")
    parser.add_argument(
        "--file",
        metavar="NAME",
        help="show this log file; its control characters, also colours, are written out as in \\x1b[31m, in a file or "
        "pipe too, and --json has them as they are",
    )
    parser.add_argument("--attempt", type=count, metavar="N", help="of this attempt (default: the newest)")


def _files(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "files",
        actions.files,
        "the files of a run with their sizes; or an archive of them",
        "rhyme runs files last\n  rhyme runs files last --output run.tar.gz\n"
        "  rhyme runs files last --kind checkpoints --output checkpoints.tar.gz",
    )
    _run(parser)
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        choices=("record", "logs", "samples", "history", "checkpoints"),
        help="only these (repeat for several); an archive has record, logs and samples by default",
    )
    parser.add_argument("--output", metavar="FILE", help="write an archive (.tar.gz) of the files")
    parser.add_argument("--attempt", type=count, metavar="N", help="of this attempt (default: the newest)")


def _export(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "export",
        actions.export,
        "a table as CSV, JSON or Parquet, or a run as a copy in MLflow or W&B",
        "rhyme runs export > runs.csv\n  rhyme runs export last --table steps --format parquet --output steps.parquet\n"
        "  rhyme runs export last --to mlflow --output http://127.0.0.1:5000\n"
        "  rhyme runs export last --to wandb-offline --output copies",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run; without one: the table of all runs")
    parser.add_argument("--table", default="steps", choices=("steps", "metrics", "intervals", "engine_steps", "moves"))
    parser.add_argument("--format", default="csv", choices=("csv", "json", "parquet"))
    parser.add_argument(
        "--to", choices=tuple(TRACKERS), help="copy the whole run with that project's own client, installed here"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="default: standard output; with --to mlflow its tracking URI, with --to wandb-offline a folder",
    )


def _access(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "tokens",
        actions.tokens,
        "the access tokens; or make or revoke one",
        "rhyme runs tokens\n  rhyme runs tokens --make grafana --role viewer --days 90\n  rhyme runs tokens --revoke 7",
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--make", metavar="NAME", help="make a token; it is printed once")
    one.add_argument("--revoke", type=count, metavar="ID", help="end a token, and the browser sessions that it opened")
    one.add_argument("--all", action="store_true", help="show revoked and expired tokens too")
    parser.add_argument("--role", default="viewer", choices=("viewer", "operator", "reporter"), help="of a new token")
    parser.add_argument("--days", type=float, metavar="N", help="a new token works for so long (default: no end)")
    parser = add_command(
        commands,
        "audit",
        actions.audit,
        "what was done, by whom, when, and from where",
        "rhyme runs audit\n  rhyme runs audit --name grafana\n  rhyme runs audit --text 'delete a run'",
    )
    parser.add_argument("--name", default="", metavar="TOKEN", help="only by the holder of this token")
    parser.add_argument("--text", default="", metavar="TEXT", help="only with this text in action or target")
    parser.add_argument("--limit", type=count, default=50, metavar="N", help="the newest N (default: 50)")


def count(text: str) -> int:
    """Return a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
