"""The verdict on a run: what it says, what it does not say, and when one should look."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhyme_openrlhf.telemetry.metrics import EnginesGain
from rhyme_openrlhf.telemetry.verdict import MESSAGE, WINDOW, Health, change_of, verdict

RISING = [0.40, 0.41, 0.39, 0.40, 0.41, 0.58, 0.60, 0.57, 0.59, 0.58]
HEALTH = Health(
    status="running",
    step=14,
    steps_total=24,
    doing=["generating"],
    rewards=RISING,
    gain=EnginesGain(1.9, 1.6, 2.2, 1.0, 1.8),
    bubble_seconds={"tail": 11.0, "sync": 2.0},
    engine_seconds=100.0,
    truncated=0.1,
)


def test_a_healthy_run_is_one_line() -> None:
    found = verdict(HEALTH)
    assert found.level == "healthy" and found.reasons == ()
    assert found.text == (
        "Step 14 of 24, generating. Reward rises (+0.18 in 5 steps). "
        "Drafts: 1.90 times the tokens/s without (95 %: 1.60 to 2.20). Bubbles 13%, most in the tail."
    )
    assert [part.where for part in found.parts] == ["", "learning", "speculation", "timeline"]


@pytest.mark.parametrize(
    ("changed", "level", "said", "where"),
    [
        ({"warnings": ["w"]}, "look", "w", "events"),
        ({"errors": ["e"]}, "look", "e", "events"),
        ({"status": "crashed", "message": "killed"}, "broken", "killed", "logs"),
        ({"rewards": RISING[::-1]}, "look", "The reward falls: -0.18 in 5 steps, to 0.402", "learning"),
        ({"gain": EnginesGain(0.8, 0.7, 0.9, 1.25)}, "look", "--no-histospec.enable", "speculation"),
        ({"bubble_seconds": {"sync": 31.0}}, "look", "nothing to run for 31%", "timeline"),
        ({"truncated": 0.6}, "look", "60% of the samples run into the length limit", "learning"),
        ({"lost_events": 2}, "look", "2 events never arrived", "events"),
    ],
)
def test_what_needs_a_person_is_a_reason_with_its_page(changed: dict, level: str, said: str, where: str) -> None:
    found = verdict(replace(HEALTH, **changed))
    assert found.level == level
    (reason,) = found.reasons
    assert said in reason.text and reason.where == where and reason.level == level


def test_errors_and_warnings_are_counted_and_break_what_has_failed() -> None:
    found = verdict(replace(HEALTH, warnings=["a", "b"], errors=["c"]))
    assert found.level == "look" and found.text.endswith("1 error. 2 warnings.")
    found = verdict(replace(HEALTH, status="failed", warnings=["a", "b"], errors=["c"]))
    assert [one.level for one in found.reasons] == ["broken", "broken", "look", "look"]
    assert found.level == "broken" and found.text.endswith("1 error. 2 warnings.")


def test_a_change_within_the_noise_of_steps_is_none() -> None:
    noisy = [0.2, 0.8, 0.3, 0.7, 0.3, 0.8, 0.3, 0.7]
    assert (change := change_of(noisy)) is not None and not change.shown
    assert "Reward level at 0.525 in 4 steps." in verdict(replace(HEALTH, rewards=noisy)).text
    # Nor has it three values, or only old ones.
    assert change_of([0.1, 0.9, 0.1]) is None
    assert "Reward 0.9." in verdict(replace(HEALTH, rewards=[0.1, 0.9])).text
    assert (newest := change_of([9.0] * 50 + [0.5] * 2 * WINDOW)) is not None and newest.by == 0


def test_a_wide_interval_is_no_result_and_an_estimate_stands_in() -> None:
    wide = EnginesGain(3.2, 0.12, 83.7, 1.0, 1.84)
    assert (
        "Drafts: about 1.8 times the tokens/s without, by this machine's step times."
        in verdict(replace(HEALTH, gain=wide)).text
    )
    assert "Drafts" not in verdict(replace(HEALTH, gain=replace(wide, estimate=0.0))).text
    # Wide, and wholly above or below 1: no result either, and no reason to switch drafts off.
    for low, high in ((2.0, 8.3), (0.1, 0.9)):
        found = verdict(replace(HEALTH, gain=EnginesGain(low, low, high, 1.2, 1.84)))
        assert "about 1.8" in found.text and not found.reasons


def test_runs_without_steps_say_what_they_do() -> None:
    starting = Health(status="starting", doing=["starting engines", "loading the policy model"])
    assert verdict(starting).text == "Starting engines and loading the policy model."
    assert verdict(Health(status="queued")).text == "Queued."


def test_an_end_is_told_with_its_reason_in_one_line() -> None:
    failed = verdict(replace(HEALTH, status="failed", message="no\nmemory " + "x" * 500))
    first = failed.parts[0].text
    assert first.startswith("Failed after step 14 of 24: no memory xx") and "\n" not in failed.text
    assert len(first) < MESSAGE + 40 and failed.reasons[0].text == "no\nmemory " + "x" * 500
    assert verdict(replace(HEALTH, status="succeeded")).text.startswith("Succeeded after step 14 of 24.")
