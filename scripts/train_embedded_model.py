"""Train the embedded model on worked solutions and write its directory; print its measurements.

    python scripts/train_embedded_model.py [--out DIRECTORY] [--steps 4000] [--threads 2]

The solutions hold wrong steps with a small probability (`tasks.error_rate`). So the model knows how to solve the
problems and yet errs when it samples at temperature 1, which reinforcement learning then sharpens. The prompts of the
shipped files are left out of the training.

Seeded: one machine and one number of threads give the same weights, unless --minutes ends the training early. The
shipped weights come from three runs on two busy cores, about 2000 steps in all. Each run continues the one before. The
clock ended them, so they cannot be reproduced bit by bit:

    --minutes 11 --steps 100000
    --minutes 8 --steps 100000 --start FIRST
    --minutes 9 --steps 100000 --start SECOND --seed 18 --learning-rate 1.2e-3
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from embedded_model import EOS_ID, PAD_ID, build_model, build_tokenizer, vocabulary
from embedded_tasks import KINDS, STEP_COUNTS, Problem, error_rate, make_problem
from transformers import Qwen3ForCausalLM

from rhyme_openrlhf.embedded import DATA, MODEL
from rhyme_openrlhf.embedded.reward import score

DEFAULT_SEED = 17
IGNORED = -100  # cross_entropy's default for positions without a target

# A batch is filled up to this many tokens with problems of like length: about 25 problems of usual length. Many small
# steps teach this model sooner than few large ones.
BATCH_TOKENS = 3072
# Batches are cut from a pool sorted by length, large enough that little is padded.
POOL_BATCHES = 48

# AdamW at a rate that a model of this width bears; short warm-up, then linear decay to a twentieth.
DEFAULT_LEARNING_RATE, BETAS, WEIGHT_DECAY, WARMUP_STEPS, FINAL_SHARE = 2e-3, (0.9, 0.98), 0.01, 100, 0.05
MAXIMUM_NORM = 1.0

# Short problems first: the share of the length distribution in use grows to the whole over this share of the steps.
CURRICULUM_SHARE, FIRST_QUANTILE = 0.4, 0.5

# Longer than any worked solution.
MAXIMUM_RESPONSE = 600


def shipped(name: str) -> list[dict[str, str]]:
    """Return the rows of a shipped prompt file."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def encoded(problem: Problem, ids: dict[str, int]) -> tuple[list[int], int]:
    """Token ids of prompt, solution and end, and the number of prompt tokens."""
    return [ids[c] for c in problem.prompt + problem.solution] + [EOS_ID], len(problem.prompt)


def batches(
    rng: random.Random, left_out: set[str], quantile: list[float]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless pairs of token ids and targets, each int64 of shape [problems, tokens].

    quantile: a one-element list with the upper end of the length distribution to draw from, read at every pool.
    """
    ids = vocabulary()
    while True:
        pool, tokens = [], 0
        while tokens < POOL_BATCHES * BATCH_TOKENS:
            kind = rng.choice(KINDS)
            steps = STEP_COUNTS[kind].at(rng.uniform(0.001, quantile[0]))
            problem = make_problem(kind, steps, rng, error_rate(steps))
            if problem.prompt not in left_out:
                pool.append(encoded(problem, ids))
                tokens += len(pool[-1][0])
        pool.sort(key=lambda item: len(item[0]))
        cut = []
        while pool:
            width = len(pool[-1][0])
            count = max(1, BATCH_TOKENS // width)
            cut.append(pool[-count:])
            del pool[-count:]
        rng.shuffle(cut)
        for chosen in cut:
            width = max(len(item) for item, _ in chosen)
            inputs = torch.full((len(chosen), width), PAD_ID)
            targets = torch.full((len(chosen), width), IGNORED)
            for row, (item, prompt) in enumerate(chosen):
                inputs[row, : len(item)] = torch.tensor(item)
                targets[row, prompt : len(item)] = torch.tensor(item[prompt:])
            yield inputs, targets


@torch.no_grad()
def measure(model: Qwen3ForCausalLM, rows: list[dict[str, str]], samples: int, temperature: float) -> dict[str, float]:
    """Mean reward by kind (and under "all") of `samples` responses a row; temperature 0 is greedy."""
    tokenizer = build_tokenizer()
    tokenizer.padding_side = "left"
    rewards: dict[str, list[float]] = {"all": []}
    ordered = sorted(rows, key=lambda row: len(row["input"]))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    for start in range(0, len(ordered), 16):
        part = [row for row in ordered[start : start + 16] for _ in range(samples)]
        inputs = tokenizer([row["input"] for row in part], return_tensors="pt", padding=True, add_special_tokens=False)
        outputs = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAXIMUM_RESPONSE,
            **({"do_sample": False} | sampling),
        )
        for row, output in zip(part, outputs[:, inputs["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(output, skip_special_tokens=False).replace(tokenizer.pad_token, "")
            reward = score(text, row["label"])
            rewards["all"].append(reward)
            rewards.setdefault(row["datasource"], []).append(reward)
    return {kind: round(sum(values) / len(values), 3) for kind, values in rewards.items()}


@torch.no_grad()
def next_token_accuracy(model: Qwen3ForCausalLM) -> dict[str, float]:
    """Return by kind the share of tokens of error-free solutions that the model finds most likely.

    This is far cheaper to measure than a reward.
    """
    rng, ids, shares = random.Random(DEFAULT_SEED), vocabulary(), {}
    for kind in KINDS:
        right = total = 0
        for index in range(12):
            problem = make_problem(kind, STEP_COUNTS[kind].at((index + 0.5) / 12), rng)
            tokens, start = encoded(problem, ids)
            row = torch.tensor([tokens])
            right += (model(row).logits[0, start - 1 : -1].argmax(-1) == row[0, start:]).sum().item()
            total += len(tokens) - start
        shares[kind] = round(right / total, 4)
    return shares


def train(steps: int, minutes: float, start: Path | None, seed: int, learning_rate: float) -> Qwen3ForCausalLM:
    """Train a float32 model for `steps` optimizer steps, or `minutes` of wall time if that ends first.

    It starts from random weights and short problems, or from the model in `start` and problems of all lengths.
    """
    rng, quantile, started = random.Random(f"{seed} {start is None}"), [FIRST_QUANTILE], time.monotonic()
    left_out = {row["input"] for path in DATA.glob("*.jsonl") for row in shipped(path.name)}
    model = build_model(seed) if start is None else Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    source, losses, tokens = batches(rng, left_out, quantile), [], 0
    for step in range(steps):
        progress = max(step / steps, (time.monotonic() - started) / 60 / minutes)
        if progress >= 1:
            break
        grown = progress / CURRICULUM_SHARE if start is None else 1.0
        quantile[0] = min(0.999, FIRST_QUANTILE + (1 - FIRST_QUANTILE) * grown)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min((step + 1) / WARMUP_STEPS, max(FINAL_SHARE, 1 - progress))
        inputs, targets = next(source)
        logits = model(inputs).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAXIMUM_NORM)
        optimizer.step()
        losses.append(loss.item())
        tokens += inputs.numel()
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - started
            recent = sum(losses[-100:]) / 100
            print(f"step {step + 1} loss {recent:.4f} tokens {tokens / 1e6:.2f} M seconds {seconds:.0f}", flush=True)
        if (step + 1) % 250 == 0:
            model.eval()
            print("  share of right next tokens", next_token_accuracy(model), flush=True)
            model.train()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start", type=Path, help="a model directory to go on from, instead of random weights")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--learning-rate", type=float, default=DEFAULT_LEARNING_RATE, help="the highest, after warm-up")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = train(options.steps, options.minutes, options.start, options.seed, options.learning_rate)
    model.to(torch.bfloat16)
    model.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    build_tokenizer().save_pretrained(options.out)
    model.to(torch.float32)  # the values stay those of bf16; float32 is faster without bf16 instructions
    torch.manual_seed(options.seed)
    for name in ("mixed_train.jsonl", "mixed_eval.jsonl"):
        print(name, "temperature 1", measure(model, shipped(name), 4, 1.0), flush=True)
        print(name, "greedy", measure(model, shipped(name), 1, 0.0), flush=True)


if __name__ == "__main__":
    main()
