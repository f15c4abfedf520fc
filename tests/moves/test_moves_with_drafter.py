"""Moves between engines that draft with a draft model: its KV cache goes along, and what is generated is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE, Phase
from rhyme_openrlhf.settings.drafting import DraftingSettings
from tests.moves.engines import Engines, LocalEngine, answer, moved_at, request, variables

PROMPT = list(range(10, 60)) * 2
TOKENS = 400


@pytest.fixture(scope="module")
def drafting_pair(starts_engine: None) -> Iterator[Engines]:
    drafting = DraftingSettings(source="draft_model", model=str(embedded.DRAFT_MODEL), probe_share=0)
    with variables():
        found = Engines([LocalEngine(index, drafting=drafting) for index in (0, 1)])
        for engine in found.engines:
            assert engine.raw
    yield found
    for engine in found.engines:
        engine.stop()


def accepted(pair: Engines) -> int:
    return sum(engine.scheduler("read_counters")["accepted"] for engine in pair.engines)


@pytest.mark.parametrize("carrier", [RECOMPUTE, KV_TRANSFER])
def test_drafts_are_accepted_behind_a_move_as_before(drafting_pair: Engines, tmp_path: Path, carrier: str) -> None:
    pair, asked = drafting_pair, request(PROMPT, max_tokens=TOKENS)
    before = accepted(pair)
    expected = answer(pair.run(lambda keeper, mover: keeper.generate(asked, 0), tmp_path))
    unmoved = accepted(pair) - before
    pair.carrier = carrier

    records, output = moved_at(pair, tmp_path, asked, (60, 1), (150, 0), (250, 1))
    assert [record.move.phase for record in records] == [Phase.RUNNING] * 3, [r.move.reason for r in records]
    # A step behind each move has no draft yet.
    assert accepted(pair) - before - unmoved > 0.9 * unmoved > 0.2 * TOKENS
    tokens, log_probs, text, reason = answer(output)
    assert tokens == expected[0] and (text, reason) == expected[2:]
    assert log_probs == pytest.approx(expected[1], abs=1e-4)
