"""Responses of a run: what is noted of a round, the records that people read, and the lengths that are replayed."""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace as NS

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.simulation.trace import parse_trace
from rhyme_openrlhf.telemetry.samples import (
    MOST_CHARACTERS,
    TABLE,
    Round,
    SampleFiles,
    chosen_prompts,
    encoded,
    file_name,
    length_records,
    sample_record,
    segments,
    step_of,
)


def test_tokens_are_counted_by_the_weights_that_generated_them() -> None:
    one = Round(engine=0, weight_version=3, context=10)
    one.end(3, NS(token_ids=range(7), finish_reason="stop"))
    assert one.tokens_by_version() == {3: 7}
    one.loads = [(4, 2), (6, 5)]
    assert one.tokens_by_version() == {3: 2, 4: 3, 6: 2}


def test_tokens_that_a_stop_string_cut_off_after_a_load_are_not_counted() -> None:
    one = Round(engine=0, weight_version=3, context=10, loads=[(4, 9)])
    one.end(4, NS(token_ids=range(7), finish_reason="stop"))
    assert one.tokens_by_version() == {3: 7, 4: 0}


def decode(tokens: list[int]) -> str:
    """A tokenizer of single bytes: most characters are several tokens."""
    return bytes(tokens).decode("utf-8", "replace")


def a_round(context: int, tokens: int, spans: list[tuple[int, int, str]] | None = None, engine: int = 0) -> Round:
    return Round(engine, 3, context, "t", tokens, 4, "stop", 10 if spans is not None else None, spans)


def test_every_prompt_has_its_turn_and_the_choice_is_the_same_again() -> None:
    prompts = [f"prompt {number}" for number in range(12)]
    chosen = [chosen_prompts(prompts, step, 2) for step in range(1, 601)]
    assert chosen == [chosen_prompts(list(reversed(prompts)), step, 2) for step in range(1, 601)]
    assert all(len(set(keys)) == 2 for keys in chosen)
    counts = Counter(key for keys in chosen for key in keys)
    # 100 times each on average; six standard deviations are 55.
    assert len(counts) == 12 and min(counts.values()) > 45 and max(counts.values()) < 155
    assert chosen_prompts(["a", "a"], 1, 5) == chosen_prompts(["a"], 1, 5)
    assert chosen_prompts(prompts, 1, 0) == []


def test_rounds_of_a_conversation_are_told_apart() -> None:
    rounds = [a_round(3, 4, [(1, 3, "history")]), a_round(9, 3, [(0, 5, "own")])]
    assert segments(rounds, 14) == [
        (3, 4, ""), (4, 6, "history"), (6, 7, ""), (7, 9, "context"), (9, 12, "own"), (12, 14, "context"),
    ]  # fmt: skip
    # Truncated to the context window.
    assert segments(rounds, 5) == [(3, 4, ""), (4, 5, "history")]


@given(st.text(alphabet="aä€😀 ", max_size=20), st.text(alphabet="aä€😀\n", max_size=40), st.data())
def test_pieces_are_the_whole_text_whatever_is_cut_where(prompt: str, response: str, data: st.DataObject) -> None:
    tokens = list((prompt + response).encode())
    context = len(prompt.encode())
    length = len(tokens) - context
    cuts = sorted(data.draw(st.sets(st.integers(0, length), max_size=8)))
    spans = [(first, end, "own") for first, end in zip(cuts[::2], cuts[1::2], strict=False)]
    record = sample_record(7, prompt, tokens, [a_round(context, length, spans)], 0.5, decode)
    assert "".join(text for _, text in record["pieces"]) == response
    assert record["accepted"] == sum(end - first for first, end, _ in spans) and record["drafted"] == 10
    assert all(a != b for a, b in zip(record["pieces"], record["pieces"][1:], strict=False))
    assert not record["cut"] and json.loads(encoded([record], 10**6)[0]) == record


def test_what_was_not_noted_is_null_and_not_zero() -> None:
    record = sample_record(1, "p", list(b"pabc"), [a_round(1, 3)], math.nan, decode)
    assert (record["drafted"], record["accepted"], record["reward"]) == (None, None, None)
    assert record["pieces"] == [["", "abc"]] and record["weight_versions"] == [3, 4]


def test_engines_are_in_the_order_of_the_rounds() -> None:
    rounds = [a_round(1, 1, [], engine=2), a_round(2, 1, [], engine=0), a_round(3, 1, [], engine=2)]
    assert sample_record(1, "p", list(b"pabc"), rounds, 1.0, decode)["engines"] == [2, 0]


def test_long_texts_are_cut_and_too_many_records_left_out() -> None:
    tokens = list(b"p" + b"x" * (2 * MOST_CHARACTERS))
    record = sample_record(1, "p", tokens, [a_round(1, len(tokens) - 1, [])], 1.0, decode)
    assert record["cut"] and len(record["pieces"][0][1]) == MOST_CHARACTERS - 1
    long_prompt = sample_record(1, "y" * MOST_CHARACTERS, list(b"pab"), [a_round(1, 2, [])], 1.0, decode)
    assert long_prompt["cut"] and long_prompt["pieces"] == [["", "ab"]]
    line = len(encoded([record], 10**9)[0])
    assert len(encoded([record] * 5, 3 * line)) == 3


def test_prompts_that_are_no_text_do_not_stop_the_run() -> None:
    record = sample_record(1, "a\ud800", list(b"pab"), [a_round(1, 2, [])], 1.0, decode)
    assert json.loads(encoded([record], 10**6)[0])["prompt"] == "a?"


def test_files_hold_at_most_what_is_allowed_and_lose_the_oldest(tmp_path: object) -> None:
    from pathlib import Path

    run = Path(str(tmp_path))
    files = SampleFiles(run, 1)
    half = b"x" * (400 * 1024) + b"\n"
    for step in (1, 2, 3):
        files.write(step, [half])
    folder = run / "samples"
    assert sorted(path.name for path in folder.iterdir()) == [file_name(2), file_name(3)]
    # Again, as after a resume; and one that is larger than all of the room stays, alone.
    files.write(3, [b"short\n"])
    assert (folder / file_name(3)).read_bytes() == b"short\n"
    files.write(4, [half, half, half])
    assert [path.name for path in folder.iterdir()] == [file_name(4)]


def test_a_steps_records_and_its_table_go_together(tmp_path: object) -> None:
    from pathlib import Path

    run = Path(str(tmp_path))
    part = b"x" * (300 * 1024)
    for step in (1, 2):
        files = SampleFiles(run, 1)
        files.write(step, [part])
        files.write_table(step, part)
    names = [file_name(2), file_name(2, TABLE)]
    assert sorted(path.name for path in (run / "samples").iterdir()) == sorted(names)
    assert [step_of(name, TABLE) for name in names] == [None, 2]


def test_names_of_files() -> None:
    assert [step_of(file_name(step)) for step in (0, 12, 1_234_567)] == [0, 12, 1_234_567]
    assert all(step_of(name) is None for name in ("step-1.jsonl", "step-000001.partial", "x", "step-000001.jsonl~"))


def of(engine: int, *tokens: int, context: int = 9) -> list[Round]:
    return [Round(engine, 0, context + 50 * number, "", count) for number, count in enumerate(tokens)]


def test_a_prompt_group_is_a_line_with_every_samples_tokens_and_first_engine() -> None:
    samples = [("a", of(0, 5)), ("b", of(1, 7)), ("a", of(1, 3, 4)), ("c", [])]
    rows = [json.loads(line) for line in length_records(3, 2, samples).splitlines()]
    assert rows == [
        {"step": 3, "epoch": 2, "prompt": prompt_key("a"), "prompt_tokens": 9, "lengths": [5, 7], "engines": [0, 1]},
        {"step": 3, "epoch": 2, "prompt": prompt_key("b"), "prompt_tokens": 9, "lengths": [7], "engines": [1]},
    ]


def test_the_simulator_reads_them() -> None:
    lines = length_records(1, 1, [("a", of(0, 5)), ("b", of(1, 7))])
    lines += length_records(2, 2, [("a", of(0, 6))])
    load = parse_trace(lines.decode().splitlines(), "lengths.jsonl")
    assert [[(p.prompt, p.prompt_tokens, p.lengths) for p in step.prompts] for step in load.steps] == [
        [(0, 9, (5,)), (1, 9, (7,))],
        [(0, 9, (6,))],
    ]
