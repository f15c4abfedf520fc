"""The draft history: what engines found, where indexes are, what they take."""

from rhyme_openrlhf.telemetry.events import HistoryState
from tests.webui.figure_rows import draw, traces

MIB = 1024**2
STATES = [
    HistoryState(1, 0, 10, 8, 2, 3 * MIB, MIB, hits=0, late=0, misses=10),
    HistoryState(1, 1, 6, 6, 0, MIB, 0, hits=0, late=0, misses=0),
    HistoryState(2, 0, 12, 9, 3, 4 * MIB, 2 * MIB, hits=6, late=1, misses=3),  # worker 1 has not reported yet
]


def test_answers_are_shares_of_a_steps_questions() -> None:
    figure = draw("history_answers", STATES)
    drawn = traces(figure)
    assert list(drawn["No history yet"].x) == [1, 2] and list(drawn["No history yet"].y) == [1.0, 0.3]
    assert list(drawn["In memory"].y) == [0.0, 0.6]
    assert drawn["Had to be read or built"].text[1] == "step 2: had to be read or built 1 of 10"
    assert "in memory 30.0%" in figure.layout.meta["description"]


def test_workers_are_added_up_and_one_that_is_late_counts_with_what_it_last_said() -> None:
    drawn = traces(draw("history_prompts", STATES))
    assert list(drawn["Known"].y) == [16, 18] and list(drawn["Index on disk only"].y) == [2, 3]


def test_room_is_written_in_the_unit_that_suits_it() -> None:
    figure = draw("history_memory", STATES)
    assert list(traces(figure)["In memory"].y) == [4.0, 5.0] and figure.layout.yaxis.title.text == "MiB"
    assert "in memory 5, on disk 2 (MiB)" in figure.layout.meta["description"]
