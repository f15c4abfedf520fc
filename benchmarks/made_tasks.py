"""Response texts of six made-up tasks, for replays of drafts.

This script writes the responses, not a model: a template with random phrases, orders of steps and slips, as a policy
samples them. Each sample of a prompt draws its own phrases. Slips become rarer from epoch to epoch.

    addition    "37+48="  ->  "7+8=15,3+4+1=8;85": two digits, answers of about 20 tokens, a token a character
    reasoning   a word problem  ->  four or five sentences of about 50 tokens, a token a word or digit
    product     "37*8="  ->  "30*8=240,7*8=56,240+56=296;296", a token a character
    code        a function that is asked for  ->  its source of about 60 tokens, a token a word or sign
    sorting     numbers to sort  ->  the list after each insertion, about 100 tokens, a token a digit, word or sign
    journey     a travel with a change  ->  three steps of reasoning of about 60 tokens, a token a word or digit

The rules of drafts were chosen with the first two and the recorded runs in view. Nothing was chosen by the others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

PROMPTS = 64
SAMPLES = 16
EPOCHS = 3
STEPS_PER_EPOCH = 2
# The probability that a step of a response is wrong, in the first epoch; halved in each later one.
FIRST_SLIPS = 0.08

NAMES = ("Tom", "Anna", "Maria", "Ben", "Li", "Omar", "Ines", "Noah", "Eva", "Raj")
THINGS = ("apples", "books", "pens", "coins", "shells", "cards", "stamps", "eggs")
OPENINGS = ("Let us think step by step .", "First , we write down what is known .", "We solve this in small steps .")
STARTS = (
    "{who} starts with {a} {what} .",
    "At first {who} has {a} {what} .",
    "In the beginning there are {a} {what} .",
)
GAINS = (
    "Then {who} buys {b} more , so {a} + {b} = {ab} .",
    "After buying {b} more {what} , {who} has {a} + {b} = {ab} {what} .",
)
LOSSES = (
    "{who} gives {c} to {friend} , so {ab} - {c} = {abc} are left .",
    "Giving {c} {what} away leaves {ab} - {c} = {abc} .",
)
ENDS = (
    "The answer is {abc} .",
    "So {who} has {abc} {what} now . The answer is {abc} .",
    "Therefore the answer is {abc} .",
)


def _slip(value: int, slips: float, rng: random.Random) -> int:
    return value + rng.choice((-2, -1, 1, 2)) if rng.random() < slips else value


def addition(prompt: random.Random, rng: random.Random, slips: float) -> tuple[list[str], list[str], bool]:
    """Return the tokens of a prompt and of a response, and whether the response is right."""
    a, b = prompt.randrange(10, 100), prompt.randrange(10, 100)
    if rng.random() < 0.7:
        low = _slip(a % 10 + b % 10, slips, rng)
        carry = "+1" if low > 9 else ""
        high = _slip(a // 10 + b // 10 + bool(carry), slips, rng)
        said = f"{a % 10}+{b % 10}={low},{a // 10}+{b // 10}{carry}={high};{10 * high + low % 10}"
        result = 10 * high + low % 10
    else:
        tens, ones = _slip(a // 10 + b // 10, slips, rng) * 10, _slip(a % 10 + b % 10, slips, rng)
        result = _slip(tens + ones, slips, rng)
        said = f"{a // 10 * 10}+{b // 10 * 10}={tens},{a % 10}+{b % 10}={ones},{tens}+{ones}={result};{result}"
    return list(f"{a}+{b}="), [*said, "."], result == a + b


def reasoning(prompt: random.Random, rng: random.Random, slips: float) -> tuple[list[str], list[str], bool]:
    """Return the tokens of a prompt and of a response, and whether the response is right."""
    who, friend = prompt.sample(NAMES, 2)
    what, a, b, c = prompt.choice(THINGS), prompt.randrange(20, 90), prompt.randrange(2, 50), prompt.randrange(2, 20)
    asked = f"{who} has {a} {what} . {who} buys {b} more and gives {c} to {friend} . How many {what} has {who} now ?"
    ab = _slip(a + b, slips, rng)
    abc = _slip(ab - c, slips, rng)
    parts = [rng.choice(choices) for choices in (OPENINGS, STARTS, GAINS, LOSSES, ENDS)]
    if rng.random() < 0.3:
        del parts[0]
    values = {"who": who, "friend": friend, "what": what, "a": a, "b": b, "c": c, "ab": ab, "abc": abc}
    said = " ".join(parts).format(**values)
    return _words(asked), [*_words(said), "<end>"], abc == a + b - c


def product(prompt: random.Random, rng: random.Random, slips: float) -> tuple[list[str], list[str], bool]:
    """Return the tokens of a prompt and of a response, and whether the response is right."""
    a, b = prompt.randrange(12, 100), prompt.randrange(3, 10)
    tens, ones = _slip(a // 10 * b, slips, rng) * 10, _slip(a % 10 * b, slips, rng)
    result = _slip(tens + ones, slips, rng)
    parts = [f"{a // 10 * 10}*{b}={tens}", f"{a % 10}*{b}={ones}"]
    if rng.random() < 0.4:
        parts.reverse()
    said = ",".join([*parts, f"{tens}+{ones}={result}"]) + f";{result}."
    return list(f"{a}*{b}="), list(said), result == a * b


VERBS = ("sum", "product", "count", "largest", "smallest", "mean")
NOUNS = ("prices", "lengths", "scores", "ages", "weights", "times")


def code(prompt: random.Random, rng: random.Random, slips: float) -> tuple[list[str], list[str], bool]:
    """Return the tokens of a prompt and of a response, and whether the response is right."""
    verb, noun, least = prompt.choice(VERBS), prompt.choice(NOUNS), prompt.randrange(2, 60)
    name, item = rng.choice((f"{verb}_of", "solve", f"{verb}")), rng.choice(("value", "item", noun[:-1]))
    bound = _slip(least, slips, rng)
    doc = rng.choice(
        (f"Return the {verb} of {noun} above {least} .", f"The {verb} of all {noun} greater than {least} .")
    )
    test = rng.choice((f"if {item} > {bound} :", f"if not {item} <= {bound} :"))
    body = {"sum": f"total += {item}", "product": f"total *= {item}", "count": "total += 1"}.get(
        verb, f"total = {'min' if verb == 'smallest' else 'max'} ( total , {item} )"
    )
    loop = f"total = {'1' if verb == 'product' else '0'} <nl> for {item} in {noun} : <nl> {test} <nl> {body} <nl>"
    said = f"def {name} ( {noun} ) : <nl> {doc if rng.random() < 0.7 else ''} <nl> {loop} return total <end>"
    return _words(f"Write a function for the {verb} of all {noun} above {least} ."), _words(said), bound == least


def sorting(prompt: random.Random, rng: random.Random, slips: float) -> tuple[list[str], list[str], bool]:
    """Return the tokens of a prompt and of a response, and whether the response is right."""
    numbers = [prompt.randrange(10, 100) for _ in range(prompt.randrange(4, 7))]
    said = [rng.choice(("Sort by insertion .", "I insert one number after the other .", "Start with an empty list ."))]
    so_far: list[int] = []
    for number in numbers:
        so_far = sorted([*so_far, number if rng.random() >= slips else number + 1])
        listed = " , ".join(map(str, so_far))
        said.append(rng.choice((f"Insert {number} : {listed} .", f"Now {number} gives {listed} .")))
    said.append(f"Result : {' , '.join(map(str, so_far))} <end>")
    return _words("Sort " + " ".join(map(str, numbers))), _words(" ".join(said)), so_far == sorted(numbers)


CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Quito", "Delhi", "Tunis", "Paris")


def journey(prompt: random.Random, rng: random.Random, slips: float) -> tuple[list[str], list[str], bool]:
    """Return the tokens of a prompt and of a response, and whether the response is right."""
    a, b, c = prompt.sample(CITIES, 3)
    first, second, wait = prompt.randrange(2, 9), prompt.randrange(2, 9), prompt.randrange(1, 4)
    start = prompt.randrange(0, 12)
    there = _slip(start + first, slips, rng)
    goes = _slip(there + wait, slips, rng)
    ends = _slip(goes + second, slips, rng)
    starts = (
        f"The train leaves {a} at {start} and needs {first} hours , so it reaches {b} at {there} .",
        f"From {a} to {b} takes {first} hours : {start} + {first} = {there} .",
        f"Leaving at {start} , we are in {b} at {there} .",
    )
    waits = (
        f"We wait {wait} hours in {b} until {goes} .",
        f"The next train goes at {there} + {wait} = {goes} .",
    )
    arrivals = (
        f"To {c} it takes {second} hours more , so we arrive at {ends} .",
        f"{goes} + {second} = {ends} , the arrival in {c} .",
    )
    answers = (f"Answer : {ends}", f"We arrive in {c} at {ends} . Answer : {ends}")
    said = [rng.choice(choices) for choices in (starts, waits, arrivals, answers)]
    asked = (
        f"A train leaves {a} at {start} . It needs {first} hours to {b} , waits {wait} hours "
        f"and needs {second} hours to {c} . When does it arrive ?"
    )
    return _words(asked), _words(" ".join(said) + " <end>"), ends == start + first + wait + second


def _words(text: str) -> list[str]:
    return re.findall(r"\d|[^\d\s]+", text)


TASKS: dict[str, Callable[[random.Random, random.Random, float], tuple[list[str], list[str], bool]]] = {
    "addition": addition,
    "reasoning": reasoning,
    "product": product,
    "code": code,
    "sorting": sorting,
    "journey": journey,
}


def made(task: str, seed: int = 1) -> list[list[Record]]:
    """Return the records of each training step of a made run, in order."""
    rng, make, numbers = random.Random(seed), TASKS[task], dict[str, int]()
    most = HistoSpecSettings().prefix_max

    def tokens(words: list[str]) -> list[int]:
        return [numbers.setdefault(word, len(numbers) + 1) for word in words]

    steps = []
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        records = []
        for number in range(step % STEPS_PER_EPOCH, PROMPTS, STEPS_PER_EPOCH):
            pieces = []
            for _ in range(SAMPLES):
                slips = FIRST_SLIPS / 2 ** (step // STEPS_PER_EPOCH)
                asked, said, right = make(random.Random(f"{seed} {number}"), rng, slips)
                pieces.append(Piece(tokens(asked)[-most:], tokens(said), float(right)))
            records.append(Record(f"{task}-{number}", step, tuple(pieces)))
        steps.append(records)
    return steps
