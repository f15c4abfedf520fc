"""Elements and bytes by address, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from rhyme_openrlhf.history.addresses import (
    TOGETHER,
    bytes_at_least,
    float32s_at,
    float64s_at,
    int32_of,
    int64_of,
    leading_zeros,
    least_byte,
    put_int32,
    put_int64,
    trailing_zeros,
)


@njit
def compared(address: int, least: int) -> tuple[int, int, int]:
    """Which bytes are as large, and the zero bits at both ends of that."""
    bits = bytes_at_least(address, least)
    return bits, trailing_zeros(bits), leading_zeros(bits)


@njit
def written(address: int, place: int, value: int, wide: bool) -> int:
    """What is read after writing."""
    if wide:
        put_int64(address, place, value)
        return int64_of(address, place)
    put_int32(address, place, value)
    return int32_of(address, place)


@njit
def least(address: int, bits: int) -> int:
    """The least of some bytes."""
    return least_byte(address, bits)


@pytest.mark.parametrize("bits", [0, 1, 2, 1 << 31, 0b1011000, (1 << 32) - 2, (1 << 32) - 1])
def test_the_least_of_some_bytes(bits: int) -> None:
    given = np.random.default_rng(1).integers(0, 256, 3 * TOGETHER, dtype=np.uint8)
    for start in range(2 * TOGETHER):
        asked = [int(given[start + place]) for place in range(TOGETHER) if bits >> place & 1]
        assert least(given.ctypes.data + start, bits) == min(asked, default=255)


@njit
def fractions(singles: int, doubles: int, size: int) -> float:
    """The scalar product of two arrays."""
    return float((float32s_at(singles, size) * float64s_at(doubles, size)).sum())


def test_fractions_are_read() -> None:
    singles, doubles = np.array([0.5, 0.25, 3], dtype=np.float32), np.array([8.0, 4.0, 0.125])
    assert fractions(singles.ctypes.data, doubles.ctypes.data, 3) == 5.375


@pytest.mark.parametrize("least", [0, 1, 77, 200, 255])
def test_bytes_are_compared_together(least: int) -> None:
    given = np.random.default_rng(0).integers(0, 256, 4 * TOGETHER, dtype=np.uint8)
    for begin in (0, 3, 60):
        part = given[begin : begin + TOGETHER]
        bits, below, above = compared(part.ctypes.data, least)
        expected = sum(1 << place for place, byte in enumerate(part.tolist()) if byte >= least)
        assert bits == expected
        assert below == (64 if not bits else (bits & -bits).bit_length() - 1)
        assert above == 64 - bits.bit_length()


def test_elements_are_written() -> None:
    array = np.zeros(4, dtype=np.int64)
    assert written(array.ctypes.data, 2, -(2**40), True) == -(2**40)
    assert written(array.ctypes.data, 1, -5, False) == -5
    assert array.tolist() == [-5 << 32, 0, -(2**40), 0]
