"""Counting an engine's steps."""

from rhyme_openrlhf.rollout.step_meter import PADDING, Emitted, StepMeter, VerifiedDraft, verified_drafts
from rhyme_openrlhf.telemetry.metrics import EngineCounters, acceptance_rate, speculation_rate, tokens_per_step


def counters(meter: StepMeter) -> EngineCounters:
    return EngineCounters.from_dict(meter.counters())


def test_a_prefill_step_emits_no_decode_token() -> None:
    meter = StepMeter()
    meter.record_step({"a": 0}, {"a": 12}, [], {"a": Emitted(1, False)}, {}, 0.5)
    done = counters(meter)
    assert (done.prompt_tokens, done.response_tokens, done.decode_tokens, done.decode_steps) == (12, 1, 0, 0)
    assert done.busy_seconds == 0.5


def test_plain_decoding_yields_one_token_a_step() -> None:
    meter = StepMeter()
    for before in (1, 2, 3):
        step = {"a": before, "b": before}
        meter.record_step(step, {"a": 1, "b": 1}, [], {"a": Emitted(1, False), "b": Emitted(1, before == 3)}, {}, 0.1)
    done = counters(meter)
    assert (done.decode_steps, done.sample_steps, done.decode_tokens, done.finished_samples) == (3, 6, 6, 1)
    assert tokens_per_step(done) == 1.0
    assert speculation_rate(done) == 0.0


def test_a_step_without_output_still_counts_for_its_sample() -> None:
    meter = StepMeter()
    meter.record_step({"a": 5}, {"a": 1}, [], {}, {}, 0.1)
    assert counters(meter).sample_steps == 1


def test_accepted_drafts_count_only_as_far_as_they_became_response_tokens() -> None:
    meter = StepMeter()
    drafts = [VerifiedDraft("a", 4, 4), VerifiedDraft("b", 4, 1)]
    # The response of a ended inside its accepted draft: 3 of 5 sampled tokens are left of it.
    emitted = {"a": Emitted(3, True), "b": Emitted(2, False)}
    meter.record_step({"a": 9, "b": 9}, {"a": 5, "b": 5}, drafts, emitted, {"a": "own", "b": "history"}, 1)
    done = counters(meter)
    assert (done.accepted_own, done.accepted_siblings) == (3, 0)
    assert (done.drafts, done.drafted, done.accepted, done.decode_tokens) == (2, 8, 4, 5)
    assert acceptance_rate(done) == 0.5


def test_verified_drafts_leave_padding_out() -> None:
    drafts = {"padded": [PADDING] * 8, "real": [5, 6, 7], "cut": [5, 6], "lost": [1, 2]}
    found = verified_drafts(drafts, {"padded": 1, "real": 3, "cut": 1})
    assert found == [VerifiedDraft("real", 3, 2), VerifiedDraft("cut", 2, 0), VerifiedDraft("lost", 2, 0)]


def test_draft_seconds_are_busy_seconds() -> None:
    meter = StepMeter()
    meter.add_draft_seconds(0.25)
    assert counters(meter).busy_seconds == counters(meter).draft_seconds == 0.25
