"""Print the test files that a change needs, one a line, and why on stderr.

    python scripts/changed_tests.py [BASE]

The change is everything since BASE (main): commits, uncommitted changes and new files.

- A changed Python file needs the test files that import it, directly or through other files, deferred imports included.
- A text that is a module's name or a file's name counts as an import, because such texts start commands.
- All tests below a conftest.py's folder import it. A fixture's imports count for the tests that name the fixture.
- A file that no test reaches this way (templates, data, migrations, other languages) needs the tests of the folder of
  `tests` that is named like one of its folders. It also needs those that name the file's folder in a text.
- A file that says how tests run (EVERYTHING), or that fits no rule, needs all tests.
- A page of documentation that fits no rule needs none.
"""

from __future__ import annotations

import argparse
import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
EVERYTHING = {"pyproject.toml", "requirements", ".ci", "tests/conftest.py", "tests/starts.py", "tests/side_by_side.py"}
EVERYTHING |= {"scripts/setup_cpu.sh", "scripts/test.sh"}
# Top-level folders that are parts of the package, by links.
LINKED = ("api", "webui", "migrations")
PACKAGE = "rhyme_openrlhf"
DOCUMENTATION = (".md", "LICENSE")
# Reasons are printed for up to this many files.
FEW = 12


@dataclass
class Wants:
    """References of a file or of a fixture: modules it imports, texts, and the names of its parameters."""

    modules: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def module_of(path: str) -> str:
    """Return the dotted name of a Python file; of a package that of its folder."""
    parts = list(PurePosixPath(path).with_suffix("").parts)
    if parts[0] in LINKED:
        parts.insert(0, PACKAGE)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def read(path: str, source: str) -> dict[str, Wants]:
    """Return what a Python file wants under "", and what each fixture of a conftest.py wants under its name."""
    tree = ast.parse(source)
    package = module_of(path) if path.endswith("__init__.py") else module_of(path).rpartition(".")[0]
    fixtures = {
        node.name: node
        for node in tree.body
        if path.endswith("conftest.py") and isinstance(node, ast.FunctionDef) and is_fixture(node)
    }
    found = {name: collect([node], package) for name, node in fixtures.items()}
    found[""] = collect([node for node in tree.body if node not in fixtures.values()], package)
    if path in EVERYTHING:
        # Names of what tests may start, not of what they do start.
        found[""].texts.clear()
    return found


def is_fixture(function: ast.FunctionDef) -> bool:
    """Return whether a function is a fixture that a test must name, not one that pytest uses for every test."""
    texts = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any("fixture" in text for text in texts) and not any("autouse" in text for text in texts)


def collect(nodes: Iterable[ast.AST], package: str) -> Wants:
    """Return what these nodes want; relative imports are of `package`."""
    found = Wants()
    for node in (one for top in nodes for one in ast.walk(top)):
        match node:
            case ast.Import():
                found.modules.update(alias.name for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, *([node.module] if node.module else [])])
                # A name may be a module of its own.
                found.modules.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
            case ast.Constant(value=str(text)):
                found.texts.add(text)
            case ast.arg():
                found.names.add(node.arg)
    return found


def graph(sources: Mapping[str, str], files: Iterable[str]) -> dict[str, set[str]]:
    """Return the files that each Python file of `sources` uses directly; `files` are all files that can be named."""
    by_module = {module_of(path): path for path in sources}
    by_module |= {PurePosixPath(path).stem: path for path in sources if path.startswith("tests/")} | by_module
    by_name: dict[str, set[str]] = defaultdict(set)
    for path in files:
        by_name[PurePosixPath(path).name].add(path)
    parts = {path: read(path, source) for path, source in sources.items()}

    def of(wants: Wants) -> set[str]:
        used = set()
        for module in wants.modules | {text for text in wants.texts if "." in text}:
            # Importing a module runs the packages around it first.
            steps = module.split(".")
            used |= {by_module[name] for n in range(len(steps)) if (name := ".".join(steps[: n + 1])) in by_module}
        for text in wants.texts:
            used |= by_name.get(text.rpartition("/")[2], set()) if "." in text else set()
        return used

    uses = {path: of(found[""]) for path, found in parts.items()}
    for path in sources:
        if not path.startswith("tests/"):
            continue
        above = [str(folder / "conftest.py") for folder in PurePosixPath(path).parents]
        above = [one for one in above if one in parts and one != path]
        uses[path].update(above)
    for path in [path for path in sources if is_test(path)]:
        # Fixtures by name: of the file, of the conftest.py around it, and of fixtures that those name.
        around = [one for one in uses[path] | {path} if one == path or one.endswith("conftest.py")]
        around = [one for one in around if PurePosixPath(one).parent in PurePosixPath(path).parents]
        named = set.union(*(parts[one][""].names | parts[one][""].texts for one in around))
        fixtures = {name: found for one in around for name, found in parts[one].items() if name}
        seen: set[str] = set()
        while new := (named & set(fixtures)) - seen:
            seen |= new
            for name in new:
                named |= fixtures[name].names | fixtures[name].texts
        for name in seen:
            uses[path] |= of(fixtures[name])
    return {path: found - {path} for path, found in uses.items()}


def is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).name.startswith("test_") and path.endswith(".py")


def needed(changed: Iterable[str], sources: Mapping[str, str], files: Iterable[str]) -> dict[str, str]:
    """Return the test files that these changes need, each with the reason.

    `sources` are the texts of all Python files by path from the root; `files` are all files.
    """
    changed = sorted(changed)
    uses = graph(sources, {*files, *changed})
    users: dict[str, set[str]] = defaultdict(set)
    for path, used in uses.items():
        for one in used:
            users[one].add(path)
    tests = sorted(path for path in sources if is_test(path))
    found: dict[str, str] = {}
    for path in changed:
        if path in EVERYTHING or path.partition("/")[0] in EVERYTHING:
            return dict.fromkeys(tests, f"{path} says how tests run")
        reached = reach(path, users)
        chosen = {one: why for one, why in reached.items() if is_test(one) and one in sources}
        if not chosen:
            parts = PurePosixPath(path).parts[:-1]
            folders = set(parts) - {"tests", PACKAGE} | ({"api"} if "migrations" in parts else set())
            for one in tests:
                if folders.intersection(PurePosixPath(one).parts[1:-1]):
                    chosen[one] = f"{path} is of its folder"
                elif parts and parts[-1] in collect([ast.parse(sources[one])], "").texts:
                    chosen[one] = f"it names the folder of {path}"
            if not chosen and not path.endswith(DOCUMENTATION):
                chosen = dict.fromkeys(tests, f"{path} fits no rule")
        found = {**chosen, **found}
    return dict(sorted(found.items()))


def reach(changed: str, users: Mapping[str, set[str]]) -> dict[str, str]:
    """Return all files that use `changed`, directly or not, each with the way from it; the shortest first."""
    found = {changed: changed}
    turn = [changed]
    while turn:
        following = []
        for path in turn:
            for user in sorted(users.get(path, ())):
                if user not in found:
                    found[user] = f"{found[path]} <- {user}"
                    following.append(user)
        turn = following
    return found


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments, "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [one for one in done.stdout.split("\0") if one]


def main(argv: list[str]) -> int:
    """Print the test files; 2 when BASE is not known to git."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", nargs="?", default="main", help="what the change is compared with (default: main)")
    base = parser.parse_args(argv).base
    try:
        new = git("ls-files", "--others", "--exclude-standard")
        changed = {*git("diff", "--name-only", "--merge-base", base), *new}
    except subprocess.CalledProcessError as error:
        print(f"changed_tests: git knows no {base!r}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    files = {path for path in {*git("ls-files"), *new} if (ROOT / path).is_file() and not (ROOT / path).is_symlink()}
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in files if path.endswith(".py")}
    found = needed(changed, sources, files)
    total = sum(map(is_test, sources))
    print(f"changed_tests: {len(changed)} changed files need {len(found)} of {total} test files", file=sys.stderr)
    if len(found) <= FEW:
        for path, why in found.items():
            print(f"changed_tests: {path}: {why}", file=sys.stderr)
    print(*found, sep="\n", end="\n" if found else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
