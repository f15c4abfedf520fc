"""Settings: validation that names the flag, and the frozen set of our options."""

import argparse
import dataclasses

import pytest

from rhyme_openrlhf.settings.config import SETTINGS_CLASSES, RhymeSettings
from rhyme_openrlhf.settings.control import ControlSettings
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.engine import EngineSettings
from rhyme_openrlhf.settings.options import OPTION, SettingsError, add_options, from_mapping, shown_number
from rhyme_openrlhf.settings.run import RunSettings

# Our command line is a promise: an option that comes, goes or changes its default is a decision, made here.
FROZEN = {
    "--histospec.enable": True,
    "--histospec.window_start": 2,
    "--histospec.window_step": 2,
    "--histospec.window_max": 32,
    "--histospec.prefix_max": 16,
    "--histospec.prefix_min": 2,
    "--histospec.siblings": True,
    "--histospec.shared_tokens": 262144,
    "--histospec.extend_confidence": 0.7,
    "--histospec.stop_confidence": 0.5,
    "--histospec.own_output": True,
    "--drafting.source": "history",
    "--drafting.model": "",
    "--drafting.tokens": 4,
    "--drafting.runner": "auto",
    "--drafting.probe_share": 0.01,
    "--latency.profile": "auto",
    "--emulate.profile": "",
    "--emulate.train_s": 0.0,
    "--engine.max_num_seqs": 0,
    "--engine.max_num_batched_tokens": 0,
    "--history.workers": 0,
    "--history.cpus_per_worker": 0.5,
    "--history.memory_gb": 16.0,
    "--history.spill_dir": "",
    "--history.rollouts": 2,
    "--history.earlier": "auto",
    "--history.store": "",
    "--history.fetch_timeout_s": 10.0,
    "--weights.transport": "auto",
    "--weights.bucket_mb": 512,
    "--weights.check_syncs": 1,
    "--weights.timeout_s": 600.0,
    "--histopipe.enable": False,
    "--histopipe.rank_groups": 0,
    "--histopipe.two_tier": True,
    "--histopipe.defer": False,
    "--move.enable": False,
    "--move.carrier": "auto",
    "--move.timeout_s": 30.0,
    "--move.news_s": 1.0,
    "--run.dir": "",
    "--run.name": "run",
    "--run.reproducible": False,
    "--run.progress": "auto",
    "--run.worker_logs": False,
    "--dispatch.by_history": True,
    "--reallocation.enable": False,
    "--reallocation.status_s": 0.5,
    "--reallocation.threshold": 0,
    "--reallocation.cooldown_steps": 32,
    "--tp_switch.enable": False,
    "--tp_switch.size": 2,
    "--tp_switch.sizes": "",
    "--tp_switch.rule": "history",
    "--tp_switch.samples": 0,
    "--tp_switch.kv_cache_mb": 0,
    "--tp_switch.aligned_kv_cache_mb": 0,
    "--tp_switch.kv_caches": "auto",
    "--tp_switch.reserve_mb": 4096,
    "--tp_switch.device_mb": 0,
    "--tp_switch.profile": "auto",
    "--tp_switch.status_s": 0.25,
    "--limits.reward_s": 600.0,
    "--limits.rollout_s": 1800.0,
    "--limits.stage_s": 3600.0,
    "--limits.sigterm_s": 15.0,
    "--control.url": "",
    "--control.token_file": "",
    "--control.run_uid": "",
    "--control.attempt_uid": "",
    "--control.outbox_mb": 1024,
    "--telemetry.sample_groups": 2,
    "--telemetry.samples_mb": 64,
    "--telemetry.system_s": 5.0,
    "--cpu.kv_cache_mb": 256,
    "--cpu.dtype": "float32",
}


def test_our_options_are_frozen() -> None:
    options = {cls.flag(field.name): field.default for cls in SETTINGS_CLASSES for field in dataclasses.fields(cls)}
    assert options == FROZEN


def test_every_option_teaches_in_a_sentence() -> None:
    for cls in SETTINGS_CLASSES:
        for field in dataclasses.fields(cls):
            text = field.metadata[OPTION].help
            assert text.endswith((".", ";")) and len(text.split()) >= 6, cls.flag(field.name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window_max": 300}, "--histospec.window_max must be from 1 to 128, got 300"),
        ({"window_start": 0}, "--histospec.window_start must be from 1 to 128, got 0"),
        ({"window_start": 9, "window_max": 8}, "--histospec.window_start must be at most --histospec.window_max (8)"),
        ({"prefix_min": 17}, "--histospec.prefix_min must be at most --histospec.prefix_max (16), got 17"),
        ({"enable": 1}, "--histospec.enable must be bool, got 1"),
        ({"window_max": True}, "--histospec.window_max must be int, got True"),
        ({"window": 3}, "--histospec.window is no option"),
    ],
)
def test_bad_settings_are_refused_by_flag(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        from_mapping(HistoSpecSettings, values)
    assert message in str(refused.value)


def test_choices_are_named() -> None:
    with pytest.raises(SettingsError, match="--run.progress must be one of auto, bars, lines, off, got 'colours'"):
        RunSettings(progress="colours")


def test_command_line_defaults_are_the_dataclass_defaults() -> None:
    from types import SimpleNamespace

    parser = argparse.ArgumentParser()
    add_options(parser, SETTINGS_CLASSES)
    flat = vars(parser.parse_args([]))
    nested = SimpleNamespace(**{cls.group: SimpleNamespace() for cls in SETTINGS_CLASSES})
    for name, value in flat.items():
        group, _, field = name.partition(".")
        setattr(getattr(nested, group), field, value)
    assert RhymeSettings.from_namespace(nested) == RhymeSettings()


def test_a_switch_can_be_turned_off() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, SETTINGS_CLASSES)
    assert vars(parser.parse_args(["--no-histospec.enable"]))["histospec.enable"] is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": "localhost:8700"}, "--control.url must be http://HOST:PORT"),
        ({"url": "ftp://host"}, "--control.url must be http://HOST:PORT"),
        ({"url": "http://"}, "--control.url must be http://HOST:PORT"),
        ({"url": "http://host:port"}, "--control.url must be http://HOST:PORT"),
        ({"url": "http://me:secret@host"}, "must hold no user, password"),
        ({"url": "https://host/?token=secret"}, "must hold no user, password"),
        ({"run_uid": "../../etc"}, "--control.run_uid must be 16 hexadecimal digits"),
        ({"attempt_uid": "0" * 15}, "--control.attempt_uid must be 16 hexadecimal digits"),
        ({"outbox_mb": 0}, "--control.outbox_mb must be from 1 to 100000, got 0"),
    ],
)
def test_where_to_report_is_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        from_mapping(ControlSettings, values)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_ids_are_made_where_none_were_given() -> None:
    made = ControlSettings(run_uid="0123456789abcdef").with_uids()
    assert made.run_uid == "0123456789abcdef"
    assert (
        ControlSettings(attempt_uid=made.attempt_uid) and made.attempt_uid != ControlSettings().with_uids().attempt_uid
    )


@pytest.mark.parametrize(
    ("samples", "tokens", "message"),
    [
        (-1, 0, "--engine.max_num_seqs must be from 0 to 4096, got -1"),
        (0, 100, "--engine.max_num_batched_tokens must be at least --engine.max_num_seqs (128), .*, got 100"),
        # vLLM's own number of tokens.
        (3000, 0, "--engine.max_num_batched_tokens must be at least --engine.max_num_seqs (3000), .*, got 2048"),
    ],
)
def test_sizes_that_no_engine_has_are_refused(samples: int, tokens: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("(", r"\(").replace(")", r"\)")):
        EngineSettings(samples, tokens)


@pytest.mark.parametrize(
    ("number", "shown"),
    [(1048576, "1048576"), (134217728.0, "134217728"), (0.7, "0.7"), (30.0, "30"), (1e-06, "1e-06"), (-1, "-1")],
)
def test_numbers_are_written_as_a_person_does(number: float, shown: str) -> None:
    assert shown_number(number) == shown


def test_only_sizes_that_are_given_are_vllms_arguments() -> None:
    assert EngineSettings().arguments() == {}
    assert EngineSettings(256, 8192).arguments() == {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
