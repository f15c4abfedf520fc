"""Settings of the control plane: where a run reports to, and under which public ids.

Also what the service and its clients both know of webhooks, because a client does not import the service.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from rhyme_openrlhf.settings.options import Settings, SettingsError, option

# Public ids of runs and attempts: as many hexadecimal digits as the control plane's tables keep (api/store/models.py).
UID_DIGITS = 16
_UID = re.compile(rf"[0-9a-f]{{{UID_DIGITS}}}")


class WebhookLimit(NamedTuple):
    """The limit above which a webhook has a message: its field of the webhook, default and meaning."""

    field: str
    default: float
    meaning: str


# Events of runs that a webhook can be about, in the order of forms. Some have a limit.
WebhookEvent = Literal["failed", "finished", "stalled", "reward_fell", "engine_idle"]
WEBHOOK_EVENTS: tuple[str, ...] = get_args(WebhookEvent)
WEBHOOK_LIMITS: Mapping[str, WebhookLimit] = {
    "stalled": WebhookLimit("stalled_minutes", 30, "minutes in which a running run did nothing"),
    "reward_fell": WebhookLimit("reward_fall", 0.1, "how far the reward is below the run's best"),
    "engine_idle": WebhookLimit("idle_percent", 50, "above this percentage of the rollouts"),
}


def check_address(flag: str, url: str) -> None:
    """Raise SettingsError unless `url` is the address of a control plane."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise SettingsError(f"{flag} must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
    if parts.username is not None or parts.query or parts.fragment:
        # It is shown in the run record, so nothing secret may be in it; and its value is not repeated here.
        raise SettingsError(
            f"{flag} must hold no user, password, query or fragment: give the token by --control.token_file or "
            "RHYME_CONTROL_TOKEN"
        )


def new_uid() -> str:
    """Return a new public id."""
    return secrets.token_hex(UID_DIGITS // 2)


@dataclass(frozen=True)
class ControlSettings(Settings):
    """Address and labels that a run reports under. The token is no setting, because settings are written to the run
    record.
    """

    group: ClassVar[str] = "control"
    title: ClassVar[str] = "Control plane: a service that a run reports to, where people see, compare and stop runs."

    url: str = option(
        "",
        "Control plane (`rhyme serve`) to report to, as http://HOST:PORT. The token comes from "
        "--control.token_file or the environment variable RHYME_CONTROL_TOKEN. If not given, nothing is reported.",
        kind="url",
    )
    token_file: str = option(
        "", "File with the access token for it. Keep the file readable for you alone.", kind="file"
    )
    run_uid: str = option(
        "",
        "Id of the run there (16 hexadecimal digits), to go on with a run that is already shown; else a new one.",
        kind="plain",
        expert=True,
    )
    attempt_uid: str = option(
        "",
        "Id of this start of the run there (16 hexadecimal digits); made here if not given.",
        kind="plain",
        expert=True,
    )
    outbox_mb: int = option(
        1024,
        "MB of events that may wait for a control plane that does not answer; of more, the oldest are not sent (they "
        "stay in the run directory, for `rhyme runs import`).",
        low=1,
        high=100000,
        expert=True,
    )

    def check(self) -> None:
        if self.url:
            check_address(self.flag("url"), self.url)
        for name in ("run_uid", "attempt_uid"):
            uid = getattr(self, name)
            if uid and not _UID.fullmatch(uid):
                raise SettingsError(f"{self.flag(name)} must be {UID_DIGITS} hexadecimal digits (0-9a-f), got {uid!r}")

    def with_uids(self) -> ControlSettings:
        """Return these settings with random ids where none were given, unique without asking a server."""
        return dataclasses.replace(self, run_uid=self.run_uid or new_uid(), attempt_uid=self.attempt_uid or new_uid())
