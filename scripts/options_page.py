"""Write docs/options.md: every option of ours, from the settings that the command line derives from too.

`python scripts/options_page.py` prints the page; `--write` writes it. A test compares the page with the settings.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rhyme_openrlhf.settings.config import SETTINGS_CLASSES
from rhyme_openrlhf.settings.options import OPTION, Option, Settings

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options

Every option of `rhyme train` that OpenRLHF does not have. OpenRLHF's own options keep their names, defaults and
meanings; `rhyme train --help` prints both. A value outside of its range is refused with one sentence.

Options marked *expert* are left out of `--help`; `--help-all` shows them. This page is generated
(`scripts/options_page.py`).
"""


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
