"""The commands of `rhyme runs`. Each takes a client and parsed arguments, and returns the exit code.

Invariant: with --json, standard output is the server's JSON and nothing else; other messages go to standard error.
Raises ClientError.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from rhyme_openrlhf.cli.console import console
from rhyme_openrlhf.cli.runs import tables, watch
from rhyme_openrlhf.cli.runs.client import PAGE, Client, ClientError
from rhyme_openrlhf.settings.control import UID_DIGITS
from rhyme_openrlhf.telemetry.wording import without_controls

BAD_INPUT = 2
NEWEST = "last"
# The table of a comparison needs none of its curves; this is the least the service gives (api/routes/series.py).
LEAST_POINTS = 4
# A run that was asked to stop ends between two steps; this is beyond the service's own grace time.
WAIT_SECONDS = 1800.0


def list_runs(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs list`"""
    params: dict[str, Any] = {"sort": args.sort, "direction": "asc" if args.ascending else "desc"}
    for name in ("status", "tag", "experiment", "text"):
        if getattr(args, name):
            params[name] = getattr(args, name)
    if args.archived:
        params["archived"] = "all"
    runs = list(client.pages("/runs", params, args.limit))
    _show(args, runs, lambda: tables.runs_table(runs, time.time()))
    if not runs and not args.json:
        print("there are no such runs; `rhyme runs start --help` shows how to start one", file=sys.stderr)
    return 0


def show(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs show`"""
    run = client.get(f"/runs/{find(client, args.run)}")
    _show(args, run, lambda: tables.run_table(run, time.time()))
    return 0


def start(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs start`"""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if bool(command) == bool(args.file):
        raise ClientError("give either a command behind -- or a file with --file", BAD_INPUT)
    body: dict[str, Any] = {"command": shlex.join(command)} if command else _read_spec(args.file)
    for name in ("name", "experiment", "notes"):
        if getattr(args, name):
            body[name] = getattr(args, name)
    if args.tag:
        body["tags"] = args.tag
    if args.set:
        # Over those of the command, or of the file.
        for group, values in edits(args.set, []).items():
            body.setdefault("arguments", {}).setdefault(group, {}).update(values)
    run = client.post("/runs", body, args.key or uuid.uuid4().hex)
    return _started(client, args, run)


def stop(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs stop`"""
    uid = find(client, args.run)
    run = client.post(f"/runs/{uid}/stop")
    if args.wait:
        watch.wait_for(client, uid, watch.ENDED, WAIT_SECONDS, _told(args))
        run = client.get(f"/runs/{uid}")
    _show(args, run, lambda: tables.run_table(run, time.time()))
    if args.wait and run["status"] not in watch.ENDED:
        raise ClientError(f"run {uid} is still {run['status']} after {WAIT_SECONDS:.0f} s")
    return 0


def resume(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs resume`"""
    uid = find(client, args.run)
    return _started(client, args, client.post(f"/runs/{uid}/resume"))


def clone(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs clone`"""
    uid = find(client, args.run)
    body: dict[str, Any] = {"edits": edits(args.set, args.unset)}
    for name in ("name", "experiment", "notes"):
        if getattr(args, name):
            body[name] = getattr(args, name)
    if args.tag:
        body["tags"] = args.tag
    return _started(client, args, client.post(f"/runs/{uid}/clone", body, uuid.uuid4().hex))


def logs(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs logs`"""
    uid = find(client, args.run)
    if not (args.file or args.list):
        watch.show_events(client, uid, args.tail, args.follow, args.json, sys.stdout)
        return 0
    attempt = args.attempt or _newest_attempt(client, uid)
    if args.list:
        files = client.get(f"/runs/{uid}/attempts/{attempt}/logs")
        _show(args, files, lambda: tables.logs_table(files, time.time()))
        return 0
    watch.show_log(client, uid, attempt, args.file, args.tail, args.follow, args.json, sys.stdout)
    return 0


def compare(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs compare`"""
    uids = [find(client, run) for run in args.run]
    if len(uids) < 2:
        raise ClientError("two runs at least are compared", BAD_INPUT)
    comparison = client.get("/compare", {"run": uids, "points": args.points if args.json else LEAST_POINTS})
    difference = client.get("/config-diff", {"a": uids[0], "b": uids[1]}) if len(uids) == 2 else None
    _show(args, {"comparison": comparison, "config": difference}, lambda: tables.comparison_table(comparison))
    if difference is not None and not args.json:
        console().print()
        console().print(tables.differences_table(difference, [one["run"]["name"] for one in comparison["runs"]]))
    return 0


def export(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs export`"""
    if args.format == "parquet" and not args.output and sys.stdout.isatty():
        raise ClientError("Parquet is no text: name a file with --output, or lead standard output into one", BAD_INPUT)
    path = f"/export/runs/{find(client, args.run)}/{args.table}" if args.run else "/export/runs"
    with client.download(path, {"format": args.format}) as pieces:
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
        target = Path(args.output)
        partial = target.with_name(f".{target.name}.partial")
        try:
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            partial.replace(target)
        except OSError as error:
            raise ClientError(f"{target} cannot be written: {error.strerror}") from None
    print(f"{target}: {target.stat().st_size:,} bytes", file=sys.stderr)
    return 0


def import_run(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs import`"""
    done = client.post("/imports", {"directory": os.path.abspath(args.directory)})
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


def find(client: Client, name: str) -> str:
    """Return the uid of the run that `name` means: a uid, its beginning, a name, or "last"."""
    if len(name) == UID_DIGITS and all(c in "0123456789abcdef" for c in name):
        return name
    if name == NEWEST:
        newest = list(client.pages("/runs", {"sort": "created_at", "direction": "desc"}, 1))
        if not newest:
            raise ClientError("there are no runs yet")
        return str(newest[0]["uid"])
    found = list(client.pages("/runs", {"text": name, "archived": "all"}, PAGE))
    for fits in (lambda run: run["uid"].startswith(name), lambda run: run["name"] == name):
        uids = [str(run["uid"]) for run in found if fits(run)]
        if len(uids) == 1:
            return uids[0]
        if uids:
            raise ClientError(f"several runs are called {name!r}: {', '.join(uids[:5])}; name one by its uid")
    raise ClientError(f"there is no run {name!r}; `rhyme runs list` shows all")


def edits(assignments: list[str], unset: list[str]) -> dict[str, dict[str, Any]]:
    """`group.option=value` as arguments of a spec; values are JSON where they can be, else text. Raises ClientError."""
    found: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        option, equals, written = assignment.partition("=")
        if not equals:
            raise ClientError(f"--set needs GROUP.OPTION=VALUE, got {assignment!r}", BAD_INPUT)
        try:
            given = json.loads(written)
        except ValueError:
            given = written
        _set(found, option, given)
    for option in unset:
        _set(found, option, None)
    return found


def _set(found: dict[str, dict[str, Any]], option: str, given: Any) -> None:
    group, dot, name = option.removeprefix("--").partition(".")
    if not (group and dot and name):
        raise ClientError(f"an option is GROUP.OPTION, as in vllm.num_engines; got {option!r}", BAD_INPUT)
    found.setdefault(group, {})[name] = given


def _read_spec(path: str) -> dict[str, Any]:
    try:
        spec = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text())
    except OSError as error:
        raise ClientError(f"{path} cannot be read: {error.strerror}", BAD_INPUT) from None
    except ValueError as error:
        raise ClientError(f"{path} is not JSON: {error}", BAD_INPUT) from None
    if not isinstance(spec, dict):
        raise ClientError(
            f"{path} must hold a JSON object, as `rhyme runs show RUN --json` has it in `spec`", BAD_INPUT
        )
    return spec


def _started(client: Client, args: argparse.Namespace, run: dict[str, Any]) -> int:
    """Show a run that was just asked for, and follow it if wanted."""
    if args.json:
        print(json.dumps(run, indent=2))
    else:
        name = without_controls(run["name"])
        print(f"run {run['uid']} ({name}) is {run['status']}; rhyme runs logs -f {run['uid']}")
    if args.follow:
        watch.show_events(client, run["uid"], PAGE, True, args.json, sys.stdout)
    return 0


def _newest_attempt(client: Client, uid: str) -> int:
    attempts = client.get(f"/runs/{uid}/attempts")
    if not attempts:
        raise ClientError(f"run {uid} has not been started yet")
    return int(attempts[-1]["number"])


def _told(args: argparse.Namespace) -> Callable[[str], None]:
    return lambda status: None if args.json else print(f"the run is {status}", file=sys.stderr)


def _show(args: argparse.Namespace, content: Any, table: Callable[[], RenderableType]) -> None:
    if args.json:
        print(json.dumps(content, indent=2))
    else:
        console().print(table())
