"""The choice of address and token: the nearest given, and a kept token only for its own address."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from rhyme_openrlhf.client.access import (
    CODE_START,
    DEFAULT_URL,
    Access,
    AccessError,
    checked_url,
    client_file,
    find_access,
    is_loopback,
    keep,
    split_link,
)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_a_kept_token_is_private_and_used_for_its_address_alone(home: dict[str, str]) -> None:
    path = keep(Access("http://one:1", "token-one"), home)
    keep(Access("http://two:2", "token-two"), home)
    assert path == Path(home["HOME"]) / ".config" / "rhyme-openrlhf" / "client.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_access("", "", home) == Access("http://two:2", "token-two")
    assert find_access("http://one:1/", "", home) == Access("http://one:1", "token-one")
    with pytest.raises(AccessError, match="no access token for http://three:3: sign in with `rhyme runs login"):
        find_access("http://three:3", "", home)


def test_what_is_given_goes_before_what_is_kept(home: dict[str, str], tmp_path: Path) -> None:
    keep(Access("http://kept:1", "kept-token"), home)
    environment = {**home, "RHYME_CONTROL_URL": "http://named:2", "RHYME_CONTROL_TOKEN": "named-token"}
    assert find_access("", "", environment) == Access("http://named:2", "named-token")
    (tmp_path / "token").write_text("file-token\n")
    given = find_access("http://given:3", str(tmp_path / "token"), environment)
    assert given == Access("http://given:3", "file-token")


def test_the_default_is_this_machine(home: dict[str, str]) -> None:
    assert find_access("", "", {**home, "RHYME_CONTROL_TOKEN": "t"}).url == DEFAULT_URL


def test_the_default_is_where_the_service_listens() -> None:
    settings = pytest.importorskip("rhyme_openrlhf.api.settings")
    assert settings.ServeSettings().base_url() == DEFAULT_URL


@pytest.mark.parametrize("content", ["[]", "{}", '{"servers": 3}', '{"servers": {}, "default": 1}'])
def test_a_file_that_holds_something_else_counts_as_empty(home: dict[str, str], content: str) -> None:
    path = client_file(home)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert keep(Access("http://one:1", "t"), home) == path
    assert json.loads(path.read_text()) == {"default": "http://one:1", "servers": {"http://one:1": "t"}}


def test_a_damaged_file_is_said(home: dict[str, str]) -> None:
    path = client_file(home)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(AccessError, match="cannot be read"):
        find_access("", "", home)


@pytest.mark.parametrize(
    "url", ["host:1", "ftp://host", "http://", "", "http://me:secret@host", "http://h/#token=secret"]
)
def test_a_bad_address_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(AccessError) as refused:
        checked_url(url)
    assert "#token" not in str(refused.value)


def test_links() -> None:
    assert split_link("http://127.0.0.1:8420/#token=abc") == ("http://127.0.0.1:8420", "abc")
    assert split_link("http://127.0.0.1:8420/#code=once_abc") == ("http://127.0.0.1:8420", "once_abc")
    assert split_link("https://host/") == ("https://host", "")
    assert split_link("https://host/#other") == ("https://host", "")


def test_a_code_begins_as_the_service_s_codes_do() -> None:
    credentials = pytest.importorskip("rhyme_openrlhf.api.store.credentials")
    assert credentials.CODE_START == CODE_START
    assert not credentials.TOKEN_START.startswith(CODE_START)


def test_loopback() -> None:
    assert all(map(is_loopback, ("http://127.0.0.1:1", "http://localhost", "http://[::1]:3")))
    assert not any(map(is_loopback, ("http://10.0.0.1", "https://host.example")))
