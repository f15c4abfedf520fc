"""Files, flags, commands and links that the documentation names exist; its site loads nothing from elsewhere."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rhyme_openrlhf.api.launch.actions import LaunchSettings
from rhyme_openrlhf.api.settings import OpenIdSettings, ServeSettings
from rhyme_openrlhf.cli.main import COMMANDS
from rhyme_openrlhf.settings.config import SETTINGS_CLASSES
from rhyme_openrlhf.settings.upstream_flags import UPSTREAM_FLAGS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
)
# A path of this repository, as text names it; one of the package may leave its first folder out.
PATH = re.compile(
    r"`((?:[\w.-]+/)+[\w.-]*\.(?:py|sh|md|yml|yaml|sbatch|cpp|h|json|toml|jsonl|html|js|css|Dockerfile))`"
)
FLAG = re.compile(r"(?<![\w-])--(?:no-)?([a-z_]+\.[a-z0-9_.]+[a-z0-9_])")
# Files that a command of the page makes, or that stand in another repository.
ELSEWHERE = (
    "openrlhf/", "trainer/", "v1/", "vllm/", "config/", "device_allocator/", "models/", "data/", "logs/", "_private/",
    "utils/",
)  # fmt: skip
TOP = ("", "rhyme_openrlhf/", "rhyme_openrlhf/webui/", "webui/", "webui/static/", "webui/figures/", "docs/")


def known_flags() -> set[str]:
    """Return the names of all flags with a point: ours, the service's, and OpenRLHF's."""
    ours = [*SETTINGS_CLASSES, ServeSettings, LaunchSettings, OpenIdSettings]
    names = {f"{group.group}.{field.name}" for group in ours for field in dataclasses.fields(group)}
    return names | {flag.removeprefix("--") for flag in UPSTREAM_FLAGS}


# Pages that scripts write, for the most part, and the changes of all versions.
GENERATED = ("docs/options.md", "docs/serve-options.md", "docs/events.md", "docs/http-addresses.md", "docs/papers.md")
MOST_LINES = 150


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_that_people_write_can_be_read_at_once(page: Path) -> None:
    lines = len(page.read_text().splitlines())
    assert lines <= MOST_LINES or page_id(page) in GENERATED, "give a part of it a page of its own"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {name for name in PATH.findall(page.read_text()) if not name.startswith(ELSEWHERE)}
    assert sorted(name for name in named if not any((ROOT / top / name).exists() for top in TOP)) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_flags_that_a_page_names_exist(page: Path) -> None:
    assert sorted(set(FLAG.findall(page.read_text())) - known_flags()) == []


def commands(text: str) -> list[str]:
    """Return the `rhyme` commands of a page's shell blocks, continued lines joined."""
    blocks = re.findall(r"^```(?:bash|sh|)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"(\S+=\S+ )*(\.venv/bin/)?rhyme ", line)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_a_page_exist(page: Path) -> None:
    for line in commands(page.read_text()):
        words = shlex.split(re.sub(r"[<>\[\]|]", " ", line), comments=True)
        after = next(number for number, word in enumerate(words) if word.endswith("rhyme")) + 1
        assert words[after] in COMMANDS or words[after] in ("--help", "--version", "COMMAND"), line


def test_flags_of_commands_are_in_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags with a point are OpenRLHF's, the service's and ours; the others belong to one command each."""
    named: dict[tuple[str, ...], set[str]] = {}
    for page in PAGES:
        for line in commands(page.read_text()):
            # What follows "--" is the command of a run that is started.
            words = shlex.split(re.sub(r"<[^>]*>", "X", line).partition(" -- ")[0], comments=True)
            after = next(number for number, word in enumerate(words) if word.endswith("rhyme")) + 1
            depth = {("runs", "views"): 3}.get(
                tuple(words[after : after + 2]), 2 if words[after] in ("runs", "history") else 1
            )
            command = tuple(words[after : after + depth])
            flags = {word.partition("=")[0] for word in words[after:] if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
            named.setdefault(command, set()).update(flags - {"--help"})
    assert {("simulate",), ("profile",), ("runs", "export")} <= set(named)
    for command, flags in named.items():
        if command[0] not in COMMANDS or not flags or command[0] in ("train", "demo"):
            continue
        with pytest.raises(SystemExit):
            raise SystemExit(importlib.import_module(COMMANDS[command[0]].module).main([*command[1:], "--help"]))
        printed = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", capsys.readouterr().out))
        assert sorted(flags - printed) == [], command


def test_the_checks_find_what_is_not_there() -> None:
    assert PATH.findall("`moves/gone.py` and `a.py` and `pipeline/controller.py`") == [
        "moves/gone.py",
        "pipeline/controller.py",
    ]
    assert FLAG.findall("--histospec.gone x --no-histospec.enable, --only") == ["histospec.gone", "histospec.enable"]
    assert "histospec.gone" not in known_flags() and "actor.model_name_or_path" in known_flags()
    assert commands("```bash\nrhyme gone x\nls\n```\n") == ["rhyme gone x"]


class _Loaded(HTMLParser):
    """Addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag loads; links that a reader follows are none."""
        values = dict(attrs)
        loads = tag in ("script", "img", "source", "iframe") or (tag == "link" and values.get("rel") != "canonical")
        self.addresses += [str(values[name]) for name in ("src", "href", "srcset") if loads and values.get(name)]


@pytest.mark.usefixtures("starts_python")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= 20
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text())
        # The theme's script queries the host of the repository for such an element.
        assert 'data-md-component="source"' not in page.read_text(), page
        assert [one for one in loaded.addresses if one.startswith(("http://", "https://", "//"))] == [], page
        # The page for unknown addresses names files from the site's root.
        folder = tmp_path if page.name == "404.html" else page.parent
        files = [folder / one.partition("?")[0].lstrip("/") for one in loaded.addresses]
        assert [file for file in files if not file.exists()] == [], page


@pytest.mark.parametrize("name", ["options.md", "serve-options.md"])
def test_a_page_of_options_is_what_the_settings_say(name: str) -> None:
    spec = importlib.util.spec_from_file_location("options_page", ROOT / "scripts" / "options_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGES[name]()
    assert (ROOT / "docs" / name).read_text() == page, "python scripts/options_page.py --write"
    assert re.findall(r"\de[+-]\d\d", page) == [], "a person writes no exponents"


def test_nothing_says_to_install_a_package_that_is_not_published() -> None:
    """The package is installed from a clone: `pip install -e ".[server]"`."""
    said = [*PAGES, *(ROOT / "rhyme_openrlhf").rglob("*.py"), *(ROOT / "scripts").glob("*")]
    wanted = re.compile(r"pip install [^\n]*rhyme-openrlhf\b")
    assert [page_id(path) for path in said if path.is_file() and wanted.search(path.read_text())] == []
