"""Records of single responses for people to read: what was written, and which of it came from drafts. Pure.

A record is one JSON object on one line:

    {"step", "group" (prompt_keys.py::prompt_key of the prompt), "prompt", "pieces": [[source, text], ...],
     "tokens", "drafted", "accepted", "reward", "engines", "weight_versions", "finish_reason", "cut"}

`pieces` joined are the text behind the prompt. Their sources: "" sampled by the model itself, "history", "siblings" and
"own" (drafting/drafter.py) accepted drafts, as "ngram", "draft_model" and "eagle3" (--drafting.source); "context"
what the task put between two rounds. `drafted` and `accepted` are null where nothing was noted (no speculation);
`weight_versions` are those of the first and of the last token; `cut` says that the text was longer than is kept.

Invariants: the same text as the whole response decoded at once, also where a character's bytes come from two pieces;
what does not fit into the bytes allowed is left out whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.telemetry.sample_rounds import Round

MODEL = ""
CONTEXT = "context"
# More than a person reads of one response; about 60,000 tokens.
MOST_CHARACTERS = 200_000
# What a tokenizer puts where bytes are no whole character (yet).
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def chosen_prompts(prompts: Sequence[str], step: int, groups: int) -> list[str]:
    """Keys of the `groups` prompts to record in a step: every prompt has the same chance in every step.

    The ones with the smallest hashes of step and prompt, so that the same run chooses the same ones again.
    """

    def rank(key: str) -> bytes:
        return hashlib.blake2b(f"{step}|{key}".encode(), digest_size=8).digest()

    return sorted({prompt_key(prompt) for prompt in prompts}, key=rank)[:groups]


def segments(rounds: Sequence[Round], end: int) -> list[tuple[int, int, str]]:
    """The positions behind the prompt, up to `end`, as contiguous (first, end, source)."""
    found: list[tuple[int, int, str]] = []
    at = rounds[0].context

    def up_to(position: int, source: str) -> None:
        nonlocal at
        position = min(position, end)
        if position > at:
            found.append((at, position, source))
            at = position

    for one in rounds:
        up_to(one.context, CONTEXT)
        over = one.context + one.tokens
        for first, last, source in one.spans or ():
            up_to(min(one.context + first, over), MODEL)
            up_to(min(one.context + last, over), source)
        up_to(over, MODEL)
    up_to(end, CONTEXT)
    return found


def texts(
    tokens: Sequence[int], bounds: Sequence[tuple[int, int, str]], decode: Callable[[list[int]], str]
) -> Iterator[tuple[str, str]]:
    """(source, text) of each segment. A character whose bytes end in a later segment belongs to that one.

    Each segment is decoded behind the one before it, because what a token looks like depends on its neighbours.
    """
    if not bounds:
        return
    # As far back as any tokenizer looks.
    window = max(0, bounds[0][0] - 4)
    shown = len(decode(list(tokens[window : bounds[0][0]])).rstrip(INCOMPLETE))
    for number, (first, end, source) in enumerate(bounds):
        text = decode(list(tokens[window:end]))
        whole = text if number == len(bounds) - 1 else text.rstrip(INCOMPLETE)
        yield source, whole[shown:]
        if whole == text:
            window, shown = first, len(decode(list(tokens[first:end])))
        else:
            shown = max(shown, len(whole))


def sample_record(
    step: int,
    prompt: str,
    tokens: Sequence[int],
    rounds: Sequence[Round],
    reward: float,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The record of one sample: `tokens` are those of its whole sequence, prompt and response."""
    pieces: list[list[str]] = []
    room = MOST_CHARACTERS - min(len(prompt), MOST_CHARACTERS // 2)
    cut = len(prompt) > MOST_CHARACTERS // 2
    bounds = segments(rounds, len(tokens))
    for source, text in texts(tokens, bounds, decode):
        if len(text) > room:
            cut, text = True, text[:room]
        room -= len(text)
        if text and pieces and pieces[-1][0] == source:
            pieces[-1][1] += text
        elif text:
            pieces.append([source, text])
        if cut and not room:
            break
    noted = all(one.spans is not None for one in rounds)
    return {
        "step": step,
        "group": prompt_key(prompt),
        "prompt": prompt[: MOST_CHARACTERS // 2],
        "pieces": pieces,
        "tokens": sum(one.tokens for one in rounds),
        "drafted": sum(one.drafted or 0 for one in rounds) if noted else None,
        "accepted": sum(end - first for first, end, source in bounds if source not in (MODEL, CONTEXT))
        if noted
        else None,
        "reward": reward if math.isfinite(reward) else None,
        "engines": list(dict.fromkeys(one.engine for one in rounds)),
        "weight_versions": [rounds[0].weight_version, rounds[-1].last_weight_version],
        "finish_reason": rounds[-1].finish_reason,
        "cut": cut,
    }


def encoded(records: Iterable[dict[str, Any]], most_bytes: int) -> list[bytes]:
    """The records' lines, as many as fit into `most_bytes`."""
    lines: list[bytes] = []
    for record in records:
        # A lone surrogate in a prompt is no UTF-8.
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        most_bytes -= len(line)
        if most_bytes < 0:
            break
        lines.append(line)
    return lines
