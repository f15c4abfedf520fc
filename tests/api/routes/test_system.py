"""Machine samples as reported, and as the API returns them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import event

from rhyme_openrlhf.api.read.system import CacheSample, cache_samples, machine_samples, nodes_of
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.record import SystemRow
from rhyme_openrlhf.telemetry.events import EngineSample, RunStarted, SystemSample

URL = f"/api/v1/runs/{'a' * 16}/system"
GIGABYTE = 1024**3


def a_sample(cpu: float, node: str = "n0", gpu: tuple[float, ...] = (0.5, math.nan), **more: Any) -> SystemSample:
    values: dict[str, Any] = {
        "node": node, "cpu": cpu, "load": 3.0, "memory_used": 40 * GIGABYTE, "memory_total": 64 * GIGABYTE,
        "disk_free": 10**12, "shared_memory": GIGABYTE, "object_store": None, "gpu": list(gpu),
        "gpu_memory_used": [GIGABYTE] * len(gpu), "gpu_memory_total": [80 * GIGABYTE] * len(gpu),
        "process_cpu": {"engine 0": 1.5, "<b>": 0.1}, "process_memory": {"engine 0": 2 * GIGABYTE, "<b>": 1},
        **more,
    }  # fmt: skip
    return SystemSample(**values)


def report(api: Any, numbered: Any) -> None:
    rows: list[Any] = [(1.0, "driver", RunStarted(1, "a run", ["rhyme"], 2, 1, 1, 3, 4, 2, False))]
    for number in range(100):
        rows += [(10.0 + 5 * number, "system", a_sample(number / 100, node)) for node in ("n0", "n1")]
    rows += [
        (20.0 + engine, "rollout", EngineSample(1, engine, 4, 1.0, 50, 20, 10, 0.25 if engine else None))
        for engine in (0, 1)
    ]
    api.announce()
    api.send(numbered(rows))


def test_each_machine_has_its_curves_and_its_processes(api: Any, numbered: Any) -> None:
    report(api, numbered)
    answer = api.viewer.get(URL, params={"points": 20}).json()
    curves = {(one["of"], one["name"]): one for one in answer["curves"]}
    assert len(curves) == 2 * 8 + 2 and answer["missing"] == ""
    cpu = curves["n1", "cpu"]
    assert cpu["count"] == 100 and len(cpu["x"]) <= 20 and max(cpu["values"]) == 0.99
    # The one GPU that is known; the sum of both.
    assert set(curves["n0", "gpu"]["values"]) == {0.5}
    assert set(curves["n0", "gpu_memory_used"]["values"]) == {2 * GIGABYTE}
    assert set(curves["n0", "object_store"]["values"]) == {None}
    assert curves["0", "kv_cache"]["values"] == [None] and curves["1", "kv_cache"]["values"] == [0.25]
    node = answer["nodes"][0]
    assert (node["node"], node["gpus"], node["memory_total"], node["time"]) == ("n0", 2, 64 * GIGABYTE, 505.0)
    assert node["processes"][1] == {"name": "engine 0", "cores": 1.5, "memory": 2 * GIGABYTE}


@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
def test_of_many_samples_few_are_read_and_extremes_stay(
    api: Any, numbered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(api, numbered)
    peaks: list[Any] = [(12.5, "machine", a_sample(0.999, "n1", load=99.0)), (13.5, "machine", a_sample(0.001, "n0"))]
    peaks += [(30.0 + i, "engines", EngineSample(1, 1, 4, 1.0, 50, 20, 10, 0.9 if i == 7 else 0.5)) for i in range(60)]
    api.send(numbered(peaks))
    exact = api.viewer.get(URL, params={"points": 20}).json()
    monkeypatch.setattr("rhyme_openrlhf.api.read.system.MAX_ROWS", 50)
    loaded: list[Any] = []
    listen = lambda row, _: loaded.append(row)  # noqa: E731
    event.listen(SystemRow, "load", listen)
    try:
        answer = api.viewer.get(URL, params={"points": 20}).json()
    finally:
        event.remove(SystemRow, "load", listen)
    assert len(loaded) <= 4 and answer["nodes"] == exact["nodes"]
    curves = {(one["of"], one["name"]): one for one in answer["curves"]}
    assert [(one["of"], one["name"]) for one in exact["curves"]] == list(curves)
    for before in exact["curves"]:
        after = curves[before["of"], before["name"]]
        assert len(after["x"]) <= 20 and after["x"] == sorted(after["x"]), before["name"]
        if "gpu" in before["name"]:
            continue
        known = [[value for value in one["values"] if value is not None] for one in (before, after)]
        assert [min(one, default=None) for one in known] == [min(known[0], default=None)] * 2
        assert [max(one, default=None) for one in known] == [max(known[0], default=None)] * 2
        assert [one["count"] for one in (before, after)] == [before["count"]] * 2
        assert after["x"][0] == before["x"][0] and after["x"][-1] == before["x"][-1]
    assert max(curves["n1", "cpu"]["values"]) == 0.999 and max(curves["n1", "load"]["values"]) == 99.0
    assert max(curves["1", "kv_cache"]["values"]) == 0.9
    assert 10 <= curves["n0", "gpu"]["count"] <= 60


def test_a_window_and_some_names(api: Any, numbered: Any) -> None:
    report(api, numbered)
    answer = api.viewer.get(URL, params={"name": ["load", "load"], "from_time": 20, "to_time": 30}).json()
    assert [(one["of"], one["x"]) for one in answer["curves"]] == [("n0", [20, 25, 30]), ("n1", [20, 25, 30])]
    for bad in ({"name": "disk"}, {"points": 5}, {"from_time": "nan"}):
        assert api.viewer.get(URL, params=bad).status_code == 422


def test_a_run_without_says_how_to_get_it(api: Any) -> None:
    api.announce()
    answer = api.viewer.get(URL).json()
    assert answer["nodes"] == [] and "--telemetry.system_s" in answer["missing"]


def test_what_no_machine_has_is_refused_or_harmless(api: Any, numbered: Any) -> None:
    api.announce()
    huge = numbered([(1.0, "system", a_sample(0.5))])
    huge[0]["memory_used"] = 2**60
    answer = api.reporter.post(f"/api/v1/ingest/attempts/{'b' * 16}/batches", json={"events": huge})
    assert answer.status_code == 422 and "memory_used" in answer.text
    odd = a_sample(math.inf, gpu=(), process_cpu={"a\0b": 1.0, "ok": math.nan}, process_memory={}, load=math.nan)
    api.send(numbered([(1.0, "system", odd)]))
    answer = api.viewer.get(URL, params={"name": "cpu"}).json()
    assert answer["curves"][0]["values"] == [None]
    assert answer["nodes"][0]["processes"] == [{"name": "ok", "cores": None, "memory": 0}]


def test_figures_are_drawn_of_the_samples_that_were_reported(
    api: Any, numbered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(api, numbered)
    with api.service.database.reading() as session:
        run = find_run(session, "a" * 16)
        samples = machine_samples(session, run, 0.0)
        assert [one.time for one in samples] == sorted(one.time for one in samples) and len(samples) == 200
        first = samples[0]
        # A GPU whose use is not known is None.
        assert (first.gpu, first.gpu_memory_used) == ((0.5, None), (GIGABYTE, GIGABYTE))
        assert (first.process_cpu["engine 0"], first.process_memory["engine 0"]) == (1.5, 2 * GIGABYTE)
        assert {one.node for one in machine_samples(session, run, 500.0, "n1")} == {"n1"}
        assert len(machine_samples(session, run, 500.0)) == 4
        assert cache_samples(session, run, 0.0) == [CacheSample(1, 21.0, 0.25)]
        assert nodes_of(session, run) == ["n0", "n1"]
        monkeypatch.setattr("rhyme_openrlhf.api.read.system.MAX_ROWS", 50)
        some = machine_samples(session, run, 0.0)
        assert 20 <= len(some) <= 100 and all(one in samples for one in some)
        assert {one.node for one in some} == {"n0", "n1"}
