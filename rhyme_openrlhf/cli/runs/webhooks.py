"""`rhyme webhooks`: rules by which a control plane sends messages about runs to other services."""

from __future__ import annotations

import argparse
import json
import sys

from rhyme_openrlhf.cli.runs import tables
from rhyme_openrlhf.cli.runs.actions import UsageError, show_answer
from rhyme_openrlhf.cli.runs.command import add_command, count, perform
from rhyme_openrlhf.client import Client, ClientError
from rhyme_openrlhf.settings.control import WEBHOOK_EVENTS, WEBHOOK_LIMITS
from rhyme_openrlhf.settings.options import Parser

# Help of the argument that names one.
WEBHOOK = "its number or name in `rhyme webhooks list`"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each command's `action` is in its defaults."""
    parser = Parser(
        prog="rhyme webhooks",
        description="Have messages about runs sent to Slack or another service, by a control plane (rhyme serve).",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_command(commands, "list", show, "the webhooks", "rhyme webhooks list")
    adding = add_command(
        commands,
        "add",
        add,
        "make a webhook; the secret that signs its messages is printed once",
        "rhyme webhooks add team https://example.org/hook --event failed --event stalled --stalled-minutes 20\n"
        "  rhyme webhooks add slack https://hooks.slack.com/services/... --form slack --event failed --event finished",
    )
    adding.add_argument("name", metavar="NAME", help="for people")
    adding.add_argument("url", metavar="URL", help="where messages are posted to")
    adding.add_argument("--event", action="append", required=True, choices=WEBHOOK_EVENTS, help="about these (repeat)")
    adding.add_argument("--form", default="json", choices=("json", "slack"), help="of its messages (default: json)")
    for event, (field, default, meaning) in WEBHOOK_LIMITS.items():
        help = f"{event}: {meaning} (default: {default})"
        adding.add_argument(f"--{field.replace('_', '-')}", type=float, default=default, metavar="X", help=help)
    editing = add_command(
        commands,
        "edit",
        edit,
        "change a webhook; what is not given stays, and so does its secret",
        "rhyme webhooks edit 3 --event failed --event stalled --stalled-minutes 20",
    )
    editing.add_argument("webhook", metavar="WEBHOOK", help=WEBHOOK)
    editing.add_argument("--name", help="for people")
    editing.add_argument("--url", help="where messages are posted to")
    editing.add_argument("--event", action="append", choices=WEBHOOK_EVENTS, help="about these alone (repeat)")
    editing.add_argument("--form", choices=("json", "slack"), help="of its messages")
    for event, (field, _, meaning) in WEBHOOK_LIMITS.items():
        editing.add_argument(f"--{field.replace('_', '-')}", type=float, metavar="X", help=f"{event}: {meaning}")
    for name, action, help in (
        ("test", test, "send a test message now, and say how that went"),
        ("delete", delete, "delete a webhook with its messages"),
    ):
        one = add_command(commands, name, action, help, f"rhyme webhooks {name} slack")
        one.add_argument("webhook", metavar="WEBHOOK", help=WEBHOOK)
    logging = add_command(
        commands, "log", log, "messages that were sent, wait, or were given up", "rhyme webhooks log --webhook slack"
    )
    logging.add_argument("--webhook", help="only of this webhook, by its number or name")
    logging.add_argument("--limit", type=count, default=50, metavar="N", help="the newest N (default: 50)")
    return parser


def main(argv: list[str]) -> int:
    """Run one command; its exit code."""
    return perform(build_parser().parse_args(argv), "rhyme webhooks")


def show(client: Client, args: argparse.Namespace) -> int:
    """`rhyme webhooks list`"""
    found = list(client.webhooks())
    show_answer(args, found, lambda: tables.webhooks_table(found))
    return 0


def add(client: Client, args: argparse.Namespace) -> int:
    """`rhyme webhooks add`"""
    limits = {name: getattr(args, name) for name, _, _ in WEBHOOK_LIMITS.values()}
    made = client.make_webhook(args.name, args.url, args.event, form=args.form, **limits)
    # The secret alone on standard output, so that it goes into a file.
    print(json.dumps(made, indent=2) if args.json else made["secret"])
    print(f"webhook {made['id']} is made; its secret is shown only this once", file=sys.stderr)
    return 0


def edit(client: Client, args: argparse.Namespace) -> int:
    """`rhyme webhooks edit`"""
    names = ("name", "url", "form", *(field for field, _, _ in WEBHOOK_LIMITS.values()))
    changes = {name: getattr(args, name) for name in names} | {"events": args.event}
    changes = {name: value for name, value in changes.items() if value is not None}
    if not changes:
        raise UsageError("give what to change: --name, --url, --event, --form or a limit")
    changed = client.edit_webhook(number_of(client, args.webhook), **changes)
    show_answer(args, changed, lambda: tables.webhooks_table([changed]))
    return 0


def test(client: Client, args: argparse.Namespace) -> int:
    """`rhyme webhooks test`"""
    sent = client.test_webhook(number_of(client, args.webhook))
    show_answer(args, sent, lambda: tables.deliveries_table([sent]))
    if sent["state"] != "delivered":
        raise ClientError(f"webhook {args.webhook}: {sent['error']}")
    return 0


def delete(client: Client, args: argparse.Namespace) -> int:
    """`rhyme webhooks delete`"""
    client.delete_webhook(number_of(client, args.webhook))
    print(f"webhook {args.webhook} is deleted", file=sys.stderr)
    return 0


def log(client: Client, args: argparse.Namespace) -> int:
    """`rhyme webhooks log`"""
    webhook = None if args.webhook is None else number_of(client, args.webhook)
    found = list(client.deliveries(webhook=webhook, limit=args.limit))
    show_answer(args, found, lambda: tables.deliveries_table(found))
    return 0


def number_of(client: Client, webhook: str) -> int:
    """Return the number of the webhook with this number or name. Raises UsageError."""
    if webhook.isdecimal():
        return int(webhook)
    found = [one["id"] for one in client.webhooks() if one["name"] == webhook]
    if len(found) != 1:
        which = "no webhook has" if not found else f"webhooks {', '.join(map(str, found))} have"
        raise UsageError(f"{which} the name {webhook!r}: give a number of `rhyme webhooks list`")
    return int(found[0])
