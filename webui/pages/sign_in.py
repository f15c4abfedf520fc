"""The page `/sign-in`: takes the code from the link that `rhyme serve` prints, or a token from a form."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.webui.pages.rendering import render_public

router = APIRouter(include_in_schema=False)
# Longer than any address of a page with all its filters.
ADDRESS_LENGTH = 4000


@router.get("/sign-in")
def sign_in(following: Annotated[str, Query(alias="next", max_length=ADDRESS_LENGTH)] = "/") -> HTMLResponse:
    """Render the form; its script signs in by itself if the address carries a code or a token."""
    return render_public("sign_in.html", following=local_path(following))


def local_path(address: str) -> str:
    """Return `address` if it is a path of this service, else "/", so that a link never leads to another site."""
    # Browsers read "//host" and "/\\host" as another host, and remove tabs and line breaks before parsing.
    if not address.startswith("/") or address[1:2] in ("/", "\\") or any(ord(c) < 0x20 for c in address):
        return "/"
    return address
