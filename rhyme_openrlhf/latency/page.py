"""A profile as one HTML page: measured points, and the fitted curves through them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from html import escape

import plotly.graph_objects as go
from plotly.colors import qualitative

from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.latency.step_model import Quality, StepModel
from rhyme_openrlhf.latency.transfer_model import carrying_words
from rhyme_openrlhf.telemetry.figure_page import page

MS = 1000.0
# Plotly's own, in its order: points have the colour of the curve through them.
COLOURS = qualitative.Plotly


def draw(profile: Profile, quality: Quality) -> str:
    """Return the page."""
    subject = profile.subject
    title = f"{subject.model}, {subject.hardware}, {subject.dtype}, TP {subject.tensor_parallel_size}"
    figures = [_plain(profile), _verifying(profile)]
    if profile.prefills:
        figures.append(_prefills(profile))
    error = "not known" if quality.held_out_error is None else f"{quality.held_out_error:.1%} in the mean"
    facts = (
        f"{profile.origin}; {len(profile.steps)} decode steps, {len(profile.prefills)} prefills. Error on points held "
        f"out: {error} ({quality.points} points); noise of repeated identical steps: {quality.noise:.1%}."
    )
    facts = f"{facts} {'; '.join(carrying_words(profile))}."
    return page(title, title, f"<p>{escape(facts)}</p>", figures)


def _plain(profile: Profile) -> go.Figure:
    figure = go.Figure()
    by_running: dict[int, list[StepPoint]] = defaultdict(list)
    for point in profile.steps:
        if not point.drafts:
            by_running[point.running].append(point)
    for running, points in sorted(by_running.items()):
        points.sort(key=lambda point: point.context)
        figure.add_scatter(
            x=[point.context for point in points],
            y=[point.seconds * MS for point in points],
            error_y={"type": "data", "array": [point.spread * MS for point in points]},
            mode="lines+markers",
            name=f"{running} samples",
        )
    return _titled(figure, "Decode steps without drafts", "context of all samples (tokens)", x_type="log")


def _verifying(profile: Profile) -> go.Figure:
    """Draw points and the fitted staircase of each number of samples at its shortest context."""
    figure, model = go.Figure(), StepModel(profile)
    by_running: dict[int, list[StepPoint]] = defaultdict(list)
    for point in profile.steps:
        by_running[point.running].append(point)
    for (running, points), colour in zip(sorted(by_running.items()), itertools.cycle(COLOURS), strict=False):
        shortest = min(point.context for point in points)
        # The context of a measured step moves by some tokens with the drafts.
        near = sorted((p for p in points if p.context < shortest + running * 16), key=lambda point: point.drafts)
        most = near[-1].drafts
        drafts = list(range(0, most + 1, max(1, most // 200)))
        fitted = [model.seconds(running, shortest, count) * MS for count in drafts]
        name = f"{running} samples"
        figure.add_scatter(x=drafts, y=fitted, mode="lines", name=name, legendgroup=name, line={"color": colour})
        figure.add_scatter(
            x=[point.drafts for point in near],
            y=[point.seconds * MS for point in near],
            error_y={"type": "data", "array": [point.spread * MS for point in near]},
            mode="markers",
            marker={"color": colour},
            name=name,
            legendgroup=name,
            showlegend=False,
        )
    return _titled(figure, "Steps that verify drafts, at the shortest context", "draft tokens of all samples")


def _prefills(profile: Profile) -> go.Figure:
    figure = go.Figure()
    by_sequences: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for point in profile.prefills:
        by_sequences[point.sequences].append((point.length, point.seconds))
    for sequences, points in sorted(by_sequences.items()):
        points.sort()
        x, y = [length for length, _ in points], [seconds * MS for _, seconds in points]
        figure.add_scatter(x=x, y=y, mode="lines+markers", name=f"{sequences} sequences")
    return _titled(figure, "Prefill", "tokens of each sequence", x_type="log")


def _titled(figure: go.Figure, title: str, x: str, x_type: str = "linear") -> go.Figure:
    return figure.update_layout(title=title, xaxis={"title": x, "type": x_type}, yaxis={"title": "milliseconds"})
