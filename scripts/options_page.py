"""Write docs/options.md and docs/serve-options.md: every option of ours, and what OpenRLHF's own do here.

`python scripts/options_page.py` prints the pages; `--write` writes them. A test compares them with the settings.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from rhyme_openrlhf.api.launch.actions import LaunchSettings
from rhyme_openrlhf.api.settings import OpenIdSettings, ServeSettings
from rhyme_openrlhf.settings.config import SETTINGS_CLASSES
from rhyme_openrlhf.settings.options import OPTION, Option, Settings, shown_number
from rhyme_openrlhf.settings.upstream_flags import UPSTREAM_FLAGS

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Options

Every option of `rhyme train` that OpenRLHF does not have. OpenRLHF's own options keep their names and defaults;
[a table](#openrlhfs-options) says where one is refused or differs. `rhyme train --help` prints both. A value outside of
its range is refused with one sentence.

Options marked *expert* are left out of `--help`; `--help-all` shows them. This page is generated
(`scripts/options_page.py`).
"""
SERVE_HEAD = """# Options of rhyme serve

Every option of the control plane's service. [Deploy](operate/deploy.md) says which ones a server needs. A value
outside of its range is refused with one sentence. This page is generated (`scripts/options_page.py`).

| without a point | meaning |
|---|---|
| `--local` (default) | start Ray on this machine |
| `--no-local` | without a cluster: show runs, and start none |
| `--ray-address` | dashboard of a Ray cluster to start runs on; needs `--launch.control_url` and `--launch.dir` |
| `--ray-token-file` | file with that cluster's token, if it wants one |
| `--demo` | show recorded runs; starts nothing and leaves nothing behind |
| `--new-link` | print another sign-in link for the service of the data directory or the database |
"""
SERVE_CLASSES = (ServeSettings, LaunchSettings, OpenIdSettings)
THEIRS = """## OpenRLHF's options

What each flag of OpenRLHF's command does here. Flags are not abbreviated, and a number outside of its range is refused.

| option | here | when, or how |
|---|---|---|"""


def row(group: type[Settings], field: dataclasses.Field) -> str:
    """Return one option's line of the table."""
    rule: Option = field.metadata[OPTION]
    flag = f"`{group.flag(field.name)}`" + (" *expert*" if rule.expert else "")
    if isinstance(field.default, bool):
        default, allowed = ("on" if field.default else "off"), f"`--no-{group.group}.{field.name}` switches it off"
    else:
        default = shown_number(field.default) if isinstance(field.default, float) else str(field.default) or "none"
        allowed = rule.allowed().replace("|", "or")
    return f"| {flag} | {default} | {allowed} | {rule.help} |"


def upstream_row(flag: str) -> str:
    """Return the line of one of OpenRLHF's options."""
    judged = UPSTREAM_FLAGS[flag]
    more = f" ([more]({judged.page}))" if judged.page else ""
    return f"| `{flag}` | {judged.verdict} | {judged.sentence}{more} |"


def tables(groups: Iterable[type[Settings]]) -> list[str]:
    """Return the lines of the groups' tables."""
    lines = []
    for group in groups:
        rows = [row(group, field) for field in dataclasses.fields(group)]
        head = [f"## {group.group}", "", group.title, ""]
        lines += [*head, "| option | default | allowed | meaning |", "|---|---|---|---|", *rows, ""]
    return lines


def options() -> str:
    """Return the page of the options of `rhyme train`."""
    return "\n".join([HEAD, *tables(SETTINGS_CLASSES), THEIRS, *map(upstream_row, sorted(UPSTREAM_FLAGS)), ""])


def serve_options() -> str:
    """Return the page of the options of `rhyme serve`."""
    return "\n".join([SERVE_HEAD, *tables(SERVE_CLASSES)])


PAGES = {"options.md": options, "serve-options.md": serve_options}


def main() -> None:
    """Write the pages, or print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages instead of printing them")
    write = parser.parse_args().write
    for name, page in PAGES.items():
        if write:
            (DOCS / name).write_text(page())
        else:
            print(page())


if __name__ == "__main__":
    main()
