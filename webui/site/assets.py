"""Static files: our own and plotly.js, under an address that contains a digest of their content.

Invariant: the content of an address never changes, so browsers keep it; a new version has a new address. The files
contain nothing about runs, so they need no sign-in.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response as AnyResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

# One year, the longest time for which browsers keep a file.
KEEP = "public, max-age=31536000, immutable"
FOLDER = Path(__file__).parents[1] / "static"
# plotly.js as its authors bundle it for bars and curves, in the version that the `plotly` package draws for.
PLOTLY = "plotly/plotly-basic.min.js"
_IMPORT = re.compile(r'^import [^;]* from "\./([a-z_]+\.js)";', re.MULTILINE)


class KeptFiles(StaticFiles):
    """Files that browsers may keep."""

    async def get_response(self, path: str, scope: Scope) -> AnyResponse:
        response = await super().get_response(path, scope)
        if response.status_code in (200, 304):
            response.headers["Cache-Control"] = KEEP
        return response


@functools.cache
def version() -> str:
    """Return a digest of all our static files, which is part of their address."""
    found = hashlib.sha256()
    for file in sorted(path for path in FOLDER.rglob("*") if path.is_file()):
        found.update(file.relative_to(FOLDER).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def static_url(path: str) -> str:
    """Return the address of a file below `static/`, such as `css/tokens.css`."""
    return f"/static/{version()}/{path}"


@functools.cache
def modules(entry: str) -> tuple[str, ...]:
    """Return all modules that the script `entry` imports, directly or not, so that a browser can load them at once."""
    found: list[str] = []
    waiting = [entry]
    while waiting:
        for name in _IMPORT.findall((FOLDER / waiting.pop()).read_text()):
            path = f"js/{name}"
            if path not in found:
                found.append(path)
                waiting.append(path)
    return tuple(found)


@functools.cache
def plotly_style_ids() -> tuple[str, ...]:
    """Return the ids of style elements that plotly.js would add to a page.

    The Content-Security-Policy refuses such elements, and our own style sheets have their rules. Pages contain empty
    elements with these ids, so that plotly.js adds none.
    """
    return tuple(sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', (FOLDER / PLOTLY).read_text()))))


def install(app: FastAPI) -> None:
    """Add the static files to `app`."""
    app.mount(f"/static/{version()}", KeptFiles(directory=FOLDER), name="static")
