"""Rows of the table of a step's samples (telemetry/sample_table.py), made of OpenRLHF's experiences.

Invariants: it reads the experiences and changes nothing. Sums over a sample's tokens are made for a whole micro-batch
at once, so all samples of a step cost milliseconds. What an estimator or the engines do not give is left out of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.telemetry.sample_table import GAP_BOUNDS, PART, plain
from rhyme_openrlhf.telemetry.samples import INCOMPLETE, MOST_CHARACTERS, Round, segments, texts

Decode = Callable[[list[int]], str]
# What the table has under a name of its own, or what is no figure of a single sample.
_NO_PART = frozenset({"reward", "response_clip_ratio", "group_reward_std"})


def sample_rows(
    step: int,
    experiences: Sequence[Any],
    rounds: Sequence[Sequence[Round]],
    written: Mapping[int, Mapping[str, Any]],
    token_texts: TokenTexts,
) -> list[dict[str, Any]]:
    """Return a row for each sample, by number. `rounds`: of each sample; `written`: the records of kept responses."""
    rows = []
    for experience in experiences:
        sums = list(_sums(experience))
        for place, number in enumerate(experience.index):
            row = {"step": step, "number": number, "group": prompt_key(experience.prompts[place]), **sums[place]}
            row |= _of_rounds(step, rounds[number])
            if number in written:
                row |= _written(experience, place, rounds[number], written[number], token_texts)
            rows.append(row)
    return sorted(rows, key=lambda row: row["number"])


def _sums(experience: Any) -> Iterator[dict[str, Any]]:
    """Yield what is summed over the tokens of each sample of a micro-batch, and its reward function's figures."""
    mask = experience.action_mask.bool()
    counts = mask.sum(-1)
    columns: dict[str, list[Any]] = {
        "tokens": counts.tolist(),
        "reward": experience.info["reward"].float().tolist(),
        "truncated": experience.truncated.bool().tolist() if experience.truncated is not None else [None] * len(mask),
    }
    # The first generated token follows the prompt; a mask's entry is of the token behind it.
    columns["prompt_tokens"] = (mask.int().argmax(-1) + 1).tolist()
    for name, values in (("advantage", experience.advantages), ("log_prob", experience.action_log_probs)):
        if values is not None:
            columns[name] = _mean(values, mask, counts)
    engine = experience.rollout_log_probs
    if engine is not None:
        columns["engine_log_prob"] = _mean(engine, mask, counts)
    if engine is not None and experience.action_log_probs is not None:
        gaps = (experience.action_log_probs.float() - engine.float()).masked_fill(~mask, 0.0)
        columns["gap"] = _mean(gaps, mask, counts)
        largest = gaps.gather(-1, gaps.abs().argmax(-1, keepdim=True)).squeeze(-1)
        columns["gap_largest"] = _known(largest)
        classes = torch.bucketize(gaps, torch.tensor(GAP_BOUNDS), right=True)
        within = torch.zeros(len(mask), len(GAP_BOUNDS) + 1, dtype=torch.int32)
        columns["gap_counts"] = within.scatter_add_(-1, classes, mask.int()).tolist()
    for name, figures in experience.info.items():
        if name not in _NO_PART and isinstance(figures, torch.Tensor) and figures.numel() == len(mask):
            columns[PART + name] = _known(figures.float().flatten())
    for place in range(len(mask)):
        yield {name: values[place] for name, values in columns.items()}


def _mean(values: torch.Tensor, mask: torch.Tensor, counts: torch.Tensor) -> list[float | None]:
    """Return the mean over each sample's tokens; None without tokens."""
    return _known(values.float().masked_fill(~mask, 0.0).sum(-1) / counts)


def _known(values: torch.Tensor) -> list[float | None]:
    return [
        value if finite else None for value, finite in zip(values.tolist(), values.isfinite().tolist(), strict=True)
    ]


def _of_rounds(step: int, rounds: Sequence[Round]) -> dict[str, Any]:
    if not rounds:
        return {}
    return {
        "prompt_tokens": rounds[0].context,
        "rounds": len(rounds),
        "finish_reason": rounds[-1].finish_reason or None,
        "age": step - rounds[0].weight_version - 1,
        "weight_versions": [rounds[0].weight_version, rounds[-1].last_weight_version],
        "engines": list(dict.fromkeys(one.engine for one in rounds)),
    }


def _written(
    experience: Any, place: int, rounds: Sequence[Round], record: Mapping[str, Any], token_texts: TokenTexts
) -> dict[str, Any]:
    """Return what is kept of a sample whose response is kept: its texts, and its tokens one by one."""
    first, end = rounds[0].context, int(experience.attention_mask[place].sum())
    ids = experience.sequences[place, first:end].tolist()
    pieces = token_texts(experience.sequences[place, :end].tolist(), first)
    # As much as is kept of a text.
    room, kept = MOST_CHARACTERS, 0
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            break
        kept += 1
    sources = [source for start, stop, source in segments(rounds, end) for _ in range(start, stop)]
    mask = experience.action_mask[place, first - 1 : end - 1].bool()
    label = experience.labels[place] if experience.labels else None
    row: dict[str, Any] = {
        "prompt": plain(record["prompt"]),
        "label": None if label is None else plain(str(label))[:MOST_CHARACTERS],
        "response": plain("".join(pieces[:kept])),
        "drafted": record["drafted"],
        "accepted": record["accepted"],
        "token_ids": ids[:kept],
        "token_texts": [plain(piece) for piece in pieces[:kept]],
        "token_sources": sources[:kept],
    }
    by_token = {
        "log_probs": experience.action_log_probs,
        "engine_log_probs": experience.rollout_log_probs,
        "advantages": experience.advantages,
    }
    for name, values in by_token.items():
        if values is not None:
            of_tokens = values[place, first - 1 : end - 1].float().masked_fill(~mask, torch.nan)
            row[name] = _known(of_tokens[:kept])
    return row


class TokenTexts:
    """The text of each token of a sequence: most tokens look the same everywhere, so each is decoded once.

    Tokens that share a character are decoded together. Where the texts do not join to the whole, because the tokenizer
    changes a token by its neighbours, each token is decoded in its place.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, tokens: Sequence[int], first: int) -> list[str]:
        """Return the texts of the tokens from place `first` on; joined they are the text behind that place."""
        known = self._known
        before = self._decode([tokens[0]])
        for token in set(tokens[first:]) - known.keys():
            # Behind another token, because the first of a text may lose its space.
            text = self._decode([tokens[0], token])
            known[token] = text[len(before) :] if text.startswith(before) else INCOMPLETE
        found: list[str] = []
        for in_parts, together in groupby(tokens[first:], lambda token: INCOMPLETE in known[token]):
            run = list(together)
            found += self._in_place([tokens[0], *run], 1) if in_parts else [known[token] for token in run]
        ahead = self._decode(list(tokens[first - 1 : first]))
        if ahead + "".join(found) == self._decode(list(tokens[first - 1 :])):
            return found
        return self._in_place(tokens, first)

    def _in_place(self, tokens: Sequence[int], first: int) -> list[str]:
        bounds = [(place, place + 1, "") for place in range(first, len(tokens))]
        return [text for _, text in texts(tokens, bounds, self._decode)]
