"""PAT's equations 1 to 4."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.latency.transfer_model import NotMeasured, TransferModel
from tests.latency import formula

model = TransferModel(formula.profile())


def test_prefill_of_equal_lengths_is_the_measured_one() -> None:
    assert model.prefill_seconds([512] * 4) == pytest.approx(4 * 512e-5)
    assert model.prefill_seconds([64]) == pytest.approx(64e-5)
    assert model.prefill_seconds([]) == 0.0


def test_unequal_lengths_cost_what_their_root_mean_square_does() -> None:
    """Equation 3: lengths 1 and 7 have the root mean square 5."""
    assert model.prefill_seconds([70, 490]) == pytest.approx(model.prefill_seconds([350, 350]))


def test_kv_transfer_is_bytes_over_bandwidth() -> None:
    assert model.kv_bytes([1000, 24]) == 1024 * 2048
    assert model.kv_transfer_seconds([1000, 24]) == pytest.approx(1024 * 2048 / 1e9)


def test_what_was_not_measured_is_not_guessed() -> None:
    empty = TransferModel(formula.profile(prefills=(), kv_bytes_per_second=0.0, weight_load_seconds=0.0))
    for ask in (lambda: empty.prefill_seconds([1]), lambda: empty.kv_transfer_seconds([1]), empty.weight_load_seconds):
        with pytest.raises(NotMeasured, match="rhyme profile"):
            ask()
