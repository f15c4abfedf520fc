"""`rhyme runs views` and `rhyme runs list`: the list of runs, and its filters, order and columns under a name."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rhyme_openrlhf.cli.runs import tables
from rhyme_openrlhf.cli.runs.actions import UsageError, show_answer
from rhyme_openrlhf.client import Client, ClientError
from rhyme_openrlhf.client.models import SavedView


def add_list_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which runs are listed, in which order, with which values."""
    parser.add_argument("--status", action="append", metavar="STATUS", help="only these (repeat for several)")
    parser.add_argument(
        "--origin", action="append", choices=("launched", "reported", "imported"), help="only these (repeat)"
    )
    parser.add_argument("--tag", action="append", metavar="TAG", help="only with all of these tags")
    parser.add_argument("--experiment", metavar="NAME", help="only of this experiment")
    parser.add_argument("--text", metavar="TEXT", help="only with this in name, notes or id")
    parser.add_argument(
        "--filter",
        metavar="CONDITION",
        help="only these: names compared by = != < <= > >= or ~ (contains), with and, or, not and brackets; a name is "
        "a field, metric.NAME (its last value) or config.GROUP.OPTION",
    )
    parser.add_argument(
        "--column", action="append", metavar="NAME", help="show metric.NAME or config.GROUP.OPTION too (repeat)"
    )
    parser.add_argument("--archived", action="store_true", help="archived ones too")
    parser.add_argument("--sort", metavar="COLUMN", help="created_at (default), reward, metric.NAME, ...")
    parser.add_argument("--ascending", action="store_true", help="smallest or oldest first")


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the options of `add_list_options` say, as arguments of `Client.runs`."""
    given = {
        "status": args.status,
        "origin": args.origin,
        "tag": args.tag,
        "experiment": args.experiment,
        "text": args.text,
        "filter": args.filter,
        "columns": args.column,
        "archived": "all" if args.archived else None,
        "sort": args.sort,
        "direction": "asc" if args.ascending else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def list_runs(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs list`"""
    shown = _of_view(_find(client, args.view)) if args.view else {}
    # What is given beside a view takes the place of the view's.
    shown |= asked(args)
    runs = list(client.runs(**shown, limit=args.limit))
    show_answer(args, runs, lambda: tables.runs_table(runs, time.time(), shown.get("columns", ())))
    if not runs and not args.json:
        print("there are no such runs; `rhyme runs start --help` shows how to start one", file=sys.stderr)
    return 0


def list_views(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs views list`"""
    found = list(client.views())
    show_answer(args, found, lambda: tables.views_table(found))
    return 0


def save(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs views save`"""
    shown = asked(args)
    if len(shown.get("tag", ())) > 1:
        raise UsageError("a view has one tag: give the others in --filter, as 'tag = a and tag = b'")
    shown["values"] = shown.pop("columns", [])
    shown["tag"] = "".join(shown.get("tag", ()))
    saved = client.save_view(args.name, shared=args.everyone, replace=args.replace, **shown)
    show_answer(args, saved, lambda: tables.views_table([saved]))
    return 0


def rename(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs views rename`"""
    renamed = client.rename_view(_find(client, args.name)["id"], args.new_name)
    show_answer(args, renamed, lambda: tables.views_table([renamed]))
    return 0


def delete(client: Client, args: argparse.Namespace) -> int:
    """`rhyme runs views delete`"""
    view = _find(client, args.name)
    client.delete_view(view["id"])
    print(f"the view {args.name} is deleted", file=sys.stderr)
    return 0


def _find(client: Client, name: str) -> SavedView:
    """Return the view of this name, this token's own before one for everyone. Raises ClientError."""
    found = sorted((view for view in client.views() if view["name"] == name), key=lambda view: view["shared"])
    if not found:
        raise ClientError(f"there is no saved view named {name}: `rhyme runs views list` shows them")
    return found[0]


def _of_view(view: SavedView) -> dict[str, Any]:
    """Return a view as arguments of `Client.runs`."""
    shown: dict[str, Any] = {
        name: view[name]
        for name in ("status", "origin", "experiment", "text", "filter", "archived", "sort", "direction")
    }
    return {**shown, "tag": [view["tag"]] if view["tag"] else [], "columns": view["values"]}
