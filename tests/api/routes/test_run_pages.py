"""Queries of a run's page: steps, curves, timeline, engines, events, comparison, exports."""

from __future__ import annotations

import csv
import io
import itertools
import json
from typing import Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import update

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.telemetry import metrics
from rhyme_openrlhf.telemetry.events import EngineInterval
from rhyme_openrlhf.telemetry.metrics import EngineCounters

pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)

ONE = f"/api/v1/runs/{'a' * 16}"
SOURCES = ("history_share", "siblings_share", "own_share", "shared_share")
EXPORT = f"/api/v1/export/runs/{'a' * 16}"


def get(api: Any, path: str, **parameters: Any) -> Any:
    answer = api.viewer.get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_steps_are_paged_in_both_directions(reported: Any) -> None:
    first = get(reported, f"{ONE}/steps", limit=2)
    assert [row["step"] for row in first["items"]] == [1, 2]
    assert first["items"][0]["engine_tokens"] == 200 and "attempt_id" not in first["items"][0]
    rest = get(reported, f"{ONE}/steps", limit=2, cursor=first["next_cursor"])
    assert [row["step"] for row in rest["items"]] == [3] and rest["next_cursor"] is None
    back = get(reported, f"{ONE}/steps", direction="desc", from_step=1, to_step=2)
    assert [row["step"] for row in back["items"]] == [2, 1]


def test_engines_samples_moves_switches_and_stability(reported: Any) -> None:
    assert [row["engine"] for row in get(reported, f"{ONE}/steps/2/engines")["items"]] == [0, 1]
    assert get(reported, f"{ONE}/steps/9/engines")["items"] == []
    assert [row["step"] for row in get(reported, f"{ONE}/samples", engine=1)["items"]] == [1, 2, 3]
    move = get(reported, f"{ONE}/moves", from_step=2, to_step=2)["items"]
    assert [(m["cause"], m["carrier"], m["outcome"], m["tokens"]) for m in move] == [
        ("reallocation", "recompute", "moved", 7)
    ]
    assert (move[0]["downtime_seconds"], move[0]["predicted_seconds"]) == (0.2, 0.4)
    assert [row["to_tp"] for row in get(reported, f"{ONE}/switches")["items"]] == [2, 2, 2]
    assert get(reported, f"{ONE}/rank-stability") == [{"epoch": 1, "correlation": 0.75, "prompts": 4}]


def test_figures_of_curves_are_those_of_the_metrics_module(reported: Any) -> None:
    names = "speculation_rate,acceptance_rate,tokens_per_step,decode_step_ms,tokens_per_second,bubble_fraction"
    names += f",{','.join(SOURCES)}"
    series = get(reported, f"{ONE}/series", names=names)
    values = {curve["name"]: curve["values"][0] for curve in series["curves"]}
    counters = EngineCounters(200, 180, 60, 120, 100, 20, 80, 40, 4.0, 0.5, 8, 10, 6)
    for name in ("speculation_rate", "acceptance_rate", "tokens_per_step", "decode_step_ms", *SOURCES):
        assert values[name] == pytest.approx(getattr(metrics, name)(counters))
    assert values["tokens_per_second"] == pytest.approx(metrics.tokens_per_second(200, 4.0))
    assert values["bubble_fraction"] == pytest.approx(3.0 / (2 * 4.0))


def test_without_a_timeline_nothing_is_said_of_bubbles(api: Any, record: Any) -> None:
    api.announce()
    # The second step's intervals were given up: it has none to find bubbles in.
    rows = [row for row in record() if not (row["kind"] == "engine_interval" and row["step"] == 2)]
    api.send(rows)
    curve = get(api, f"{ONE}/series", names="bubble_fraction")["curves"][0]["values"]
    assert curve == [pytest.approx(0.375), None, pytest.approx(0.375)]
    other = [row for row in record() if row["kind"] != "engine_interval"]
    api.announce(run="c" * 16, attempt="d" * 16)
    api.send(other, attempt="d" * 16)
    assert get(api, f"/api/v1/runs/{'c' * 16}")["bubble_fraction"] is None


def test_events_of_rare_and_frequent_kinds_are_found(reported: Any) -> None:
    def kinds(*wanted: str) -> list[str]:
        return [row["kind"] for row in get(reported, f"{ONE}/events", kind=list(wanted), limit=100)["items"]]

    assert kinds("note") == ["note"]
    assert kinds("engine_interval") == ["engine_interval"] * 12
    assert sorted(set(kinds("note", "engine_interval"))) == ["engine_interval", "note"]
    assert kinds("checkpoint_saved", "rank_stability") == ["rank_stability", "checkpoint_saved"]


def test_curves_of_columns_metrics_and_nothing(reported: Any) -> None:
    series = get(reported, f"{ONE}/series", names="reward,policy_loss,never,reward", from_step=2)
    by_name = {curve["name"]: curve for curve in series["curves"]}
    assert list(by_name) == ["reward", "policy_loss", "never"]
    assert by_name["reward"]["x"] == [2.0, 3.0]
    # A loss that was not finite is a gap.
    assert by_name["policy_loss"]["values"] == [None, pytest.approx(0.3)]
    assert by_name["never"] == {"name": "never", "x": [], "values": [], "count": 0}
    timed = get(reported, f"{ONE}/series", names="reward", axis="time")
    assert timed["curves"][0]["x"][0] == pytest.approx(9.0)
    steps = get(reported, f"{ONE}/series", names="samples,response_tokens,reward")["curves"]
    for axis, amounts in (("samples", steps[0]), ("tokens", steps[1])):
        (curve,) = get(reported, f"{ONE}/series", names="reward", axis=axis, from_step=2)["curves"]
        # Steps before the window count too.
        assert curve["x"] == list(itertools.accumulate(amounts["values"]))[1:]
    (smooth,) = get(reported, f"{ONE}/series", names="reward", smooth=0.5)["curves"]
    first, second, *_ = steps[2]["values"]
    assert smooth["values"][:2] == [pytest.approx(first), pytest.approx((first + 2 * second) / 3)]
    assert reported.viewer.get(f"{ONE}/series", params={"names": "reward", "smooth": 1}).status_code == 422
    names = get(reported, f"{ONE}/series/names")
    assert "policy_loss" in names["metrics"] and "speculation_rate" in names["figures"]
    assert reported.viewer.get(f"{ONE}/series", params={"names": ","}).status_code == 422
    assert reported.viewer.get(f"{ONE}/series", params={"names": ",".join("abcdefgh" * 8)}).status_code == 200
    many = ",".join(f"m{i}" for i in range(33))
    assert reported.viewer.get(f"{ONE}/series", params={"names": many}).status_code == 422


def test_a_long_curve_is_down_sampled(api: Any, record: Any) -> None:
    api.announce()
    api.send(record(steps=300, engines=1))
    curve = get(api, f"{ONE}/series", names="reward", points=20)["curves"][0]
    assert curve["count"] == 300 and len(curve["x"]) <= 20
    assert max(curve["values"]) == pytest.approx(3.5)


def test_a_start_is_no_bubble_and_a_stop_is_a_gap(api: Any, record: Any, numbered: Any) -> None:
    api.announce()
    rows = record(ended=False)
    begin = next(row["time"] for row in rows if row["kind"] == "rollout_started")
    # Engine 0 is there long before the first rollout; then it waits for the trainer between two of them.
    waits = [
        EngineInterval(0, "idle", begin - 66, begin - 30, 1, 0, "trainer"),
        EngineInterval(0, "idle", begin - 30, begin + 0.5, 1, 0, "trainer"),
        EngineInterval(0, "idle", begin + 4, begin + 10, 2, 0, "trainer"),
    ]
    api.send(rows + numbered([(begin + 5, "more", one) for one in waits]))
    (lane,) = get(api, f"{ONE}/timeline", from_step=1, to_step=2, engine=[0])["lanes"]
    found = [(round(one["start"] - begin, 1), round(one["end"] - begin, 1)) for one in lane["intervals"]]
    assert (0.0, 0.5) in found and (4.0, 10.0) in found and min(found) == (0.0, 0.5)
    # The tails of two rollouts, and what is left of the three waits.
    assert lane["bubble_seconds"] == pytest.approx(2 * 2 + 0.5 + 6)


def test_the_timeline_shows_chosen_or_worst_engines(reported: Any) -> None:
    worst = get(reported, f"{ONE}/timeline", from_step=1, to_step=2, worst=1)
    assert worst["engines"] == 2 and [lane["engine"] for lane in worst["lanes"]] == [0]
    lane = worst["lanes"][0]
    assert lane["bubble_seconds"] == pytest.approx(4.0)
    assert [(i["step"], i["state"], i["cause"]) for i in lane["intervals"]] == [
        (1, "generate", ""), (1, "idle", "tail"), (2, "generate", ""), (2, "idle", "tail"),
    ]  # fmt: skip
    chosen = get(reported, f"{ONE}/timeline", from_step=1, to_step=3, engine=[1, 7])
    assert [lane["engine"] for lane in chosen["lanes"]] == [1]
    short = get(reported, f"{ONE}/timeline", from_step=1, to_step=3, limit=3)
    assert short["truncated"] and sum(len(lane["intervals"]) for lane in short["lanes"]) == 3


def test_events_are_filtered_and_paged(reported: Any) -> None:
    notes = get(reported, f"{ONE}/events", kind=["note"])["items"]
    assert notes[0]["body"] == {"level": "info", "text": "<b>a note</b>"} and notes[0]["attempt"] == 1
    of_trainer = get(reported, f"{ONE}/events", source="trainer")["items"]
    assert [event["sequence"] for event in of_trainer] == [0, 1, 2]
    ids: list[int] = []
    cursor = None
    while True:
        page = get(reported, f"{ONE}/events", limit=7, **({"cursor": cursor} if cursor else {}))
        ids += [event["id"] for event in page["items"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert ids == sorted(set(ids)) and len(ids) == 44


def test_runs_are_compared(reported: Any, record: Any) -> None:
    reported.announce(run="c" * 16, attempt="d" * 16, name="other")
    reported.send(record(steps=2), attempt="d" * 16)
    both = get(reported, "/api/v1/compare", run=["a" * 16, "c" * 16], names="reward", axis="time")
    assert [entry["run"]["uid"] for entry in both["runs"]] == ["a" * 16, "c" * 16]
    assert both["runs"][0]["ratios"]["tokens_per_second"] == 1.0
    assert both["runs"][1]["ratios"]["step"] == pytest.approx(2 / 3)
    assert both["runs"][1]["figures"]["seconds_per_step"] == pytest.approx(9.0)
    assert both["runs"][1]["figures"]["rollout_seconds"] == 4.0
    # Both have two steps, so that none is left out.
    assert (both["from_step"], both["to_step"]) == (1, 2)
    assert len(both["runs"][1]["curves"][0]["x"]) == 2
    for wrong, status in ((["a" * 16], 422), (["a" * 16] * 9, 422), (["a" * 16, "e" * 16], 404)):
        assert reported.viewer.get("/api/v1/compare", params={"run": wrong}).status_code == status


def test_the_difference_of_two_configurations(api: Any) -> None:
    api.announce(config={"settings": {"window": 2, "same": [1]}, "versions": {"vllm": "1"}})
    config = {"settings": {"window": 3, "same": [1], "new": {}}, "versions": {"vllm": "2"}}
    api.announce(run="c" * 16, attempt="d" * 16, config=config)
    diff = get(api, "/api/v1/config-diff", a="a" * 16, b="c" * 16)["differences"]
    assert {row["name"]: (row["a"], row["b"], row["in_a"], row["in_b"]) for row in diff} == {
        "new": (None, {}, False, True),
        "window": (2, 3, True, True),
        "versions.vllm": ("1", "2", True, True),
    }


@pytest.mark.parametrize(
    ("table", "rows"), [("steps", 3), ("metrics", 6), ("intervals", 12), ("engine_steps", 6), ("moves", 3)]
)
def test_a_table_is_the_same_in_all_formats(
    reported: Any, table: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small groups, so that there are several.
    monkeypatch.setattr("rhyme_openrlhf.api.read.export.GROUP", 2)
    as_json = json.loads(reported.viewer.get(f"{EXPORT}/{table}", params={"format": "json"}).content)
    as_csv = reported.viewer.get(f"{EXPORT}/{table}", params={"format": "csv"})
    as_parquet = reported.viewer.get(f"{EXPORT}/{table}", params={"format": "parquet"})
    assert "attachment" in as_csv.headers["content-disposition"]
    assert len(as_json) == rows
    assert pq.read_table(io.BytesIO(as_parquet.content)).to_pylist() == as_json
    read = list(csv.DictReader(io.StringIO(as_csv.text)))
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in as_json] == read


@pytest.mark.parametrize(
    "name", ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1+1", "\r=1+1", '"=1+1', ' "-1+1', "\uff1d1+1", "\tx", "- x"]
)
def test_no_text_in_a_csv_is_a_formula(api: Any, name: str) -> None:
    api.announce(name=name)
    text = api.viewer.get("/api/v1/export/runs").content.decode()
    assert [row["name"] for row in csv.DictReader(io.StringIO(text, newline=""))] == [f"'{name}"]


@pytest.mark.parametrize("name", ["a=1", "-0.5", "+1e-6", "'quoted", "plain - name", '"plain"'])
def test_other_texts_and_numbers_in_a_csv_stay(api: Any, name: str) -> None:
    api.announce(name=name)
    with api.service.database.writing() as session:
        session.execute(update(Run).values(reward=-0.5))
    text = api.viewer.get("/api/v1/export/runs").text
    assert [(row["name"], row["reward"]) for row in csv.DictReader(io.StringIO(text))] == [(name, "-0.5")]


def test_the_table_of_runs_is_exported_and_an_empty_table_too(api: Any) -> None:
    api.announce(name='=cmd|"x",\nand <b>')
    rows = list(csv.DictReader(io.StringIO(api.viewer.get("/api/v1/export/runs").text)))
    assert [row["name"] for row in rows] == ['\'=cmd|"x",\nand <b>']
    assert api.viewer.get("/api/v1/export/runs?format=json").json()[0]["name"] == '=cmd|"x",\nand <b>'
    assert json.loads(api.viewer.get(f"{EXPORT}/steps", params={"format": "json"}).content) == []
    empty = api.viewer.get(f"{EXPORT}/steps", params={"format": "parquet"})
    assert pq.read_table(io.BytesIO(empty.content)).num_rows == 0
    assert api.viewer.get(f"{EXPORT}/steps").text.startswith("step,")
    assert api.viewer.get(f"{EXPORT}/events").status_code == 422
    assert api.viewer.get(f"/api/v1/export/runs/{'e' * 16}/steps").status_code == 404
