"""Static files: our own and plotly.js, each under an address that contains a digest of its content.

Invariant: the content of an address never changes, so browsers keep it; a new version has a new address. The files
contain nothing about runs, so they need no sign-in.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.responses import Response as AnyResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from rhyme_openrlhf.webui.site.drawing_library import drawing_library

# One year, the longest time for which browsers keep a file.
KEEP = "public, max-age=31536000, immutable"
# Compression of 1.1 MB of plotly.js; a higher level takes three times as long and saves 2 %.
GZIP_LEVEL = 6
FOLDER = Path(__file__).parents[1] / "static"
_IMPORT = re.compile(r'^import [^;]* from "\./([a-z_]+\.js)";', re.MULTILINE)

router = APIRouter(include_in_schema=False)


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
def plotly_url() -> str:
    """Return the address of plotly.js."""
    return f"/static/plotly-{hashlib.sha256(_plotly(packed=False)).hexdigest()[:12]}.min.js"


@functools.cache
def _plotly(packed: bool) -> bytes:
    return gzip.compress(_plotly(packed=False), GZIP_LEVEL, mtime=0) if packed else drawing_library().encode()


@functools.cache
def plotly_style_ids() -> tuple[str, ...]:
    """Return the ids of style elements that plotly.js would add to a page for its map library.

    The Content-Security-Policy refuses such elements, and we draw no maps. Pages contain empty elements with these ids,
    so that plotly.js adds none.
    """
    return tuple(sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', _plotly(packed=False).decode()))))


@router.get(plotly_url())
def plotly_js(request: Request) -> Response:
    """Send plotly.js (`drawing_library`)."""
    packed = "gzip" in request.headers.get("Accept-Encoding", "")
    headers = {"Cache-Control": KEEP, "Vary": "Accept-Encoding"}
    if packed:
        headers["Content-Encoding"] = "gzip"
    return Response(_plotly(packed), media_type="text/javascript", headers=headers)


def install(app: FastAPI) -> None:
    """Add the static files to `app`."""
    app.include_router(router)
    app.mount(f"/static/{version()}", KeptFiles(directory=FOLDER), name="static")
