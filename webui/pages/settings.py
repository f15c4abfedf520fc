"""`/settings`: who may get in, and which folders may runs use?"""

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

# Tokens of the list; runs' own reporters come and go by themselves.
TOKENS = 200
# What each role is for, as docs/http-api.md says.
ROLES: tuple[tuple[str, str], ...] = (
    ("viewer", "Sees everything but tokens: people who follow runs, Grafana, scripts that read."),
    (
        "operator",
        "Does everything: starts, stops and deletes runs, makes tokens. Whoever has it runs code on the cluster.",
    ),
    ("reporter", "Only sends what a run reports. For machines that run rhyme train --control.url."),
)
# Shown under Folders, to operators; the store's address may hold a password, which is shown to nobody.
_PLACES = ("data_dir", "database", "roots", "dir", "tls_cert", "tls_key")


@dataclass(frozen=True)
class LimitRow:
    """One setting of the service, as it is in force."""

    flag: str
    value: str
    help: str
    changed: bool


@router.get("/settings")
def settings_page(
    page: PageDep, launching: LaunchingDep, revoked: Annotated[str, Query(max_length=10)] = ""
) -> HTMLResponse:
    """Tokens and roots for operators; limits and versions for everybody."""
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
    """The list of tokens; empty for a viewer."""
    tokens = _tokens(page, revoked == "yes") if page.may_act else []
    return page.render("parts/tokens.html", tokens=tokens, show_revoked=revoked == "yes")


def _tokens(page: Page, revoked: bool) -> list[dict[str, Any]]:
    """Newest first; those of the service's own runs, which it closes itself, only with their run's name."""
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
