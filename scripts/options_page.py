"""Write docs/options.md: every option of ours, and what OpenRLHF's own do here, from settings/.

`python scripts/options_page.py` prints the page; `--write` writes it. A test compares the page with the settings.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rhyme_openrlhf.settings.config import SETTINGS_CLASSES
from rhyme_openrlhf.settings.options import OPTION, Option, Settings
from rhyme_openrlhf.settings.upstream_flags import UPSTREAM_FLAGS

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options

Every option of `rhyme train` that OpenRLHF does not have. OpenRLHF's own options keep their names and defaults;
[a table](#openrlhfs-options) says where one is refused or differs. `rhyme train --help` prints both. A value outside of
its range is refused with one sentence.

Options marked *expert* are left out of `--help`; `--help-all` shows them. This page is generated
(`scripts/options_page.py`).
"""
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
        default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default) or "none"
        allowed = rule.allowed().replace("|", "or")
    return f"| {flag} | {default} | {allowed} | {rule.help} |"


def upstream_row(flag: str) -> str:
    """Return the line of one of OpenRLHF's options."""
    judged = UPSTREAM_FLAGS[flag]
    more = f" ([more]({judged.page}))" if judged.page else ""
    return f"| `{flag}` | {judged.verdict} | {judged.sentence}{more} |"


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for group in SETTINGS_CLASSES:
        rows = [row(group, field) for field in dataclasses.fields(group)]
        parts += [
            f"## {group.group}",
            "",
            group.title,
            "",
            "| option | default | allowed | meaning |",
            "|---|---|---|---|",
        ]
        parts += [*rows, ""]
    parts += [THEIRS, *map(upstream_row, sorted(UPSTREAM_FLAGS)), ""]
    return "\n".join(parts)


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name} instead of printing it")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
