"""Data-sheet step times against the same sums done by hand."""

from __future__ import annotations

import pytest
from roofline import DeviceSpec, ModelSpec, roofline

from rhyme_openrlhf.latency.step_model import StepModel

MODEL = ModelSpec("m", 8e9, 32, 8, 128, 4096)
DEVICE = DeviceSpec("d", 1e12, 400e12, 50e9, 48e9)


def test_few_samples_wait_for_memory_and_many_for_arithmetic() -> None:
    model = StepModel(roofline(MODEL, DEVICE, 1, 1.0))
    assert model.seconds(1, 1, 0) == pytest.approx(16e9 / 1e12, rel=1e-3)
    assert model.seconds(1024, 1024, 0) == pytest.approx(2 * 8e9 * 1024 / 400e12 + 131072 * 1024 / 1e12, rel=1e-3)
    assert model.seconds(1, 30000, 0) - model.seconds(1, 0, 0) == pytest.approx(131072 * 30000 / 1e12, rel=1e-3)


def test_many_rows_read_the_context_that_few_samples_have() -> None:
    """256 samples and 256 drafts: a profile of 512 rows must know contexts beyond what 512 samples could hold."""
    seconds = StepModel(roofline(MODEL, DEVICE, 1, 1.0)).seconds(256, 256 * 1000, 256)
    assert seconds == pytest.approx(2 * 8e9 * 512 / 400e12 + 131072 * 256_000 / 1e12, rel=1e-3)


def test_half_the_efficiency_is_twice_the_time() -> None:
    full, half = (StepModel(roofline(MODEL, DEVICE, 2, part)) for part in (1.0, 0.5))
    assert half.seconds(64, 64000, 0) == pytest.approx(2 * full.seconds(64, 64000, 0))


def test_two_devices_read_half_and_talk() -> None:
    profile = roofline(MODEL, DEVICE, 2, 1.0)
    sent = 4096 * 2 * 2 * 2 * 32 / 2 / 50e9
    assert StepModel(profile).seconds(1, 0, 0) == pytest.approx(8e9 / 1e12 + sent, rel=1e-3)
    assert profile.origin == "derived" and profile.kv_bytes_per_token == 65536
