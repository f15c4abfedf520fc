"""The page `/settings`: tokens for access, folders that runs may use, limits of the service."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.engine import make_url

from rhyme_openrlhf import __version__
from rhyme_openrlhf.api.access.launching import LaunchingDep
from rhyme_openrlhf.api.launch.actions import LaunchSettings
from rhyme_openrlhf.api.launch.schema import upstream_version
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store.models import Run, Token
from rhyme_openrlhf.settings.options import OPTION, Settings
from rhyme_openrlhf.webui.new_run.form import written
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep

router = APIRouter(include_in_schema=False)

# Most tokens in the list; tokens of the service's own runs come and go by themselves.
TOKENS = 200
# The use of each role, as in docs/http-api.md.
ROLES: tuple[tuple[str, str], ...] = (
    ("viewer", "Reads everything but tokens. For people who follow runs, Grafana, and scripts that only read."),
    (
        "operator",
        "Starts, stops and deletes runs, and makes tokens. It allows running any code on the cluster.",
    ),
    ("reporter", "Only sends a run's reports. For machines that run rhyme train --control.url."),
)
# Operators see these under Folders. The store's address is shown without its password.
_PLACES = ("data_dir", "database", "roots", "dir", "tls_cert", "tls_key")


@dataclass(frozen=True)
class LimitRow:
    """A setting of the service with its current value."""

    flag: str
    value: str
    help: str
    changed: bool


@router.get("/settings")
def settings_page(
    page: PageDep, launching: LaunchingDep, revoked: Annotated[str, Query(max_length=10)] = ""
) -> HTMLResponse:
    """Render tokens and folders for operators, limits and versions for everyone."""
    settings = page.service.settings
    return page.render(
        "settings.html",
        roles=ROLES,
        tokens=_tokens(page, revoked == "yes") if page.may_act else [],
        show_revoked=revoked == "yes",
        roots=[str(root) for root in launching.roots] if page.may_act else [],
        directory=str(launching.directory) if page.may_act else "",
        database=make_url(settings.database_url()).render_as_string(hide_password=True) if page.may_act else "",
        sections=[
            (ServeSettings.title, _rows(settings)),
            (LaunchSettings.title, _rows(launching.settings)),
        ],
        version=__version__,
        openrlhf=upstream_version(),
    )


@router.get("/ui/settings/parts/tokens")
def tokens_piece(page: PageDep, revoked: Annotated[str, Query(max_length=10)] = "") -> HTMLResponse:
    """Render the list of tokens, which is empty for a viewer."""
    tokens = _tokens(page, revoked == "yes") if page.may_act else []
    return page.render("parts/tokens.html", tokens=tokens, show_revoked=revoked == "yes")


def _tokens(page: Page, revoked: bool) -> list[dict[str, Any]]:
    """Return tokens, the newest first.

    Tokens of the service's own runs, which the service revokes itself, have only their run's name.
    """
    query = select(Token, Run.uid, Run.name).outerjoin(Run, Run.id == Token.run_id)
    if not revoked:
        query = query.where(Token.revoked_at.is_(None))
    with page.service.database.reading() as session:
        rows = session.execute(query.order_by(Token.id.desc()).limit(TOKENS)).tuples().all()
        return [
            {"row": token, "run": uid, "run_name": name, "mine": token.id == page.who.token_id}
            for token, uid, name in rows
        ]


def _rows(settings: Settings) -> list[LimitRow]:
    found = []
    for field in dataclasses.fields(settings):
        if field.name in _PLACES:
            continue
        value = getattr(settings, field.name)
        flag = settings.flag(field.name)
        found.append(LimitRow(flag, written(value), field.metadata[OPTION].help, value != field.default))
    return found
