"""Which files and directories a spec may name: those below the service's roots, looked at through symbolic links.

A reward function and an agent are code that the run executes, a model directory may hold code (OpenRLHF loads models
with trust_remote_code), and checkpoints are written and deleted: so who may write below the roots may do all that.

Invariants: what `checked` returns names only resolved paths below a root (or parts of this package), names of the
hub, and addresses of reward servers; a text that could be read as a path is never taken for a name. What upstream
would run as a data set's loading script is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.launch.schema import TypedOption
from rhyme_openrlhf.settings.latency import AUTO, NONE
from rhyme_openrlhf.settings.options import PathKind
from rhyme_openrlhf.settings.redaction import redact_text

# NAME or OWNER/NAME, as the hub allows them; a job's working directory is empty, so these are no relative paths there.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_PART = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)


class PathRefused(ValueError):
    """A path may not be used; the message says why in one clause, without repeating what was sent."""


def checked(option: TypedOption, value: str, roots: Sequence[Path]) -> str:
    """`value` of a path option, with every path in it resolved. Raises PathRefused.

    An empty text names nothing where it is the option's default.
    """
    assert option.path is not None
    if value == "" == option.default:
        return value
    return _CHECKS[option.path](value, roots)


def profile_file(text: str, roots: Sequence[Path]) -> Path:
    """A profile that the service itself may read. Raises PathRefused."""
    return _exists(text, roots, "profile", Path.is_file, "a file")


def _below(text: str, roots: Sequence[Path], kind: PathKind) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise PathRefused("must be an absolute path")
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null byte
        raise PathRefused("is no path that can be followed") from error
    allowed = [root.resolve() for root in roots]
    if kind != "output":
        allowed.append(embedded.FOLDER.resolve())
    if not any(resolved.is_relative_to(root) and resolved != root for root in allowed):
        raise PathRefused(f"must lie below one of the service's roots ({', '.join(map(str, roots))})")
    return resolved


def _exists(text: str, roots: Sequence[Path], kind: PathKind, test: Callable[[Path], bool], what: str) -> Path:
    resolved = _below(text, roots, kind)
    try:
        there = test(resolved)
    except OSError as error:
        raise PathRefused("cannot be looked at") from error
    if not there:
        raise PathRefused(f"must be {what} that exists")
    return resolved


def _model(value: str, roots: Sequence[Path]) -> str:
    if _HUB_NAME.fullmatch(value):
        return value
    return str(_exists(value, roots, "model", Path.is_dir, "the name of a model of the hub or a model directory"))


def _data(value: str, roots: Sequence[Path]) -> str:
    return ",".join(_data_set(part.strip(), roots) for part in value.split(","))


def _data_set(text: str, roots: Sequence[Path]) -> str:
    name, at, part = text.partition("@")
    if at and not _PART.fullmatch(part):
        raise PathRefused("must have a plain folder name behind '@'")
    if name.endswith(".py"):
        raise PathRefused("must be data, not a loading script (.py)")
    if _HUB_NAME.fullmatch(name) and not name.endswith(DATA_SUFFIXES):
        return text
    path = _exists(name, roots, "data", Path.exists, "a data file or directory, or the name of a data set of the hub,")
    if path.is_file() and path.suffix not in DATA_SUFFIXES:
        raise PathRefused(f"must be a file of the kinds {', '.join(DATA_SUFFIXES)}")
    # Upstream runs <directory>/<its name>.py if it is there.
    if path.is_dir() and (path / f"{path.name}.py").exists():
        raise PathRefused("must be data; this directory has a loading script, which would be run")
    if set("@,") & set(str(path)):
        raise PathRefused("must not have '@' or ',' in its path: upstream splits there")
    return f"{path}{at}{part}"


def _reward(value: str, roots: Sequence[Path]) -> str:
    return ",".join(_one_reward(part.strip(), roots) for part in value.split(","))


def _one_reward(text: str, roots: Sequence[Path]) -> str:
    if text.startswith(("http://", "https://")):
        try:
            parts = urlsplit(text)
            usable = bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or text.endswith(".py") or any(character.isspace() for character in text):
            raise PathRefused("must be the address of a reward server, as http://HOST:PORT/PATH")
        if parts.username is not None or redact_text(text) != text:
            raise PathRefused("must hold no user, password or token: a spec is kept and shown")
        return text
    return _python_file(text, roots, "reward")


def _agent(value: str, roots: Sequence[Path]) -> str:
    return _python_file(value, roots, "agent")


def _python_file(text: str, roots: Sequence[Path], kind: PathKind) -> str:
    path = _exists(text, roots, kind, Path.is_file, "a Python file (.py)")
    if path.suffix != ".py":
        raise PathRefused("must be a Python file (.py)")
    if "," in str(path):
        raise PathRefused("must not have ',' in its path: upstream splits there")
    return str(path)


def _output(value: str, roots: Sequence[Path]) -> str:
    path = _below(value, roots, "output")
    if path.exists() and not path.is_dir():
        raise PathRefused("must be a directory, or be free to become one")
    return str(path)


def _file(value: str, roots: Sequence[Path]) -> str:
    return str(_exists(value, roots, "file", Path.is_file, "a file"))


def _profile(value: str, roots: Sequence[Path]) -> str:
    return value if value in (AUTO, NONE) else _file(value, roots)


def _profiles(value: str, roots: Sequence[Path]) -> str:
    found = [_profile(part.strip(), roots) for part in value.split(",")]
    if any("," in path for path in found):
        raise PathRefused("must not have ',' in its path: several profiles are separated there")
    return ",".join(found)


_CHECKS: dict[PathKind, Callable[[str, Sequence[Path]], str]] = {
    "model": _model,
    "data": _data,
    "reward": _reward,
    "agent": _agent,
    "output": _output,
    "file": _file,
    "profile": _profile,
    "profiles": _profiles,
}
