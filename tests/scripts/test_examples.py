"""Every flag in `examples/*.sh` exists, in OpenRLHF's parser or in our settings, and the scripts are well-formed."""

import ast
import dataclasses
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from rhyme_openrlhf.settings.config import SETTINGS_CLASSES

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.sh"))

# All of OpenRLHF's flags and of ours have a dot, other programs' (ray's --address) have none.
FLAG = re.compile(r"(?<![\w-])--[a-z_]+\.[a-z0-9_.]*[a-z0-9]")

# OpenRLHF adds the optimizer's flags in a loop over these.
PREFIXES = ("actor", "critic")


def upstream_flags() -> set[str]:
    """Read from the source of OpenRLHF's command: its parser is built in a block that also starts training."""
    spec = importlib.util.find_spec("openrlhf") if importlib.util.find_spec("openrlhf") else None
    if spec is None or spec.origin is None:
        pytest.skip("openrlhf is not installed")
    source = (Path(spec.origin).parent / "cli" / "train_ppo_ray.py").read_text()
    flags: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            flags |= {_text(node.args[0], prefix) for prefix in PREFIXES}
    return flags


def _text(node: ast.expr, prefix: str) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else prefix for part in node.values)
    assert isinstance(node, ast.Constant)
    return node.value


def our_flags() -> set[str]:
    flags = set()
    for settings in SETTINGS_CLASSES:
        for field in dataclasses.fields(settings):
            flags.add(settings.flag(field.name))
            if isinstance(field.default, bool):
                flags.add(settings.flag(field.name).replace("--", "--no-", 1))
    return flags


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_flag_exists(example: Path) -> None:
    """In comments, too."""
    used = set(FLAG.findall(example.read_text()))
    assert len(used) > 20 and not used - upstream_flags() - our_flags()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_it_is_a_shell_script_that_says_it_was_not_run(example: Path) -> None:
    assert example.stat().st_mode & 0o100, f"{example} is not executable"
    subprocess.run(["bash", "-n", example], check=True)
    shebang, marked, *_ = example.read_text().splitlines()
    assert shebang == "#!/usr/bin/env bash"
    assert marked.startswith("# NOT RUN on GPUs by us yet")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_missing_variable_is_named(example: Path) -> None:
    done = subprocess.run(["bash", example], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode != 0
    assert re.search(r"set (DATA|REWARD|REWARD_MODEL) to", done.stderr)
