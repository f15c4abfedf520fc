"""Tables of runs for a terminal: pure, from the API's JSON to rich tables.

Invariants: everything that the server sends is shown as text, never as markup or control characters. A missing figure
is "-". A field that an older or newer server does not send counts as missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rhyme_openrlhf.settings.control import WEBHOOK_LIMITS
from rhyme_openrlhf.telemetry import wording

Json = Mapping[str, Any]

STYLES = {
    "running": "green",
    "succeeded": "blue",
    "failed": "red",
    "crashed": "bold red",
    "lost": "magenta",
    "stopped": "yellow",
    "stopping": "yellow",
}
# How much of a long value a table shows.
VALUE_WIDTH = 60
_SECONDS_PER_DAY = 86400


def runs_table(runs: Sequence[Json], now: float, columns: Sequence[str] = ()) -> Table:
    """Build the table of runs with the values `columns`. `now` in unix seconds."""
    fields = ("run", "name", "status", "step", "reward", "tokens/s", "speculation", "bubbles", "age", "tags")
    table = _table(*fields, *columns)
    for run in runs:
        _row(
            table,
            text(run.get("uid")),
            text(run.get("name")),
            status(run),
            step(run),
            wording.number(run.get("reward"), 3),
            wording.number(run.get("tokens_per_second"), 0),
            wording.percent(run.get("speculation_rate")),
            wording.percent(run.get("bubble_fraction")),
            age(run.get("created_at"), now),
            text(", ".join(map(str, run.get("tags") or []))),
            *(value((run.get("values") or {}).get(name)) for name in columns),
        )
    return table


def views_table(views: Sequence[Json]) -> Table:
    """Build the table of saved views of the list."""
    table = _table("id", "name", "for", "runs", "order", "values")
    for view in views:
        named = (
            f"{name} {' '.join(given) if isinstance(given, list) else given}"
            for name in ("status", "origin", "tag", "experiment", "text", "filter", "archived")
            if (given := view.get(name)) and (name, given) != ("archived", "no")
        )
        cells = (view.get("id"), view.get("name"), "everyone" if view.get("shared") else "you", ", ".join(named))
        order = f"{view.get('sort')} {view.get('direction')}"
        _row(table, *map(text, cells), text(order), text(" ".join(view.get("values") or [])))
    return table


def groups_table(found: Json) -> Table:
    """Build the table of groups: options, number of runs, and last and best values over their seeds."""
    groups = found.get("groups") or []
    options = list(dict.fromkeys(name for group in groups for name in group.get("options") or {}))
    figures = [one["name"] for one in groups[0]["figures"]] if groups else []
    table = _table("runs", *options, *(f"{name}, {which}" for name in figures for which in ("last", "best")))
    for group in groups:
        values = group.get("options") or {}
        spreads = (one[which] for one in group["figures"] for which in ("final", "best"))
        cells = (value(values[name]) if name in values else "default" for name in options)
        _row(table, str(len(group["runs"])), *cells, *map(spread, spreads))
    return table


def spread(of: Json) -> str:
    """Return mean and standard deviation as `0.61 ± 0.02`."""
    deviation = of.get("deviation")
    return value(of.get("mean")) + ("" if deviation is None else f" ± {deviation:.2g}")


def sweep_table(sweep: Json) -> Table:
    """Build the table of the runs of a sweep with the options that differ."""
    runs = sweep.get("runs") or []
    names = list(runs[0].get("options") or {}) if runs else []
    table = _table("run", "name", *names)
    for run in runs:
        values = (text(json.dumps((run.get("options") or {}).get(name))) for name in names)
        _row(table, text(run.get("uid")), text(run.get("name")), *values)
    return table


def tokens_table(tokens: Sequence[Json], now: float) -> Table:
    """Build the table of access tokens."""
    table = _table("id", "name", "role", "begins with", "age", "last used", "works until")
    for token in tokens:
        ends = token.get("revoked_at") or token.get("expires_at")
        until = _date(ends)
        if token.get("revoked_at") is not None:
            until = f"revoked {until}"
        _row(
            table,
            text(token.get("id")),
            text(token.get("name")),
            text(token.get("role")),
            text(token.get("prefix")),
            age(token.get("created_at"), now),
            age(token.get("last_used_at"), now),
            text(until),
        )
    return table


def audit_table(entries: Sequence[Json]) -> Table:
    """Build the table of the audit log."""
    table = _table("when", "who", "from", "what", "target")
    for entry in entries:
        place = f"{entry.get('address')}{' (browser)' if entry.get('browser') else ''}"
        cells = (_date(entry.get("time")), entry.get("name"), place, entry.get("action"), entry.get("target"))
        _row(table, *map(text, cells))
    return table


def webhooks_table(webhooks: Sequence[Json]) -> Table:
    """Build the table of webhooks; an event that has a limit shows it."""
    table = _table("id", "name", "form", "events", "address")
    for webhook in webhooks:
        limits = {event: f" {webhook.get(limit.field)}" for event, limit in WEBHOOK_LIMITS.items()}
        events = ", ".join(event + limits.get(event, "") for event in webhook.get("events") or [])
        # A service of an earlier version does not say.
        name = webhook.get("name") if webhook.get("active", True) else f"{webhook.get('name')} (off: no operator's)"
        cells = (webhook.get("id"), name, webhook.get("form"), events, webhook.get("url"))
        _row(table, *map(text, cells))
    return table


def deliveries_table(deliveries: Sequence[Json]) -> Table:
    """Build the table of messages of webhooks; one that was not taken shows why."""
    table = _table("when", "webhook", "state", "tries", "message")
    for one in deliveries:
        said = f"{one.get('text')} ({one['error']})" if one.get("error") else one.get("text")
        cells = (_date(one.get("created_at")), one.get("webhook"), one.get("state"), one.get("tries"), said)
        _row(table, *map(text, cells))
    return table


def run_table(run: Json, now: float, waits_for: str = "") -> Table:
    """Build the table of one run, with a line for each known value, and for what it waits in the queue."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    lines: list[tuple[str, Text | str]] = [
        ("run", text(run.get("uid"))),
        ("name", text(run.get("name"))),
        ("status", status(run)),
        ("step", step(run)),
        ("reward", wording.number(run.get("reward"), 3)),
        ("tokens/s", wording.number(run.get("tokens_per_second"), 0)),
        ("speculation", wording.percent(run.get("speculation_rate"))),
        ("bubbles", wording.percent(run.get("bubble_fraction"))),
        ("created", moment(run.get("created_at"), now)),
        ("started", moment(run.get("started_at"), now)),
        ("finished", moment(run.get("finished_at"), now)),
        ("origin", text(run.get("origin"))),
    ]
    if found := run.get("verdict"):
        lines.insert(2, ("verdict", text(f"{found.get('level')}: {found.get('text')}")))
    for phase in reversed(run.get("phases") or []):
        lines.insert(3, ("now", text(phase.get("text"))))
    if waits_for:
        lines.insert(3, ("waits for", text(waits_for)))
    for name in ("experiment", "parent", "notes"):
        if run.get(name):
            lines.append((name, text(run[name])))
    if run.get("tags"):
        lines.append(("tags", text(", ".join(map(str, run["tags"])))))
    if run.get("dropped_events"):
        lines.append(("dropped", f"{run['dropped_events']:,} events never arrived (rhyme runs import brings them in)"))
    if run.get("command"):
        lines.append(("command", text(" ".join(map(str, run["command"])))))
    for attempt in run.get("attempts") or []:
        lines.append((f"attempt {attempt.get('number')}", _attempt(attempt, now)))
    for name, content in lines:
        _row(table, name, content)
    return table


def comparison_table(comparison: Json) -> Table:
    """Build the table of runs side by side, with ratios to the first run."""
    runs = comparison["runs"]
    window = f", steps {comparison['from_step']} to {comparison['to_step']}" if comparison.get("to_step") else ""
    table = _table(f"median{window}", *(f"{one['run'].get('name')} ({str(one['run'].get('uid'))[:8]})" for one in runs))
    for figure in runs[0]["figures"]:
        cells = []
        for number, one in enumerate(runs):
            cell = value(one["figures"].get(figure))
            ratio = one["ratios"].get(figure)
            cells.append(f"{cell} (x{ratio:.2f})" if number and ratio is not None else cell)
        _row(table, text(figure.replace("_", " ")), *cells)
    return table


def differences_table(difference: Json, names: Sequence[str]) -> Table:
    """Build the table of settings in which two runs differ."""
    table = _table("setting", *names)
    for row in difference["differences"]:
        _row(table, text(row["name"]), *(value(row[side]) if row[f"in_{side}"] else "" for side in ("a", "b")))
    return table


def logs_table(files: Sequence[Json], now: float) -> Table:
    """Build the table of an attempt's log files."""
    table = _table("file", "size", "changed")
    for file in files:
        _row(table, text(file.get("name")), f"{file.get('size', 0):,}", age(file.get("modified_at"), now) + " ago")
    return table


def files_table(found: Json, now: float) -> Table:
    """Build the table of a run's files, and where they are."""
    table = _table("file", "kind", "size", "changed")
    table.caption = text(f"in {found.get('directory')}")
    for file in found.get("files") or []:
        changed = age(file.get("modified_at"), now) + " ago"
        _row(table, text(file.get("name")), text(file.get("kind")), f"{file.get('size', 0):,}", changed)
    return table


def status(run: Json) -> Text:
    """Return the status in its colour, and the message if there is one."""
    word = str(run.get("status"))
    shown = Text(word, style=STYLES.get(word, ""))
    if run.get("message"):
        shown.append_text(Text(" ") + text(run["message"], VALUE_WIDTH))
    return shown


def step(run: Json) -> str:
    """Return `42/500`, or `42` if the number of steps is not known beforehand."""
    total = run.get("steps_total")
    return f"{run.get('step') or 0}" + (f"/{total}" if total else "")


def age(then: float | None, now: float) -> str:
    """Return the time since `then`: `3 min 12 s`, `2 d 4 h`."""
    if then is None:
        return wording.NO_VALUE
    seconds = max(0.0, now - then)
    if seconds < _SECONDS_PER_DAY:
        return wording.duration(seconds)
    return f"{int(seconds // _SECONDS_PER_DAY)} d {int(seconds % _SECONDS_PER_DAY // 3600)} h"


def moment(then: float | None, now: float) -> str:
    """Return local date and time, and the time since."""
    return wording.NO_VALUE if then is None else f"{_date(then)} ({age(then, now)} ago)"


def _date(then: float | None) -> str:
    return wording.NO_VALUE if then is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(then))


def value(content: Any) -> str:
    """Return a setting or figure as one short line."""
    if isinstance(content, float):
        return f"{content:.4g}"
    shown = content if isinstance(content, str) else json.dumps(content)
    return text(wording.NO_VALUE if content is None else shown, VALUE_WIDTH).plain


def text(content: Any, width: int = 0) -> Text:
    """Return any value as one line without control characters, cut to `width` characters if given."""
    plain = "".join(c if c.isprintable() else " " for c in str("" if content is None else content))
    if width and len(plain) > width:
        plain = plain[: width - 1] + "…"
    return Text(plain)


def _attempt(attempt: Json, now: float) -> Text:
    shown = Text("resumed, " if attempt.get("resumes") else "")
    shown.append_text(status(attempt))
    shown.append(f", queued {age(attempt.get('queued_at'), now)} ago")
    if attempt.get("run_directory"):
        shown.append_text(Text(", ") + text(attempt["run_directory"]))
    return shown


def _row(table: Table, *cells: Text | str) -> None:
    """Add a row whose strings are plain text, because rich would read them as markup."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(text(column), no_wrap=number == 0)
    return table
