"""The replay counts what an engine would have done: against counting by hand, and with drafters that know too much."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import replay
from replay import Ours, Sample

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.journal import NO_RUN, write_entries
from rhyme_openrlhf.history.record import Record, encode
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

CONTEXT = [1, 2, 3]


def record(step: int, *responses: list[int], prompt: str = "p") -> Record:
    return Record(prompt, step, tuple(Piece(CONTEXT, response, 1.0) for response in responses))


class Proposes:
    """Drafts `length` tokens: the sample's own future, with its token at `wrong` (counted in the draft) changed."""

    def __init__(self, length: int, wrong: int | None = None) -> None:
        self.length, self.wrong = length, wrong
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.learnt: list[int] = []

    def begin(self, samples: list[Sample]) -> None:
        self.begun += [sample.name for sample in samples]

    def draft(self, running: list[Sample]) -> list[list[int]]:
        drafts = []
        for sample in running:
            # What a drafter sees is what the engine has written, and nothing else.
            assert sample.text == sample.context + sample.response[: sample.done]
            draft = sample.response[sample.done : sample.done + self.length]
            if self.wrong is not None and self.wrong < len(draft):
                draft[self.wrong] += 1000
            drafts.append(draft)
        return drafts

    def verified(self, sample: Sample, drafted: int, accepted: int) -> str:
        return "future"

    def finished(self, sample: Sample) -> None:
        self.ended.append(sample.name)

    def learn(self, records: list[Record]) -> None:
        self.learnt += [record.rollout_id for record in records]


def one_epoch(drafter: Proposes, *records: Record) -> Counter[str]:
    (total,) = replay.replay([list(records)], [drafter])
    return total


def test_without_drafts_each_step_yields_a_token_of_each_sample() -> None:
    drafter = Proposes(0)
    total = one_epoch(drafter, record(1, list(range(10, 15)), list(range(20, 23))))
    # The first tokens come from prefill: four and two are left, and the longer sample decides how many steps there are.
    assert (total["steps"], total["samples"], total["tokens"], total["drafted"]) == (4, 6, 6, 0)
    assert drafter.ended == ["1-p-1", "1-p-0"]


def test_accepted_drafts_yield_one_token_more() -> None:
    total = one_epoch(Proposes(3), record(1, list(range(10, 19))))
    # Eight tokens in two steps of 3 + 1; a draft leaves room for the token that verifying yields anyway.
    assert (total["steps"], total["tokens"], total["drafted"], total["accepted"]) == (2, 8, 6, 6)
    assert total["from future"] == 6
    total = one_epoch(Proposes(30), record(1, list(range(10, 19))))
    assert (total["steps"], total["tokens"], total["drafted"]) == (1, 8, 7)


def test_what_is_behind_a_wrong_token_is_rejected() -> None:
    total = one_epoch(Proposes(3, wrong=1), record(1, list(range(10, 19))))
    # Each step: one token accepted, and one that verifying yields. In the last there is room for one, which is right.
    assert (total["steps"], total["tokens"], total["accepted"], total["drafted"]) == (4, 8, 4, 10)


def test_engines_share_the_prompts_and_learn_from_all() -> None:
    drafters = [Proposes(0), Proposes(0)]
    prompts = [record(1, [5, 6], prompt=name) for name in "abc"]
    later, again = [record(2, [5, 6], prompt="d")], [record(3, [5, 6], prompt="c")]
    epochs = replay.replay([prompts, later, again], drafters)
    assert [drafter.begun for drafter in drafters] == [["1-a-0", "1-c-0", "2-d-0", "3-c-0"], ["1-b-0"]]
    assert [drafter.learnt for drafter in drafters] == [[1, 1, 1, 2, 3]] * 2
    # An epoch ends where a prompt comes again.
    assert [epoch["samples"] for epoch in epochs] == [4, 1]


def test_ours_drafts_the_second_epoch_from_the_first() -> None:
    rng = np.random.default_rng(3)
    responses = [rng.integers(0, 1000, 200).tolist() for _ in range(4)]
    steps = [[record(number, *responses)] for number in (1, 2)]
    settings = HistoSpecSettings(siblings=False, own_output=False, shared_tokens=0)
    first, second = replay.replay(steps, [Ours(settings)])
    assert first["tokens"] == second["tokens"] == first["samples"] == 4 * 199
    assert second["samples"] < 4 * 199 / 5
    assert second["from history"] == second["accepted"] > 4 * 199 * 0.8


def test_a_journal_becomes_a_trace_and_is_read_back(tmp_path: Path) -> None:
    records = [record(1, [4, 5], [6]), record(2, [7, 8, 9], [10])]
    journal, trace = tmp_path / "worker-0.journal", tmp_path / "trace.jsonl.xz"
    write_entries(journal, NO_RUN, [encode(one) for one in records])
    replay.write_trace(replay.read_journal(journal), trace)
    found = [
        (one.prompt_key, one.rollout_id, *(list(p.tokens) for p in one.pieces)) for (one,) in replay.read_trace(trace)
    ]
    assert found == [("p", 1, [4, 5], [6]), ("p", 2, [7, 8, 9], [10])]
