"""OpenRLHF's experience maker, which also hands each response with its reward to the history workers.

Experiences are where every kind of reward (function, remote, model) is known. Invariant: recording is sent and not
waited for (but in a reproducible run); what is trained is upstream's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.keys import owner, prompt_key
from rhyme_openrlhf.history.worker import PromptRollout
from rhyme_openrlhf.training.recorder import RunServices


class RhymeExperienceMaker(RemoteExperienceMaker):
    """Upstream's, with history. `services` and `step` are set by the trainer that owns it."""

    services: RunServices
    step: int = 0
    _sent: tuple[Any, ...] = ()

    def make_experience_batch(self, rollout_samples: list[Any]) -> list[Any]:
        """Experiences of a step, as upstream; their responses go to the history workers."""
        experiences = super().make_experience_batch(rollout_samples)
        workers = self.services.history_workers
        if workers:
            context = self.services.settings.histospec.prefix_max
            shares = by_worker(experiences, len(workers), context)
            self._sent = tuple(
                workers[number].record.remote(self.step, rollouts) for number, rollouts in shares.items()
            )
        return experiences

    def wait_for_history(self) -> None:
        """Until the workers have this step's responses, as far as they answer in time.

        For reproducible runs only: there the next rollout must find the same history whatever the timing.
        """
        if self._sent:
            timeout = self.services.settings.history.fetch_timeout_s
            ray.wait(list(self._sent), num_returns=len(self._sent), timeout=timeout, fetch_local=False)


def by_worker(experiences: list[Any], workers: int, context: int) -> dict[int, list[PromptRollout]]:
    """The responses in a step's experiences, by prompt, for the history worker that owns each prompt."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    for experience in experiences:
        rewards = experience.info["reward"].tolist()
        for row, prompt in enumerate(experience.prompts):
            key = prompt_key(prompt)
            found = response_pieces(experience.sequences[row], experience.action_mask[row], rewards[row], context)
            pieces[key] += found
            lengths[key].append(sum(len(piece.tokens) for piece in found))
    shares: dict[int, list[PromptRollout]] = defaultdict(list)
    for key, found in pieces.items():
        shares[owner(key, workers)].append(PromptRollout(key, tuple(found), tuple(lengths[key])))
    return shares


def response_pieces(sequence: torch.Tensor, action_mask: torch.Tensor, reward: float, context: int) -> list[Piece]:
    """The generated stretches of one sequence ([length], mask [length - 1]: entry i is for token i + 1).

    One stretch for a single turn, one a turn for a conversation; each with up to `context` tokens before it.
    """
    tokens = sequence.tolist()
    generated = [False, *action_mask.bool().tolist()]
    pieces = []
    start = None
    for position in range(len(tokens) + 1):
        inside = position < len(tokens) and generated[position]
        if inside and start is None:
            start = position
        elif not inside and start is not None:
            pieces.append(Piece(tokens[max(0, start - context) : start], tokens[start:position], reward))
            start = None
    return pieces
