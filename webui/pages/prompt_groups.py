"""The page `/runs/<uid>/prompts`: how do a prompt's samples differ, and how do they change through training?

Without a prompt it lists a step's prompt groups; with one, its samples in a step, and one of them beside the table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import Offset, RunUid
from rhyme_openrlhf.api.read.log_files import LogError
from rhyme_openrlhf.api.read.pagination import part_of
from rhyme_openrlhf.api.read.sample_files import sample_folders
from rhyme_openrlhf.api.read.sample_tables import (
    NO_TABLES,
    Folders,
    Group,
    Sample,
    groups_of,
    samples_of_step,
    steps_of_prompt,
    table_steps,
)
from rhyme_openrlhf.api.store.bounds import INT32, NO_NUL
from rhyme_openrlhf.api.store.lookup import NotFoundError, find_run
from rhyme_openrlhf.telemetry.draft_sources import TEXT_SOURCES
from rhyme_openrlhf.telemetry.sample_table import COLUMNS, GAP_BOUNDS
from rhyme_openrlhf.telemetry.samples import CONTEXT
from rhyme_openrlhf.webui.figures.drawing.base import figure_json
from rhyme_openrlhf.webui.figures.sample_figures import NO_GAPS, SAMPLE_FIGURES
from rhyme_openrlhf.webui.pages.rendering import HEADERS, Page, PageDep, url_with, whole_number
from rhyme_openrlhf.webui.pages.run import run_context
from rhyme_openrlhf.webui.pages.samples import chosen_step, step_links
from rhyme_openrlhf.webui.site import reading, text

router = APIRouter(include_in_schema=False)

GROUPS = 50
# Each is an element with its figures; more would make the page slow.
MOST_TOKENS = 4000
View = Literal["read", "raw", "tokens"]
VIEWS: dict[View, str] = {"read": "Read", "raw": "Raw", "tokens": "Tokens"}
Colour = Literal["probability", "gap", "source"]
COLOURS: dict[Colour, str] = {
    "probability": "Log-probability", "gap": "Gap between engine and trainer", "source": "Draft source",
}  # fmt: skip
# Bounds of the colours, from pale to strong: how unlikely a token was, and how large its gap.
UNLIKELY = (0.5, 0.2, 0.05, 0.01, 0.001)
GAPS = tuple(bound for bound in GAP_BOUNDS if bound > 0)[: len(UNLIKELY)]
HEATS: dict[Colour, list[str]] = {
    "probability": [f"≥ {100 * UNLIKELY[0]:g}%", *(f"< {100 * bound:g}%" for bound in UNLIKELY)],
    "gap": [f"< {GAPS[0]:g}", *(f"≥ {bound:g}" for bound in GAPS)],
}
# Figures of the trainer that the reward and the advantage say better.
HIDDEN_PARTS = frozenset({"return", "score"})

Word = Annotated[str, Query(max_length=40, pattern=NO_NUL)]


class Asked(BaseModel):
    """The query parameters as forms and links send them."""

    step: Word = ""
    group: Word = ""
    sample: Word = ""
    view: View = "read"
    colour: Colour = "probability"
    cursor: Offset = None


@dataclass(frozen=True)
class Row:
    """Samples of a group with the same answer and reward: the first of them, and how many there are."""

    sample: Sample
    count: int
    href: str
    is_chosen: bool


@dataclass(frozen=True)
class Token:
    """A token of the heat map: its text, its strength from 0 to 5, its source, and its figures in words."""

    text: str
    heat: int
    source: str
    words: str


@dataclass(frozen=True)
class Turn:
    """A stretch of a response that one side wrote."""

    by_model: bool
    text: str
    passages: list[reading.Passage]


AskedQuery = Annotated[Asked, Query()]


@router.get("/runs/{uid}/prompts")
def prompts_page(uid: RunUid, page: PageDep, launching: LaunchingDep, asked: AskedQuery) -> HTMLResponse:
    """Render a step's prompt groups, or one prompt's samples; the address holds every choice."""
    with page.service.database.reading() as session:
        context = run_context(page, session, find_run(session, uid))
    folders = sample_folders(page.service.database, uid, readable_roots(launching))
    shown = _one_prompt(page, folders, asked) if asked.group else _groups(page, folders, asked)
    template = "prompt.html" if asked.group else "prompts.html"
    return page.render(template, uid=uid, **context, **shown, asked=asked, missing=NO_TABLES)


@router.get("/ui/runs/{uid}/sample-figures/{name}")
def sample_figure(
    uid: RunUid,
    name: Annotated[str, Path(max_length=64)],
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
    step: Annotated[int | None, Query(ge=0, le=INT32)] = None,
) -> Response:
    """Return a figure of the recorded samples, without a theme."""
    figure = SAMPLE_FIGURES.get(name)
    if figure is None:
        raise NotFoundError("figure", name)
    folders = sample_folders(service.database, uid, readable_roots(launching))
    return Response(figure_json(figure.draw(folders, step)), media_type="application/json", headers=HEADERS)


def _groups(page: Page, folders: Folders, asked: Asked) -> dict[str, Any]:
    steps = sorted(one.step for one in table_steps(folders))
    step = chosen_step(steps, asked.step)
    groups: list[Group] = []
    problem = ""
    if step is not None:
        groups, problem = _read(folders, step)
    # Those whose responses are kept first, then the widest spread: there is most to see.
    groups.sort(key=lambda group: (group.first("prompt") is None, -(group.spread or 0.0)))
    shown, following = part_of(groups, asked.cursor, GROUPS)
    return {
        **step_links(steps, step, partial(_link, page, cursor=None)),
        "groups": [(group, _link(page, group=group.key, step=step, cursor=None)) for group in shown],
        "number": len(groups),
        "silent": sum(not group.has_signal for group in groups),
        "next_url": _link(page, cursor=following) if following else None,
        "first_url": _link(page, cursor=None) if int(asked.cursor or 0) else None,
        "problem": problem,
        "mean_of": mean_of,
        "figures": {name: figure.title for name, figure in SAMPLE_FIGURES.items()},
    }


def _one_prompt(page: Page, folders: Folders, asked: Asked) -> dict[str, Any]:
    steps = sorted(steps_of_prompt(folders, asked.group, table_steps(folders)))
    step = chosen_step(steps, asked.step)
    found, problem = _read(folders, step, asked.group) if step is not None else ([], "")
    group = found[0] if found else None
    number = whole_number(asked.sample)
    samples = group.samples if group else []
    sample = next((one for one in samples if one.number == number), samples[0] if samples else None)
    return {
        **step_links(steps, step, partial(_link, page, cursor=None)),
        "group": group,
        "rows": _rows(page, samples, sample),
        # A figure that is 0 for all, as the KL without a reference model, is none.
        "parts": sorted({name for one in samples for name, value in one.parts.items() if value} - HIDDEN_PARTS),
        "sample": sample,
        "views": [(title, asked.view == view, _link(page, view=view)) for view, title in VIEWS.items()],
        "other_view": _link(page, view="read" if asked.view == "raw" else "raw"),
        "colours": [(title, asked.colour == one, _link(page, colour=one)) for one, title in COLOURS.items()],
        "turns": turns(sample) if sample is not None and asked.view != "tokens" else [],
        "tokens": tokens(sample, asked.colour) if sample is not None and asked.view == "tokens" else [],
        "has_gaps": sample is not None and sample.engine_log_probs is not None,
        "heats": HEATS.get(asked.colour, []),
        "no_gaps": NO_GAPS,
        "most_tokens": MOST_TOKENS,
        "sources": TEXT_SOURCES,
        "all_url": _link(page, group=None, sample=None, step=step),
        "problem": problem,
    }


def _read(folders: Folders, step: int, key: str = "") -> tuple[list[Group], str]:
    """Return the step's groups, of all prompts with their figures alone, and a sentence if they cannot be read."""
    columns = list(COLUMNS) if key else ["number", "reward", "tokens", "truncated", "age", "gap", "prompt"]
    try:
        return groups_of(samples_of_step(folders, step, columns, key)), ""
    except LogError as error:
        return [], str(error)


def _link(page: Page, **changes: Any) -> str:
    return url_with(page.request.url.path, page.request.query_params.multi_items(), changes)


def _rows(page: Page, samples: Sequence[Sample], chosen: Sample | None) -> list[Row]:
    """Return the samples, those with the same answer and reward as one row."""

    def same(sample: Sample) -> Any:
        return sample.number if sample.response is None else (sample.response, sample.reward)

    counts = Counter(map(same, samples))
    first = {same(sample): sample for sample in reversed(samples)}
    current = same(chosen) if chosen is not None else None
    return [
        Row(sample, counts[same(sample)], _link(page, sample=sample.number), same(sample) == current)
        for sample in samples
        if first[same(sample)] is sample
    ]


def mean_of(group: Group, name: str) -> float | None:
    """Return the mean of the samples' values of this name."""
    values = [float(value) for one in group.samples if (value := one.values[name]) is not None]
    return sum(values) / len(values) if values else None


def turns(sample: Sample) -> list[Turn]:
    """Return the response as what the model wrote and what the task put between, in their order."""
    if sample.token_texts is None or sample.token_sources is None:
        return []
    stretches: list[tuple[bool, list[str]]] = []
    for piece, source in zip(sample.token_texts, sample.token_sources, strict=False):
        by_model = source != CONTEXT
        if not stretches or stretches[-1][0] != by_model:
            stretches.append((by_model, []))
        stretches[-1][1].append(piece)
    joined = [(by_model, "".join(pieces)) for by_model, pieces in stretches]
    return [Turn(by_model, whole, reading.passages(whole)) for by_model, whole in joined]


def tokens(sample: Sample, colour: Colour) -> list[Token]:
    """Return the first tokens of a response with what the trainer and the engine said of them."""
    texts = sample.token_texts or []
    none: list[None] = [None] * len(texts)
    found = []
    for place, (piece, source, mine, theirs, advantage) in enumerate(
        zip(
            texts,
            sample.token_sources or none,
            sample.log_probs or none,
            sample.engine_log_probs or none,
            sample.advantages or none,
            strict=False,
        )
    ):
        if place == MOST_TOKENS:
            break
        gap = mine - theirs if mine is not None and theirs is not None else None
        said = [f"token {place + 1}"]
        if mine is not None:
            said.append(f"trainer {text.number(mine, 3)} ({text.percent(math.exp(min(0.0, mine)))})")
        if theirs is not None:
            said.append(f"engine {text.number(theirs, 3)}")
        if gap is not None:
            said.append(f"gap {text.change(gap)}")
        if advantage is not None:
            said.append(f"advantage {text.number(advantage, 3)}")
        if source:
            said.append(TEXT_SOURCES[source].words if source in TEXT_SOURCES else source)
        found.append(Token(reading.visible(piece), _heat(colour, mine, gap), source or "", "; ".join(said)))
    return found


def _heat(colour: Colour, log_prob: float | None, gap: float | None) -> int:
    if colour == "probability" and log_prob is not None:
        return sum(math.exp(min(0.0, log_prob)) < bound for bound in UNLIKELY)
    if colour == "gap" and gap is not None:
        return sum(abs(gap) >= bound for bound in GAPS)
    return 0
