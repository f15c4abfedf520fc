"""What an engine did since its last sample, from counters that only grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.telemetry.engine_samples import RUNNING, EngineSampler
from rhyme_openrlhf.telemetry.event_json import parse, to_json
from rhyme_openrlhf.telemetry.metrics import EngineCounters

counts = st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 64))


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=10))
def test_samples_add_up(looks: list[tuple[tuple[int, int, int, int], ...]]) -> None:
    sampler = EngineSampler(7, 2, 100.0)
    totals = [EngineCounters(), EngineCounters()]
    found = []
    for number, look in enumerate(looks):
        answers = []
        for engine, (tokens, drafted, accepted, running) in enumerate(look):
            totals[engine] += EngineCounters(response_tokens=tokens, drafted=drafted, accepted=accepted)
            answers.append({**totals[engine].to_dict(), RUNNING: running})
        found.append(sampler.samples(answers, 101.5 + number))
    for look, samples in zip(looks, found, strict=True):
        for engine, ((tokens, drafted, accepted, running), sample) in enumerate(zip(look, samples, strict=True)):
            assert (sample.step, sample.engine, sample.running) == (7, engine, running)
            assert (sample.response_tokens, sample.drafted, sample.accepted) == (tokens, drafted, accepted)
            recorded = parse(to_json(sample, 1.0, "rollout", 0))
            assert recorded is not None and recorded.event == sample
    assert [samples[0].seconds for samples in found] == [1.5] + [1.0] * (len(looks) - 1)
