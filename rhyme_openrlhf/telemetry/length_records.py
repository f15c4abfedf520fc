"""How long every response of a run was: `lengths.jsonl` in the run directory, one prompt group a line. Pure.

    {"step": 1, "epoch": 1, "prompt": "a1b2", "prompt_tokens": 180, "lengths": [2210, 870], "engines": [0, 0]}

`prompt` is the prompt's key (prompt_keys.py), `lengths` the generated tokens of its samples, `engines` where each of
them began. `rhyme simulate --from-run` replays it. Invariant: some 100 bytes a prompt and 10 a sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.telemetry.sample_records import TurnLike


def length_records(step: int, epoch: int, samples: Iterable[tuple[str, list[TurnLike]]]) -> bytes:
    """The lines of a step's samples, each as its prompt and its turns; samples without turns are left out."""
    groups: dict[str, dict[str, Any]] = {}
    for prompt, turns in samples:
        if not turns:
            continue
        key = prompt_key(prompt)
        named: dict[str, Any] = {"step": step, "epoch": epoch, "prompt": key, "prompt_tokens": turns[0].context}
        row = groups.setdefault(key, {**named, "lengths": [], "engines": []})
        row["lengths"].append(sum(turn.tokens for turn in turns))
        row["engines"].append(turns[0].engine)
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in groups.values())
