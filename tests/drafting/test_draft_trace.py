"""Which tokens of a request came from drafts."""

from __future__ import annotations

from rhyme_openrlhf.drafting.draft_trace import DraftTraces


def test_spans_are_where_accepted_tokens_lie() -> None:
    traces = DraftTraces()
    traces.start("a", "name-a")
    traces.start("b", None)
    assert "a" in traces and "b" not in traces and len(traces) == 1
    traces.add("a", 4, 2, 1, "history")
    traces.add("a", 2, 0, 4, "history")
    traces.add("a", 3, 3, 5, "own")
    traces.finish("a")
    traces.finish("b")
    assert "a" not in traces
    expected = {"drafted": 9, "spans": [(1, 3, "history"), (5, 8, "own")]}
    assert traces.take(["name-a", "unknown"]) == [expected, {"drafted": 0, "spans": []}]
    assert traces.take(["name-a"]) == [{"drafted": 0, "spans": []}]


def test_what_nobody_takes_is_dropped_oldest_first() -> None:
    traces = DraftTraces(kept=2)
    for name in ("1", "2", "3"):
        traces.start(name, name)
        traces.add(name, 5, 1, 0, "own")
        traces.finish(name)
    assert [trace["drafted"] for trace in traces.take(["1", "2", "3"])] == [0, 5, 5]
