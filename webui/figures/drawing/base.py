"""Building blocks of all figures: an unthemed figure with its description, and its JSON without markup.

`layout.meta` carries the text shown beside the drawing:

- `description`: a sentence for readers who cannot see the figure
- `empty`: the sentence shown instead of the figure when there is nothing to draw, else None
- `framed`: True if the layout alone fixes both axes (`axes.frame`), so that an update redraws only the curves
"""

from __future__ import annotations

import re
from typing import Any

import plotly.graph_objects as go
from plotly.io.json import to_json_plotly


def blank(description: str, empty: str | None = None) -> go.Figure:
    """Return a figure without traces and theme."""
    figure = go.Figure(layout=go.Layout(template=go.layout.Template()))
    figure.update_layout(meta={"description": description, "empty": empty})
    return figure


def plain(words: str) -> str:
    """Escape text that a run wrote, because plotly.js interprets some tags, entities and values in %{...}."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "&#37;{")


# Keys whose values plotly.js interprets as markup. A list of strings as coordinates holds names of categories.
_MARKUP_KEYS = frozenset({"name", "text", "hovertext", "ticktext", "x", "y"})
# The only markup that our own figures write is a line break. Text that `plain` has already escaped stays as it is.
_MARKUP = re.compile("<(?!br>)|(?<!<br)>|&(?!amp;|lt;|gt;|#37;)|%{")


def figure_json(figure: go.Figure) -> str:
    """Return the figure as JSON in which no name, label or hover text contains markup, except line breaks.

    A figure should pass text that a run wrote through `plain`, so that it is shown as written. This function escapes
    what a figure has forgotten, because a forgotten name could otherwise become a link.
    """
    return to_json_plotly(_without_markup(figure.to_dict()))


def _without_markup(node: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in node.items():
        if key == "meta":
            # Text beside the drawing, which pages insert as plain text.
            found[key] = value
        elif isinstance(value, dict):
            found[key] = _without_markup(value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            found[key] = [_without_markup(one) for one in value]
        elif key not in _MARKUP_KEYS:
            found[key] = value
        elif isinstance(value, (list, tuple)):
            found[key] = [_harmless(one) if isinstance(one, str) else one for one in value]
        else:
            found[key] = _harmless(value) if isinstance(value, str) else value
    return found


def _harmless(words: str) -> str:
    return _MARKUP.sub(lambda found: plain(found[0]), words)
