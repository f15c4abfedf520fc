"""The commands of `rhyme runs`. Each takes a client and parsed arguments, and returns the exit code.

Invariant: with --json, standard output is the server's JSON and nothing else; other messages go to standard error.
Raises ClientError.
"""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from rhyme_openrlhf.cli.console import console
from rhyme_openrlhf.cli.runs import tables, watch
from rhyme_openrlhf.client import Client, ClientError, trackers
from rhyme_openrlhf.client.calls import ALL, ENDED, PAGE
from rhyme_openrlhf.client.models import RunDetail
from rhyme_openrlhf.settings.varied import Range, read_value, read_values
from rhyme_openrlhf.telemetry.wording import without_controls

# The table of a comparison needs none of its curves; this is the least the service gives (api/routes/series.py).
LEAST_POINTS = 4
# A run that was asked to stop ends between two steps; this is beyond the service's own grace time.
WAIT_SECONDS = 1800.0


# Fields of a file for `rhyme runs start --file`.
SPEC_FIELDS = frozenset({"name", "experiment", "notes", "tags", "command", "arguments"})


class UsageError(ClientError):
    """The command line is wrong; the message is one sentence."""


def show(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs show`"""
    run = client.run(client.find(args.run))
    show_answer(args, run, lambda: tables.run_table(run, time.time(), watch.waits_for(client, run)))
    return 0


def start(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs start`"""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if bool(command) == bool(args.file):
        raise UsageError("give either a command behind -- or a file with --file")
    spec: dict[str, Any] = {"command": shlex.join(command)} if command else _read_spec(args.file)
    # Settings of --set take precedence over those of the command or the file.
    for group, values in edits(args.set, []).items():
        spec.setdefault("arguments", {}).setdefault(group, {}).update(values)
    spec |= _described(args)
    if unknown := sorted(set(spec) - SPEC_FIELDS):
        raise UsageError(f"{args.file} has no field {unknown[0]!r}: it may have {', '.join(sorted(SPEC_FIELDS))}")
    return _started(client, args, client.start(**spec, key=args.key or ""))


def sweep(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs sweep`"""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("give the command that all runs have in common behind --")
    started = client.sweep(
        args.name,
        dict(_varied(written) for written in args.vary),
        shlex.join(command),
        count=args.count,
        seed=args.seed,
        tags=args.tag,
        notes=args.notes,
        key=args.key,
    )
    show_answer(args, started, lambda: tables.sweep_table(started))
    if not args.json:
        print(f"{len(started['runs'])} runs; `rhyme runs list --experiment {args.name}` shows them", file=sys.stderr)
    return 0


def _varied(written: str) -> tuple[str, Any]:
    """Return an option and its values of `group.option=V1,V2`, `group.option=LOW..HIGH` or with `log:` before."""
    option, equals, values = written.partition("=")
    if not (equals and values):
        raise UsageError(f"--vary needs GROUP.OPTION=VALUES, got {written!r}")
    try:
        found = read_values(values)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return option, dataclasses.asdict(found) if isinstance(found, Range) else found


def stop(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs stop`"""
    if bool(args.run) == bool(args.experiment):
        raise UsageError("name either a run, or an experiment with --experiment")
    if args.experiment:
        return _stop_experiment(client, args)
    uid = client.find(args.run)
    run = client.stop(uid)
    if args.wait:
        watch.wait_for(client, uid, ENDED, WAIT_SECONDS, _told(args))
        run = client.run(uid)
    show_answer(args, run, lambda: tables.run_table(run, time.time()))
    if args.wait and run["status"] not in ENDED:
        raise ClientError(f"run {uid} is still {run['status']} after {WAIT_SECONDS:.0f} s")
    return 0


def groups(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs groups`"""
    names = args.metric or ("reward", "tokens_per_second")
    found = client.groups(_experiment(client, args.experiment), names, points=args.points if args.json else 0)
    show_answer(args, found, lambda: tables.groups_table(found))
    if found["truncated"]:
        print("older runs of the experiment were left out", file=sys.stderr)
    return 0


def _experiment(client: Client, name: str) -> int:
    """Return the id of an experiment. Raises ClientError."""
    number = next((one["id"] for one in client.experiments() if one["name"] == name), None)
    if number is None:
        raise ClientError(f"there is no experiment {name!r}")
    return number


def _stop_experiment(client: Client, args: argparse.Namespace) -> int:
    stopped = client.stop_experiment(_experiment(client, args.experiment))
    late = []
    if args.wait:
        for run in list(client.runs(experiment=args.experiment, limit=ALL)):
            if watch.wait_for(client, run["uid"], ENDED, WAIT_SECONDS, _told(args)) not in ENDED:
                late.append(run["uid"])
    show_answer(args, stopped, lambda: f"{stopped['runs']} runs were asked to stop")
    if late:
        raise ClientError(f"after {WAIT_SECONDS:.0f} s each, these runs have not ended: {', '.join(late)}")
    return 0


def resume(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs resume`"""
    return _started(client, args, client.resume(client.find(args.run), key=args.key or ""))


def clone(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs clone`"""
    uid = client.find(args.run)
    return _started(client, args, client.clone(uid, edits=edits(args.set, args.unset), **_described(args)))


def edit(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs edit`"""
    uid = client.find(args.run)
    changes = {name: getattr(args, name) for name in ("name", "notes", "experiment")}
    based_on = ""
    if args.tag or args.untag:
        before = client.run(uid)
        based_on = before["etag"]
        changes["tags"] = sorted({*before["tags"], *(args.tag or [])} - {*(args.untag or [])})
    if all(change is None for change in changes.values()):
        raise UsageError("give what to change: --name, --notes, --experiment, --tag or --untag")
    run = client.edit(uid, **changes, based_on=based_on)
    show_answer(args, run, lambda: tables.run_table(run, time.time()))
    return 0


def archive(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs archive`"""
    uid = client.find(args.run)
    run = client.unarchive(uid) if args.undo else client.archive(uid)
    show_answer(args, run, lambda: tables.run_table(run, time.time()))
    return 0


def delete(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs delete`"""
    uid = client.find(args.run)
    if not args.yes:
        raise UsageError(f"this deletes everything that run {uid} reported; add --yes if that is meant")
    client.delete(uid)
    print(json.dumps({"deleted": uid}) if args.json else f"run {uid} is deleted; its run directory stays")
    return 0


def logs(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs logs`"""
    uid = client.find(args.run)
    if not (args.file or args.list):
        watch.show_events(client, uid, args.tail, args.follow, args.json, sys.stdout)
        return 0
    attempt = args.attempt or _newest_attempt(client, uid)
    if args.list:
        files = client.logs(uid, attempt)
        show_answer(args, files, lambda: tables.logs_table(files, time.time()))
        return 0
    watch.show_log(client, uid, attempt, args.file, args.tail, args.follow, args.json, sys.stdout)
    return 0


def compare(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs compare`"""
    uids = [client.find(run) for run in args.run]
    if len(uids) < 2:
        raise UsageError("two runs at least are compared")
    comparison = client.compare(uids, points=args.points if args.json else LEAST_POINTS)
    difference = client.config_difference(uids[0], uids[1]) if len(uids) == 2 else None
    show_answer(args, {"comparison": comparison, "config": difference}, lambda: tables.comparison_table(comparison))
    if difference is not None and not args.json:
        console().print()
        console().print(tables.differences_table(difference, [one["run"]["name"] for one in comparison["runs"]]))
    return 0


def export(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs export`"""
    if args.to:
        if not args.run:
            raise UsageError("--to copies one run: name it")
        copy = trackers.read(client, client.find(args.run))
        where = trackers.TRACKERS[args.to](copy, args.output or "")
        print(f"{copy.name}: {len(copy.steps)} steps copied to {where}")
        return 0
    if args.format == "parquet" and not args.output and sys.stdout.isatty():
        raise UsageError("Parquet is no text: name a file with --output, or lead standard output into one")
    with client.export(client.find(args.run) if args.run else "", args.table, form=args.format) as pieces:
        if not args.output:
            if sys.stdout.isatty():
                # Names and messages of runs may hold control characters; a file or pipe gets the table as it is.
                for text in codecs.iterdecode(pieces, "utf-8", "replace"):
                    sys.stdout.write(without_controls(text))
                return 0
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return 0
        _written(Path(args.output), pieces)
    return 0


def files(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs files`"""
    uid = client.find(args.run)
    attempt = args.attempt or _newest_attempt(client, uid)
    if args.output:
        with client.download(uid, attempt, args.kind) as pieces:
            _written(Path(args.output), pieces)
        return 0
    found = client.files(uid, attempt)
    if args.kind:
        found["files"] = [file for file in found["files"] if file["kind"] in args.kind]
    show_answer(args, found, lambda: tables.files_table(found, time.time()))
    return 0


def tokens(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs tokens`"""
    if args.make:
        issued = client.make_token(args.make, args.role, days=args.days)
        # The secret alone on standard output, so that it goes into a file.
        print(json.dumps(issued, indent=2) if args.json else issued["token"])
        print("it is shown only this once: keep it like a password", file=sys.stderr)
    elif args.revoke:
        client.revoke_token(args.revoke)
        print(f"token {args.revoke} is revoked", file=sys.stderr)
    else:
        found = list(client.tokens(revoked=args.all))
        show_answer(args, found, lambda: tables.tokens_table(found, time.time()))
    return 0


def audit(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs audit`"""
    found = list(client.audit(name=args.name, text=args.text, limit=args.limit))
    show_answer(args, found, lambda: tables.audit_table(found))
    return 0


def _written(target: Path, pieces: Iterable[bytes]) -> None:
    """Write a file, which has its name only once it is whole. Raises ClientError."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
        partial.replace(target)
    except OSError as error:
        raise ClientError(f"{target} cannot be written: {error.strerror}") from None
    print(f"{target}: {target.stat().st_size:,} bytes", file=sys.stderr)


def import_run(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs import`"""
    done = client.import_directory(os.path.abspath(args.directory))
    if args.json:
        print(json.dumps(done, indent=2))
    else:
        there = f", {done['duplicates']:,} were there" if done["duplicates"] else ""
        print(f"run {done['run']}: {done['accepted']:,} events brought in{there}; rhyme runs show {done['run']}")
        if removed := done.get("removed"):
            print(
                f"removed, because neither a directory nor a token of the run vouches for them: attempts "
                f"{', '.join(removed)}; importing their directories brings them back"
            )
    return 0


def edits(assignments: list[str], unset: list[str]) -> dict[str, dict[str, Any]]:
    """`group.option=value` as arguments of a spec; values are JSON where they can be, else text. Raises ClientError."""
    found: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        option, equals, written = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set needs GROUP.OPTION=VALUE, got {assignment!r}")
        _set(found, option, read_value(written))
    for option in unset:
        _set(found, option, None)
    return found


def _set(found: dict[str, dict[str, Any]], option: str, given: Any) -> None:
    group, dot, name = option.removeprefix("--").partition(".")
    if not (group and dot and name):
        raise UsageError(f"an option is GROUP.OPTION, as in vllm.num_engines; got {option!r}")
    found.setdefault(group, {})[name] = given


def _read_spec(path: str) -> dict[str, Any]:
    try:
        spec = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(spec, dict):
        raise UsageError(f"{path} must hold a JSON object, as `rhyme runs show RUN --json` has it in `spec`")
    return spec


def _started(client: Client, args: argparse.Namespace, run: RunDetail) -> int:
    """Show a run that was just asked for, and follow it if wanted."""
    if args.json:
        print(json.dumps(run, indent=2))
    else:
        name = without_controls(run["name"])
        print(f"run {run['uid']} ({name}) is {run['status']}; rhyme runs logs -f {run['uid']}")
    if args.follow:
        watch.show_events(client, run["uid"], PAGE, True, args.json, sys.stdout)
    return 0


def _described(args: argparse.Namespace) -> dict[str, Any]:
    """Return name, experiment, notes and tags, as far as they are given."""
    given = {"name": args.name, "experiment": args.experiment, "notes": args.notes, "tags": args.tag}
    return {name: value for name, value in given.items() if value}


def _newest_attempt(client: Client, uid: str) -> int:
    attempts = client.run(uid)["attempts"]
    if not attempts:
        raise ClientError(f"run {uid} has not been started yet")
    return int(attempts[-1]["number"])


def _told(args: argparse.Namespace) -> Callable[[str], None]:
    return lambda status: None if args.json else print(f"the run is {status}", file=sys.stderr)


def show_answer(args: argparse.Namespace, content: Any, table: Callable[[], RenderableType]) -> None:
    """Print the server's JSON with --json, else the table."""
    if args.json:
        print(json.dumps(content, indent=2))
    else:
        console().print(table())
