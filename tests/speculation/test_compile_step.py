"""No decode step compiles anything: asked in a process of its own, where nothing was compiled for another test."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Prints what was compiled when drafter and planner were made, by function, and what real steps compiled beside it.
STEPS = """
import enum, importlib, json, pkgutil, sys
import numpy as np
import rhyme_openrlhf.history, rhyme_openrlhf.speculation
from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.speculation.drafter import SOURCE_NAMES, HistoryDrafter, Verified
from rhyme_openrlhf.speculation.planner import DraftPlanner

class Status(enum.IntEnum):
    RUNNING = 1

class Request:
    def __init__(self, name, text):
        self.request_id, self._all_token_ids = name, text
        self.status, self.is_prefill_chunk, self.spec_token_ids = Status.RUNNING, False, []

def compiled():
    found = {}
    for package in (rhyme_openrlhf.history, rhyme_openrlhf.speculation):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if hasattr(value, "signatures") and value.__module__ == module.name:
                    found[module.name + "." + name] = [str(one) for one in value.signatures]
    return found

text = [number * number % 97 for number in range(20_000)]
index = build_index([Piece(text[:4], text[4:600], 1.0), Piece(text[:4], text[8:900], 0.0)])
drafter = HistoryDrafter(HistoSpecSettings())
if sys.argv[1] == "planned":
    points = tuple(StepPoint(b, 100, n, 0.01, 0.0, 9) for b in (1, 8) for n in (0, 64))
    profile = Profile(Subject("m", "h", "d", 1), "measured", points)
    drafter.plan_with(DraftPlanner(Predictor(StepModel(profile)), len(SOURCE_NAMES)))
made = compiled()
drafter.install("prompt", index)
requests = [Request(f"sample {number}", text[: 8 + number]) for number in range(3)]
for request in requests:
    drafter.start(request.request_id, "prompt", 4, 30_000, None, request)
names = [request.request_id for request in requests]
drafted = 0
for size in (9, 20, 600, 1500, 6000, 19_000):
    for request in requests:
        request._all_token_ids[:] = text[: size + len(request.request_id)]
    assert drafter.find_decoding(names, Status.RUNNING) == len(names)
    drafter.draft_decoding(1000)
    lengths = [len(request.spec_token_ids) for request in requests]
    drafted += sum(lengths)
    if all(lengths):
        drafter.verified(Verified(names, lengths, [1] * len(names)))
drafter.draft(names, [request._all_token_ids for request in requests], 1000, 1000)
for name in names:
    drafter.finish(name)
later = {name: signatures for name, signatures in compiled().items() if signatures != made.get(name)}
print(json.dumps({"made": made, "drafted": drafted, "later": later}))
"""


@pytest.mark.parametrize("rules", ["fixed", "planned"])
def test_no_step_compiles_anything(rules: str) -> None:
    done = subprocess.run([sys.executable, "-c", STEPS, rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["drafted"]
    assert found["later"] == {}
    of_a_step = ("decoding.find_decoding", "decoding.give_drafts", "step_parts.append_and_draft", "step_parts.gather")
    assert all(found["made"][f"rhyme_openrlhf.speculation.{name}"] for name in of_a_step)
