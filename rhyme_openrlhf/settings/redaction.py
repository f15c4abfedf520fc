"""A run's command and configuration as they may be recorded, sent, kept and shown: without their secrets. Pure.

Which options are secrets is said where they are declared (`settings/options.py`, `settings/upstream_kinds.py`). An
option that this version does not know is a secret if its name says so. In every text, a user with a password in an
address, a secret in its query, and what follows the flag of a secret are hidden too.

Invariants: what is redacted once stays the same when it is redacted again; only texts change, and only to `HIDDEN`. The
process that runs gets the real values, because nothing here changes what it is given.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.settings.config import SETTINGS_CLASSES
from rhyme_openrlhf.settings.options import OPTION, TextKind
from rhyme_openrlhf.settings.upstream_kinds import UPSTREAM_KINDS

HIDDEN = "***"
# No configuration is nested deeper; what is, is not followed.
DEEPEST = 64
# No option's name is longer; of one that is, its end says what it is.
LONGEST_NAME = 200
# Parts of a run directory's config.json that have options by group and name; `command` is a list of words.
_COMMAND, _BY_NAME = "command", ("arguments", "settings")

# The kind of each option that takes a text, by flag; ours and OpenRLHF's.
KINDS: dict[str, TextKind | None] = dict(UPSTREAM_KINDS) | {
    cls.flag(field.name): field.metadata[OPTION].kind for cls in SETTINGS_CLASSES for field in dataclasses.fields(cls)
}
SECRET_FLAGS = frozenset(flag for flag, kind in KINDS.items() if kind == "secret")

_SECRET_WORDS = r"(?:api_?key|key|token|secret|password|passwd|passphrase|credentials?)"
_SECRET_NAME = re.compile(rf"(?:^|[._-]){_SECRET_WORDS}$", re.IGNORECASE)
# Each begins at a character that the rest of it may not hold, so that no text takes long.
_USER_IN_ADDRESS = re.compile(r"://[^/?#\s]*@")
_SECRET_IN_QUERY = re.compile(rf"([?&](?:[^?&=#\s]*[._-])?{_SECRET_WORDS}=)[^&#\s,]+", re.IGNORECASE)
_FLAG_IN_TEXT = re.compile(rf"((?:{'|'.join(map(re.escape, sorted(SECRET_FLAGS)))})(?:=|\s+))(\"[^\"]*\"|'[^']*'|\S+)")


class Unprinted(str):
    """A secret among OpenRLHF's arguments: readable by the code that uses it, hidden where arguments are printed."""

    def __repr__(self) -> str:
        return repr(HIDDEN)


def redact_text(text: str) -> str:
    """Return `text` with the secrets in addresses, and behind flags of secrets, hidden."""
    if "://" in text:
        text = _USER_IN_ADDRESS.sub(f"://{HIDDEN}@", text)
        text = _SECRET_IN_QUERY.sub(rf"\1{HIDDEN}", text)
    return _FLAG_IN_TEXT.sub(rf"\1{HIDDEN}", text) if "--" in text else text


def redact_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the values of secret options hidden.

    An abbreviated flag counts as the secret that it may mean, because OpenRLHF's own command takes abbreviations.
    """
    shown: list[str] = []
    is_value = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if is_value and not word.startswith("--"):
            shown.append(HIDDEN)
            is_value = False
        elif flag.startswith("--") and _is_secret_flag(flag):
            shown.append(f"{flag}={HIDDEN}" if equals else flag)
            is_value = not equals
        else:
            shown.append(redact_text(word))
            is_value = False
    return shown


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `config.json`, or of an event, with its secrets hidden."""
    found: dict[str, Any] = {}
    for name, part in config.items():
        if name == _COMMAND and isinstance(part, list):
            words = all(isinstance(word, str) for word in part)
            found[name] = redact_command(part) if words else _redacted(part, name, 1)
        else:
            found[name] = _redacted(part, "" if name in _BY_NAME else name, 1)
    return found


def hide_when_printed(args: SimpleNamespace, name: str = "") -> None:
    """Make the secrets in OpenRLHF's nested arguments `Unprinted`, because it prints its arguments into a log."""
    for key, value in vars(args).items():
        dotted = f"{name}.{key}" if name else key
        if isinstance(value, SimpleNamespace):
            hide_when_printed(value, dotted)
        elif isinstance(value, list):
            setattr(args, key, [_unprinted(item, dotted) for item in value])
        else:
            setattr(args, key, _unprinted(value, dotted))


def _unprinted(value: Any, name: str) -> Any:
    return Unprinted(value) if isinstance(value, str) and _redacted(value, name, 0) != value else value


def _redacted(value: Any, name: str, depth: int) -> Any:
    """Return `value` of the option `name` (dotted; "" for all options) with its secrets hidden."""
    if depth > DEEPEST:
        return HIDDEN
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name[-LONGEST_NAME:]) else redact_text(value)
    if isinstance(value, Mapping):
        begin = f"{name}." if name else ""
        return {key: _redacted(item, f"{begin}{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, name, depth + 1) for item in value]
    return value


def _is_secret_flag(flag: str) -> bool:
    is_abbreviation = flag not in KINDS and flag != "--" and any(secret.startswith(flag) for secret in SECRET_FLAGS)
    return is_abbreviation or is_secret(flag.removeprefix("--")[-LONGEST_NAME:])


# A page asks for the same few hundred names again and again.
@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether the option `name` is a secret: it says so, or this version does not know it and its name does."""
    flag = f"--{name}"
    return flag in SECRET_FLAGS or (flag not in KINDS and _SECRET_NAME.search(name) is not None)
