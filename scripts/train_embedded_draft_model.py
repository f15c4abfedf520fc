"""Distil a draft model, half as deep, from the embedded model, and write its directory; print its measurements.

    python scripts/train_embedded_draft_model.py [--out DIRECTORY] [--minutes 6] [--threads 2]

The draft model begins with every other layer of the embedded model, with its embeddings and its output layer. It
learns the embedded model's next-token distribution on worked solutions of the same tasks (the shipped prompts left
out). It serves `--drafting.source draft_model`, where vLLM takes its likeliest next tokens. So the script measures how
often those agree with the embedded model's, on solutions that neither has seen.

The shipped weights come from --minutes 6 --threads 1 on a busy core: 1,230 steps, after which both find the same next
token most likely at 79.5 % of the places. The clock ended it, so they cannot be reproduced bit by bit.
"""

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from embedded_model import build_draft_model, build_tokenizer, model_config
from train_embedded_model import (
    BETAS,
    DEFAULT_SEED,
    IGNORED,
    MAXIMUM_NORM,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    batches,
    shipped,
)
from transformers import Qwen3ForCausalLM

from rhyme_openrlhf.embedded import DATA, DRAFT_MODEL, MODEL

# Below the rate from random weights: half of the network is already trained.
LEARNING_RATE, FINAL_SHARE = 1.5e-3, 0.05
# All lengths of problems from the start, but for the last thousandth, as the shipped prompts have.
QUANTILE = 0.999
MEASURED_BATCHES = 8


def half_of(teacher: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Return a draft model with every other layer of `teacher`, the last among them, and all other modules."""
    student = build_draft_model(DEFAULT_SEED)
    layers, kept = model_config().num_hidden_layers, student.config.num_hidden_layers
    chosen = {str(layers - 1 - number * (layers // kept)): str(kept - 1 - number) for number in range(kept)}
    weights = {}
    for name, value in teacher.state_dict().items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if parts[2] not in chosen:
                continue
            parts[2] = chosen[parts[2]]
        weights[".".join(parts)] = value
    student.load_state_dict(weights)
    return student


def targets_of(teacher: Qwen3ForCausalLM, inputs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the next token at every place, [problems, tokens, vocabulary]."""
    with torch.no_grad():
        return torch.log_softmax(teacher(inputs).logits.float(), dim=-1)


@torch.no_grad()
def agreement(student: Qwen3ForCausalLM, teacher: Qwen3ForCausalLM, left_out: set[str]) -> float:
    """Return the share of the places of unseen solutions at which both find the same next token most likely."""
    source = batches(random.Random("measured"), left_out, [QUANTILE])
    same = places = 0
    for _ in range(MEASURED_BATCHES):
        inputs, targets = next(source)
        asked = targets[:, 1:] != IGNORED
        agree = student(inputs).logits[:, :-1].argmax(-1) == teacher(inputs).logits[:, :-1].argmax(-1)
        same += int((agree & asked).sum())
        places += int(asked.sum())
    return same / places


def distil(minutes: float, seed: int) -> Qwen3ForCausalLM:
    """Return the trained draft model, float32."""
    left_out = {row["input"] for path in DATA.glob("*.jsonl") for row in shipped(path.name)}
    teacher = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    student = half_of(teacher).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    source, started, step, losses = batches(random.Random(seed), left_out, [QUANTILE]), time.monotonic(), 0, []
    while (progress := (time.monotonic() - started) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, max(FINAL_SHARE, 1 - progress))
        inputs, targets = next(source)
        asked = targets[:, 1:] != IGNORED
        wanted = targets_of(teacher, inputs)[:, :-1][asked]
        found = torch.log_softmax(student(inputs).logits[:, :-1][asked].float(), dim=-1)
        loss = F.kl_div(found, wanted, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), MAXIMUM_NORM)
        optimizer.step()
        losses.append(loss.item())
        step += 1
        if step % 50 == 0:
            print(f"step {step} divergence {sum(losses[-50:]) / 50:.4f}, {progress:.0%} of the time", flush=True)
    student.eval()
    print(f"the same likeliest next token: {agreement(student, teacher, left_out):.1%}", flush=True)
    return student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DRAFT_MODEL)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    student = distil(options.minutes, options.seed).to(torch.bfloat16)
    student.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    build_tokenizer().save_pretrained(options.out)


if __name__ == "__main__":
    main()
