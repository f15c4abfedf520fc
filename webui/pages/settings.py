"""The page `/settings`: tokens for access, what operators did, folders that runs may use, limits of the service."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.engine import make_url

from rhyme_openrlhf import __version__
from rhyme_openrlhf.api.access.audit import audit_entries
from rhyme_openrlhf.api.access.launching import LaunchingDep
from rhyme_openrlhf.api.launch.actions import LaunchSettings
from rhyme_openrlhf.api.launch.schema import upstream_version
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.credentials import is_valid
from rhyme_openrlhf.api.store.models import TARGET_LENGTH, AuditEntry, Run, Token
from rhyme_openrlhf.settings.options import OPTION, Settings
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep
from rhyme_openrlhf.webui.site.text import written

router = APIRouter(include_in_schema=False)

AuditText = Annotated[str, Query(max_length=TARGET_LENGTH, pattern=NO_NUL)]

# Newest entries of the audit log on the page; the API and `rhyme runs audit` have all of them.
AUDIT_ENTRIES = 50
# How long a token may work, in days; 0: until it is revoked.
LIFETIMES = ((0, "no end"), (1, "1 day"), (7, "7 days"), (30, "30 days"), (90, "90 days"), (365, "1 year"))
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
    page: PageDep,
    launching: LaunchingDep,
    revoked: Annotated[str, Query(max_length=10)] = "",
    audit: AuditText = "",
) -> HTMLResponse:
    """Render tokens, the audit log and folders for operators, limits and versions for everyone."""
    settings = page.service.settings
    return page.render(
        "settings.html",
        roles=ROLES,
        tokens=_tokens(page, revoked == "yes") if page.may_act else [],
        show_revoked=revoked == "yes",
        lifetimes=LIFETIMES,
        entries=_entries(page, audit) if page.may_act else [],
        audit_text=audit,
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


@router.get("/ui/settings/parts/audit")
def audit_piece(page: PageDep, audit: AuditText = "") -> HTMLResponse:
    """Render the newest entries of the audit log, none for a viewer."""
    return page.render("parts/audit.html", entries=_entries(page, audit) if page.may_act else [], audit_text=audit)


def _entries(page: Page, text: str) -> Sequence[AuditEntry]:
    with page.service.database.reading() as session:
        return audit_entries(session, "", text, AUDIT_ENTRIES, None)[0]


def _tokens(page: Page, revoked: bool) -> list[dict[str, Any]]:
    """Return tokens, the newest first.

    Tokens of the service's own runs, which the service revokes itself, have only their run's name.
    """
    query = select(Token, Run.uid, Run.name).outerjoin(Run, Run.id == Token.run_id)
    if not revoked:
        query = query.where(is_valid(time.time()))
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
