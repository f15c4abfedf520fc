"""Figures of machines: a line a machine while they can be told apart, then mean, highest and lowest."""

from __future__ import annotations

from rhyme_openrlhf.api.read.system import CacheSample, MachineSample
from rhyme_openrlhf.webui.figures.subjects.system import GIGABYTE
from tests.webui.figure_rows import draw


def row(node: str, time: float, **more: object) -> MachineSample:
    values: dict[str, object] = {"cpu": 0.5, "memory_used": 8 * 10**9, "memory_total": 16 * 10**9, "time": time}
    return MachineSample(node=node, **{**values, **more})  # type: ignore[arg-type]


def test_few_machines_have_a_line_each() -> None:
    rows = [row("b", 60.0, cpu=0.25), row("a", 60.0, cpu=0.75), row("a", 120.0, cpu=1.0)]
    figure = draw("system-cpu", rows)
    assert [trace.name for trace in figure.data] == ["a", "b"]
    assert list(figure.data[0].y) == [0.75, 1.0] and figure.data[0].x[0] == "1970-01-01 00:01:00.00"
    assert "lowest 25%, highest 100%" in figure.layout.meta["description"]


def test_many_machines_are_summed_up() -> None:
    rows = [row(f"node-{n:02}", 10.0 * t, cpu=n / 10) for t in range(3) for n in range(10)]
    figure = draw("system-cpu", rows)
    mean, highest, lowest = figure.data
    assert mean.name == "mean machine of 10" and all(abs(value - 0.45) < 1e-9 for value in mean.y)
    assert set(highest.y) == {0.9} and set(lowest.y) == {0.0}


def test_gpus_are_told_apart_and_their_absence_is_said() -> None:
    rows = [row("a", 1.0, gpu=(0.5, 0.9), gpu_memory_used=(40.0, 60.0), gpu_memory_total=(80.0, 80.0))]
    assert [trace.name for trace in draw("system-gpu", rows).data] == ["a GPU 0", "a GPU 1"]
    assert [list(trace.y) for trace in draw("system-gpu-memory", rows).data] == [[0.5], [0.75]]
    assert "No GPU" in draw("system-gpu", [row("a", 1.0)]).layout.meta["empty"]


def test_the_smallest_processes_are_added_up() -> None:
    cores = {f"p{n}": float(n) for n in range(10)}
    figure = draw("system-process-cpu", [row("a", 1.0, process_cpu=cores)])
    shown = {trace.name: trace.y[0] for trace in figure.data}
    assert shown == {**{f"p{n}": float(n) for n in range(3, 10)}, "others": 0.0 + 1 + 2}


def test_processes_of_the_same_name_on_two_machines_are_two() -> None:
    rows = [row(node, 1.0, process_cpu={"engine": cores}) for node, cores in (("a", 1.0), ("b", 3.0))]
    shown = {trace.name: trace.y[0] for trace in draw("system-process-cpu", rows).data}
    assert shown == {"engine, a": 1.0, "engine, b": 3.0}


def test_the_share_of_the_kv_cache_is_drawn() -> None:
    assert list(draw("system-kv-cache", [CacheSample(1, 2.0, 0.5)]).data[0].y) == [0.5]


def test_what_a_machine_does_not_know_is_left_out() -> None:
    assert draw("system-disk", [row("a", 1.0)]).layout.meta["empty"]
    figure = draw("system-store", [row("a", 1.0, object_store=2.0 * GIGABYTE)])
    assert [(trace.name, trace.y[0]) for trace in figure.data] == [("object store, a", 2.0)]
