"""OpenRLHF's experience maker, which also hands each response with its reward to the history workers and the record.

Experiences are where every kind of reward (function, remote, model) is known. Invariant: recording is sent and not
waited for (but in a reproducible run); what is trained is upstream's.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from itertools import islice
from typing import Any

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.worker import PromptRollout
from rhyme_openrlhf.prompt_keys import evaluation_key, owner, prompt_key, round_key
from rhyme_openrlhf.telemetry.events import OffPolicyness
from rhyme_openrlhf.telemetry.samples import MEGABYTE, ROUNDS, encoded, sample_record
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.training.sample_rows import TokenTexts, sample_rows
from rhyme_openrlhf.training.updates import check_shares

SOURCE = "trainer"


class RhymeExperienceMaker(RemoteExperienceMaker):
    """Upstream's, with history. `services` and `step` are set by the trainer that owns it."""

    services: RunServices
    step: int = 0
    # How many samples the last step had.
    samples: int = 0
    _sent: tuple[Any, ...] = ()
    # Extra logs of the step that some samples have and others have not.
    _partial: frozenset[str] = frozenset()

    def split_rollout_samples(self, rollout_samples: list[Any]) -> list[Any]:
        """Return micro-batches of the samples, as upstream, which needs the same extra logs of each."""
        self._partial |= align_logs(rollout_samples)
        micro_batches: list[Any] = super().split_rollout_samples(rollout_samples)
        return micro_batches

    def make_experience_batch(self, rollout_samples: list[Any]) -> list[Any]:
        """Return the experiences of a step, as upstream; their responses go to the history workers."""
        experiences = super().make_experience_batch(rollout_samples)
        fill_logs(experiences, self._partial | align_logs(experiences))
        self._partial = frozenset()
        self.samples = len(rollout_samples)
        # Micro-batches by length are as many on every rank.
        if not self.args.train.dynamic_batch_enable:
            sizes = [len(experience.index) for experience in experiences]
            for group in filter(None, (self.actor_model_group, self.critic_model_group)):
                ranks = len(group._actor_handlers) // group.duplicate_actors
                check_shares(self.step, sizes, ranks, self.args.train.micro_batch_size)
        self._record(rollout_samples, experiences)
        workers = self.services.history_workers
        if workers:
            histospec = self.services.settings.histospec
            shares = by_worker(experiences, len(workers), histospec.prefix_max, texts=histospec.enable)
            self._sent = tuple(
                workers[number].record.remote(self.step, rollouts) for number, rollouts in shares.items()
            )
            self._compare_ranks(workers)
        return experiences

    def _record(self, rollout_samples: list[Any], experiences: list[Any]) -> None:
        """Record the step's off-policyness, the table of its samples, and the responses of the chosen prompts."""
        rounds = [getattr(sample, ROUNDS, []) for sample in rollout_samples]
        ages = Counter(self.step - of_sample[0].weight_version - 1 for of_sample in rounds if of_sample)
        if ages:
            tokens: Counter[int] = Counter()
            for one in (one for of_sample in rounds for one in of_sample):
                for version, count in one.tokens_by_version().items():
                    tokens[self.step - version - 1] += count
            values = sorted({*ages, *tokens})
            event = OffPolicyness(self.step, values, [ages[value] for value in values], [tokens[v] for v in values])
            self.services.record(event, SOURCE)
        settings = self.services.settings.telemetry
        if settings.sample_groups == 0:
            return
        rewards = rewards_by_sample(experiences)
        made: dict[int, dict[str, Any]] = {}

        def records() -> Iterator[dict[str, Any]]:
            for number, of_sample in enumerate(rounds):
                if of_sample and of_sample[0].trace:
                    sample = rollout_samples[number]
                    made[number] = sample_record(
                        self.step,
                        sample.prompts[0],
                        sample.sequences[0].tolist(),
                        of_sample,
                        rewards[number],
                        self._decode,
                    )
                    yield made[number]

        lines = encoded(records(), settings.samples_mb * MEGABYTE)
        if lines:
            self.services.recorder.write_samples.remote(self.step, lines)
        kept = dict(islice(made.items(), len(lines)))
        rows = sample_rows(self.step, experiences, rounds, kept, self._token_texts)
        self.services.recorder.write_sample_table.remote(self.step, rows)

    @functools.cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self._decode)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _compare_ranks(self, workers: tuple[Any, ...]) -> None:
        """After an epoch's last step: have the workers record how well the epoch before ranked its prompts."""
        steps = self.services.steps_per_epoch
        if steps is None or self.step % steps:
            return
        epoch = self.services.epoch_of(self.step)
        lengths = [worker.epoch_lengths.remote(self.step - steps + 1, self.step) for worker in workers]
        workers[0].report_ranks.remote(epoch, *lengths)

    def wait_for_history(self) -> None:
        """Wait until the workers have this step's responses, as far as they answer in time.

        For reproducible runs only: there the next rollout must find the same history at any timing.
        """
        if self._sent:
            timeout = self.services.settings.history.fetch_timeout_s
            ray.wait(list(self._sent), num_returns=len(self._sent), timeout=timeout, fetch_local=False)


def align_logs(experiences: list[Any]) -> set[str]:
    """Give all experiences the extra logs of any of them, NaN where one has none; return the names of those."""
    partial = set()
    for key in sorted({key for experience in experiences for key in experience.info}):
        for experience in experiences:
            if key not in experience.info:
                partial.add(key)
                experience.info[key] = torch.full((len(experience.sequences),), torch.nan)
    return partial


def fill_logs(experiences: list[Any], partial: Set[str]) -> None:
    """Put the mean of the samples that have one of these logs in the place of NaN: it is then the step's mean."""
    for key in partial:
        values = [experience.info[key].float() for experience in experiences]
        mean = torch.cat(values).nanmean()
        for experience, value in zip(experiences, values, strict=True):
            experience.info[key] = torch.where(value.isnan(), mean, value)


def rewards_by_sample(experiences: list[Any]) -> dict[int, float]:
    """Return the reward of each of a step's samples, by number: upstream may have put them into another order."""
    return {
        number: reward
        for experience in experiences
        for number, reward in zip(experience.index, experience.info["reward"].tolist(), strict=True)
    }


def by_worker(
    experiences: list[Any], workers: int, context: int, texts: bool = True, evaluation: bool = False
) -> dict[int, list[PromptRollout]]:
    """Return the responses in a step's experiences, by prompt and round, for the history worker that owns each prompt.

    Without `texts` only their lengths: nothing will be drafted from them. Of an `evaluation` without rewards, which are
    not known yet.
    """
    pieces: dict[str, list[Piece]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    for experience in experiences:
        rewards = [0.0] * len(experience.prompts) if evaluation else experience.info["reward"].tolist()
        for row, prompt in enumerate(experience.prompts):
            key = evaluation_key(prompt_key(prompt)) if evaluation else prompt_key(prompt)
            found = response_pieces(experience.sequences[row], experience.action_mask[row], rewards[row], context)
            for number, piece in enumerate(found if texts else ()):
                pieces[round_key(key, number)].append(piece)
            lengths[key].append(sum(len(piece.tokens) for piece in found))
    shares: dict[int, list[PromptRollout]] = defaultdict(list)
    for key in {**lengths, **pieces}:
        rollout = PromptRollout(key, tuple(pieces.get(key, ())), tuple(lengths.get(key, ())))
        shares[owner(key, workers)].append(rollout)
    return shares


def response_pieces(sequence: torch.Tensor, action_mask: torch.Tensor, reward: float, context: int) -> list[Piece]:
    """Return the generated stretches of one sequence ([length], mask [length - 1]: entry i is for token i + 1).

    One stretch for a single round, one a round for a conversation; each with up to `context` tokens before it.
    """
    tokens = sequence.numpy(force=True).astype(np.int32)
    generated = action_mask.numpy(force=True).astype(np.int8)
    # Where the mask changes: each stretch's first entry, then the first behind it. Entry i is for token i + 1.
    edges = np.flatnonzero(np.diff(generated, prepend=0, append=0)) + 1
    return [
        Piece(tokens[max(0, start - context) : start], tokens[start:end], reward)
        for start, end in edges.reshape(-1, 2).tolist()
    ]
