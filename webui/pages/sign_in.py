"""`/sign-in`: takes the code out of the link that `rhyme serve` prints, or a token out of a form."""

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
    """The form; its script signs in by itself where the address carries a code or a token."""
    return render_public("sign_in.html", following=local_path(following))


def local_path(address: str) -> str:
    """`address` if it is a path of this service, else "/": nobody is sent elsewhere by a link to us."""
    # Browsers read "//host" and "/\\host" as another host, and drop tabs and line breaks before they look.
    if not address.startswith("/") or address[1:2] in ("/", "\\") or any(ord(c) < 0x20 for c in address):
        return "/"
    return address
