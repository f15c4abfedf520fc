"""Write the reference pages that follow from code: events, addresses of the HTTP API, and files of a run.

`python scripts/reference_pages.py` lists the pages that differ from the code and exits with 1 if any does; `--write`
writes them. `tests/docs/test_reference_pages.py` compares them. The page of options has a script of its own.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from fastapi.openapi.utils import get_openapi

from rhyme_openrlhf.api.app import PREFIX, routes
from rhyme_openrlhf.telemetry import events as events_module
from rhyme_openrlhf.telemetry import run_directory
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.sample_table import COLUMNS

sys.path.insert(0, str(Path(__file__).parent))
from field_meanings import meaning

DOCS = Path(__file__).parents[1] / "docs"
EVENTS_HEAD = """# Events

A run reports everything as events. They stand in `events.jsonl` of [the run directory](run-files.md), one JSON object a
line, and `GET /api/v1/runs/{uid}/events` returns them. Terminal, summary, dashboard and metrics are computed from them
alone. This page is generated from `rhyme_openrlhf/telemetry/events.py` (`scripts/reference_pages.py`).

```json
{"kind": "note", "time": 1764038400.0, "source": "driver", "sequence": 2, "level": "info", "text": "..."}
```

Every event has these fields, and those of its kind:

| field | type | meaning |
|---|---|---|
| `kind` | str | the kind of event, a heading below |
| `time` | float | unix seconds |
| `source` | str | the process that reports: `driver`, `trainer`, `engine-0`, ... |
| `sequence` | int | number of the event among those of its source, from 0 |

- **Counting**: steps and epochs count from 1. Weight version 0 is what the run starts with; version n follows step n.
- **Numbers that are not finite** are the strings `"nan"`, `"inf"` and `"-inf"`, so each line is strict JSON.
- **Compatibility**: skip kinds and fields that you do not know. A field with a default may be missing in older records.
"""
ADDRESSES_HEAD = """# Addresses of the HTTP API

Every address of the control plane with its parameters. [The HTTP API](http-api.md) explains signing in, lists, streams
and errors. `/api/v1/openapi.json` has the forms of all requests and responses. This page is generated from the routes
(`scripts/reference_pages.py`).
"""


def events() -> str:
    """Return the page of all kinds of events, in the order in which the schema lists them, and of engines' counters."""
    kinds = [line for kind in EVENT_CLASSES for line in _fields(kind.kind, kind)]
    return "\n".join([EVENTS_HEAD, *kinds, *_fields("EngineCounters", EngineCounters)])


def _fields(name: str, described: type[Any]) -> Iterator[str]:
    """Yield a heading, the class's docstring, and a table of its fields."""
    yield from (f"## {name}", "", _with_names_of_the_json(inspect.cleandoc(described.__doc__ or "")), "")
    notes, types = _field_notes(described), get_type_hints(described)
    rows = [
        [
            f"`{field.name}`",
            _type(types[field.name]),
            _default(field),
            notes.get(field.name) or meaning(name, field.name),
        ]
        for field in fields(described)
    ]
    # Columns in which no field has anything are left out.
    kept = [column for column in range(4) if any(row[column] for row in rows)]
    for row in [["field", "type", "default", "meaning"], ["---"] * 4, *rows] if rows else []:
        yield f"| {' | '.join(row[column] for column in kept)} |"
    yield ""


def _with_names_of_the_json(text: str) -> str:
    """Replace names of the Python module by the words that stand in the JSON."""
    for kind in EVENT_CLASSES:
        text = re.sub(rf"\b{kind.__name__}\.", f"{kind.kind}.", text)
        text = re.sub(rf"`?\b{kind.__name__}\b(?!\()`?", f"`{kind.kind}`", text)
    for constant in ("ROLLOUT_PART", "REWARD_METRIC", "POLICY"):
        text = re.sub(rf"\b{constant}\b", f'"{getattr(events_module, constant)}"', text)
    return text


def _field_notes(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings that follow fields in the class's source."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    return {
        one.target.id: " ".join(str(following.value.value).split())
        for one, following in zip(body, body[1:], strict=False)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }


def _type(hint: Any) -> str:
    words = hint.__name__ if isinstance(hint, type) and not getattr(hint, "__args__", ()) else str(hint)
    words = re.sub(r"typing\.Optional\[(.*)\]", r"\1 | None", words)
    choices = re.sub(r"typing\.Literal\[(.*?)\]", lambda found: found.group(1).replace("''", '""'), words)
    choices = re.sub(r"'(\w+)'", r"`\1`", choices).replace("NoneType", "None")
    return re.sub(r"\w+\.(?=\w)", "", choices).replace("|", "or")


def fields(described: type[Any]) -> tuple[msgspec.inspect.Field, ...]:
    """Return the fields of an event's class, or of the counters."""
    return msgspec.inspect.type_info(described).fields  # type: ignore[attr-defined]


def _default(field: msgspec.inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()}`"
    return "" if field.default is msgspec.NODEFAULT else f"`{field.default!r}`".replace("'", '"')


def addresses() -> str:
    """Return the page of all addresses, by the tags of their routes."""
    described = get_openapi(title="rhyme-openrlhf", version="", routes=list(routes()))
    by_tag: dict[str, list[str]] = {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            names = [f"`{one['name']}`" for one in operation.get("parameters", ()) if one["in"] == "query"]
            words = operation.get("summary", ""), ", ".join(names)
            row = f"| `{method.upper()} {path.removeprefix(PREFIX)}` | {words[0]} | {words[1]} |"
            by_tag.setdefault(operation.get("tags", ["health"])[0], []).append(row)
    parts = [ADDRESSES_HEAD, f"All addresses but those of *health* begin with `{PREFIX}`.", ""]
    for tag, rows in by_tag.items():
        parts += [f"## {tag}", "", "| address | what it does | query parameters |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def files() -> str:
    """Return the page of a run's files, with its tables: the files, and the columns of the table of samples."""
    listed = re.findall(r"^- (`[^`]+`): (.*(?:\n  .*)*)", run_directory.__doc__ or "", re.MULTILINE)
    rows = [f"| {name} | {' '.join(meaning.split())} |" for name, meaning in listed]
    page = _with_table((DOCS / "run-files.md").read_text(), "files", ["| file | content |", "|---|---|", *rows])
    columns = [f"| `{name}` | {kind} | {words} |" for name, (kind, words) in COLUMNS.items()]
    kinds = [one.replace("list<element: ", "list<").replace("list<item: ", "list<") for one in columns]
    return _with_table(page, "columns", ["| column | type | meaning |", "|---|---|---|", *kinds])


def _with_table(page: str, name: str, lines: list[str]) -> str:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    return "\n".join([f"{before}{begin}{lines[0]}", *lines[1:], f"{end}{rest.partition(end)[2]}"])


PAGES: dict[str, Callable[[], str]] = {"events.md": events, "http-addresses.md": addresses, "run-files.md": files}


def main() -> int:
    """Write the pages, or name those that differ; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages")
    write = parser.parse_args().write
    differ = [name for name, page in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != page()]
    for name in differ:
        if write:
            (DOCS / name).write_text(PAGES[name]())
        else:
            print(f"docs/{name} differs from the code: python scripts/reference_pages.py --write")
    return 1 if differ and not write else 0


if __name__ == "__main__":
    sys.exit(main())
