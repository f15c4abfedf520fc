"""Rows of the table of samples, from experiences as OpenRLHF makes them."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils.experience import Experience

from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.telemetry.sample_table import COLUMNS, GAP_BOUNDS, encoded_table
from rhyme_openrlhf.telemetry.samples import Round, sample_record
from rhyme_openrlhf.training.sample_rows import TokenTexts, sample_rows


def decode(tokens: list[int]) -> str:
    """A tokenizer of single bytes: most characters are several tokens."""
    return bytes(tokens).decode("utf-8", "replace")


def an_experience(**more: Any) -> Experience:
    """Two samples of 'ab': 'cde', and 'c' with padding behind it."""
    values: dict[str, Any] = {
        "sequences": torch.tensor([list(b"abcde"), [*b"abc", 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "action_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]], dtype=torch.bool),
        "action_log_probs": torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -0.5, 9.0, 9.0]]),
        "rollout_log_probs": torch.tensor([[0.0, -1.0, -2.5, -1.0], [0.0, -0.5, 0.0, 0.0]]),
        "advantages": torch.tensor([[7.0, 0.5, 0.5, 0.5], [7.0, -0.5, 7.0, 7.0]]),
        "truncated": torch.tensor([True, False]),
        "index": [1, 0],
        "prompts": ["ab", "ab"],
        "labels": ["e", "f"],
        "info": {
            "reward": torch.tensor([1.0, 0.25]), "correct": torch.tensor([1, 0]),
            "kl": torch.tensor([0.5, torch.nan]), "group_reward_std": torch.tensor([0.1, 0.1]),
        },
    }  # fmt: skip
    return Experience(**values | more)


def rows_of(experience: Experience, written: bool = True) -> list[dict[str, Any]]:
    rounds = [
        [Round(1, 5, 2, "t", 1, 6, "stop", 0, [])],
        [Round(0, 3, 2, "t", 2, 5, "length", 2, [(0, 1, "own")]), Round(1, 5, 4, "t", 1, 5, "stop", 1, [])],
    ]
    records = {}
    if written:
        sequences = [list(b"abc"), list(b"abcde")]
        records = {n: sample_record(8, "ab", sequences[n], rounds[n], 1.0, decode) for n in (0, 1)}
    return sample_rows(8, [experience], rounds, records, TokenTexts(decode))


def test_a_row_has_what_the_trainer_used() -> None:
    short, long = rows_of(an_experience())
    assert long["step"] == 8 and long["number"] == 1 and long["group"] == prompt_key("ab")
    assert (long["reward"], long["advantage"], long["tokens"], long["prompt_tokens"]) == (1.0, 0.5, 3, 2)
    assert (long["log_prob"], long["engine_log_prob"], long["gap_largest"]) == (-2.0, -1.5, -2.0)
    assert (long["rounds"], long["age"], long["engines"], long["truncated"]) == (2, 4, [0, 1], True)
    assert long["finish_reason"] == "stop" and long["weight_versions"] == [3, 5]
    assert (long["part.correct"], long["part.kl"], short["part.kl"]) == (1.0, 0.5, None)
    assert not {"part.reward", "part.group_reward_std"} & long.keys()
    assert (short["tokens"], short["advantage"], short["gap"], short["age"]) == (1, -0.5, 0.0, 2)


def test_tokens_are_counted_by_their_gap() -> None:
    short, long = rows_of(an_experience())
    counts = dict(enumerate(long["gap_counts"]))
    of_gap = {0.0: GAP_BOUNDS.index(0.01), 0.5: GAP_BOUNDS.index(1.0), -2.0: GAP_BOUNDS.index(-1.0)}
    assert {place: n for place, n in counts.items() if n} == dict.fromkeys(of_gap.values(), 1)
    assert sum(short["gap_counts"]) == 1


def test_tokens_of_kept_responses_have_their_place_in_the_sequence() -> None:
    short, long = rows_of(an_experience())
    assert long["token_texts"] == ["c", "d", "e"] and long["response"] == "cde" and long["label"] == "e"
    assert long["token_sources"] == ["own", "", ""] and long["log_probs"] == [-1.0, -2.0, -3.0]
    assert long["engine_log_probs"] == [-1.0, -2.5, -1.0] and long["advantages"] == [0.5] * 3
    assert (long["drafted"], long["accepted"]) == (3, 1)
    assert short["token_ids"] == list(b"c") and short["log_probs"] == [-0.5]


def test_what_the_task_wrote_has_no_log_probability() -> None:
    mask = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]], dtype=torch.bool)
    long = rows_of(an_experience(action_mask=mask))[1]
    assert long["log_probs"] == [-1.0, None, -3.0] and long["tokens"] == 2 and long["log_prob"] == -2.0


def test_what_is_not_known_is_null() -> None:
    rows = rows_of(an_experience(rollout_log_probs=None, labels=[]), written=False)
    table = pq.read_table(io.BytesIO(encoded_table(rows)))
    for name in ("engine_log_prob", "gap", "gap_counts", "prompt", "token_ids", "drafted"):
        assert table[name].null_count == 2, name
    unknown = sample_rows(8, [an_experience()], [[], []], {}, TokenTexts(decode))[0]
    assert unknown["prompt_tokens"] == 2 and "age" not in unknown


def test_pandas_reads_the_file_and_finds_every_column() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(io.BytesIO(encoded_table(rows_of(an_experience()))))
    assert list(frame.columns) == [*COLUMNS, "part.correct", "part.kl"]
    assert frame.groupby("group")["reward"].mean().tolist() == [0.625]
    assert list(frame["token_texts"][1]) == ["c", "d", "e"]


@given(st.text(alphabet="aä€😀 ", min_size=1, max_size=10), st.text(alphabet="aä€😀\n", max_size=30))
def test_texts_of_tokens_join_to_the_response_whatever_the_characters(prompt: str, response: str) -> None:
    tokens = list((prompt + response).encode())
    first = len(prompt.encode())
    texts = TokenTexts(decode)(tokens, first)
    assert len(texts) == len(tokens) - first and "".join(texts) == response


def test_tokens_that_change_by_their_neighbours_are_read_in_their_place() -> None:
    def joined(tokens: list[int]) -> str:
        return decode(tokens).replace("ab", "aB")

    assert TokenTexts(joined)(list(b"xab"), 1) == ["a", "B"]


def test_a_prompt_that_is_no_text_does_not_stop_the_record() -> None:
    row = {"step": 1, "number": 0, "group": "g"}
    record = SimpleNamespace(prompt="\ud800")
    experience = an_experience(labels=[record.prompt, record.prompt])
    assert encoded_table([row]) and encoded_table(rows_of(experience))
