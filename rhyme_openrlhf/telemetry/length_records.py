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
from rhyme_openrlhf.telemetry.sample_rounds import Round


def length_records(step: int, epoch: int, samples: Iterable[tuple[str, list[Round]]]) -> bytes:
    """The lines of a step's samples, each as its prompt and its rounds; samples without rounds are left out."""
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
