"""Random states: each generator of a process goes on as it would have."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from rhyme_openrlhf.training.reproducible import random_state, set_random_state


def draws() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_each_generator_goes_on_from_its_state() -> None:
    state = random_state()
    expected = draws()
    others = draws()
    set_random_state(state)
    assert draws() == expected
    assert all(one != other for one, other in zip(expected, others, strict=True))
