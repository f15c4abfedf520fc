"""The state of a process's random number generators: Python's, NumPy's, torch's, and CUDA's where a GPU is."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rhyme_openrlhf.platform import gpu_present


def random_state() -> dict[str, Any]:
    """The state of all generators of this process; only plain Python and NumPy objects."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy().copy(),
    }
    if gpu_present():
        state["cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from what `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    if gpu_present() and "cuda" in state:
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]))


class RankRandomState:
    """Added to an actor that is one rank of a model: its random state can be read and set from the trainer."""

    _rank: int

    def random_state(self) -> dict[str, Any]:
        """This rank's random state."""
        return random_state()

    def set_random_state(self, states: list[dict[str, Any]]) -> None:
        """Go on from this rank's part of `states`, which are in the order of the ranks."""
        if self._rank < len(states):
            set_random_state(states[self._rank])
