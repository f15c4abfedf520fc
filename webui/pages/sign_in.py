"""The page `/sign-in`: takes the code from the link that `rhyme serve` prints, or a token from a form.

With an OpenID Connect provider it has a button, and the provider sends the browser back to the same page at
`RETURN_PATH`.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.settings import RETURN_PATH
from rhyme_openrlhf.webui.pages.rendering import render_public

router = APIRouter(include_in_schema=False)
# Longer than any address of a page with all its filters.
ADDRESS_LENGTH = 4000


@router.get("/sign-in")
def sign_in(
    service: ServiceDep, following: Annotated[str, Query(alias="next", max_length=ADDRESS_LENGTH)] = "/"
) -> HTMLResponse:
    """Render the form; its script signs in by itself if the address carries a code or a token."""
    return _rendered(service, local_path(following))


@router.get(RETURN_PATH)
def back_from_provider(service: ServiceDep) -> HTMLResponse:
    """Render the form; its script sends the provider's answer, which is in the address, to the API."""
    return _rendered(service, "/")


def _rendered(service: Service, following: str) -> HTMLResponse:
    provider = service.openid.settings.title_of_provider if service.openid else None
    return render_public("sign_in.html", following=following, provider=provider)


def local_path(address: str) -> str:
    """Return `address` if it is a path of this service, else "/", so that a link never leads to another site."""
    # Browsers read "//host" and "/\\host" as another host, and remove tabs and line breaks before parsing.
    if not address.startswith("/") or address[1:2] in ("/", "\\") or any(ord(c) < 0x20 for c in address):
        return "/"
    return address
