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
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator, _collect_prompt_batch
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


def tell_engines(
    generator: SamplesGenerator, prompts: list[str], lengths: Sequence[Sequence[int]], **generate_kwargs: Any
) -> None:
    """Tell each of the generator's engines which of the prompts it will get, and how their samples are generated.

    Prompts go to engines as in the next step, if the engines are then idle: by predicted work, or in turn where there
    are no `lengths` of earlier responses.
    """
    engines = generator.vllm_engines
    samples = generate_kwargs.get("n_samples_per_prompt", generator.args.rollout.n_samples_per_prompt)
    chosen = by_predicted_work(lengths, [0] * len(engines), samples) if lengths else None
    engine_of = chosen or [number % len(engines) for number in range(len(prompts))]
    how = _sampling(generator, prompts, **{**generate_kwargs, "images": None})
    for number, engine in enumerate(engines):
        own = [prompt for prompt, at in zip(prompts, engine_of, strict=True) if at == number]
        engine.expect_prompts.remote(own, *how)


def _sampling(generator: SamplesGenerator, prompts: list[str], **generate_kwargs: Any) -> tuple[Any, int, Any]:
    """Return sampling parameters, maximal length and tokenizer, as upstream sends them with each prompt."""
    sent: list[dict[str, Any]] = []
    door = SimpleNamespace(
        generate_responses=SimpleNamespace(remote=lambda **arguments: sent.append(arguments)),
        get_num_unfinished_requests=SimpleNamespace(remote=lambda: ray.put(0)),
    )
    engines, generator.vllm_engines = generator.vllm_engines, [door]
    try:
        SamplesGenerator._dispatch_prompts_to_vllm(generator, prompts[:1], [""], **generate_kwargs)
    finally:
        generator.vllm_engines = engines
    if not sent:
        return None, 0, None
    return sent[0]["sampling_params"], sent[0]["max_length"], sent[0]["hf_tokenizer"]
