"""The table of a training step's samples: a row a sample, as the trainer used it. Pure; knows no torch.

`samples/step-000012.parquet` has all samples of step 12, in the order of their prompts. `COLUMNS` says what each column
is. Columns of `WRITTEN` have values for the samples whose responses are kept (samples.py) alone. Besides these, a table
has a column `part.NAME` for each figure that the reward function, the agent or the trainer gave a sample.

A list of `BY_TOKEN` has an entry for each token behind the prompt; what the task put between two rounds was never
sampled, so its log-probabilities are null. The gap of a token is the trainer's log-probability less the engine's.

Invariants: what is not known is null, never 0. `pandas.read_parquet` reads a file as it is. Files of all steps have the
same columns but for the parts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PART = "part."
_INTEGERS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())
_WORDS = pa.list_(pa.string())

# Bounds of the classes of `gap_counts`: class i counts gaps from bound i - 1 up to, not including, bound i.
GAP_BOUNDS = (-3.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int32(), "the training step"),
    "number": (pa.int32(), "names the sample within its step"),
    "group": (pa.string(), "a key of the prompt, the same in all steps and runs"),
    "reward": (pa.float32(), "the reward, before penalties and KL"),
    "advantage": (pa.float32(), "mean advantage of its tokens, as trained"),
    "tokens": (pa.int32(), "response tokens that the model generated"),
    "prompt_tokens": (pa.int32(), "tokens of the prompt"),
    "rounds": (pa.int32(), "requests to an engine: more than one in a conversation"),
    "finish_reason": (pa.string(), "`stop`, `length` or `abort`"),
    "truncated": (pa.bool_(), "the length limit ended it"),
    "age": (pa.int32(), "training steps between the weights that began it and its use"),
    "weight_versions": (_INTEGERS, "weight versions of its first and last token"),
    "engines": (_INTEGERS, "engines that generated it, in order"),
    "drafted": (pa.int32(), "draft tokens proposed; with the kept responses only"),
    "accepted": (pa.int32(), "draft tokens accepted; with the kept responses only"),
    "log_prob": (pa.float32(), "mean log-probability of its tokens, by the trainer"),
    "engine_log_prob": (pa.float32(), "the same, by the engine that sampled them"),
    "gap": (pa.float32(), "mean of trainer's less engine's log-probability"),
    "gap_largest": (pa.float32(), "its gap of the largest size"),
    "gap_counts": (_INTEGERS, "its tokens by gap, in the classes of the file's metadata `gap_bounds`"),
    "prompt": (pa.string(), "the prompt"),
    "label": (pa.string(), "the reference answer"),
    "response": (pa.string(), "the response"),
    "token_ids": (_INTEGERS, "each token"),
    "token_texts": (_WORDS, "each token's text; joined they are the response"),
    "token_sources": (_WORDS, "the source of its draft; empty: sampled; `context`: written by the task"),
    "log_probs": (_NUMBERS, "each token's log-probability, by the trainer"),
    "engine_log_probs": (_NUMBERS, "the same, by the engine"),
    "advantages": (_NUMBERS, "each token's advantage"),
}  # fmt: skip
BY_TOKEN = ("token_ids", "token_texts", "token_sources", "log_probs", "engine_log_probs", "advantages")
WRITTEN = ("drafted", "accepted", "prompt", "label", "response", *BY_TOKEN)

Row = Mapping[str, Any]


def encoded_table(rows: Sequence[Row]) -> bytes:
    """Return the file of a step's rows; a value that a row lacks is null."""
    parts = sorted({name for row in rows for name in row if name.startswith(PART)})
    kinds = {name: kind for name, (kind, _) in COLUMNS.items()} | dict.fromkeys(parts, pa.float32())
    arrays = [pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()]
    schema = pa.schema(list(kinds.items()), metadata={"gap_bounds": ",".join(map(str, GAP_BOUNDS))})
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
    return sink.getvalue()


def plain(text: str) -> str:
    """Return a text as Parquet can hold it: a lone surrogate is no UTF-8."""
    return text.encode("utf-8", "replace").decode()
