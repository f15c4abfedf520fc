"""The embedded problems: right answers, consistent slips, the length rules of the shipped files, reproducibility."""

import json
import random
import runpy
from pathlib import Path

import pytest
from embedded_tasks import (
    KINDS,
    STEP_COUNTS,
    Problem,
    draw_problem,
    error_rate,
    make_problem,
)

from rhyme_openrlhf.embedded import DATA

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_embedded_tasks.py"


@pytest.fixture(scope="module")
def sets() -> dict[str, list[Problem]]:
    return runpy.run_path(str(SCRIPT))["problem_sets"]()


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def solved(problem: Problem) -> str:
    """The answer, computed from the prompt alone."""
    if problem.kind == "sort":
        return "".join(sorted(problem.prompt.removesuffix("=")))
    return str(sum(int(character) for character in problem.prompt if character.isdigit()))


@pytest.mark.parametrize("kind", KINDS)
def test_error_free_solutions_reach_the_answer(kind: str) -> None:
    rng = random.Random(1)
    for _ in range(200):
        problem = draw_problem(kind, rng)
        assert problem.solution.rpartition(";")[2] == problem.answer == solved(problem)
        assert problem.solution.count(";") == 1
        assert ";" not in problem.prompt


def test_examples() -> None:
    rng = random.Random(5)
    for kind in KINDS:
        problem = make_problem(kind, 4, rng)
        steps = problem.solution.split(";")[0].split(",")
        assert len(steps) == 4
    chain = make_problem("chain", 2, random.Random(0))
    first, second = chain.solution.split(";")[0].split(",")
    a, b, c = (int(digit) for digit in chain.prompt if digit.isdigit())
    assert (first, second) == (f"b{a}+{b}={a + b}", f"c{a + b}+{c}={a + b + c}")


def test_path_solution_follows_the_links() -> None:
    problem = make_problem("path", 20, random.Random(2))
    links, _, start = problem.prompt.removesuffix("=").partition(":")
    steps = [step.split("=") for step in problem.solution.split(";")[0].split(",")]
    assert sorted(link for link, _ in steps) == sorted(links.split(","))
    assert steps[0][0][0] == start
    assert all(link[-1] == after[0] for (link, _), (after, _) in zip(steps, steps[1:], strict=False))


def test_errors_leave_the_prompt_and_are_continued() -> None:
    for kind in KINDS:
        clean = make_problem(kind, 10, random.Random(3))
        wrong = make_problem(kind, 10, random.Random(3), errors=1.0)
        assert (wrong.prompt, wrong.answer) == (clean.prompt, clean.answer)
        assert wrong.solution != clean.solution
    wrong = make_problem("chain", 10, random.Random(3), errors=1.0)
    steps = [step.split("=") for step in wrong.solution.split(";")[0].split(",")]
    for (_, result), (after, _) in zip(steps, steps[1:], strict=False):
        assert after[1:].split("+")[0] == result
    assert wrong.solution.rpartition(";")[2] == steps[-1][1]
    wrong = make_problem("sort", 10, random.Random(3), errors=1.0)
    picked = "".join(step[0] for step in wrong.solution.split(";")[0].split(","))
    assert wrong.solution.rpartition(";")[2] == picked != wrong.answer


def test_error_rate_shrinks_with_the_steps() -> None:
    assert error_rate(4) > error_rate(40) > 0
    assert (1 - error_rate(40)) ** 40 == pytest.approx((1 - error_rate(4)) ** 4)


def test_bounds_and_unknown_kinds_are_refused() -> None:
    with pytest.raises(KeyError):
        make_problem("riddle", 4, random.Random(0))
    for kind, counts in STEP_COUNTS.items():
        for steps in (counts.minimum - 1, counts.maximum + 1):
            with pytest.raises(ValueError, match=kind):
                make_problem(kind, steps, random.Random(0))


def test_lengths_are_long_tailed(sets: dict[str, list[Problem]]) -> None:
    for name, problems in sets.items():
        if not name.endswith("_train.jsonl"):
            continue
        lengths = [len(problem.solution) + 1 for problem in problems]  # one token a character, and the end token
        median = percentile(lengths, 0.5)
        assert 60 <= median <= 150, name
        assert percentile(lengths, 0.95) >= 3 * median, name
        assert 300 <= max(lengths) <= 500, name
        assert max(len(problem.prompt) + len(problem.solution) + 1 for problem in problems) <= 1024, name


def test_mixed_sets_hold_every_kind_evenly(sets: dict[str, list[Problem]]) -> None:
    for name in ("mixed_train.jsonl", "mixed_eval.jsonl"):
        kinds = [problem.kind for problem in sets[name]]
        assert {kinds.count(kind) for kind in KINDS} == {len(kinds) // len(KINDS)}
    assert len(sets["mixed_train.jsonl"]) == 48


def test_no_prompt_appears_twice_in_all_files(sets: dict[str, list[Problem]]) -> None:
    prompts = [problem.prompt for problems in sets.values() for problem in problems]
    assert len(prompts) == len(set(prompts))


def test_shipped_files_equal_what_the_script_makes(sets: dict[str, list[Problem]]) -> None:
    assert {path.name for path in DATA.glob("*.jsonl")} == set(sets)
    for name, problems in sets.items():
        expected = "".join(json.dumps(problem.row()) + "\n" for problem in problems)
        assert (DATA / name).read_bytes() == expected.encode(), name
