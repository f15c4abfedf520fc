"""OpenRLHF's own command line with ours beside it: the contract with openrlhf.cli.train_ppo_ray 0.11.2."""

import dataclasses
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import upstream
from rhyme_openrlhf.settings.config import OLD_FLAGS, SETTINGS_CLASSES, RhymeSettings
from rhyme_openrlhf.settings.options import OPTION, Option

pytest.importorskip("openrlhf")

MINIMAL = ["--vllm.num_engines", "2", "--reward.remote_url", "reward.py", "--actor.model_name_or_path", "m"]


# A flag where its line begins.
FLAG = re.compile(r"^  (?:-h, )?(--\S+)", re.MULTILINE)


def rules() -> dict[str, Option]:
    """Return what is said of each option of ours, by its flag as help shows it."""
    found = {}
    for cls in SETTINGS_CLASSES:
        for field in dataclasses.fields(cls):
            flag = cls.flag(field.name)
            found[flag.replace("--", "--[no-]") if isinstance(field.default, bool) else flag] = field.metadata[OPTION]
    return found


def shown_by(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `rhyme train` prints with this flag."""
    with pytest.raises(SystemExit):
        upstream.parse([flag])
    return capsys.readouterr().out


def parse(*arguments: str) -> SimpleNamespace:
    return upstream.parse([*MINIMAL, *arguments])


def test_defaults_are_upstreams_and_ours() -> None:
    args = parse("--actor.num_gpus_per_node", "1")
    # Spot checks against upstream's source, among them a value that its main block derives after parsing.
    assert (args.train.seed, args.rollout.batch_size, args.actor.adam.lr) == (42, 1024, 1e-6)
    assert args.rollout.vllm_generate_batch_size == 1024
    assert args.reward.remote_url == ["reward.py"]
    assert RhymeSettings.from_namespace(args) == RhymeSettings()


def test_flags_of_both_sides_are_taken() -> None:
    args = parse("--actor.num_gpus_per_node", "1", "--train.seed", "7", "--histospec.window_max", "16")
    assert args.train.seed == 7
    assert RhymeSettings.from_namespace(args).histospec.window_max == 16


@pytest.mark.usefixtures("starts_python")
def test_every_upstream_option_is_in_our_help() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rhyme_openrlhf.cli.train_ppo_ray", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    source = "\n".join(__import__("ast").unparse(statement) for statement in upstream.main_block())
    flags = __import__("re").findall(r"add_argument\('(--[\w.]+)'", source)
    assert len(flags) > 120
    assert [flag for flag in flags if flag not in done.stdout] == []
    assert "--histospec.window_max" in done.stdout and "--weights.transport" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "ray", "vllm", "deepspeed", "transformers"}, "--help must be quick"


def test_help_shows_at_most_40_flags_of_ours_before_upstreams_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = shown_by("--help", capsys).split("OpenRLHF's options:")
    found = set(FLAG.findall(ours)) - {"--help", "--help-all"}
    assert 30 <= len(found) <= 40 and "--ckpt.path" in theirs
    assert {flag for flag in found if "." in flag} == {flag for flag, rule in rules().items() if not rule.expert}
    lines = [line for line in ours.partition("\n\nCommand:\n")[2].splitlines() if line and not line.endswith(":")]
    assert [line for line in lines if not FLAG.match(line)] == [] and max(map(len, lines)) <= upstream.WIDTH
    assert all("Default: " in line for line in lines if "." in FLAG.findall(line)[0])


def test_help_all_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert {flag for flag in FLAG.findall(shown_by("--help-all", capsys)) if flag in rules()} == set(rules())


def test_a_flag_of_the_version_before_is_taken_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, sentence in OLD_FLAGS.items():
        assert RhymeSettings.from_namespace(parse("--actor.num_gpus_per_node", "1", flag, "5")) == RhymeSettings()
        assert capsys.readouterr().err == f"rhyme train: {flag} is ignored: {sentence}\n"
        assert flag not in rules() and flag not in shown_by("--help-all", capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algo.advantage.estimator", "group_norm"], "group_norm requires n_samples_per_prompt > 1"),
        (["--train.partial_rollout_enable"], "--train.partial_rollout_enable requires --train.async_enable"),
        (["--actor.num_gpus_per_node", "4000"], "The number of sample batches must be greater"),
    ],
)
def test_upstreams_own_checks_still_run(arguments: list[str], message: str) -> None:
    with pytest.raises(upstream.ArgumentsError, match=message):
        parse(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no_such_flag", "1"], "unrecognized arguments: --no_such_flag 1"),
        (["--train.seed", "x"], "argument --train.seed: invalid int value: 'x'"),
        (["--histospec.window_ma", "3"], "unrecognized arguments: --histospec.window_ma 3"),
    ],
)
def test_unknown_or_malformed_flags_cost_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*arguments)
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 2


def test_missing_options_that_upstream_trips_over_are_named() -> None:
    with pytest.raises(upstream.ArgumentsError, match=r"option is missing: [^\[]*--reward.model_name_or_path\)$"):
        upstream.parse(["--vllm.num_engines", "2"])


def test_the_names_we_replace_in_upstreams_launcher_exist() -> None:
    """run/placement.py sets these names; if upstream drops one, our actors would silently not be used."""
    import inspect

    import openrlhf.cli.train_ppo_ray as launcher
    import openrlhf.trainer.ray.vllm_engine as engines

    source = inspect.getsource(launcher.train)
    for name in ("get_strategy(args)", "PolicyModelActor,", "PPOTrainerAsync as PPOTrainer", "import PPOTrainer"):
        assert name in source
    assert "RolloutRayActor.options(" in inspect.getsource(engines.create_vllm_engines)


def test_the_demo_is_a_valid_command_line() -> None:
    from rhyme_openrlhf.cli.demo import arguments

    args = upstream.parse(arguments("/tmp/demo"))
    assert args.vllm.num_engines == 2 and args.train.num_episodes >= 4
    assert args.actor.model_name_or_path == str(embedded.MODEL)
