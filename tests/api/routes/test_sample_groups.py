"""Prompt groups over HTTP: a step's samples, one prompt through training, the file; and files that others wrote."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rhyme_openrlhf.api.read import sample_tables
from rhyme_openrlhf.client import AsyncClient
from rhyme_openrlhf.telemetry.sample_table import GAP_BOUNDS, encoded_table
from rhyme_openrlhf.telemetry.samples import TABLE, file_name
from tests.api.http_service import BASE

RUN = "a" * 16
URL = f"/api/v1/runs/{RUN}/sample-groups"
EVIL = "<img src=x onerror=alert(1)>"


def key(number: int) -> str:
    return f"{number:032x}"


def a_row(number: int, step: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "number": number, "group": key(number // 4), "reward": number % 4 / 4, "advantage": 0.5,
        "tokens": 10, "accepted": 4, "gap_counts": [1] * (len(GAP_BOUNDS) + 1), "prompt": EVIL, "response": "a b",
        "token_texts": ["a", " b"], "log_probs": [-1.0, None], "part.correct": 1.0, **more,
    }  # fmt: skip


def write(run_directory: Path, step: int, content: bytes) -> Path:
    folder = run_directory / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(step, TABLE)
    path.write_bytes(content)
    return path


@pytest.fixture
def with_tables(api: Any) -> Any:
    for step, numbers in ((1, range(12)), (2, range(4, 8)), (30, range(12))):
        write(api.root / RUN, step, encoded_table([a_row(number, step) for number in numbers]))
    api.announce()
    return api


def test_a_steps_groups_come_in_pages_with_their_samples(with_tables: Any) -> None:
    page = with_tables.viewer.get(f"{URL}/1", params={"limit": 2}).json()
    assert page["matching"] == 3 and page["next_cursor"] == "2" and page["gap_bounds"] == list(GAP_BOUNDS)
    first = page["items"][0]
    assert (first["group"], first["prompt"], first["reward_mean"]) == (key(0), EVIL, 0.375)
    assert first["reward_spread"] == pytest.approx(0.3227, abs=1e-4) and first["has_signal"]
    sample = first["samples"][1]
    assert (sample["number"], sample["reward"], sample["parts"], sample["label"]) == (1, 0.25, {"correct": 1.0}, None)
    assert sample["log_probs"] is None and sample["age"] is None
    rest = with_tables.viewer.get(f"{URL}/1", params={"cursor": "2"}).json()
    assert [group["group"] for group in rest["items"]] == [key(2)] and rest["next_cursor"] is None


def test_equal_rewards_are_no_signal(api: Any) -> None:
    write(api.root / RUN, 1, encoded_table([a_row(number, reward=1.0) for number in range(4)]))
    api.announce()
    (group,) = api.viewer.get(f"{URL}/1").json()["items"]
    assert not group["has_signal"] and group["reward_spread"] == 0


def test_single_tokens_come_when_they_are_asked_for(with_tables: Any) -> None:
    page = with_tables.viewer.get(f"{URL}/1", params={"tokens": True, "group": key(1)}).json()
    (group,) = page["items"]
    assert page["matching"] == 1 and group["group"] == key(1)
    assert group["samples"][0]["token_texts"] == ["a", " b"] and group["samples"][0]["log_probs"] == [-1.0, None]


def test_a_prompt_alone_gives_the_steps_in_which_it_was_generated(with_tables: Any) -> None:
    assert with_tables.viewer.get(URL).json() == {"steps": [1, 2, 30], "missing": ""}
    assert with_tables.viewer.get(URL, params={"group": key(2)}).json()["steps"] == [1, 30]
    assert with_tables.viewer.get(URL, params={"group": key(9)}).json()["steps"] == []


def test_a_step_that_was_done_again_is_read_again(with_tables: Any) -> None:
    assert with_tables.viewer.get(URL, params={"group": key(2)}).json()["steps"] == [1, 30]
    path = write(with_tables.root / RUN, 2, encoded_table([a_row(8, 2)]))
    assert path.stat().st_mtime_ns
    assert with_tables.viewer.get(URL, params={"group": key(2)}).json()["steps"] == [1, 2, 30]


def test_the_file_comes_as_it_is_and_the_newest_without_a_step(with_tables: Any) -> None:
    address = f"/api/v1/runs/{RUN}/sample-table"
    newest = with_tables.viewer.get(address)
    assert newest.headers["content-type"] == "application/vnd.apache.parquet"
    assert pq.read_table(io.BytesIO(newest.content))["step"].to_pylist() == [30] * 12
    assert len(pq.read_table(io.BytesIO(with_tables.viewer.get(address, params={"step": 2}).content))) == 4
    assert with_tables.viewer.get(address, params={"step": 7}).status_code == 404


def test_the_client_gives_groups_steps_and_a_data_frame(with_tables: Any) -> None:
    async def ask() -> None:
        transport = httpx.ASGITransport(app=with_tables.app)
        async with AsyncClient(BASE, with_tables.tokens["viewer"], transport=transport) as client:
            assert (await client.sampled_steps(RUN, group=key(2)))["steps"] == [1, 30]
            assert [one["group"] async for one in client.sample_groups(RUN, 1)] == [key(0), key(1), key(2)]
            pytest.importorskip("pandas")
            frame = await client.samples(RUN, 2)
            assert frame["part.correct"].tolist() == [1.0] * 4 and frame["step"].tolist() == [2] * 4

    asyncio.run(ask())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PAR1", b"not a table" * 100, encoded_table([a_row(0)])[:-20],
        encoded_table([a_row(number % 4) for number in range(5000)]),
    ],
    ids=["empty", "short", "text", "torn", "large"],
)  # fmt: skip
def test_what_is_no_table_is_an_answer_and_no_failure(
    api: Any, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(sample_tables, "MAX_ROWS", 4000)
    write(api.root / RUN, 1, content)
    api.announce()
    answer = api.viewer.get(f"{URL}/1")
    assert answer.status_code == 404 and "no table that can be read" in answer.json()["detail"]
    assert api.viewer.get(URL, params={"group": key(0)}).json()["steps"] == []


def test_a_table_that_takes_too_much_room_unpacked_is_not_read(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_tables, "MAX_BYTES", 100_000)
    write(api.root / RUN, 1, encoded_table([a_row(0, token_texts=[f"{n}" for n in range(100_000)])]))
    api.announce()
    assert api.viewer.get(f"{URL}/1").status_code == 200
    assert api.viewer.get(f"{URL}/1", params={"tokens": True}).status_code == 404


def test_columns_of_another_type_are_null_and_others_are_left_out(api: Any) -> None:
    columns = {
        "group": pa.array([key(0)]), "reward": pa.array(["high"]), "tokens": pa.array([3], pa.int32()),
        "part.text": pa.array(["x"]), "part.bad": pa.array([float("nan")], pa.float32()), "secret": pa.array(["s"]),
    }  # fmt: skip
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    write(api.root / RUN, 1, sink.getvalue())
    api.announce()
    answer = api.viewer.get(f"{URL}/1")
    (sample,) = answer.json()["items"][0]["samples"]
    assert (sample["reward"], sample["tokens"], sample["parts"]) == (None, 3, {"bad": None})
    assert "secret" not in answer.text


def test_no_other_file_is_read(api: Any) -> None:
    secret = write(api.root.parent / "outside", 1, encoded_table([a_row(0, prompt="the secret")]))
    folder = api.root / RUN / "samples"
    folder.mkdir(parents=True)
    (folder / file_name(1, TABLE)).symlink_to(secret)
    api.announce()
    assert api.viewer.get(URL).json() == {"steps": [], "missing": sample_tables.NO_TABLES}
    for address in (f"{URL}/1", f"/api/v1/runs/{RUN}/sample-table?step=1", f"/api/v1/runs/{RUN}/sample-table"):
        answer = api.viewer.get(address)
        assert answer.status_code == 404 and "secret" not in answer.text
