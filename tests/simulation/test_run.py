"""Whole simulated runs."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.simulation.engine_kinds import gaps
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import PRESETS, Workload, drawn
from tests.examples import examples
from tests.latency import formula
from tests.simulation.kinds import CLUSTER, PROFILES, SHAPE
from tests.simulation.kinds import RUN_PROFILE as PROFILE

features = st.one_of(
    st.builds(
        Features,
        trainer=st.sampled_from(["sync", "async"]),
        dispatch=st.booleans(),
        reallocation=st.booleans(),
        cooldown=st.just(10),
        switching=st.sampled_from(["off", "maximum", "history"]),
        speculation=st.sampled_from(["off", "window", "budget"]),
        interval=st.just(0.5),
    ),
    st.builds(
        Features,
        trainer=st.just("pipeline"),
        rank_groups=st.integers(0, 12),
        two_tier=st.booleans(),
        outliers=st.just(True),
        defer=st.booleans(),
        reallocation=st.booleans(),
        cooldown=st.just(5),
        threshold=st.sampled_from([0, 2]),
        switching=st.sampled_from(["off", "maximum", "history"]),
        speculation=st.sampled_from(["off", "window", "budget"]),
        interval=st.sampled_from([0.1, 0.5]),
    ),
)


def workload(steps: int = 5, prompts: int = 6, samples: int = 4, seed: int = 0) -> Workload:
    return drawn(SHAPE, steps, prompts, samples, 2, seed)


def simulate(load: Workload, chosen: Features, cluster: Cluster = CLUSTER) -> Result:
    return Run(load, cluster, chosen, PROFILES).go()


@settings(deadline=None, max_examples=examples(60))
@given(features, st.integers(0, 1000), st.integers(1, 20))
def test_what_every_run_keeps(chosen: Features, seed: int, prompts: int) -> None:
    load = workload(prompts=prompts, seed=seed)
    result = simulate(load, chosen)
    tokens = sum(sum(p.lengths) for step in load.steps for p in step.prompts)
    # Tokens in are tokens out: nothing lost or generated twice, wherever it was moved.
    assert result.tokens_generated == pytest.approx(tokens)
    # Every device is in exactly one state at any time.
    end = max(step.completed for step in result.steps)
    assert sum(result.accounts.seconds.values()) == pytest.approx(CLUSTER.nodes * CLUSTER.devices * end)
    # Every step trains on as many samples as it drew, also when prompt groups are deferred.
    assert [s.samples for s in result.steps] == [sum(len(p.lengths) for p in s.prompts) for s in load.steps]
    assert sum(step.tokens for step in result.steps) == tokens
    for number, step in enumerate(result.steps):
        assert 0 <= step.begun < step.completed < step.trained
        before = result.steps[number - 1].trained if number else 0.0
        assert step.trained >= before + step.tokens / CLUSTER.trainer_tokens_per_second - 1e-9
        # At most one step off policy; the synchronous trainer: none.
        off = 1 if chosen.trainer == "sync" else 2
        if number >= off:
            assert step.begun >= result.steps[number - off].trained + CLUSTER.publish_seconds - 1e-9


@settings(deadline=None, max_examples=examples(10))
@given(features)
def test_the_same_input_gives_the_same_run(chosen: Features) -> None:
    assert simulate(workload(), chosen) == simulate(workload(), chosen)


def test_more_engines_are_not_slower() -> None:
    """Beyond ties: least-loaded dispatch may put two long prompts together on one of more engines."""
    for trainer in ("sync", "async"):
        times = [
            simulate(workload(prompts=24), Features(trainer), dataclasses.replace(CLUSTER, nodes=nodes)).seconds
            for nodes in (1, 2, 4)
        ]
        assert times[1] <= 1.02 * times[0] and times[2] <= 1.02 * times[1]


def test_one_step_off_policy_hides_the_training_time() -> None:
    slow = dataclasses.replace(CLUSTER, trainer_tokens_per_second=3000.0)
    sync, off_policy = (simulate(workload(), Features(trainer), slow) for trainer in ("sync", "async"))
    assert off_policy.seconds < 0.9 * sync.seconds
    assert sync.accounts.seconds["trainer"] > off_policy.accounts.seconds["trainer"]


def test_features_do_what_they_are_for() -> None:
    """On a long-tailed load, each against the run without it."""
    load = drawn(SHAPE, 8, 32, 8, 2, 5)
    plain = simulate(load, Features())
    pipeline = simulate(load, Features("pipeline", rank_groups=8, interval=0.5))
    drafts = simulate(load, Features(speculation="window"))
    moved = simulate(load, Features(reallocation=True, cooldown=10, threshold=4, interval=0.2))
    switched = simulate(load, Features(switching="history"))
    assert pipeline.seconds < plain.seconds and pipeline.accounts.seconds["weights"] > 0
    assert drafts.decode_steps < 0.9 * plain.decode_steps and drafts.drafts > 0
    assert moved.moves["reallocation"] > 0 and moved.accounts.seconds["tail"] < plain.accounts.seconds["tail"]
    assert switched.switches > 0 and switched.seconds < plain.seconds


def test_outliers_move_only_where_they_are_too_long_and_deferring_them_pays() -> None:
    """A run can be unlucky with what it defers; three of them together are not."""
    gains = []
    for seed in range(3):
        load = drawn(dataclasses.replace(SHAPE, within=0.6, stability=0.5), 8, 32, 4, 2, seed)
        result = simulate(load, Features("pipeline", rank_groups=8, outliers=True, interval=0.2))
        assert 0 < result.moves["outlier_intra"] < 0.1 * 8 * 32 * 4 and "outlier_inter" not in result.moves
        deferred = simulate(load, Features("pipeline", rank_groups=8, outliers=True, defer=True, interval=0.2))
        assert deferred.moves["outlier_inter"] > 0
        gains.append(deferred.seconds / result.seconds)
    assert statistics.fmean(gains) < 1.0


def test_nothing_is_deferred_out_of_its_epoch() -> None:
    load = drawn(dataclasses.replace(SHAPE, within=0.6, stability=0.5), 8, 32, 4, 1, 0)
    result = simulate(load, Features("pipeline", rank_groups=8, outliers=True, defer=True, interval=0.2))
    assert "outlier_inter" not in result.moves


def test_the_pipeline_goes_with_reallocation_and_switches() -> None:
    """Both have something to do where engines wait for weights; what a run keeps is above. Reallocation gains nothing:
    that engines of one step have unequal loads is the pipeline's plan."""
    load = drawn(SHAPE, 8, 32, 8, 2, 5)
    plain = simulate(load, Features("pipeline", rank_groups=4))
    chosen = Features("pipeline", rank_groups=4, reallocation=True, threshold=2, cooldown=5, interval=0.2)
    moved = simulate(load, chosen)
    switched = simulate(load, Features("pipeline", rank_groups=4, switching="history"))
    assert moved.moves["reallocation"] > 0 and moved.seconds < 1.05 * plain.seconds
    assert switched.switches > 0


def test_engines_that_share_a_machine_are_slower_together() -> None:
    """With others beside twice as slow: less than twice as long, because the last sample runs alone."""
    crowd = dataclasses.replace(
        PROFILE,
        beside=1,
        steps=tuple(dataclasses.replace(point, seconds=2 * point.seconds) for point in PROFILE.steps),
        prefills=tuple(dataclasses.replace(point, seconds=2 * point.seconds) for point in PROFILE.prefills),
    )
    load, pair = workload(prompts=8), dataclasses.replace(CLUSTER, nodes=1, devices=2)
    alone = Run(load, pair, Features("sync"), PROFILES).go()
    shared = Run(load, pair, Features("sync"), PROFILES, crowds={2: crowd}).go()
    assert 1.3 * alone.rollout_seconds < shared.rollout_seconds < 2 * alone.rollout_seconds
    assert shared.tokens_generated == pytest.approx(alone.tokens_generated)
    single = dataclasses.replace(pair, devices=1)
    assert (
        Run(load, single, Features("sync"), PROFILES, crowds={2: crowd}).go()
        == Run(load, single, Features("sync"), PROFILES).go()
    )


def test_a_profile_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no profile of --tp 2; those given are of"):
        simulate(workload(), Features(), dataclasses.replace(CLUSTER, tensor_parallel=2))


def test_a_switch_needs_somewhere_to_go() -> None:
    with pytest.raises(ValueError, match="TP switching needs a profile of a larger"):
        Run(workload(), CLUSTER, Features(switching="history"), {1: PROFILE})


def test_what_a_profile_lacks_is_said() -> None:
    assert gaps(PROFILES) == []
    bare = formula.profile(prefills=(), weight_load_seconds=0.0, kv_bytes_per_second=0.0)
    assert len(gaps({1: bare})) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": 6, "tensor_parallel": 4}, "does not divide"),
        ({"nodes": 0}, "--nodes must be from 1"),
    ],
)
def test_impossible_clusters_are_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CLUSTER, **change)


def test_features_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="of the streaming pipeline"):
        Features(two_tier=True)


def test_the_presets_have_the_papers_quantiles() -> None:
    load = drawn(dataclasses.replace(PRESETS["pat-deepscaler"], longest=10**6), 8, 500, 8, 8, 1)
    lengths = [length for step in load.steps for p in step.prompts for length in p.lengths]
    assert sum(length > 8192 for length in lengths) / len(lengths) == pytest.approx(0.1085, abs=0.01)
    assert sum(length > 16384 for length in lengths) / len(lengths) == pytest.approx(0.0218, abs=0.004)
    load = drawn(PRESETS["rlhfspec-lmsys"], 8, 500, 8, 8, 1)
    lengths = sorted(length for step in load.steps for p in step.prompts for length in p.lengths)
    assert lengths[len(lengths) // 2] == pytest.approx(378, rel=0.05)
    assert lengths[len(lengths) * 95 // 100] == pytest.approx(1373, rel=0.05)


@pytest.fixture
def searched_by_hand() -> Iterator[None]:
    gc.disable()
    # Not through everything that the other tests have made.
    gc.freeze()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "features",
    [
        Features("sync", switching="history"),
        Features(reallocation=True, cooldown=5, interval=0.3, speculation="budget"),
        Features("pipeline", rank_groups=4, two_tier=True, outliers=True, defer=True, interval=0.3),
    ],
    ids=lambda features: str(features.trainer),
)
@pytest.mark.usefixtures("searched_by_hand")
def test_a_run_drops_nothing_that_is_in_a_cycle(features: Features) -> None:
    found = []
    for _ in range(2):
        run = Run(drawn(SHAPE, 6, 32, 4, 2, 5), CLUSTER, features, PROFILES)
        gc.collect()
        run.go()
        found.append(gc.collect())
    # What is only made once, by the first, is no run's.
    assert found[1] == 0
