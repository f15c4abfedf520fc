"""Lengths of a step's responses: complete, short, and what the simulator reads."""

from __future__ import annotations

import json

from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.simulation.trace import parse_trace
from rhyme_openrlhf.telemetry.length_records import length_records
from rhyme_openrlhf.telemetry.sample_rounds import Round


def rounds(engine: int, *tokens: int, context: int = 9) -> list[Round]:
    return [Round(engine, 0, context + 50 * number, "", count) for number, count in enumerate(tokens)]


def test_a_prompt_group_is_a_line_with_every_samples_tokens_and_first_engine() -> None:
    samples = [("a", rounds(0, 5)), ("b", rounds(1, 7)), ("a", rounds(1, 3, 4)), ("c", [])]
    rows = [json.loads(line) for line in length_records(3, 2, samples).splitlines()]
    assert rows == [
        {"step": 3, "epoch": 2, "prompt": prompt_key("a"), "prompt_tokens": 9, "lengths": [5, 7], "engines": [0, 1]},
        {"step": 3, "epoch": 2, "prompt": prompt_key("b"), "prompt_tokens": 9, "lengths": [7], "engines": [1]},
    ]


def test_the_simulator_reads_them() -> None:
    lines = length_records(1, 1, [("a", rounds(0, 5)), ("b", rounds(1, 7))])
    lines += length_records(2, 2, [("a", rounds(0, 6))])
    load = parse_trace(lines.decode().splitlines(), "lengths.jsonl")
    assert [[(p.prompt, p.prompt_tokens, p.lengths) for p in step.prompts] for step in load.steps] == [
        [(0, 9, (5,)), (1, 9, (7,))],
        [(0, 9, (6,))],
    ]
