"""Sign-in with an OpenID Connect provider as people meet it: from the button to the page that they wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("authlib")

from rhyme_openrlhf.api.app import create_app
from rhyme_openrlhf.api.settings import OpenIdSettings, ServeSettings
from rhyme_openrlhf.webui.install import install
from tests.api.access.openid_provider import CLIENT_ID, CLIENT_SECRET, OpenIdProvider, running_provider
from tests.webui.conftest import Dashboard, make_tokens, serving


@pytest.fixture
def provider() -> Iterator[OpenIdProvider]:
    with running_provider() as running:
        running.claims = {"sub": "1", "email": "ann@example.org", "email_verified": True, "groups": ["rl"]}
        yield running


@pytest.fixture
def with_provider(
    make_settings: Callable[..., ServeSettings], provider: OpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Dashboard]:
    """A service whose sign-in page has the provider's button."""
    monkeypatch.setenv("RHYME_OPENID_CLIENT_SECRET", CLIENT_SECRET)
    openid = OpenIdSettings(issuer=provider.issuer, client_id=CLIENT_ID, operators="rl", title_of_provider="<Example>")
    app = create_app(make_settings(), openid_settings=openid)
    install(app)
    with serving(app) as port:
        yield Dashboard(f"http://127.0.0.1:{port}", app, app.state.service, make_tokens(app.state.service), "")


def forget_errors(page: Any) -> None:
    """Forget the answers to a browser that is not signed in. Some come after the page can be used, so it is left."""
    page.goto("about:blank")
    page.console_errors.clear()


def test_a_click_signs_in_and_leads_to_the_page_that_was_wanted(with_provider: Dashboard, browser_page: Any) -> None:
    from playwright.sync_api import expect

    page = browser_page
    page.goto(f"{with_provider.url}/settings?x=1")
    expect(page).to_have_url(f"{with_provider.url}/sign-in?next=%2Fsettings%3Fx%3D1")
    page.get_by_role("button", name="Sign in with <Example>").click()
    expect(page).to_have_url(f"{with_provider.url}/settings?x=1")
    page.get_by_text("operator", exact=True).first.click()
    expect(page.locator(".account-box")).to_contain_text("ann@example.org")
    # Neither the code nor the provider's page is in the way back.
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("button", name="Sign in with <Example>")).to_be_enabled()
    forget_errors(page)


def test_what_goes_wrong_is_said_under_the_button(
    with_provider: Dashboard, provider: OpenIdProvider, browser_page: Any
) -> None:
    from playwright.sync_api import expect

    page = browser_page
    provider.claims["groups"] = ["sales"]
    page.goto(f"{with_provider.url}/sign-in")
    page.get_by_role("button", name="Sign in with").click()
    problem = page.locator("[data-provider-problem]")
    expect(problem).to_contain_text("No role of this service is for ann@example.org")
    assert page.url == f"{with_provider.url}/sign-in/openid"
    provider.broken = "/token"
    page.get_by_role("button", name="Sign in with").click()
    expect(problem).to_contain_text("The provider's answer is not what OpenID Connect prescribes")
    # The token is there beside it.
    page.get_by_label("Token or link").fill(with_provider.tokens["operator"])
    page.get_by_role("button", name="Sign in", exact=True).click()
    expect(page).to_have_url(f"{with_provider.url}/")
    forget_errors(page)
