"""Responses of a run: what is noted of each while it is generated, and what the run directory keeps of them. Pure.

A sample of a single-turn task has one round, one request to an engine; a sample of a conversation has one for each
answer. `Round` is what is noted of it; rounds travel with the response, to the experience that is made of it.

`samples/step-000012.jsonl` has the responses of a few prompts of step 12, chosen by a hash, one record a line:

    {"step", "group" (prompt_keys.py::prompt_key of the prompt), "prompt", "pieces": [[source, text], ...],
     "tokens", "drafted", "accepted", "reward", "engines", "weight_versions", "finish_reason", "cut"}

`pieces` joined are the text behind the prompt. Their sources: "" sampled by the model itself, "history", "siblings",
"own" and "shared" (drafting/drafter.py) accepted drafts, as "ngram", "draft_model" and "eagle3" (--drafting.source);
"context" what the task put between two rounds. `drafted` and `accepted` are null where nothing was noted (no
speculation);
`weight_versions` are those of the first and of the last token; `cut` says that the text was longer than is kept.

`lengths.jsonl` has how long every response was, one prompt group a line; `rhyme simulate --from-run` replays it:

    {"step": 1, "epoch": 1, "prompt": "a1b2", "prompt_tokens": 180, "lengths": [2210, 870], "engines": [0, 0]}

`prompt` is the prompt's key, `lengths` the generated tokens of its samples, `engines` where each of them began.

Invariants: a record's text is that of the whole response decoded at once, also where one character's bytes come from
two pieces. What does not fit into the bytes allowed is left out whole. A file of records appears whole or not at all.
With the tables of samples (sample_table.py) they hold at most the given MB; those of the oldest steps go first. A step
that is done again (after a resume into the same directory) replaces its files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.telemetry.run_directory import SAMPLES_FOLDER

# Where a response (a dictionary of OpenRLHF's) and an experience of it (an attribute) keep the sample's rounds.
ROUNDS = "rhyme_rounds"
MODEL = ""
CONTEXT = "context"
# More than a person reads of one response; about 60,000 tokens.
MOST_CHARACTERS = 200_000
# What a tokenizer puts where bytes are no whole character (yet).
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MEGABYTE = 1024 * 1024
_NAME = re.compile(r"step-(\d{6,9})(\.jsonl|\.parquet)")
RECORDS, TABLE = ".jsonl", ".parquet"


@dataclass
class Round:
    """One request: `engine` ran it, begun with `weight_version` behind `context` tokens (prompt and earlier rounds).

    `trace` is the name under which the scheduler notes its drafts, "" if it does not. `spans`: which of its response
    tokens came from accepted drafts, as (first, end, source); None: not noted.
    """

    engine: int
    weight_version: int
    context: int
    trace: str = ""
    tokens: int = 0
    last_weight_version: int = 0
    finish_reason: str = ""
    drafted: int | None = None
    spans: list[tuple[int, int, str]] | None = field(default=None)
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Weights loaded while it was generated, as far as that is noted: (version, its response tokens until then)."""

    def end(self, weight_version: int, completion: Any) -> None:
        """Note that the request is finished, with weights that may be newer than those that it was begun with.

        `completion` is vLLM's (token_ids, finish_reason).
        """
        self.tokens = len(completion.token_ids)
        self.last_weight_version = weight_version
        self.finish_reason = completion.finish_reason or ""

    def tokens_by_version(self) -> dict[int, int]:
        """Return its response tokens by the weights that generated them."""
        found, before = {}, 0
        version = self.weight_version
        for newer, tokens in (*self.loads, (self.last_weight_version, self.tokens)):
            # A load is noted when the scheduler has tokens that a stop string may then cut off.
            until = min(tokens, self.tokens)
            found[version] = until - before
            version, before = newer, until
        return found


def chosen_prompts(prompts: Sequence[str], step: int, groups: int) -> list[str]:
    """Keys of the `groups` prompts to record in a step: every prompt has the same chance in every step.

    The ones with the smallest hashes of step and prompt, so that the same run chooses the same ones again.
    """

    def rank(key: str) -> bytes:
        return hashlib.blake2b(f"{step}|{key}".encode(), digest_size=8).digest()

    return sorted({prompt_key(prompt) for prompt in prompts}, key=rank)[:groups]


def segments(rounds: Sequence[Round], end: int) -> list[tuple[int, int, str]]:
    """Return the positions behind the prompt, up to `end`, as contiguous (first, end, source)."""
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
    """Return the record of one sample: `tokens` are those of its whole sequence, prompt and response."""
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
    """Return the records' lines, as many as fit into `most_bytes`."""
    lines: list[bytes] = []
    for record in records:
        # A lone surrogate in a prompt is no UTF-8.
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        most_bytes -= len(line)
        if most_bytes < 0:
            break
        lines.append(line)
    return lines


def length_records(step: int, epoch: int, samples: Iterable[tuple[str, list[Round]]]) -> bytes:
    """Return the lines of a step's samples, each as its prompt and its rounds; samples without rounds are left out."""
    groups: dict[str, dict[str, Any]] = {}
    for prompt, rounds in samples:
        if not rounds:
            continue
        key = prompt_key(prompt)
        named: dict[str, Any] = {"step": step, "epoch": epoch, "prompt": key, "prompt_tokens": rounds[0].context}
        row = groups.setdefault(key, {**named, "lengths": [], "engines": []})
        row["lengths"].append(sum(one.tokens for one in rounds))
        row["engines"].append(rounds[0].engine)
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in groups.values())


def file_name(step: int, suffix: str = RECORDS) -> str:
    """Return the file of a step's records, or its `TABLE`; names sort as steps do for the first million of them."""
    return f"step-{step:06d}{suffix}"


def step_of(name: str, suffix: str = RECORDS) -> int | None:
    """Return the step whose file of this suffix has this name; None: it is no such file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and match[2] == suffix else None


class SampleFiles:
    """Writes a run's files: of each step its records, and the table of its samples. One writer a run directory."""

    def __init__(self, run_directory: Path, most_mb: int) -> None:
        self._folder = run_directory / SAMPLES_FOLDER
        self._most = most_mb * MEGABYTE
        # The bytes of each step's files. Those of a recorder that died, too.
        self._sizes: dict[int, dict[str, int]] = defaultdict(dict)
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if match := _NAME.fullmatch(path.name):
                self._sizes[int(match[1])][path.name] = path.stat().st_size

    def write(self, step: int, lines: Sequence[bytes]) -> None:
        """Write a step's records, and delete the files of the oldest steps where there are too many. Raises OSError."""
        self._write(step, file_name(step), b"".join(lines))

    def write_table(self, step: int, table: bytes) -> None:
        """Write the table of a step's samples, as `write` does. Raises OSError."""
        self._write(step, file_name(step, TABLE), table)

    def _write(self, step: int, name: str, content: bytes) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / name
        partial = path.with_suffix(".partial")
        try:
            size = partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._sizes[step][name] = size
        while sum(sum(of_step.values()) for of_step in self._sizes.values()) > self._most and len(self._sizes) > 1:
            for old in self._sizes.pop(min(self._sizes)):
                (self._folder / old).unlink(missing_ok=True)
