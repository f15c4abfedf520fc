"""Check of `rhyme verify`: what `rhyme doctor` looks at. Imports nothing heavy."""

from __future__ import annotations

import dataclasses

from rhyme_openrlhf.cli.doctor_checks import BLOCKING, LOW, run_checks, verdicts
from rhyme_openrlhf.cli.doctor_facts import Facts
from rhyme_openrlhf.verify.outcome import Outcome

WHAT = "what rhyme doctor checks"


def use(facts: Facts) -> str:
    """Return the doctor's name of the use that `rhyme verify` needs here."""
    return "training on GPUs" if facts.has_gpu else "embedded demo"


def lack(facts: Facts) -> str:
    """Return why no engine will start here; "" when one will."""
    (verdict,) = [verdict for verdict in verdicts(facts, run_checks(facts)) if verdict.use == use(facts)]
    return "" if verdict.runs else verdict.reason


def check(facts: Facts) -> Outcome:
    """Failed where a run is certain to fail; what is merely low is said."""
    checks = run_checks(facts)
    bad = [check for check in checks if check.state in (*BLOCKING, LOW)]
    lines = [f"{len(checks)} components looked at, {len(bad)} of them not as wanted"]
    lines += [f"{c.component}: {c.found}, wanted {c.wanted}{f'; run: {c.mend}' if c.mend else ''}" for c in bad]
    reason = lack(facts)
    figures = {"components": [dataclasses.asdict(check) for check in checks]}
    return Outcome(WHAT, "failed" if reason else "ok", f"{reason}; see rhyme doctor" if reason else "", lines, figures)
