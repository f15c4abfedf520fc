"""Shared by all tests: OpenRLHF must be importable without a GPU; the project's wheel; a service's settings."""

import fcntl
import functools
import gc
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import without_training_stack
from tests.chromium import browser_page, chromium  # noqa: F401 (fixtures, for every folder the same browser)
from tests.side_by_side import pytest_collection_finish, pytest_xdist_make_scheduler, unmixed  # noqa: F401 (hooks)
from tests.starts import (  # noqa: F401 (fixtures and a hook)
    GUARD,
    mark,
    pytest_runtest_protocol,
    starts_browser,
    starts_cluster,
    starts_e2e,
    starts_engine,
    starts_listener,
    starts_postgresql,
    starts_python,
    starts_ray,
    starts_service,
)

if TYPE_CHECKING:
    from rhyme_openrlhf.api.settings import ServeSettings

GUARD.install()

# DeepSpeed names itself as a source of random numbers that pytest-randomly should seed. That would import it, torch and
# Transformers into each process, in 5 s, and no test draws from it.
if importlib.util.find_spec("pytest_randomly"):
    import pytest_randomly

    pytest_randomly.entrypoint_reseeds = []

# What is imported and collected stays: a quarter of that time went into searching it for garbage.
gc.disable()

# No test asserts time: a machine that does other work too takes longer for an example.
hypothesis.settings.register_profile("any-machine", deadline=None)
hypothesis.settings.load_profile("any-machine")
# As many examples as tests/examples.py says; chosen by `--hypothesis-profile=quick`.
hypothesis.settings.register_profile("quick", deadline=None)
# Of a test that is to fail, the smallest example is of no use (scripts/mutants.py).
phases = [phase for phase in hypothesis.Phase if phase not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)]
hypothesis.settings.register_profile("fails", deadline=None, phases=phases)

# The pure parts are tested without torch too, and without the seconds that importing torch takes. Where there is a GPU,
# the stand-ins refuse to work instead.
if importlib.util.find_spec("torch"):
    from rhyme_openrlhf.platform import shims

    shims.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-training-stack", action="store_true", help="skip what imports torch or vLLM")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("without_training_stack"):
        without_training_stack.install()


# Tests below these folders need nothing but the server extra, unless they start more.
SERVER_FOLDERS = ("api", "webui")
MORE_THAN_THE_SERVER = ("engine", "ray", "e2e")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what tests start, and what `scripts/test.sh --server` runs; keep the order of what must not be mixed."""
    before = list(items)
    for item in items:
        mark(item)
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in SERVER_FOLDERS and not any(map(item.get_closest_marker, MORE_THAN_THE_SERVER)):
            item.add_marker("server")
    yield
    items[:] = unmixed(items, before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Search for garbage again, in what tests make and not in everything that was imported."""
    gc.freeze()
    gc.enable()


@functools.cache
def one_thread(torch: ModuleType) -> None:
    """Give torch one thread: beside another pytest process, engines and Ray, more threads wait for each other."""
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if torch := sys.modules.get("torch"):
        one_thread(torch)


def pytest_sessionfinish() -> None:
    """Have Python go through nothing at its end that tests have left, which takes seconds.

    Libraries of the training stack print a page of complaints if Python finds something of theirs only then.
    """
    if "torch" in sys.modules:
        gc.unfreeze()
    else:
        gc.disable()
        gc.freeze()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, starts_python: None) -> Path:  # noqa: F811 (the fixture)
    """The project's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    # It is built in the source tree, where the pytest process beside this one may be building it too.
    with (root / "pyproject.toml").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        done = subprocess.run([*command, str(root)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., "ServeSettings"]:
    """A service's settings, with limits that no test meets by chance."""
    # Not every environment has what the service needs.
    from rhyme_openrlhf.api.settings import ServeSettings
    from tests.stores import prepare

    def make(**more: Any) -> ServeSettings:
        values: dict[str, Any] = {
            "data_dir": str(tmp_path / "data"),
            "roots": str(tmp_path / "runs"),
            "requests_per_second": 100_000.0,
            "request_burst": 100_000,
            "sign_ins_per_minute": 100_000.0,
            "live_poll_s": 0.05,
        }
        settings = ServeSettings(**{**values, **more})
        prepare(settings)
        return settings

    return make
