"""Commands and configurations without their secrets: what is hidden, what stays, and that a run still gets it."""

from __future__ import annotations

import json
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.settings.redaction import (
    DEEPEST,
    HIDDEN,
    SECRET_FLAGS,
    hide_when_printed,
    redact_command,
    redact_config,
    redact_text,
)

SECRET = "hunter2secret"


def test_the_secrets_are_those_that_say_so() -> None:
    assert {"--logger.wandb.key"} == SECRET_FLAGS


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--logger.wandb.key", SECRET, "--train.seed", "7"], ["--logger.wandb.key", HIDDEN, "--train.seed", "7"]),
        ([f"--logger.wandb.key={SECRET}"], [f"--logger.wandb.key={HIDDEN}"]),
        (["--logger.wandb.key", f"-{SECRET}"], ["--logger.wandb.key", HIDDEN]),
        # OpenRLHF's own command takes abbreviations.
        (["--logger.wandb.k", SECRET], ["--logger.wandb.k", HIDDEN]),
        ([f"--logger.wandb.ke={SECRET}"], [f"--logger.wandb.ke={HIDDEN}"]),
        # Options that this version does not know.
        (["--logger.hf_token", SECRET], ["--logger.hf_token", HIDDEN]),
        (["--reward.api-key", SECRET], ["--reward.api-key", HIDDEN]),
        (
            ["--reward.remote_url", f"http://me:{SECRET}@host/score,https://other:8000/score?x=1&api_key={SECRET}"],
            ["--reward.remote_url", f"http://{HIDDEN}@host/score,https://other:8000/score?x=1&api_key={HIDDEN}"],
        ),
        (["-c", f"rhyme train --logger.wandb.key {SECRET}"], ["-c", f"rhyme train --logger.wandb.key {HIDDEN}"]),
    ],
)  # fmt: skip
def test_a_command_shows_no_secret(words: list[str], shown: list[str]) -> None:
    assert redact_command(words) == shown
    assert redact_command(shown) == shown


@pytest.mark.parametrize(
    "words",
    [
        ["--data.input_key", "question", "--data.label_key=answer", "--ckpt.best_metric_key", "eval/pass1"],
        ["--control.token_file", "/home/me/token", "--run.name", "a-token"],
        ["--reward.remote_url", "https://host:8000/@me/score?model=x", "--data.input_template", "a@b: {} --x"],
        ["--logger.wandb.org", "us", "--logger.wandb.project", "p", "--", "--logger"],
    ],
)
def test_what_is_no_secret_stays(words: list[str]) -> None:
    assert redact_command(words) == words


def test_a_configuration_shows_no_secret() -> None:
    config: dict[str, Any] = {
        "command": ["rhyme", "train", "--logger.wandb.key", SECRET],
        "arguments": {
            "logger": {"wandb": {"key": SECRET, "org": "us"}},
            "reward": {"remote_url": [f"http://me:{SECRET}@host/score"]},
            "data": {"input_key": "question", "max_len": 12},
            "hub": {"token": SECRET, "tokens": 3},
        },
        "settings": {"control": {"token_file": "/home/me/token"}, "logger": {"wandb.key": SECRET}},
        "versions": {"torch": "2.11"},
    }
    shown = redact_config(config)
    assert SECRET not in json.dumps(shown) and SECRET in json.dumps(config)
    assert shown["arguments"]["data"] == config["arguments"]["data"]
    assert shown["arguments"]["logger"]["wandb"] == {"key": HIDDEN, "org": "us"}
    assert shown["settings"]["control"] == config["settings"]["control"] and shown["versions"] == {"torch": "2.11"}
    assert redact_config(shown) == shown


def test_a_secret_that_is_not_given_is_seen_not_to_be() -> None:
    arguments = {"arguments": {"logger": {"wandb": {"key": None}}}}
    assert redact_config(arguments) == arguments


def test_what_is_nested_too_deep_is_hidden_instead_of_followed() -> None:
    deep: Any = SECRET
    for _ in range(5_000):
        deep = {"a": deep}
    shown: Any = redact_config({"odd": deep, "command": [["no text"]]})
    for _ in range(DEEPEST + 1):
        shown = next(iter(shown.values()))
    assert shown == HIDDEN


@pytest.mark.parametrize("piece", ["a", "?", "&", "://", "--", "key", "-", " ", "@", "--logger.wandb.key "])
def test_no_text_takes_long(piece: str) -> None:
    began = time.process_time()
    redact_text(f"--logger.wandb.key http://x?{piece * 200_000}")
    assert time.process_time() - began < 10


def test_upstreams_arguments_print_without_secrets_and_hold_them() -> None:
    args = SimpleNamespace(
        logger=SimpleNamespace(wandb=SimpleNamespace(key=SECRET, org="us")),
        reward=SimpleNamespace(remote_url=[f"http://me:{SECRET}@host/score"]),
        train=SimpleNamespace(seed=7),
    )
    hide_when_printed(args)
    assert SECRET not in str(args) and "us" in str(args)
    sent = pickle.loads(pickle.dumps(args))
    assert SECRET not in str(sent)
    assert sent.logger.wandb.key == SECRET and sent.reward.remote_url == [f"http://me:{SECRET}@host/score"]
    assert json.loads(json.dumps(sent.logger.wandb.key)) == SECRET
