"""GPU memory of drafts and log-probabilities together, at the default share of the GPU. Measured.

    python benchmarks/draft_memory.py --out draft_memory.json

An engine of a small model with a vocabulary of 151,936 entries runs `--samples` samples at once at OpenRLHF's default
--vllm.gpu_memory_utilization. One of them is greedy and has its own response as history, so it drafts as many tokens as
its window allows. The others are sampled from random weights, so nothing is drafted for them. If the sampler computed
log-probabilities for a rectangle of samples and longest draft, the engine would run out of memory here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rhyme_openrlhf.cli import demo, train_arguments
from rhyme_openrlhf.engine.messages import Request
from rhyme_openrlhf.history.index import build_index
from rhyme_openrlhf.platform import run_gpus
from rhyme_openrlhf.proof.histories import draft_of
from rhyme_openrlhf.verify.engines import Engine, EnginePool

# Qwen3's.
VOCABULARY = 151936
UTILIZATION = "0.95"
PROMPT = tuple(range(10, 42))
GREEDY = "greedy"


def write_model(folder: Path, vocabulary: int) -> None:
    """Write the embedded architecture with random weights for `vocabulary` tokens, and the embedded tokenizer."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    from embedded_model import build_tokenizer, model_config

    config = model_config()
    config.vocab_size = vocabulary
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


BEGAN = time.monotonic()


def say(what: str) -> None:
    """Print what begins now, and the seconds since this program began."""
    print(f"[{time.monotonic() - BEGAN:5.1f} s] {what}", flush=True)


def probe(engine: Engine, samples: int, tokens: int, context: int) -> dict[str, Any]:
    """Return what the engine did for `samples` samples at once, one of them with long drafts."""
    greedy = Request(PROMPT, tokens, history=GREEDY)
    say("one greedy sample")
    (answer,) = engine.answer([Request(PROMPT, tokens)])
    engine.install(GREEDY, build_index(draft_of(list(answer.tokens), list(PROMPT), context)))
    say(f"{samples} samples, of which one has drafts as long as its window")
    before = engine.counters()
    engine.answer([greedy, *(Request((*PROMPT, 42 + n % 64), tokens, 1.0) for n in range(samples - 1))])
    did = engine.counters() - before
    return {"drafted": did.drafted, "accepted": did.accepted, "decode_steps": did.decode_steps}


def main() -> None:
    """Run and report; errors that end the engine are raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="of each sample")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--out", type=Path, default=Path("draft_memory.json"))
    chosen = parser.parse_args()
    gpus = run_gpus()
    with tempfile.TemporaryDirectory(prefix="rhyme-draft-memory-") as folder:
        write_model(Path(folder), chosen.vocabulary)
        argv = demo.arguments("unused", gpus)
        argv += ["--actor.model_name_or_path", folder, "--vllm.gpu_memory_utilization", UTILIZATION]
        checked = train_arguments.check(argv, lambda said: print(said, flush=True))
        pool = EnginePool(checked.args, checked.settings, checked.on_gpus)
        found: dict[str, Any] = {"kind": "measured", "samples": chosen.samples, "vocabulary": chosen.vocabulary}
        found |= {"utilization": float(UTILIZATION), "survived": False}
        try:
            say("an engine")
            actor = pool.single()
            engine = Engine(actor)
            found["free_bytes_before"] = engine.facts.gpu_free_bytes
            chosen.out.write_text(json.dumps(found) + "\n")
            found |= probe(engine, chosen.samples, chosen.tokens, checked.settings.histospec.prefix_max)
            found |= {"free_bytes_after": Engine(actor).facts.gpu_free_bytes, "survived": True}
        finally:
            chosen.out.write_text(json.dumps(found, indent=1) + "\n")
            pool.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
