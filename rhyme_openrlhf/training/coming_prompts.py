"""The prompts that come next: seen in the data loader without drawing them, and told to the engines that get them.

Engines rehearse these prompts while they have nothing to run (engine/actor_parts/rehearsal.py). In the streaming
pipeline engines have their next prompts anyway. Checked against torchdata 0.11 and OpenRLHF 0.11.2
`trainer/ppo_utils/samples_generator.py`.

Invariants: the data loader, its state and this process's random state stay as they are. A prompt that another engine
gets in the end, or none, costs its drafts and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch
from torchdata.stateful_dataloader import StatefulDataLoader

from rhyme_openrlhf.scheduling.step_plan import by_predicted_work
from rhyme_openrlhf.training.reproducible import random_state, set_random_state

# In a data loader's state (torchdata 0.11): whether its epoch's prompts are all drawn.
LOADER_FINISHED = "_iterator_finished"


def coming_prompts(loader: Any, count: int) -> list[str]:
    """Return the next `count` prompts that the loader will give in this epoch; prompts with images are left out."""
    # Asked for its state before its first prompt, a loader would begin its epoch.
    if getattr(loader, "_iterator", None) is None:
        return []
    state = copy.deepcopy(loader.state_dict())
    if state[LOADER_FINISHED]:
        return []
    kept = random_state()
    try:
        twin = StatefulDataLoader(
            loader.dataset, loader.batch_size, shuffle=True, drop_last=loader.drop_last, collate_fn=loader.collate_fn
        )
        twin.load_state_dict(state)
        prompts, _, images, _ = _collect_prompt_batch(iter(twin), count)
    finally:
        set_random_state(kept)
    return [prompt for prompt, of_prompt in zip(prompts, images, strict=True) if not of_prompt]


def tell_engines(engines: Sequence[Any], prompts: list[str], lengths: Sequence[Sequence[int]], samples: int) -> None:
    """Tell each engine, without waiting, which of the prompts it will get if the engines are then idle.

    `lengths`: of the prompts' last responses, none where that is not known; `samples`: of each prompt.
    """
    chosen = by_predicted_work(lengths, [0] * len(engines), samples) if lengths else None
    # As upstream: in turn.
    engine_of = chosen or [number % len(engines) for number in range(len(prompts))]
    for number, engine in enumerate(engines):
        own = [prompt for prompt, at in zip(prompts, engine_of, strict=True) if at == number]
        engine.expect_prompts.remote(own)
