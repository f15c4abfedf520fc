"""OpenRLHF's rollout actor with the seeding shim, and nothing else of ours.

The base of our own engine actor, and, on a machine without a GPU, what `platform/openrlhf_cli.py` runs as "OpenRLHF
unchanged". Checked against OpenRLHF 0.11.2 `trainer/ray/vllm_engine.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from rhyme_openrlhf.platform import gpu_present, shims
from rhyme_openrlhf.settings.config import RhymeSettings

if not gpu_present():
    shims.install()

import openrlhf.trainer.ray.vllm_engine as upstream

from rhyme_openrlhf.engine.request_keys import UNCOUNTED, WORKER_EXTENSION
from rhyme_openrlhf.engine.seeding import SampleIdentity, VisitedPrompt, current_sample, request_seed
from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.telemetry.samples import ROUNDS

PlainRolloutActor = plain_class(upstream.RolloutRayActor, __name__, "PlainRolloutActor")


class SeededRolloutActor(PlainRolloutActor):  # type: ignore[misc, valid-type]
    """One vLLM engine. `rhyme` are the run's settings, `run_seed` its --train.seed."""

    # Ray awaits an actor's constructor; upstream's is one too.
    async def __init__(self, *args: Any, rhyme: RhymeSettings, run_seed: int, **kwargs: Any) -> None:  # type: ignore[misc]
        self.rhyme = rhyme
        self._run_seed = run_seed
        self._visits: Counter[str] = Counter()
        if not gpu_present():
            from rhyme_openrlhf.platform.cpu_engine import cpu_engine_arguments

            kwargs = cpu_engine_arguments(kwargs, rhyme.cpu)
        kwargs["worker_extension_cls"] = WORKER_EXTENSION
        await super().__init__(*args, **kwargs)

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """The `num_samples` responses to one prompt, as upstream; each knows which sample it is."""
        visit = self._visit(prompt)
        # A plain string from here on: whatever gets the prompt may keep or send it.
        prompt = str(prompt)

        async def one(sample: int) -> dict[str, Any]:
            identity = SampleIdentity(prompt, visit, sample)
            current_sample.set(identity)
            (response,) = await super(SeededRolloutActor, self).generate_responses(
                prompt, label, sampling_params, max_length, hf_tokenizer, 1, images
            )
            response[ROUNDS] = identity.rounds
            return response

        # gather() runs each coroutine in a task with its own copy of the context.
        return list(await asyncio.gather(*(one(sample) for sample in range(num_samples))))

    def _visit(self, prompt: str) -> int:
        """Which visit of the prompt this is: as its sender says, or else as counted here."""
        if isinstance(prompt, VisitedPrompt):
            return prompt.visit
        self._visits[prompt] += 1
        return self._visits[prompt] - 1

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """One request, as upstream; seeded if the run is reproducible."""
        self.seed_request(sampling_params, len(prompt_token_ids))
        return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)

    def seed_request(self, sampling_params: Any, prompt_tokens: int) -> None:
        """Give a request its own seed, if the run is reproducible (the caller passes its own copy of the params)."""
        identity = current_sample.get()
        if self.rhyme.run.reproducible and identity is not None:
            sampling_params.seed = request_seed(self._run_seed, identity, prompt_tokens)

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probability of each token after the first, by the weights this engine now runs, at temperature 1."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, extra_args={UNCOUNTED: True})
        output = await PlainRolloutActor.generate(self, list(token_ids), parameters)
        return [at[token].logprob for at, token in list(zip(output.prompt_logprobs, token_ids, strict=True))[1:]]

    def ready(self) -> bool:
        """Answers once the engine has started: what the driver waits for."""
        return True
