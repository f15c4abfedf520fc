"""Seeds, orders and random states: two runs with the same seed train the same samples, and a resumed run goes on alike.

OpenRLHF 0.11.2 does not seed the order in which its controller draws prompts, nor the requests to vLLM
(`engine/seeding.py`). It trains samples in the order in which they finish. With `--run.reproducible` these gaps are
closed. Without it only the random states are used, which every checkpoint holds: Python's, NumPy's, torch's, and CUDA's
where a GPU is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rhyme_openrlhf.platform import gpu_present


def seed_controller(seed: int) -> None:
    """Seed this process, so that the prompt loader's shuffle depends on --train.seed alone."""
    import transformers

    transformers.set_seed(seed)


def in_prompt_order(samples: Sequence[Any], of_each: int) -> list[Any]:
    """Return samples by prompt instead of by who finished first; the `of_each` samples of a row stay side by side.

    Rows with the same prompt are ordered by their labels, and then by what was generated.
    """

    def order(row: Sequence[Any]) -> tuple[Any, ...]:
        return row[0].prompts[0], str(row[0].labels[0]), [sample.sequences[0].tolist() for sample in row]

    rows = [samples[first : first + of_each] for first in range(0, len(samples), of_each)]
    return [sample for row in sorted(rows, key=order) for sample in row]


def random_state() -> dict[str, Any]:
    """Return the state of all generators of this process; only plain Python and NumPy objects."""
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
        """Return this rank's random state."""
        return random_state()

    def set_random_state(self, states: list[dict[str, Any]]) -> None:
        """Go on from this rank's part of `states`, which are in the order of the ranks."""
        if self._rank < len(states):
            set_random_state(states[self._rank])
