"""The distribution that sampling parameters ask for, by their definitions: an independent reference, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def log_probabilities(
    model: Any, before: Sequence[int], response: Sequence[int], parameters: Any, bad_words: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return the log-probability of each token at each place of a response, float64[tokens, vocabulary].

    `before`: the request's prompt. `parameters`: vLLM's, of which what stops a response is read for `min_tokens` alone.
    `bad_words`: their tokens.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *response]])).logits[0, len(before) - 1 : -1].double().numpy().copy()
    places, vocabulary = logits.shape
    ends = [model.config.eos_token_id, *parameters.stop_token_ids]
    logits[: parameters.min_tokens, ends] = -np.inf
    for *start, last in bad_words:
        for place in range(len(start), places):
            if list(response[place - len(start) : place]) == start:
                logits[place, last] = -np.inf

    # counts[t]: how often each token stands in the response before place t.
    counts = np.zeros((places, vocabulary))
    np.add.at(counts, (np.arange(places), np.array(response, dtype=int)), 1)
    counts = np.cumsum(counts, axis=0) - counts
    known = counts > 0
    known[:, list(before)] = True
    repeated = np.where(logits > 0, logits / parameters.repetition_penalty, logits * parameters.repetition_penalty)
    logits = np.where(known, repeated, logits)
    logits -= parameters.frequency_penalty * counts + parameters.presence_penalty * (counts > 0)

    if parameters.temperature > 0:
        logits /= parameters.temperature
        _cut(logits, parameters.top_k, parameters.top_p)
    return _log_softmax(logits)


def _cut(logits: np.ndarray, top_k: int, top_p: float) -> None:
    """Rule out what is behind the `top_k` likeliest tokens, and then behind the fewest that have `top_p` together."""
    order = np.argsort(-logits, axis=1, kind="stable")
    if top_k > 0:
        np.put_along_axis(logits, order[:, top_k:], -np.inf, axis=1)
    chances = np.take_along_axis(np.exp(_log_softmax(logits)), order, axis=1)
    behind = np.cumsum(chances, axis=1) - chances >= top_p
    behind[:, 0] = False
    rows, ranks = np.nonzero(behind)
    logits[rows, order[rows, ranks]] = -np.inf


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
