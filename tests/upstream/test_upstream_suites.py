"""OpenRLHF's own tests (they are inside its wheel), held against our subclasses.

Upstream's test files load the module under test by its file name, with fakes around it. `_serve` answers that load
with the real module, in which the class under test is ours.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from rhyme_openrlhf.settings.config import RhymeSettings

upstream = pytest.importorskip("openrlhf")

SUITE = Path(upstream.__file__).parents[1] / "tests"


def load_suite(name: str) -> types.ModuleType:
    """An upstream test file as a module."""
    spec = importlib.util.spec_from_file_location(f"upstream_{name}", SUITE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(monkeypatch: pytest.MonkeyPatch, suite: types.ModuleType, replacement: types.ModuleType) -> None:
    """Give `replacement` to a test file that loads a module by path."""

    class Loader:
        def create_module(self, spec: Any) -> types.ModuleType:
            return replacement

        def exec_module(self, module: types.ModuleType) -> None:
            """It is loaded already."""

    def spec_from_file_location(name: str, location: Any) -> Any:
        return importlib.machinery.ModuleSpec(name, Loader())  # type: ignore[arg-type]

    util = SimpleNamespace(
        spec_from_file_location=spec_from_file_location, module_from_spec=lambda spec: spec.loader.create_module(spec)
    )
    monkeypatch.setattr(suite, "importlib", SimpleNamespace(util=util), raising=True)


def silent_services() -> Any:
    settings = RhymeSettings()
    return SimpleNamespace(
        record=lambda *_: None,
        record_all=lambda *_: None,
        stop_requested=lambda: False,
        epoch_of=lambda step: 1,
        settings=settings,
        checkpoint_path="checkpoints",
    )


# --- samples generator


@pytest.fixture
def generator_suite(monkeypatch: pytest.MonkeyPatch) -> tuple[types.ModuleType, Any]:
    import openrlhf.trainer.ppo_utils.samples_generator as real

    from rhyme_openrlhf.training.samples_generator import RhymeSamplesGenerator

    class Ours(RhymeSamplesGenerator):
        # Theirs makes some without a constructor.
        services = silent_services()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, services=silent_services(), **kwargs)

    suite = load_suite("test_samples_generator")
    module = types.ModuleType("served")
    module.__dict__.update(vars(real) | {"SamplesGenerator": Ours})
    fake_ray = SimpleNamespace(
        cancelled=[], wait=lambda refs, **_: (refs[:1], refs[1:]), get=lambda ref: ref, cancel=lambda ref: None
    )
    monkeypatch.setattr(real, "ray", fake_ray)
    monkeypatch.setattr(real, "tqdm", suite._Pbar)
    _serve(monkeypatch, suite, module)
    return suite, (module, fake_ray)


def test_samples_generator_drains_its_buffer(generator_suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as theirs:
        generator_suite[0].test_terminal_oversampling_buffer_is_drained_before_next_episode(theirs)


def test_samples_generator_keeps_filtered_rollouts(generator_suite: Any) -> None:
    suite, served = generator_suite
    suite.test_dynamic_filtering_preserves_terminal_accepted_rollouts(served)


# --- trainer


@pytest.fixture
def trainer_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    import openrlhf.trainer.ppo_trainer as real

    from rhyme_openrlhf.training import engines as our_engines
    from rhyme_openrlhf.training import trainer as our_trainer
    from rhyme_openrlhf.training.samples_generator import GeneratorState
    from rhyme_openrlhf.training.trainer import RhymePPOTrainer

    class Ours(RhymePPOTrainer):
        services = silent_services()
        vllm_engines: list[Any] = []
        _weights = None
        kl_ctl = SimpleNamespace(value=0.1)
        # tests/training/test_checkpoint.py tests ours; here upstream's saving inside of it.
        _checkpoints = SimpleNamespace(step_completed=lambda *_: None, saving=lambda tag: nullcontext())
        # A run without a step fails with us (tests/training/test_trainer.py), and is well with upstream.
        finish_training = staticmethod(lambda: None)
        # Upstream's tests have a samples generator of their own.
        source = SimpleNamespace(state_after=lambda states: GeneratorState(0))

    fake_ray = MagicMock()
    fake_ray.get.side_effect = lambda value, **_: value
    monkeypatch.setattr(real, "ray", fake_ray)
    monkeypatch.setattr(our_trainer, "ray", fake_ray)
    monkeypatch.setattr(our_engines, "ray", fake_ray)
    monkeypatch.setattr(real, "tqdm", load_suite("test_ppo_trainer")._Pbar)
    module = types.ModuleType("served")
    module.__dict__.update(vars(real) | {"PPOTrainer": Ours, "BasePPOTrainer": Ours})
    return module


def trainer_tests() -> list[Any]:
    suite = load_suite("test_ppo_trainer")
    cases: list[Any] = []
    for name, function in vars(suite).items():
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        rows = marks[0].args[1] if marks else [()]
        names = marks[0].args[0].split(",") if marks else []
        for number, row in enumerate(rows):
            cases.append(pytest.param(function, dict(zip(names, row, strict=True)), id=f"{name}-{number}"))
    return cases


@pytest.mark.parametrize(("function", "values"), trainer_tests())
def test_trainer(
    function: Callable[..., None],
    values: dict[str, Any],
    trainer_module: types.ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import inspect

    # Ours has its generator bring the tokenizer to the engines.
    monkeypatch.setattr(function.__globals__["_Generator"], "prepare", lambda self: None, raising=False)  # type: ignore[attr-defined]
    wanted = inspect.signature(function).parameters
    available = {"ppo_module": trainer_module, "tmp_path": tmp_path} | values
    function(**{name: available[name] for name in wanted})


# --- what we leave as it is must work in this environment


@pytest.mark.usefixtures("starts_python")
def test_upstreams_files_pass_as_they_are() -> None:
    files = [str(SUITE / f"test_{name}.py") for name in ("agent", "samples_generator", "ppo_trainer", "experience")]
    # In one process: each would import OpenRLHF again.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(SUITE.parent), *files],
        cwd=SUITE.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]
