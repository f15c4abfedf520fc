"""A real engine that goes from turn to turn by itself: deferred samples, samples that come late, rewards that hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.calls import TurnCalls
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, RewardLateError
from rhyme_openrlhf.scheduling.turns import training_turn
from rhyme_openrlhf.settings.histopipe import HistoPipeSettings
from rhyme_openrlhf.telemetry.samples import ROUNDS
from tests.engine.actors import LONG, Actor, an_actor, model_with, stored

# A run that has made training step 10.
BEFORE = 10
FIRST, SECOND, THIRD = (training_turn(BEFORE + n, BEFORE) for n in (1, 2, 3))


@pytest.fixture
def actor(starts_engine: None) -> Iterator[Actor]:
    with an_actor(histopipe=HistoPipeSettings(enable=True)) as found:
        found.raw.weight_version = found.raw.parts[TurnCalls]._turns.version = BEFORE
        yield found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded.MODEL)


def call(tokenizer: Any, tokens: int, samples: int = 1, label: str = "") -> dict[str, Any]:
    """Arguments of a call, as OpenRLHF sends it."""
    parameters = SamplingParams(temperature=1, max_tokens=tokens, ignore_eos=True, logprobs=1)
    return {
        "prompt": "a3b7c4=", "label": label, "sampling_params": parameters, "max_length": 768,
        "hf_tokenizer": tokenizer, "num_samples": samples, "images": None,
    }  # fmt: skip


def test_a_deferred_sample_goes_on_below_the_next_turn_and_its_weights(
    actor: Actor, tokenizer: Any, tmp_path: Path
) -> None:
    engine = actor.raw
    # Made before anything runs: on a busy machine it takes as long as the long sample.
    segment = stored(model_with(0.9), BEFORE + 1, tmp_path)
    actor.call(engine.hand_turn(FIRST, 3, []))
    long = actor.start(engine.generate_in_turn(FIRST.number, 7, **call(tokenizer, LONG)))
    actor.call(engine.generate_in_turn(FIRST.number, 8, **call(tokenizer, 5, samples=2)))
    while not (there := actor.call(engine.running_samples())).samples or there.samples[0][2] < 20:
        time.sleep(0.01)
    assert there.turn == FIRST.number and there.samples[0][:2] == (FIRST.number, 7)
    actor.call(engine.hand_turn(SECOND, 1, []))
    loaded = actor.start(engine.offer_weights(segment, []))
    assert engine.weight_version == BEFORE
    actor.call(engine.defer(FIRST.number, 7))
    report = actor.call(engine.turn_report(FIRST.number))
    assert report.weight_version == BEFORE and loaded.result(60).seconds > 0
    (response,) = actor.call(engine.generate_in_turn(SECOND.number, 7, **call(tokenizer, 5)))
    assert not long.done() and engine.weight_version == BEFORE + 1
    assert response[ROUNDS][0].tokens_by_version() == {BEFORE + 1: 5}
    actor.call(engine.turn_report(SECOND.number))
    (noted,) = long.result(120)[0][ROUNDS]
    (load,) = noted.loads
    assert load[0] == BEFORE + 1 and 20 <= load[1] < LONG
    assert noted.tokens_by_version() == {BEFORE: load[1], BEFORE + 1: LONG - load[1]}

    # What comes late of a step that is over goes on in the turn that the engine is in.
    assert actor.call(engine.extend_turn(FIRST, [(3, 1)], 1, [])) == SECOND.number
    (response,) = actor.call(engine.generate_in_turn(SECOND.number, 3, **call(tokenizer, 6)))
    assert response[ROUNDS][0].weight_version == BEFORE + 1
    # And of a step that the engine has no part in, in a turn of its own.
    assert actor.call(engine.extend_turn(THIRD, [(3, 0)], 1, [])) == THIRD.number
    # Told twice, because a connection broke, it is one sample: else the turn would never end.
    assert actor.call(engine.extend_turn(THIRD, [(3, 0)], 1, [])) == THIRD.number
    actor.call(engine.generate_in_turn(THIRD.number, 3, **call(tokenizer, 6)))
    report = actor.call(engine.turn_report(THIRD.number))
    assert report.weight_version == BEFORE + 1 and actor.call(engine.turn_report(THIRD.number)) == report


def test_a_reward_that_hangs_holds_no_turn_up(actor: Actor, tokenizer: Any, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import time\ndef reward_func(queries, prompts, labels):\n"
        "    time.sleep(2 if labels == ['hang'] else 0)\n    return {'rewards': 1.0}\n"
    )
    engine = actor.raw
    engine.executor = CheckedExecutor(str(reward), 0.2)
    actor.call(engine.hand_turn(FIRST, 3, []))
    late = actor.start(engine.generate_in_turn(FIRST.number, 0, **call(tokenizer, 5, samples=2, label="hang")))
    (response,) = actor.call(engine.generate_in_turn(FIRST.number, 1, **call(tokenizer, 100)))
    assert response["reward"] == 1.0
    actor.call(engine.turn_report(FIRST.number))
    with pytest.raises(RewardLateError, match=r"reward.py did not answer within 0.2 s \(--limits.reward_s\)"):
        late.result(60)
    # Tried again, when the turn is over.
    number = actor.call(engine.extend_turn(FIRST, [(0, 1)], 1, []))
    (response,) = actor.call(engine.generate_in_turn(number, 0, **call(tokenizer, 5)))
    assert response["reward"] == 1.0
