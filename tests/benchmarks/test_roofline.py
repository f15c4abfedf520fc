"""Data-sheet step times against the same sums done by hand."""

from __future__ import annotations

import pytest
from roofline import DeviceSpec, ModelSpec, roofline

from rhyme_openrlhf.latency.step_model import StepModel

MODEL = ModelSpec("m", 8e9, 32, 8, 128, 4096)
DEVICE = DeviceSpec("d", 1e12, 400e12, 50e9, 48e9)


@pytest.mark.parametrize(
    ("running", "context", "drafts", "seconds"),
    [
        # Few samples wait for memory, many for arithmetic.
        (1, 1, 0, 16e9 / 1e12),
        (1024, 1024, 0, 2 * 8e9 * 1024 / 400e12 + 131072 * 1024 / 1e12),
        (1, 30000, 0, 16e9 / 1e12 + 131072 * 30000 / 1e12),
        # A profile of 512 rows knows contexts beyond what 512 samples could hold.
        (256, 256 * 1000, 256, 2 * 8e9 * 512 / 400e12 + 131072 * 256_000 / 1e12),
    ],
)
def test_a_step_takes_what_memory_and_arithmetic_take(running: int, context: int, drafts: int, seconds: float) -> None:
    full, half = (StepModel(roofline(MODEL, DEVICE, 1, part)).seconds(running, context, drafts) for part in (1.0, 0.5))
    assert full == pytest.approx(seconds, rel=1e-3) and half == pytest.approx(2 * full)


def test_two_devices_read_half_and_talk() -> None:
    profile = roofline(MODEL, DEVICE, 2, 1.0)
    sent = 4096 * 2 * 2 * 2 * 32 / 2 / 50e9
    assert StepModel(profile).seconds(1, 0, 0) == pytest.approx(8e9 / 1e12 + sent, rel=1e-3)
    assert profile.origin == "derived" and profile.kv_bytes_per_token == 65536
