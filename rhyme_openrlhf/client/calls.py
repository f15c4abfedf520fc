"""Every request of the clients: address, parameters, body and result type. Pure: the clients send them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from rhyme_openrlhf.client import models

PREFIX = "/api/v1"
# Rows per request of a list.
PAGE = 200
# More items than any list has.
ALL = 2**31 - 1
# Statuses of a run that has ended (api/store/status.py; a client must not import the service).
ENDED = frozenset({"stopped", "succeeded", "failed", "crashed", "lost"})

Result = TypeVar("Result")
Arguments = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Call(Generic[Result]):
    """A request whose JSON response is a `Result`; for a list, `Result` is one item of at most `most`."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    most: int = 0

    def page(self, left: int, cursor: str | None) -> Call[Any]:
        """Return the request of one page of a list, of which `left` items are still wanted."""
        further = {"limit": min(left, PAGE)} | ({"cursor": cursor} if cursor else {})
        return Call(self.method, self.path, {**self.params, **further})


def whoami() -> Call[models.Who]:
    """Return the user of this token."""
    return Call("GET", "/session")


def tokens(*, revoked: bool = False) -> Call[models.Token]:
    """Yield the access tokens, the newest first; `revoked`: also those that are revoked or expired."""
    return Call("GET", "/tokens", {"revoked": revoked}, most=ALL)


def make_token(name: str, role: str, *, days: float | None = None) -> Call[models.IssuedToken]:
    """Create a token that works for `days`, None: until it is revoked; its secret is in this response alone."""
    return Call("POST", "/tokens", body={"name": name, "role": role, "days": days})


def revoke_token(number: int) -> Call[None]:
    """Revoke the token with this id."""
    return Call("DELETE", f"/tokens/{number}")


def audit(*, name: str = "", text: str = "", limit: int = 50) -> Call[models.AuditEntry]:
    """Yield what was done, the newest first: by the holder of the token `name`, with `text` in action or target."""
    return Call("GET", "/audit", {"name": name, "text": text}, most=limit)


def webhooks() -> Call[models.Webhook]:
    """Yield the webhooks, the newest first."""
    return Call("GET", "/webhooks", most=ALL)


def make_webhook(
    name: str, url: str, events: Sequence[str], *, form: str = "json", **limits: float
) -> Call[models.IssuedWebhook]:
    """Have messages about `events` posted to `url`; the secret that signs them is in this response alone.

    `events`: failed, finished, stalled, reward_fell, engine_idle. The limits of the last three are stalled_minutes,
    reward_fall and idle_percent. `form`: json or slack.
    """
    body = {"name": name, "url": url, "events": list(events), "form": form, **limits}
    return Call("POST", "/webhooks", body=body)


def edit_webhook(number: int, **changes: Any) -> Call[models.Webhook]:
    """Change name, url, events, form or limits of the webhook with this id; its secret stays."""
    return Call("PATCH", f"/webhooks/{number}", body=changes)


def delete_webhook(number: int) -> Call[None]:
    """Delete the webhook with this id, with its messages."""
    return Call("DELETE", f"/webhooks/{number}")


def test_webhook(number: int) -> Call[models.Delivery]:
    """Send a test message of the webhook with this id once, and return how that went."""
    return Call("POST", f"/webhooks/{number}/test")


def deliveries(*, webhook: int | None = None, limit: int = 50) -> Call[models.Delivery]:
    """Yield messages of one or all webhooks, the newest first."""
    return Call("GET", "/webhooks/deliveries", {} if webhook is None else {"webhook": webhook}, most=limit)


def runs(
    *,
    status: Sequence[str] = (),
    origin: Sequence[str] = (),
    tag: Sequence[str] = (),
    experiment: str = "",
    text: str = "",
    filter: str = "",
    columns: Sequence[str] = (),
    archived: str = "no",
    sort: str = "created_at",
    direction: str = "desc",
    limit: int = 50,
) -> Call[models.Run]:
    """Yield at most `limit` runs that match all conditions, in order.

    `filter`: a condition such as `reward > 0.5 and config.actor.adam.lr = 1e-6`. `columns`: further values of each run,
    `metric.NAME` or `config.GROUP.OPTION`, in its `values`; `sort` takes these names and fields.
    """
    given = {"status": list(status), "origin": list(origin), "tag": list(tag), "experiment": experiment, "text": text}
    given |= {"filter": filter, "column": list(columns)}
    params = {name: value for name, value in given.items() if value}
    return Call("GET", "/runs", {**params, "archived": archived, "sort": sort, "direction": direction}, most=limit)


def views() -> Call[models.SavedView]:
    """Yield this token's saved views of the list of runs and those for everyone, the newest first."""
    return Call("GET", "/views", most=ALL)


def save_view(name: str, *, shared: bool = False, replace: bool = False, **shown: Any) -> Call[models.SavedView]:
    """Save a view of the list of runs, for this token or for everyone; `replace` one of the same name.

    `shown`: status, origin, tag, experiment, text, filter, archived, sort and direction as for `runs`; `values` as its
    `columns`; `columns`: of the dashboard's table.
    """
    return Call("POST", "/views", body={"name": name, "shared": shared, "replace": replace, **shown})


def rename_view(number: int, name: str) -> Call[models.SavedView]:
    """Give the saved view with this id another name."""
    return Call("PATCH", f"/views/{number}", body={"name": name})


def delete_view(number: int) -> Call[None]:
    """Delete the saved view with this id."""
    return Call("DELETE", f"/views/{number}")


def run(uid: str) -> Call[models.RunDetail]:
    """Return a run with its configuration and attempts."""
    return Call("GET", f"/runs/{uid}")


def queue() -> Call[models.Queue]:
    """Return the waiting runs with what each waits for, and the runs that have their GPUs."""
    return Call("GET", "/queue")


def start(
    command: str = "",
    *,
    arguments: Arguments | None = None,
    name: str = "",
    experiment: str = "",
    tags: Sequence[str] = (),
    notes: str = "",
    key: str = "",
) -> Call[models.RunDetail]:
    """Start a run from a command line, from arguments by group, or from both; arguments take precedence.

    `key`: repeating a request with the same key starts no second run.
    """
    body = _described(name, experiment, tags, notes)
    if command:
        body["command"] = command
    return Call("POST", "/runs", body={**body, "arguments": arguments or {}}, headers=_key(key))


def sweep(
    name: str,
    options: Mapping[str, Any],
    command: str = "",
    *,
    arguments: Arguments | None = None,
    count: int | None = None,
    seed: int = 0,
    tags: Sequence[str] = (),
    notes: str = "",
    key: str = "",
) -> Call[models.Sweep]:
    """Start runs that differ in `options`, as the experiment `name`.

    `options`: values of each option, `{"train.seed": [1, 2]}`, or a range, `{"actor.adam.lr": {"low": 1e-7,
    "high": 1e-5, "scale": "log"}}`. `count`: the number of random draws; without it every combination.
    """
    body = {"name": name, "options": dict(options), "count": count, "seed": seed, "tags": list(tags), "notes": notes}
    if command:
        body["command"] = command
    return Call("POST", "/sweeps", body={**body, "arguments": arguments or {}}, headers=_key(key))


def experiments() -> Call[models.Experiment]:
    """Yield the experiments by name."""
    return Call("GET", "/experiments", most=ALL)


def groups(
    number: int, names: Sequence[str] = ("reward", "tokens_per_second"), *, points: int = 0
) -> Call[models.Groups]:
    """Return groups of runs that are equal but for their seed, of the experiment with this id.

    Each curve of `names` has mean and spread over the seeds. `points`: most points of a mean curve; 0: none are made.
    """
    return Call("GET", f"/experiments/{number}/groups", {"names": ",".join(names), "points": points})


def stop_experiment(number: int) -> Call[dict[str, int]]:
    """Stop all runs of the experiment with this id that have not ended."""
    return Call("POST", f"/sweeps/{number}/stop")


def clone(
    uid: str,
    *,
    edits: Arguments | None = None,
    name: str = "",
    experiment: str = "",
    tags: Sequence[str] = (),
    notes: str = "",
    key: str = "",
) -> Call[models.RunDetail]:
    """Start a run with another one's settings; an edit of None resets an option to its default."""
    body = {**_described(name, experiment, tags, notes), "edits": edits or {}}
    return Call("POST", f"/runs/{uid}/clone", body=body, headers=_key(key))


def stop(uid: str) -> Call[models.RunDetail]:
    """Ask a run to end after its step, with a checkpoint."""
    return Call("POST", f"/runs/{uid}/stop")


def resume(uid: str, *, key: str = "") -> Call[models.RunDetail]:
    """Continue a run from its last checkpoint; only once for a key."""
    return Call("POST", f"/runs/{uid}/resume", headers=_key(key))


def edit(
    uid: str,
    *,
    name: str | None = None,
    notes: str | None = None,
    tags: Sequence[str] | None = None,
    experiment: str | None = None,
    based_on: str = "",
) -> Call[models.RunDetail]:
    """Change what describes a run; an experiment of "" takes it out of its experiment.

    `based_on`: a run's `etag`. If the run was edited since then, it fails with code "changed_meanwhile".
    """
    given = {"name": name, "notes": notes, "tags": None if tags is None else list(tags)}
    body: dict[str, Any] = {one: value for one, value in given.items() if value is not None}
    if experiment is not None:
        body["experiment"] = experiment or None
    return Call("PATCH", f"/runs/{uid}", body=body, headers={"If-Match": based_on} if based_on else {})


def archive(uid: str) -> Call[models.RunDetail]:
    """Hide a run from the default list."""
    return Call("POST", f"/runs/{uid}/archive")


def unarchive(uid: str) -> Call[models.RunDetail]:
    """Show an archived run in the default list again."""
    return Call("POST", f"/runs/{uid}/unarchive")


def delete(uid: str) -> Call[None]:
    """Delete an archived run that has ended, with everything it reported; its run directory stays."""
    return Call("DELETE", f"/runs/{uid}")


def compare(uids: Sequence[str], *, points: int = 500) -> Call[models.Comparison]:
    """Return figures and curves of runs side by side."""
    return Call("GET", "/compare", {"run": list(uids), "points": points})


def config_difference(a: str, b: str) -> Call[models.ConfigDiff]:
    """Return the settings in which two runs differ."""
    return Call("GET", "/config-diff", {"a": a, "b": b})


def series(
    uid: str,
    names: Sequence[str],
    *,
    points: int = 500,
    axis: str = "step",
    smooth: float = 0.0,
    from_step: int = 0,
    to_step: int = 2**31 - 1,
) -> Call[models.Series]:
    """Return curves of a run, such as "reward"; every stretch keeps its smallest and largest value.

    `axis`: step, time, tokens or samples; `smooth`: the weight of a moving average, from 0 to below 1.
    """
    params = {"names": ",".join(names), "points": points, "axis": axis, "smooth": smooth}
    return Call("GET", f"/runs/{uid}/series", {**params, "from_step": from_step, "to_step": to_step})


def steps(uid: str, *, from_step: int = 0, to_step: int = 2**31 - 1, limit: int = ALL) -> Call[dict[str, Any]]:
    """Yield a run's steps with all their figures."""
    return Call("GET", f"/runs/{uid}/steps", {"from_step": from_step, "to_step": to_step}, most=limit)


def events(uid: str, *, kinds: Sequence[str] = (), direction: str = "asc", limit: int = ALL) -> Call[models.Event]:
    """Yield a run's events."""
    return Call("GET", f"/runs/{uid}/events", {"kind": list(kinds), "direction": direction}, most=limit)


def follow_events(uid: str, *, kinds: Sequence[str] = (), after: int = 0) -> Call[Any]:
    """Follow a run's events behind the one with id `after`."""
    return Call("GET", f"/runs/{uid}/events/stream", {"kind": list(kinds), "after": after})


def logs(uid: str, attempt: int) -> Call[list[models.LogFile]]:
    """Return the log files of an attempt."""
    return Call("GET", f"/runs/{uid}/attempts/{attempt}/logs")


def log(uid: str, attempt: int, name: str, *, tail: int = 200) -> Call[models.LogChunk]:
    """Return the last lines of a log file."""
    return Call("GET", f"/runs/{uid}/attempts/{attempt}/logs/{quote(name)}", {"tail": tail})


def follow_log(uid: str, attempt: int, name: str, *, start: int) -> Call[Any]:
    """Follow a log file from byte `start` on."""
    return Call("GET", f"/runs/{uid}/attempts/{attempt}/log-stream/{quote(name)}", {"start": start})


def files(uid: str, attempt: int) -> Call[models.RunFiles]:
    """Return the files of an attempt: record, logs, samples, history and checkpoints."""
    return Call("GET", f"/runs/{uid}/attempts/{attempt}/files")


def download(uid: str, attempt: int, kinds: Sequence[str] = ()) -> Call[Any]:
    """Return an archive (.tar.gz) of an attempt's files; without `kinds` of record, logs and samples."""
    return Call("GET", f"/runs/{uid}/attempts/{attempt}/archive", {"kind": list(kinds)})


def export(uid: str = "", table: str = "steps", *, form: str = "csv") -> Call[Any]:
    """Return a table of a run as a file, or without a run the table of all runs."""
    return Call("GET", f"/export/runs/{uid}/{table}" if uid else "/export/runs", {"format": form})


def sampled_steps(uid: str, *, group: str = "") -> Call[models.SampledSteps]:
    """Return the steps whose samples were recorded, or those in which the prompt `group` was generated."""
    return Call("GET", f"/runs/{uid}/sample-groups", {"group": group})


def sample_groups(
    uid: str, step: int, *, group: str = "", tokens: bool = False, limit: int = ALL
) -> Call[models.SampleGroup]:
    """Yield a step's samples by prompt, of all prompts or one; `tokens`: with lists of single tokens."""
    return Call("GET", f"/runs/{uid}/sample-groups/{step}", {"group": group, "tokens": tokens}, most=limit)


def sample_table(uid: str, step: int | None = None) -> Call[Any]:
    """Return all samples of a step, by default the newest, as a Parquet file."""
    return Call("GET", f"/runs/{uid}/sample-table", {} if step is None else {"step": step})


def import_directory(directory: str) -> Call[models.ImportReceipt]:
    """Bring in a run directory on the service's machine."""
    return Call("POST", "/imports", body={"directory": directory})


def exchange(code: str, name: str) -> Call[dict[str, Any]]:
    """Create an operator's token, called `name`, for the code of a sign-in link."""
    return Call("POST", "/tokens/exchange", body={"code": code, "name": name})


def _described(name: str, experiment: str, tags: Sequence[str], notes: str) -> dict[str, Any]:
    given = {"name": name, "experiment": experiment, "tags": list(tags), "notes": notes}
    return {one: value for one, value in given.items() if value}


def _key(key: str) -> dict[str, str]:
    """Return the header that makes a repeated request harmless; every call has a key of its own unless one is given."""
    return {"Idempotency-Key": key or uuid.uuid4().hex}
