"""`rhyme runs` against the real service over a real socket: what is shown, what is said, and the exit codes."""

from __future__ import annotations

import csv
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rhyme_openrlhf.api.app")


from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.cli.runs import webhooks
from rhyme_openrlhf.cli.runs.command import build_parser, main
from rhyme_openrlhf.client import client as client_module
from rhyme_openrlhf.telemetry import reporter as reporter_module
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import (
    Note,
    RunFinished,
)
from rhyme_openrlhf.telemetry.reporter import Reporter, read_report
from tests.api.webhooks.receivers import receiving
from tests.cli.runs.running_service import DEADLINE_S, RUN_STARTED, Rhyme, Service, answer, write_steps
from tests.telemetry.control_server import make_run

pytestmark = pytest.mark.usefixtures("signed_in")


def new_run(rhyme: Rhyme, name: str) -> dict[str, Any]:
    command = ["rhyme", "demo", "--train.num_episodes", "2"]
    started: dict[str, Any] = answer(rhyme, "start", "--name", name, "--tag", "t1", "--", *command)
    return started


def test_what_was_reported_is_listed_and_shown(rhyme: Rhyme, reported: str) -> None:
    code, out, _ = rhyme("list", "--status", "succeeded")
    (line,) = [line for line in out.splitlines() if reported in line]
    assert code == 0 and "trial" in line and "succeeded" in line and "4/4" in line and "0.250" in line
    assert answer(rhyme, "list", "--text", reported)[0]["uid"] == reported
    code, out, _ = rhyme("show", reported[:6])
    assert code == 0 and "succeeded" in out and "attempt 1" in out
    assert answer(rhyme, "show", "trial")["config"]["settings"]["control"]["run_uid"] == reported


def test_runs_are_found_by_a_condition(rhyme: Rhyme, reported: str) -> None:
    condition = f"metric.policy_loss < 0.2 and uid = {reported}"
    code, out, err = rhyme(
        "list", "--filter", condition, "--column", "metric.policy_loss", "--sort", "metric.policy_loss"
    )
    assert code == 0 and reported in out and "metric.policy_loss" in out and "0.1" in out, err
    (run,) = answer(rhyme, "list", "--filter", condition, "--column", "metric.policy_loss")
    assert run["values"] == {"metric.policy_loss": 0.1}


def test_events_are_shown_as_lines(rhyme: Rhyme, reported: str) -> None:
    code, out, _ = rhyme("logs", reported)
    lines = out.splitlines()
    assert code == 0
    assert "run trial: 2 epochs of 2 steps" in lines[0]
    step = "step 4/4 (epoch 1/2)  reward 0.40  rollout 2.0 s, 4,800 tok/s, 2.5 tokens/step, acceptance 75%"
    assert any(step in line for line in lines), out
    assert "warning: a note with [red]markup[/red]" in lines[-2] and "run succeeded" in lines[-1]
    code, out, _ = rhyme("logs", reported, "--tail", "1")
    assert [line.split("] ")[1][:9] for line in out.splitlines()] == ["run trial", "run succe"]
    code, out, _ = rhyme("logs", reported, "--json")
    assert [json.loads(line)["kind"] for line in out.splitlines()][-1] == "run_finished"
    # Following a run that has ended ends.
    assert rhyme("logs", "-f", reported)[0] == 0


def test_log_files(rhyme: Rhyme, reported: str) -> None:
    code, out, _ = rhyme("logs", reported, "--list")
    assert code == 0 and "driver.log" in out
    code, out, _ = rhyme("logs", reported, "--file", "driver.log", "--tail", "2")
    assert (code, out) == (0, "line 998\nline 999\n")
    code, _, err = rhyme("logs", reported, "--file", "../config.json")
    assert code == 1 and len(err.splitlines()) == 1


def test_control_characters_of_a_run_do_not_reach_the_terminal(
    rhyme: Rhyme, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b]0;title\x07\x9b2J\u202ename [link=https://example.org]x[/link]"
    uid = "7" * 16
    run = make_run(service.root / "evil", service.url, evil, run_uid=uid, attempt_uid="8" * 16)
    with EventLog(run / "events.jsonl") as log:
        log.write(RUN_STARTED, "driver")
        log.write(Note("warning", evil), "driver")
        log.write(RunFinished("failed", evil, 1.0), "driver")
    (run / "logs" / "driver.log").write_text(f"\tone\n{evil}\r100 %\r\n")
    ending = threading.Event()
    ending.set()
    Reporter(read_report(run), service.tokens["reporter"], ending).run()
    for command in (
        ["list"],
        ["show", uid],
        ["logs", uid],
        ["compare", uid, uid],
        ["logs", uid, "--file", "driver.log"],
    ):
        code, out, err = rhyme(*command)
        assert code == 0 and "[link=https://example.org]x[/link]" in out, command
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err), command
    assert out.startswith("\tone\n\\x1b]0;title\\x07\\x9b2J\\u202ename") and out.endswith("\n100 %\n")
    shown = answer(rhyme, "logs", uid, "--file", "driver.log")["text"]
    assert evil in shown
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    code, out, _ = rhyme("export")
    assert code == 0 and "\\x1b]0;title" in out and "\x1b" not in out


def test_a_run_is_followed_until_it_ends(
    rhyme: Rhyme, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through a connection that breaks after every few events: nothing is missed, nothing is shown twice."""
    uid, attempt = "3" * 16, "4" * 16
    run = make_run(service.root / "followed", service.url, "followed", run_uid=uid, attempt_uid=attempt)
    with EventLog(run / "events.jsonl") as log:
        log.write(RUN_STARTED, "driver")
    monkeypatch.setattr(reporter_module, "BATCH_AGE_SECONDS", 0.05)
    monkeypatch.setattr(reporter_module, "POLL_SECONDS", 0.01)
    # In a process of its own, the reporter says elsewhere that a busy service is late with an answer.
    monkeypatch.setattr(reporter_module, "_say", lambda text: None)
    ending = threading.Event()
    reporter = threading.Thread(target=Reporter(read_report(run), service.tokens["reporter"], ending).run)
    reporter.start()
    feed = client_module.SseParser.feed
    fed = 0
    streaming = threading.Event()

    def breaking(self: Any, line: str) -> Any:
        nonlocal fed
        fed += 1
        streaming.set()
        if fed % 7 == 0:
            raise client_module.httpx.ReadError("made to break")
        return feed(self, line)

    monkeypatch.setattr(client_module.SseParser, "feed", breaking)

    def write() -> None:
        # What was there before would be shown without the stream.
        assert streaming.wait(DEADLINE_S)
        for step in range(1, 5):
            write_steps(run, step, step)
            # Longer than a batch is kept back: they come one after the other.
            time.sleep(0.1)
        with EventLog(run / "events.jsonl") as log:
            # What comes with the end is shown without the stream.
            while fed <= 20:
                log.write(Note("info", "it goes on"), "driver")
                time.sleep(0.1)
            log.write(RunFinished("stopped", "stopped on request", 3.0), "driver")
        ending.set()

    writer = threading.Thread(target=write)
    end = time.monotonic() + DEADLINE_S
    while not answer(rhyme, "list", "--text", uid):
        assert time.monotonic() < end
    writer.start()
    code, out, err = rhyme("logs", "-f", uid)
    writer.join()
    reporter.join()
    assert (code, err) == (0, "")
    assert [line.split()[2] for line in out.splitlines() if " step " in line] == ["1/4", "2/4", "3/4", "4/4"]
    assert "stopped on request" in out.splitlines()[-1]
    assert fed > 20


def test_following_a_queued_run_says_once_what_it_waits_for(rhyme: Rhyme, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = new_run(rhyme, "patient")["uid"]

    # As three pings, which come every 15 seconds, and one behind the run's end.
    def follow(client: Any, run: str, **_: Any) -> Iterator[None]:
        yield from (None, None, None)
        client.stop(run)
        yield None

    monkeypatch.setattr(client_module.Client, "follow_events", follow)
    code, out, err = rhyme("logs", "-f", uid)
    assert (code, out) == (0, "")
    assert err == "the run is in the queue: Ray does not respond\n"


def test_a_run_is_started_stopped_resumed_and_cloned(rhyme: Rhyme) -> None:
    started = new_run(rhyme, "mine")
    assert (started["name"], started["status"], started["tags"]) == ("mine", "queued", ["t1"])
    assert started["spec"]["arguments"]["train"]["num_episodes"] == 2
    code, out, _ = rhyme("stop", "mine", "--wait")
    assert code == 0 and "stopped" in out
    assert answer(rhyme, "resume", started["uid"])["status"] == "queued"
    changes = "--name wide --set histospec.window_max=64 --unset train.num_episodes"
    cloned = answer(rhyme, "clone", started["uid"], *changes.split())
    assert cloned["parent"] == started["uid"] and cloned["name"] == "wide"
    assert cloned["spec"]["arguments"]["histospec"]["window_max"] == 64
    assert "num_episodes" not in cloned["spec"]["arguments"]["train"]
    assert answer(rhyme, "show", "last")["uid"] == cloned["uid"]
    code, out, _ = rhyme("show", "wide")
    assert code == 0 and re.search("waits for +Ray does not respond", out)


def test_a_spec_is_started_from_a_file_once(rhyme: Rhyme, tmp_path: Path) -> None:
    spec = new_run(rhyme, "first")["spec"]
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"name": "again", "arguments": spec["arguments"]}))
    argv = ["start", "--file", str(file), "--set", "train.num_episodes=3", "--key", "a-key"]
    one, two = answer(rhyme, *argv), answer(rhyme, *argv)
    assert one["uid"] == two["uid"] and one["name"] == "again"
    assert one["spec"]["arguments"]["train"]["num_episodes"] == 3
    code, _, err = rhyme(*argv[:-2], "--name", "other", "--key", "a-key")
    assert code == 1 and len(err.splitlines()) == 1
    file.write_text(json.dumps({"nmae": "again"}))
    code, _, err = rhyme(*argv)
    assert code == 2 and "no field 'nmae'" in err


def test_runs_are_compared(rhyme: Rhyme, reported: str) -> None:
    other = new_run(rhyme, "compared")["uid"]
    code, out, err = rhyme("compare", reported, other)
    assert code == 0, err
    assert "reward" in out and "trial (11111111)" in out
    assert ("control.run_uid" in out or "run.name" in out) and "settings." not in out
    found = answer(rhyme, "compare", reported, other)
    assert [one["run"]["uid"] for one in found["comparison"]["runs"]] == [reported, other]
    code, _, err = rhyme("compare", reported)
    assert code == 2 and "two runs at least" in err


def test_tables_are_exported(reported: str, tmp_path: Path, capfdbinary: Any) -> None:
    assert main(["export", reported, "--table", "steps"]) == 0
    rows = list(csv.DictReader(io.StringIO(capfdbinary.readouterr().out.decode())))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    target = tmp_path / "steps.parquet"
    assert main(["export", reported, "--format", "parquet", "--output", str(target)]) == 0
    assert target.read_bytes()[:4] == b"PAR1"
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    assert main(["export", reported, "--output", "/nowhere/steps.csv"]) == 1
    assert b"/nowhere/steps.csv cannot be written" in capfdbinary.readouterr().err


def test_a_run_directory_is_imported(rhyme: Rhyme, service: Service, tmp_path: Path) -> None:
    run = make_run(service.root / "imported", "", "imported", run_uid="5" * 16, attempt_uid="6" * 16)
    with EventLog(run / "events.jsonl") as log:
        log.write(RUN_STARTED, "driver")
    write_steps(run, 1, 2)
    code, out, err = rhyme("import", str(run))
    assert code == 0, err
    assert "9 events brought in" in out
    assert answer(rhyme, "show", "5" * 16)["origin"] == "imported"
    code, _, err = rhyme("import", str(tmp_path))
    assert code == 1 and "--serve.roots" in err


def test_a_run_is_edited_archived_and_deleted(rhyme: Rhyme) -> None:
    uid = new_run(rhyme, "edited")["uid"]
    assert rhyme("edit", uid)[0] == 2
    run = answer(rhyme, "edit", uid, "--tag", "b", "--untag", "t1", "--notes", "seen")
    assert (run["tags"], run["notes"], run["name"]) == (["b"], "seen", "edited")
    code, _, err = rhyme("edit", uid, "--experiment", "none of this name")
    assert code == 1 and "none of this name" in err
    rhyme("stop", uid, "--wait")
    assert answer(rhyme, "archive", uid)["archived_at"] is not None
    assert answer(rhyme, "archive", uid, "--undo")["archived_at"] is None
    code, _, err = rhyme("delete", uid)
    assert code == 2 and "--yes" in err
    assert rhyme("delete", uid, "--yes")[0] == 1
    rhyme("archive", uid)
    assert answer(rhyme, "delete", uid, "--yes") == {"deleted": uid}
    assert rhyme("show", uid)[0] == 1


def test_an_ambiguous_name_is_said(rhyme: Rhyme) -> None:
    for _ in range(2):
        new_run(rhyme, "twin")
    code, _, err = rhyme("show", "twin")
    assert code == 1 and "several runs are called 'twin'" in err


def test_a_token_that_is_missing_or_refused_is_one_sentence(
    rhyme: Rhyme, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = rhyme("list", "--server", "http://127.0.0.1:9")
    assert code == 4 and "no access token" in err
    monkeypatch.setenv("RHYME_CONTROL_TOKEN", "rhyme_wrong")
    code, _, err = rhyme("list")
    assert code == 4 and "does not know this access token" in err and "rhyme_wrong" not in err
    monkeypatch.setenv("RHYME_CONTROL_TOKEN", service.tokens["viewer"])
    code, _, err = rhyme("stop", "f" * 16)
    assert code == 4 and "may not do that" in err


def test_login_keeps_a_token_that_works(
    rhyme: Rhyme, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    assert rhyme("list", "--server", service.url)[0] == 4

    def typed(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text + "\n"))

    typed(f"{service.url}/#token={service.tokens['viewer']}")
    code, out, _ = rhyme("login")
    assert code == 0 and "the viewer (viewer)" in out and service.tokens["viewer"] not in out
    assert rhyme("list")[0] == 0
    typed(service.tokens["operator"])
    code, out, _ = rhyme("login", service.url)
    assert code == 0 and "(operator)" in out
    typed(f"{service.url}/#token=wrong")
    assert rhyme("login")[0] == 4
    code, _, err = rhyme("login", f"{service.url}/#token=secret")
    assert code == 2 and "secret" not in err
    assert service.tokens["operator"] in (tmp_path / "new/.config/rhyme-openrlhf/client.json").read_text()


def test_login_exchanges_a_link_for_a_token_once(
    rhyme: Rhyme, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    with service.database.writing() as session:
        code = credentials.issue_code(session, time.time(), 60)
    link = credentials.sign_in_link(service.url, code) + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(link))
    code_of_exit, out, _ = rhyme("login")
    assert code_of_exit == 0 and f"as rhyme runs on {socket.gethostname()} (operator)" in out and code not in out
    kept = (tmp_path / "new/.config/rhyme-openrlhf/client.json").read_text()
    assert code not in kept and "rhyme_" in kept
    assert rhyme("list")[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(link))
    code_of_exit, _, err = rhyme("login")
    assert code_of_exit == 4 and "used already or is too old; `rhyme serve --new-link` prints a new one" in err


def test_login_without_a_link_makes_a_token_from_this_machine_s_store(
    rhyme: Rhyme, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert rhyme("login")[0] == 4
    (tmp_path / "rhyme-openrlhf").symlink_to(service.root / "data")
    # The service of this machine is another one.
    assert rhyme("login", "http://127.0.0.1:9")[0] == 4
    code, out, _ = rhyme("login")
    assert code == 0 and f"making a token for {service.url} from the database in {tmp_path}/rhyme-openrlhf" in out
    assert rhyme("list")[0] == 0


NAMES = "list show start stop resume clone edit archive delete logs compare export import login"


@pytest.mark.parametrize("name", NAMES.split())
def test_help_teaches_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([name, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"rhyme runs {name}" in shown.partition("example:")[2]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ("show nonsense", 1, "nonsense"),
        ("show ffffffffffffffff", 1, "ffffffffffffffff"),
        ("list --filter reward>", 1, "expected a value"),
        ("start -- rhyme demo --histospec.window_max 900", 1, "histospec.window_max.*from 1 to 128"),
        ("stop --experiment nothing", 1, "there is no experiment"),
        ("tokens --revoke 123456", 1, "token"),
        ("list --view none", 1, "there is no saved view named none"),
        ("start", 2, "give either a command"),
        ("start --file /nowhere.json", 2, "/nowhere.json cannot be read"),
        ("clone ffffffffffffffff --set x", 2, "--set needs GROUP.OPTION=VALUE"),
        ("clone ffffffffffffffff --unset x", 2, "an option is GROUP.OPTION"),
        ("stop", 2, ""),
        ("export --to mlflow", 2, "name it"),
        ("sweep --name lr --vary actor.adam.lr=a..b -- rhyme demo", 2, r"LOW\.\.HIGH"),
        ("sweep --name lr --vary actor.adam.lr -- rhyme demo", 2, "GROUP.OPTION=VALUES"),
        ("views save x --tag a --tag b", 2, "--filter"),
        ("list --server http://127.0.0.1:9", 3, "no control plane answers at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_a_code(
    rhyme: Rhyme, monkeypatch: pytest.MonkeyPatch, argv: str, code: int, said: str
) -> None:
    if code == 3:
        monkeypatch.setenv("RHYME_CONTROL_TOKEN", "t")
    found, out, err = rhyme(*argv.split())
    assert (found, out) == (code, "") and re.search(said, err) and len(err.splitlines()) == 1


def test_tokens_are_made_listed_and_revoked_and_all_of_it_is_in_the_audit_log(rhyme: Rhyme) -> None:
    code, out, err = rhyme("tokens", "--make", "grafana", "--role", "viewer", "--days", "90")
    assert code == 0 and re.fullmatch(r"rhyme_\S{43}\n", out) and "only this once" in err
    (token,) = [one for one in answer(rhyme, "tokens") if one["name"] == "grafana"]
    assert token["expires_at"] == pytest.approx(time.time() + 90 * 86_400, abs=600) and token["last_used_at"] is None
    code, out, _ = rhyme("tokens")
    (line,) = [line for line in out.splitlines() if "grafana" in line]
    assert token["prefix"] in line and time.strftime("%Y-%m-%d", time.localtime(token["expires_at"])) in line
    assert rhyme("tokens", "--revoke", str(token["id"]))[0] == 0
    assert "grafana" not in rhyme("tokens")[1]
    (line,) = [line for line in rhyme("tokens", "--all")[1].splitlines() if "grafana" in line]
    assert "revoked" in line
    done = answer(rhyme, "audit", "--text", f"/tokens/{token['id']}")
    assert [one["action"] for one in done] == ["Revoke a token", "Create a token"]
    code, out, _ = rhyme("audit", "--name", "the operator", "--limit", "2")
    assert code == 0 and "Revoke a token" in out and "127.0.0.1" in out


def test_a_sweep_is_started_listed_and_stopped(rhyme: Rhyme) -> None:
    vary = ["--vary", "actor.adam.lr=1e-6,3e-6", "--vary", "data.input_key=input,other"]
    code, out, err = rhyme("sweep", "--name", "lr", *vary, "--", "rhyme", "demo")
    assert code == 0 and "lr-4" in out and "3e-06" in out and "4 runs; `rhyme runs list --experiment lr`" in err
    assert len(answer(rhyme, "list", "--experiment", "lr")) == 4
    drawn = ["--vary", "actor.adam.lr=log:1e-7..1e-5", "--count", "3", "--seed", "1"]
    code, out, _ = rhyme("sweep", "--json", "--name", "drawn", *drawn, "--", "rhyme", "demo")
    values = [run["options"]["actor.adam.lr"] for run in json.loads(out)["runs"]]
    assert len(set(values)) == 3 and all(1e-7 <= value <= 1e-5 for value in values)
    found = answer(rhyme, "groups", "lr")
    assert [len(group["runs"]) for group in found["groups"]] == [1] * 4 and found["groups"][0]["figures"][0][
        "curve"
    ] is None
    code, out, _ = rhyme("groups", "lr", "--metric", "reward")
    assert code == 0 and "actor.adam.lr" in out and "reward, best" in out and "3e-06" in out
    code, out, _ = rhyme("stop", "--experiment", "lr", "--wait")
    assert code == 0 and "4 runs were asked to stop" in out
    assert {run["status"] for run in answer(rhyme, "list", "--experiment", "lr")} == {"stopped"}
    assert {run["status"] for run in answer(rhyme, "list", "--experiment", "drawn")} == {"queued"}


def test_webhooks_are_made_tested_listed_and_deleted(
    rhyme: Rhyme, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    def hooks(*argv: str) -> tuple[int, str, str]:
        code = webhooks.main(list(argv))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    with receiving() as receiver:
        given = ("--event", "failed", "--event", "stalled", "--stalled-minutes", "20")
        code, out, err = hooks("add", "team", receiver.url, *given)
        assert code == 0 and out.startswith("whsec_") and "only this once" in err
        (hook,) = json.loads(hooks("list", "--json")[1])
        assert (hook["events"], hook["stalled_minutes"], hook["form"]) == (["failed", "stalled"], 20, "json")
        assert "failed, stalled 20" in " ".join(hooks("list")[1].split())
        number = str(hook["id"])
        changed = hooks("edit", number, "--event", "failed", "--name", "crew", "--json")[1]
        assert json.loads(changed) == {**hook, "events": ["failed"], "name": "crew"}
        assert hooks("edit", number)[0] == 2
        assert hooks("test", number)[0] == 0 and receiver.verified(out.strip())
        receiver.answer = b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n"
        code, _, err = hooks("test", number)
        assert code == 1 and err == f"rhyme webhooks: webhook {number}: it answered 500\n"
    log = json.loads(hooks("log", "--webhook", number, "--json")[1])
    assert [one["state"] for one in log] == ["failed", "delivered"]
    assert "it answered 500" in " ".join(hooks("log")[1].split())
    assert json.loads(hooks("log", "--webhook", "crew", "--json")[1]) == log
    code, _, err = hooks("test", "team")
    assert code == 2 and "no webhook has the name 'team'" in err
    assert hooks("delete", number)[0] == 0 and hooks("delete", number)[0] == 1
    code, _, err = hooks("add", "team", "ftp://x", "--event", "failed")
    assert code == 1 and "http" in err


def test_views_are_saved_listed_used_renamed_and_deleted(rhyme: Rhyme, reported: str) -> None:
    def viewed(*argv: str) -> Any:
        code, out, err = rhyme("views", *argv, "--json")
        assert code == 0, err
        return json.loads(out)

    condition = "reward > 0"
    given = ("--filter", condition, "--column", "metric.policy_loss", "--tag", "none such")
    saved = viewed("save", "good", "--everyone", *given)
    wanted = {"filter": condition, "values": ["metric.policy_loss"], "tag": "none such", "shared": True}
    assert {name: saved[name] for name in wanted} == wanted
    assert rhyme("views", "save", "good", "--everyone")[0] == 1
    assert answer(rhyme, "list", "--view", "good") == []
    viewed("save", "good", "--everyone", "--replace", *given[:-2])
    # Other tests of this file have runs in this service, too.
    found = {run["uid"]: run for run in answer(rhyme, "list", "--view", "good")}
    assert list(found[reported]["values"]) == ["metric.policy_loss"]
    # The token's own comes first, and options beside a view take the place of its own.
    viewed("save", "good", "--text", "nothing like it")
    assert answer(rhyme, "list", "--view", "good") == []
    assert reported in [one["uid"] for one in answer(rhyme, "list", "--view", "good", "--text", "")]
    assert viewed("rename", "good", "mine")["shared"] is False
    table = " ".join(rhyme("views", "list")[1].split())
    assert "mine" in table and "everyone" in table and f"filter {condition}" in table
    assert rhyme("views", "delete", "mine")[0] == 0
    assert "mine" not in rhyme("views", "list")[1]
