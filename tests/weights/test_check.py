"""A sync's figures: difference, and how far engine and policy moved, when it arrived and when it did not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.weights import WeightSettings
from rhyme_openrlhf.telemetry.events import Event, Note, WeightsChecked

pytest.importorskip("ray")


def tokens() -> Any:
    from rhyme_openrlhf.weights.check import CheckedTokens

    return CheckedTokens(range(1000), 1, 64)


def test_the_checked_tokens_go_through_the_whole_vocabulary() -> None:
    from rhyme_openrlhf.weights.check import FIXED_TOKENS, SAMPLED_TOKENS, CheckedTokens

    ordinary = range(3, 1000)
    checked = CheckedTokens(ordinary, 7, 64)
    sequences = [checked.at(version) for version in range(1, 60)]
    assert all(one[: len(FIXED_TOKENS)] == FIXED_TOKENS and len(one) == 64 for one in sequences)
    sampled = [one[len(FIXED_TOKENS) :] for one in sequences]
    # Any of them, in as many checks as the vocabulary needs: no token is seen twice before all are.
    needed = -(-len(ordinary) // SAMPLED_TOKENS)
    for first in (0, 17, 59 - needed):
        assert set().union(*sampled[first : first + needed]) == set(ordinary)
    assert len(set().union(*sampled[: needed - 1])) == (needed - 1) * SAMPLED_TOKENS
    assert sampled == [CheckedTokens(list(ordinary)[::-1], 7, 64).at(v)[len(FIXED_TOKENS) :] for v in range(1, 60)]
    assert sampled[0] != CheckedTokens(ordinary, 8, 64).at(1)[len(FIXED_TOKENS) :]


@pytest.mark.parametrize(("longest", "length"), [(5, 12), (12, 12), (20, 20), (64, 64), (4096, 64)])
def test_the_checked_tokens_fit_into_an_engine(longest: int, length: int) -> None:
    from rhyme_openrlhf.weights.check import CheckedTokens

    assert len(CheckedTokens(range(1000), 1, longest).at(3)) == length


def test_tokens_that_a_tokenizer_adds_are_not_checked() -> None:
    from rhyme_openrlhf.weights.check import FIXED_TOKENS, CheckedTokens

    vocabulary = {f"word {number}": number for number in range(40)}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, added_tokens_decoder={38: "<image>", 39: "<end>"})
    # An engine answers with a token of its own.
    sequence = CheckedTokens.of(tokenizer, 1, 30).at(1)
    assert len(sequence) == 29
    assert set().union(*(CheckedTokens.of(tokenizer, 1, 64).at(v)[len(FIXED_TOKENS) :] for v in (1, 2))) == set(
        range(38)
    )


class Policy:
    """Gives `scores`; a training step changes them."""

    def __init__(self) -> None:
        self.scores = [-1.0, -2.0]
        self.asked = 0

    def async_run_method(self, method: str, tokens: list[int]) -> list[list[float]]:
        assert method == "score" and len(tokens) > 2
        self.asked += 1
        return [list(self.scores)]


class Engine:
    """Follows the policy at a sync, or does not."""

    def __init__(self, follows: bool = True) -> None:
        self.follows = follows
        self.scores = [-1.0, -2.0]
        self.score = SimpleNamespace(remote=lambda tokens: list(self.scores))


def checks_of(
    monkeypatch: pytest.MonkeyPatch,
    engines: list[Engine],
    steps: list[list[float]],
    check_syncs: int,
    layouts: LayoutPlan | None = None,
) -> tuple[list[Event], Policy]:
    """The events of a run whose training steps give the policy these scores."""
    from rhyme_openrlhf.weights import check as weight_check

    monkeypatch.setattr(weight_check, "wait_for", lambda refs, timeout_s, what: refs)
    recorded: list[Event] = []
    services: Any = SimpleNamespace(
        layouts=layouts,
        settings=RhymeSettings(weights=WeightSettings(check_syncs=check_syncs)),
        record=lambda event, source: recorded.append(event),
    )
    policy = Policy()
    check = weight_check.WeightCheck(policy, engines, services, tokens())
    for version, scores in enumerate(steps, start=1):
        check.before_step()
        policy.scores = scores
        for engine in engines:
            if engine.follows:
                engine.scores = [score + 0.001 for score in scores]
        check.after_sync(version)
    return recorded, policy


def test_a_sync_that_arrived_moved_the_engine_as_far_as_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second), policy = checks_of(monkeypatch, [Engine()], [[-1.5, -2.0], [-1.5, -2.2]], check_syncs=2)
    assert isinstance(first, WeightsChecked) and isinstance(second, WeightsChecked)
    assert (first.version, first.engine, first.policy_moved) == (1, 0, pytest.approx(0.5))
    assert first.moved == pytest.approx(0.5, abs=0.002) and first.max_difference == pytest.approx(0.001)
    # The second check's "before" is the first one's "after": nothing is asked twice.
    assert second.moved == pytest.approx(0.2, abs=0.002) and second.policy_moved == pytest.approx(0.2)
    assert policy.asked == 3


def test_an_engine_that_kept_its_weights_did_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    events, _ = checks_of(monkeypatch, [Engine(), Engine(follows=False)], [[-1.0, -2.8]], check_syncs=1)
    good, bad, note = events
    assert isinstance(good, WeightsChecked) and good.moved == pytest.approx(0.8, abs=0.002)
    assert bad == WeightsChecked(1, 1, pytest.approx(0.8), 0.0, pytest.approx(0.8))
    assert isinstance(note, Note) and note.level == "warning" and "engine 1" in note.text


@pytest.mark.parametrize("both_awake", [True, False])
def test_engines_without_kv_cache_are_not_asked(monkeypatch: pytest.MonkeyPatch, both_awake: bool) -> None:
    """They would never answer."""
    plan = LayoutPlan(2, 1, (Tail(1, 2),), both_awake=both_awake)
    engines = [Engine(), Engine(), Engine()]
    events, _ = checks_of(monkeypatch, engines, [[-1.5, -2.0]], 1, plan)
    assert [event.engine for event in events if isinstance(event, WeightsChecked)] == list(range(2 + both_awake))


def test_after_the_first_syncs_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    events, policy = checks_of(monkeypatch, [Engine()], [[-1.5, -2.0], [-1.5, -2.2], [-1.6, -2.2]], check_syncs=1)
    assert len(events) == 1 and policy.asked == 2
    events, policy = checks_of(monkeypatch, [Engine()], [[-1.5, -2.0]], check_syncs=0)
    assert events == [] and policy.asked == 0


@pytest.mark.parametrize("where", range(3))
@pytest.mark.parametrize("spoilt", ["policy", "engine"])
def test_scores_that_are_not_a_number_are_far_apart(where: int, spoilt: str) -> None:
    from rhyme_openrlhf.weights.check import distance, is_suspicious

    policy, engine = [-1.0, -2.0, -3.0], [-1.1, -2.0, -3.0]
    (policy if spoilt == "policy" else engine)[where] = float("nan")
    assert is_suspicious(distance(policy, engine))
    assert not is_suspicious(distance([-1.0, -2.0], [-1.1, -2.0]))


@pytest.mark.parametrize("slow", ["engines", "policy"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_check_that_takes_too_long_is_a_warning_and_the_next_one_is_done(
    monkeypatch: pytest.MonkeyPatch, slow: str, first: int
) -> None:
    """`first`: before which of the three questions (before a step, after it, after the next) engines begin to be slow;
    they are slow once."""
    from rhyme_openrlhf.weights import check as weight_check
    from rhyme_openrlhf.weights.stores import WeightSyncError

    asked = 0

    def wait_for(refs: Any, timeout_s: float, what: str) -> Any:
        nonlocal asked
        if slow in what:
            asked += 1
            if asked == first + 1:
                raise WeightSyncError(f"waited {timeout_s:g} s for {what}")
        return refs

    recorded: list[Event] = []
    services: Any = SimpleNamespace(
        layouts=None,
        settings=RhymeSettings(weights=WeightSettings(check_syncs=3)),
        record=lambda event, source: recorded.append(event),
    )
    monkeypatch.setattr(weight_check, "wait_for", wait_for)
    policy, engine = Policy(), Engine()
    check = weight_check.WeightCheck(policy, [engine], services, tokens())
    for version in (1, 2, 3):
        check.before_step()
        policy.scores = engine.scores = [-1.0 - version, -2.0]
        check.after_sync(version)
    notes = [event for event in recorded if isinstance(event, Note)]
    assert len(notes) == 1 and notes[0].level == "warning"
    assert notes[0].text.startswith("a weight check is left out: waited 600 s for the ")
    assert not check.is_due
    checks = [event for event in recorded if isinstance(event, WeightsChecked)]
    left_out = [version for version in (1, 2, 3) if version not in [event.version for event in checks]]
    assert left_out == ([first] if first else [])
    # One whose state before is unknown says only how far the engine is from the policy.
    assert all((event.moved is None) == (first == 0 and event.version == 1) for event in checks)


def test_a_pipelined_check_that_takes_too_long_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from rhyme_openrlhf.weights import check as weight_check
    from rhyme_openrlhf.weights.offers import OfferedWeightCheck
    from rhyme_openrlhf.weights.stores import WeightSyncError

    def wait_for(refs: Any, timeout_s: float, what: str) -> Any:
        raise WeightSyncError(f"waited {timeout_s:g} s for {what}")

    recorded: list[Event] = []
    services: Any = SimpleNamespace(
        layouts=None,
        settings=RhymeSettings(weights=WeightSettings(check_syncs=1)),
        record=lambda event, source: recorded.append(event),
    )
    monkeypatch.setattr(weight_check, "wait_for", wait_for)
    check = OfferedWeightCheck(Policy(), [Engine()], services, tokens())
    check.before_step()
    assert not check.asks(1) and not check.is_due
    check.loaded(1, 0, SimpleNamespace(replaced=0, before=[], after=[]))
    assert [event.level for event in recorded if isinstance(event, Note)] == ["warning", "warning"]
    assert not any(isinstance(event, WeightsChecked) for event in recorded)
