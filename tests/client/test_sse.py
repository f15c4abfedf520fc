"""Server-sent events: whole or not at all, however the connection is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.client.transport import PING, SseEvent, SseParser


def parsed(lines: list[str]) -> list[SseEvent]:
    parser = SseParser()
    return [event for line in lines for event in parser.feed(line)]


def test_fields() -> None:
    lines = ["event: open", "id: 7", "data: {}", "", ": ping - 2026", "", "data:a", "data:  b", "retry: 5", "", "data"]
    assert parsed(lines) == [
        SseEvent("open", "{}", "7"),
        SseEvent(PING, "ping - 2026", ""),
        SseEvent("message", "a\n b", "7"),
    ]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.text(st.characters(exclude_characters="\r\n")))), st.data())
def test_a_cut_connection_gives_whole_events_and_the_id_to_go_on_with(
    events: list[tuple[int, str]], data: st.DataObject
) -> None:
    lines = [line for number, text in events for line in (f"id: {number}", f"data: {text}", "")]
    cut = data.draw(st.integers(0, len(lines)))
    assert parsed(lines[:cut]) == [SseEvent("message", text, str(number)) for number, text in events[: cut // 3]]
