"""The expected cost of a move, and how it is learnt from earlier moves."""

from __future__ import annotations

import dataclasses

import pytest

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import PrefillPoint, Profile, StepPoint, Subject
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE
from rhyme_openrlhf.scheduling.move_costs import Destination, MoveCosts, nearest
from rhyme_openrlhf.settings.moves import AUTO
from tests.latency import formula

BUSY = Destination(0.02, 0.02, 2048)
IDLE = Destination(0.0, 0.01, 2048)


def transfer() -> TransferModel:
    """Prefill at a millisecond for ten tokens."""
    prefills = tuple(PrefillPoint(1, length, length * 1e-4, 0.0, 3) for length in (10, 1000, 10_000))
    return TransferModel(
        Profile(Subject("m", "h", "float32", 1), "derived", (StepPoint(1, 1, 0, 0.01, 0.0, 9),), prefills)
    )


def test_what_was_never_measured_is_not_predicted() -> None:
    costs = MoveCosts()
    assert costs.predicted(KV_TRANSFER, 100, BUSY) is None and costs.predicted(RECOMPUTE, 100, BUSY) is None
    assert costs.cheaper(100, BUSY) is None
    costs.learn(RECOMPUTE, 100, BUSY, 0.5)
    assert costs.predicted(RECOMPUTE, 100, BUSY) is None


def test_a_transfer_costs_steps_and_what_moves_have_shown() -> None:
    costs = MoveCosts(transfer())
    costs.learn(KV_TRANSFER, 4000, BUSY, 0.040)
    # 10 ms beyond the half step under way and the first own one.
    assert costs.predicted(KV_TRANSFER, 100, BUSY) == pytest.approx(0.040)
    assert costs.predicted(KV_TRANSFER, 100, IDLE) == pytest.approx(0.020)
    costs.learn(KV_TRANSFER, 4000, IDLE, 5.0)
    # One that met a stall counts as one that took a few times as long.
    assert costs.predicted(KV_TRANSFER, 100, IDLE) < 0.04


def test_between_nodes_a_transfer_costs_what_it_has_cost_between_nodes() -> None:
    costs, far = MoveCosts(transfer()), dataclasses.replace(BUSY, near=False)
    costs.learn(KV_TRANSFER, 400, BUSY, 0.031)
    assert costs.predicted(KV_TRANSFER, 400, far) is None
    # A prefill of 400 tokens takes 40 ms, beside a step of 20: tried once, then dearer than that.
    assert costs.cheaper(400, far) == KV_TRANSFER
    costs.learn(KV_TRANSFER, 400, far, 0.5)
    assert costs.cheaper(400, far) == RECOMPUTE and costs.cheaper(400, BUSY) == KV_TRANSFER


def test_a_recompute_costs_a_prefill_beside_those_that_decode() -> None:
    costs = MoveCosts(transfer())
    assert costs.predicted(RECOMPUTE, 4096, IDLE) == pytest.approx(0.4096)
    assert costs.predicted(RECOMPUTE, 4096, BUSY) == pytest.approx(0.01 + 0.4096 + 2 * 0.02)
    for _ in range(30):
        costs.learn(RECOMPUTE, 4096, IDLE, 0.8)
    assert costs.predicted(RECOMPUTE, 2048, IDLE) == pytest.approx(0.4, rel=0.02)


def test_the_cheaper_one_is_chosen() -> None:
    costs = MoveCosts(transfer())
    costs.learn(KV_TRANSFER, 4000, IDLE, 0.030)
    assert costs.cheaper(4000, IDLE) == KV_TRANSFER and costs.cheaper(50, IDLE) == RECOMPUTE
    # Of a transfer nothing is known yet: as if it cost its steps alone.
    assert MoveCosts(transfer()).cheaper(50, IDLE) == RECOMPUTE
    assert MoveCosts(transfer()).cheaper(500, IDLE) == KV_TRANSFER


def test_what_is_learnt_of_long_contexts_is_not_what_is_of_short_ones() -> None:
    costs = MoveCosts()
    costs.learn(KV_TRANSFER, 300, BUSY, 0.02)
    costs.learn(KV_TRANSFER, 4100, BUSY, 0.05)
    steps = BUSY.step_s / 2 + BUSY.next_step_s
    assert costs.predicted(KV_TRANSFER, 4200, BUSY) == pytest.approx(max(0.05, steps))
    assert costs.predicted(KV_TRANSFER, 310, BUSY) == pytest.approx(max(0.02, steps))
    # Of what was not seen, the nearest size.
    assert costs.predicted(KV_TRANSFER, 100, BUSY) == costs.predicted(KV_TRANSFER, 310, BUSY)
    assert nearest({8: [1.0], 10: [7.0, 2.0, 1.0]}, 1 << 8) == 2.0 and nearest({}, 5) is None


def test_a_stall_at_the_beginning_is_soon_forgotten() -> None:
    costs = MoveCosts(transfer())
    for seconds in (3.0, 0.4, 0.41, 0.39):
        costs.learn(RECOMPUTE, 4096, IDLE, seconds)
    assert costs.predicted(RECOMPUTE, 4096, IDLE) == pytest.approx(0.4, rel=0.03)


def test_the_carrier_that_is_asked_for_is_taken_and_auto_is_the_cheaper_one() -> None:
    costs = MoveCosts(transfer())
    costs.learn(KV_TRANSFER, 4000, IDLE, 0.030)
    assert costs.choose(AUTO, 50, IDLE) == (RECOMPUTE, costs.predicted(RECOMPUTE, 50, IDLE))
    assert costs.choose(KV_TRANSFER, 50, IDLE) == (KV_TRANSFER, costs.predicted(KV_TRANSFER, 50, IDLE))
    # Where nothing is known of the destination, or of both ways, the KV cache is sent.
    assert costs.choose(AUTO, 50, None) == (KV_TRANSFER, None)
    assert MoveCosts().choose(AUTO, 50, IDLE) == (KV_TRANSFER, None)


def test_a_destination_is_known_by_its_steps_without_and_with_the_sample() -> None:
    predictor = Predictor(StepModel(formula.profile()))
    there = Destination.predicted(predictor, 3, 900, 100, 2.0, 256, near=False)
    assert there == Destination(predictor.step_seconds(3, 900, 6), predictor.step_seconds(4, 1000, 8), 256, False)
    idle = Destination.predicted(predictor, 0, 0, 100, 0.0, 256)
    assert idle == Destination(0.0, predictor.step_seconds(1, 100, 0), 256)
