"""Choice of the control plane's address and token.

The address: --server, else RHYME_CONTROL_URL, else the one last signed in to, else this machine's default. The token:
--token-file, else RHYME_CONTROL_TOKEN, else the one kept for that very address. They are kept in client.json below the
user's configuration directory, readable for its owner alone; `rhyme runs login` writes it.

Invariants: a kept token goes to no other address than the one it was kept for; no token is ever in a message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rhyme_openrlhf.client.errors import AccessError
from rhyme_openrlhf.settings.control import ControlSettings
from rhyme_openrlhf.settings.options import SettingsError
from rhyme_openrlhf.telemetry.control_connection import TokenError, read_token
from rhyme_openrlhf.telemetry.run_directory import TOKEN_VARIABLE

URL_VARIABLE = "RHYME_CONTROL_URL"
# Where `rhyme serve` listens if nothing else is said (api/settings.py).
DEFAULT_URL = "http://127.0.0.1:8420"
PRIVATE = 0o600
# How an address for the browser carries a one-time code, or a token, in its fragment (api/store/credentials.py).
LINK_MARKS = ("code=", "token=")
# How one-time codes begin (api/store/credentials.py).
CODE_START = "once_"


@dataclass(frozen=True)
class Access:
    """An address, and the token for it."""

    url: str
    token: str


def client_file(environment: Mapping[str, str]) -> Path:
    """Return the file that keeps addresses and tokens."""
    base = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".config")
    return Path(base) / "rhyme-openrlhf" / "client.json"


def find_access(server: str, token_file: str, environment: Mapping[str, str]) -> Access:
    """Return the address and token to use; `server` and `token_file` are "" if not given. Raises AccessError."""
    kept = _read(client_file(environment))
    url = checked_url(server or environment.get(URL_VARIABLE, "") or kept["default"] or DEFAULT_URL)
    given = environment.get(TOKEN_VARIABLE, "") or kept["servers"].get(url, "")
    if not token_file and not given:
        raise AccessError(
            f"there is no access token for {url}: sign in with `rhyme runs login {url}`, or set {TOKEN_VARIABLE}"
        )
    return Access(url, checked_token(given, token_file))


def checked_token(given: str, token_file: str = "") -> str:
    """Return the token in `token_file` if that is named, else `given`. Raises AccessError."""
    try:
        return read_token(token_file, given)
    except TokenError as error:
        raise AccessError(str(error).replace("--control.token_file", "--token-file")) from None


def checked_url(url: str) -> str:
    """Return an address in the one form that is compared and kept. Raises AccessError."""
    url = url.rstrip("/")
    try:
        ControlSettings(url=url)
    except SettingsError:
        raise AccessError(
            f"the address must be http://HOST:PORT or https://HOST:PORT, got {without_token(url)!r}"
        ) from None
    if not url:
        raise AccessError("the address must not be empty")
    return url


def without_token(text: str) -> str:
    """Return `text` as it may be shown: a sign-in link without its code."""
    return text.partition("#")[0].partition("?")[0]


def split_link(link: str) -> tuple[str, str]:
    """Return address, and code or token, of what `rhyme serve` printed, or of a bare address ("" for the secret)."""
    address, _, fragment = link.partition("#")
    secret = next((fragment.removeprefix(mark) for mark in LINK_MARKS if fragment.startswith(mark)), "")
    return address.rstrip("/"), secret


def keep(access: Access, environment: Mapping[str, str]) -> Path:
    """Keep a token for its address, which becomes the default; the file. Raises AccessError."""
    path = client_file(environment)
    kept = _read(path)
    kept["servers"][access.url] = access.token
    kept["default"] = access.url
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        # Private from the first byte on, for any umask.
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w") as file:
            file.write(json.dumps(kept, indent=2) + "\n")
        partial.replace(path)
    except OSError as error:
        raise AccessError(f"{path} cannot be written: {error.strerror}") from None
    return path


def is_loopback(url: str) -> bool:
    """Return True if an address is this machine's own, so that no proxy may see its requests."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _read(path: Path) -> dict[str, Any]:
    try:
        row = json.loads(path.read_text())
    except FileNotFoundError:
        row = {}
    except (OSError, ValueError):
        raise AccessError(f"{path} cannot be read; sign in again with `rhyme runs login` after removing it") from None
    servers = row.get("servers") if isinstance(row, dict) else None
    servers = servers if isinstance(servers, dict) else {}
    default = row.get("default") if isinstance(row, dict) else None
    return {"default": default if isinstance(default, str) else "", "servers": dict(servers)}
