"""Sources of a response's text, each declared once: its words, its look and its share of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextSource:
    """A source of text, by its name in records; `accepted_NAME` counts its accepted tokens.

    `words`: what a reader sees about a stretch. `tone`, `line`: its colour and underline (static/css/records.css).
    `share`: the label of its share of response tokens, if it is counted. `within`: a source that has its tokens, too.
    """

    name: str
    tone: str
    line: str
    legend: str
    words: str
    share: str = ""
    within: str = ""


# fmt: off
# Those of the compiled core, in the order of its numbers (csrc/texts.h).
CORE = (
    TextSource("history", "accent", "solid", "from earlier responses",
        "accepted draft, from earlier responses to this prompt", "Earlier responses"),
    TextSource("siblings", "other", "double", "from this step's other responses",
        "accepted draft, from this prompt's other responses of the same step", "Siblings of the same rollout"),
    TextSource("own", "good", "dashed", "from this response",
        "accepted draft, from earlier in this response", "The response so far"),
    TextSource("shared", "other", "dotted", "from other prompts",
        "accepted draft, from responses to all prompts", "Responses to other prompts"),
    TextSource("earlier", "accent", "double", "from earlier runs",
        "accepted draft, from earlier runs' responses to this prompt", "Of these, earlier runs alone", "history"),
)
# Together they have all accepted tokens: those that no other one counts are the first one's.
PARTS = tuple(source for source in CORE if not source.within)
OTHERS = (
    TextSource("ngram", "accent", "wavy", "from vLLM's n-grams",
        "accepted draft, vLLM's n-grams of this response and its prompt"),
    TextSource("draft_model", "accent", "wavy", "from the draft model", "accepted draft, from the draft model"),
    TextSource("eagle3", "accent", "wavy", "from EAGLE", "accepted draft, from the EAGLE head"),
    TextSource("context", "warn", "dotted", "inserted by the environment",
        "inserted between two rounds by the environment"),
)
# fmt: on
TEXT_SOURCES = {source.name: source for source in (*CORE, *OTHERS)}
