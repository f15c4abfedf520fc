"""Paths that a spec may name: files and directories below the service's roots, after resolving symbolic links.

A reward function and an agent are code that the run executes. A model directory may hold code (OpenRLHF loads models
with trust_remote_code). Checkpoints are written and deleted. A user who can write below the roots can therefore do all
of this.

Invariants:

- `checked` returns only resolved paths below a root (or parts of this package), names on the hub, and addresses of
  reward servers.
- A text that could be a path is never taken for a name.
- A data set's loading script, which upstream would run, is refused.
- Where earlier runs are named, a uid stands for a run of this service (earlier_runs.py); any other text is a path.
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

# NAME or OWNER/NAME, as the hub allows them. A job's working directory is empty, so no relative path exists there.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_PART = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)


# A run of this service, in --history.earlier.
RUN_UID = re.compile(r"[0-9a-f]{16}")


class PathRefused(ValueError):
    """A path may not be used; the message is a clause that does not repeat the input."""


def checked(option: TypedOption, value: str, roots: Sequence[Path], resumes: bool = False) -> str:
    """Return `value` of a path option, with all its paths resolved. Raises PathRefused.

    An empty text is accepted if it is the option's default. A run that resumes (`resumes`) may name earlier runs that
    are gone meanwhile: it goes on without them.
    """
    assert option.path is not None
    if value == "" == option.default:
        return value
    if resumes and option.path == "runs":
        return _runs(value, roots, may_be_gone=True)
    return _CHECKS[option.path](value, roots)


def profile_file(text: str, roots: Sequence[Path]) -> Path:
    """Return a profile that the service itself may read. Raises PathRefused."""
    return _exists(text, roots, "profile", Path.is_file, "a file")


def _below(text: str, roots: Sequence[Path], kind: PathKind) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise PathRefused("must be an absolute path")
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null byte
        raise PathRefused("is not a valid path") from error
    allowed = [root.resolve() for root in roots]
    if kind != "output":
        allowed.append(embedded.FOLDER.resolve())
    if not any(resolved.is_relative_to(root) and resolved != root for root in allowed):
        raise PathRefused(f"must be below one of the service's roots ({', '.join(map(str, roots))})")
    return resolved


def _exists(text: str, roots: Sequence[Path], kind: PathKind, test: Callable[[Path], bool], what: str) -> Path:
    resolved = _below(text, roots, kind)
    try:
        there = test(resolved)
    except OSError as error:
        raise PathRefused("cannot be read") from error
    if not there:
        raise PathRefused(f"must be {what} that exists")
    return resolved


def _model(value: str, roots: Sequence[Path]) -> str:
    if _HUB_NAME.fullmatch(value):
        return value
    return str(_exists(value, roots, "model", Path.is_dir, "the name of a model on the hub or a model directory"))


def _data(value: str, roots: Sequence[Path]) -> str:
    return ",".join(_data_set(part.strip(), roots) for part in value.split(","))


def _data_set(text: str, roots: Sequence[Path]) -> str:
    name, at, part = text.partition("@")
    if at and not _PART.fullmatch(part):
        raise PathRefused("must have a plain folder name after '@'")
    if name.endswith(".py"):
        raise PathRefused("must be data, not a loading script (.py)")
    if _HUB_NAME.fullmatch(name) and not name.endswith(DATA_SUFFIXES):
        return text
    path = _exists(name, roots, "data", Path.exists, "a data file or directory, or the name of a data set on the hub,")
    if path.is_file() and path.suffix not in DATA_SUFFIXES:
        raise PathRefused(f"must be a file of the kinds {', '.join(DATA_SUFFIXES)}")
    # Upstream runs <directory>/<its name>.py if it exists.
    if path.is_dir() and (path / f"{path.name}.py").exists():
        raise PathRefused("must be data; this directory has a loading script, which would be executed")
    if set("@,") & set(str(path)):
        raise PathRefused("must not have '@' or ',' in its path, because upstream splits there")
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
            raise PathRefused("must not contain a user, password or token, because a spec is stored and shown")
        return text
    return _python_file(text, roots, "reward")


def _agent(value: str, roots: Sequence[Path]) -> str:
    return _python_file(value, roots, "agent")


def _python_file(text: str, roots: Sequence[Path], kind: PathKind) -> str:
    path = _exists(text, roots, kind, Path.is_file, "a Python file (.py)")
    if path.suffix != ".py":
        raise PathRefused("must be a Python file (.py)")
    if "," in str(path):
        raise PathRefused("must not have ',' in its path, because upstream splits there")
    return str(path)


def _output(value: str, roots: Sequence[Path]) -> str:
    path = _below(value, roots, "output")
    if path.exists() and not path.is_dir():
        raise PathRefused("must be a directory or not exist yet")
    return str(path)


def _file(value: str, roots: Sequence[Path]) -> str:
    return str(_exists(value, roots, "file", Path.is_file, "a file"))


def _profile(value: str, roots: Sequence[Path]) -> str:
    return value if value in (AUTO, NONE) else _file(value, roots)


def _profiles(value: str, roots: Sequence[Path]) -> str:
    found = [_profile(part.strip(), roots) for part in value.split(",")]
    if any("," in path for path in found):
        raise PathRefused("must not have ',' in its path, because it separates several profiles")
    return ",".join(found)


def _runs(value: str, roots: Sequence[Path], may_be_gone: bool = False) -> str:
    if value in (AUTO, NONE):
        return value
    found = [_one_run(part.strip(), roots, may_be_gone) for part in value.split(",")]
    if any("," in path for path in found):
        raise PathRefused("must not have ',' in its path, because it separates several directories")
    return ",".join(found)


def _one_run(text: str, roots: Sequence[Path], may_be_gone: bool) -> str:
    if RUN_UID.fullmatch(text):
        return text
    if may_be_gone:
        return str(_below(text, roots, "runs"))
    return str(_exists(text, roots, "runs", Path.is_dir, "the uid of a run of this service or a directory"))


_CHECKS: dict[PathKind, Callable[[str, Sequence[Path]], str]] = {
    "model": _model,
    "data": _data,
    "reward": _reward,
    "agent": _agent,
    "output": _output,
    "file": _file,
    "profile": _profile,
    "profiles": _profiles,
    "runs": _runs,
}
