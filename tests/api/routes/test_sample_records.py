"""Kept responses over HTTP: pages, filters, orders; and files that another program wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.api.read.sample_files import MAX_LINE
from rhyme_openrlhf.telemetry.samples import file_name

RUN = "a" * 16
URL = f"/api/v1/runs/{RUN}/sample-records"
EVIL = "<img src=x onerror=alert(1)>"


def a_record(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": 1, "group": f"{number % 2:032x}", "prompt": f"prompt {number % 2}",
        "pieces": [["", f"a{number}"], ["history", EVIL]], "tokens": 10 - number, "drafted": 8, "accepted": number,
        "reward": number / 4, "engines": [number % 2], "weight_versions": [0, 0], "finish_reason": "stop",
        "cut": False, **more,
    }  # fmt: skip


def write(run_directory: Path, step: int, records: list[dict[str, Any]], rest: bytes = b"") -> Path:
    folder = run_directory / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(step)
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records) + rest)
    return path


@pytest.fixture
def with_records(api: Any) -> Any:
    for step in (1, 2, 30):
        write(api.root / RUN, step, [a_record(number, step=step) for number in range(6)])
    api.announce()
    return api


def test_steps_are_listed_newest_first_in_pages(with_records: Any) -> None:
    first = with_records.viewer.get(URL, params={"limit": 2}).json()
    assert [one["step"] for one in first["items"]] == [30, 2] and first["missing"] == ""
    assert all(one["attempt"] == 1 and one["bytes"] > 100 for one in first["items"])
    second = with_records.viewer.get(URL, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [one["step"] for one in second["items"]] == [1] and second["next_cursor"] is None


def test_records_come_whole_with_their_text_as_it_is(with_records: Any) -> None:
    page = with_records.viewer.get(f"{URL}/30").json()
    assert (page["matching"], page["unreadable"], page["next_cursor"]) == (6, 0, None)
    first = page["items"][0]
    assert first["pieces"] == [{"source": "", "text": "a0"}, {"source": "history", "text": EVIL}]
    assert [one["number"] for one in page["items"]] == list(range(6)) and first["step"] == 30


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({"sort": "reward", "direction": "desc"}, [5, 4, 3, 2, 1, 0]),
        ({"sort": "tokens"}, [5, 4, 3, 2, 1, 0]),
        ({"sort": "accepted", "direction": "desc", "limit": 2}, [5, 4]),
        ({"min_reward": 0.5, "max_reward": 1.0}, [2, 3, 4]),
        ({"group": f"{1:032x}"}, [1, 3, 5]),
        ({"text": "PROMPT 1", "min_reward": 1.0}, [5]),
        ({"text": "a3"}, [3]),
        ({"text": EVIL, "limit": 2, "cursor": "4"}, [4, 5]),
        ({"text": "nowhere"}, []),
        ({"cursor": "999999"}, []),
    ],
)
def test_filters_and_orders(with_records: Any, wanted: dict[str, Any], numbers: list[int]) -> None:
    page = with_records.viewer.get(f"{URL}/1", params=wanted).json()
    assert [one["number"] for one in page["items"]] == numbers


@pytest.mark.parametrize(
    "wanted",
    [{"sort": "prompt"}, {"cursor": "-1"}, {"cursor": "x"}, {"min_reward": "nan"}, {"group": "x"}, {"limit": 201}],
)
def test_what_has_not_its_form_is_refused(with_records: Any, wanted: dict[str, Any]) -> None:
    assert with_records.viewer.get(f"{URL}/1", params=wanted).status_code == 422


def test_lines_that_are_no_records_are_counted_and_left_out(api: Any) -> None:
    bad = [
        b"{}\n", b"not json\n", b"[1, 2]\n", b"null\n", b"\xff\xfe\n", b"\n", b"[" * 100_000 + b"\n",
        json.dumps(a_record(1, tokens="ten")).encode() + b"\n",
        json.dumps(a_record(1, reward=1.0)).replace("1.0", "NaN").encode() + b"\n",
        json.dumps(a_record(1, prompt="\ud800")).encode() + b"\n",
        json.dumps(a_record(1, prompt="x" * (2 * MAX_LINE))).encode() + b"\n",
        json.dumps(a_record(1, tokens=10**400)).encode() + b"\n",
    ]  # fmt: skip
    torn = json.dumps(a_record(9)).encode()[:-20]
    write(api.root / RUN, 1, [a_record(0)], b"".join(bad) + json.dumps(a_record(2)).encode() + b"\n" + torn)
    api.announce()
    page = api.viewer.get(f"{URL}/1")
    assert page.status_code == 200, page.text
    assert [one["pieces"][0]["text"] for one in page.json()["items"]] == ["a0", "a2"]
    assert page.json()["unreadable"] == len(bad) + 1


def test_samples_without_a_reward_come_last(api: Any) -> None:
    write(api.root / RUN, 1, [a_record(0, reward=None), a_record(1), a_record(2)])
    api.announce()
    for direction, numbers in (("asc", [1, 2, 0]), ("desc", [2, 1, 0])):
        page = api.viewer.get(f"{URL}/1", params={"sort": "reward", "direction": direction}).json()
        assert [one["number"] for one in page["items"]] == numbers
    assert api.viewer.get(f"{URL}/1", params={"min_reward": -100}).json()["matching"] == 2


def test_no_other_file_is_read(api: Any) -> None:
    outside = api.root.parent / "outside"
    secret = write(outside, 1, [a_record(0, prompt="the secret")])
    folder = api.root / RUN / "samples"
    folder.mkdir(parents=True)
    (folder / file_name(1)).symlink_to(secret)
    (folder / file_name(2)).mkdir()
    (folder / "step-1.jsonl").write_bytes(secret.read_bytes())
    api.announce()
    assert api.viewer.get(URL).json()["items"] == []
    for step in ("1", "2", "3", "2147483647"):
        answer = api.viewer.get(f"{URL}/{step}")
        assert answer.status_code == 404 and "secret" not in answer.text


def test_a_run_without_records_says_how_to_get_some(api: Any) -> None:
    api.announce()
    listed = api.viewer.get(URL).json()
    assert listed["items"] == [] and "--telemetry.sample_groups" in listed["missing"]
    assert api.viewer.get(f"{URL}/1").status_code == 404
    api.announce(run="c" * 16, attempt="d" * 16, run_directory=str(api.root.parent / "outside"))
    write(api.root.parent / "outside", 1, [a_record(0)])
    assert api.viewer.get(f"/api/v1/runs/{'c' * 16}/sample-records/1").status_code == 404


def test_the_newest_attempt_that_has_a_step_answers(with_records: Any) -> None:
    again = with_records.root / "again"
    write(again, 30, [a_record(0, step=30, prompt="of the second attempt")])
    with_records.announce(attempt="d" * 16, run_directory=str(again))
    listed = with_records.viewer.get(URL).json()["items"]
    assert [(one["step"], one["attempt"]) for one in listed] == [(30, 2), (2, 1), (1, 1)]
    assert with_records.viewer.get(f"{URL}/30").json()["items"][0]["prompt"] == "of the second attempt"
    assert with_records.viewer.get(f"{URL}/2").json()["matching"] == 6
