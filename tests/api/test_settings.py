"""Addresses of the service, and settings that it refuses."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rhyme_openrlhf.api.settings import ServeSettings, is_loopback
from rhyme_openrlhf.settings.options import SettingsError, add_options


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "myhost", "127.0.0.1.evil.example"])
def test_a_public_address_needs_tls_or_a_clear_word(host: str) -> None:
    with pytest.raises(SettingsError, match="serve.insecure_public"):
        ServeSettings(host=host)
    assert ServeSettings(host=host, insecure_public=True).host == host
    assert ServeSettings(host=host, tls_cert="c.pem", tls_key="k.pem").tls


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_this_machine_alone_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    assert not ServeSettings(host=host).tls


def test_half_of_tls_is_none() -> None:
    with pytest.raises(SettingsError, match="belong together"):
        ServeSettings(tls_cert="c.pem")


def test_an_empty_host_would_listen_for_everybody() -> None:
    with pytest.raises(SettingsError, match="must not be empty"):
        ServeSettings(host="")


def test_a_proxy_is_an_address_or_a_network() -> None:
    assert ServeSettings().proxies() == ()
    assert [str(one) for one in ServeSettings(trusted_proxies="10.0.0.5, fd00::/8,").proxies()] == [
        "10.0.0.5/32",
        "fd00::/8",
    ]
    for wrong in ("proxy.example", "10.0.0.5/8", "10.0.0"):
        with pytest.raises(SettingsError, match="--serve.trusted_proxies must be addresses or networks"):
            ServeSettings(trusted_proxies=wrong)


def test_files_go_where_the_desktop_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert ServeSettings().data_path() == tmp_path / "rhyme-openrlhf"
    assert ServeSettings().database_url() == f"sqlite:///{tmp_path}/rhyme-openrlhf/rhyme.sqlite"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ServeSettings().data_path() == tmp_path / ".local/share/rhyme-openrlhf"


def test_roots_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    settings = ServeSettings(roots=f"{tmp_path / 'link'}:{tmp_path}")
    assert settings.root_paths() == (tmp_path / "real", tmp_path)


def test_ipv6_is_written_as_in_urls() -> None:
    settings = ServeSettings(host="::1")
    assert settings.base_url() == "http://[::1]:8420"
    assert settings.base_url(1) == "http://[::1]:1"
    assert "[::1]" in settings.host_names()


def test_the_settings_are_options() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, (ServeSettings,))
    assert "--serve.port" in parser.format_help()
