"""A training step beside transformers: tokens a CPU second on one thread, at equal losses.

    python tests/bench/bench_pretrain.py [--precision fp32|bf16] [--steps 8] [--rounds 3]

Both train the same Llama from the same weights on the same rows with the same AdamW and clipping;
the peer is the usual loop around transformers' LlamaForCausalLM (bf16: autocast). Measured in
turns A/B/A/B, one process each, after two steps of warm-up; the ratio is that of medians. The
losses of both are printed and must agree, so that nobody wins by computing something else.
`--packed` gives rows of four documents, which the peer sees through a block-diagonal 4-D mask.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WARM_UP = 2
LR = 1e-3


def rows(step: int, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Batch number `step`: random walks over the vocabulary, which can be learnt."""
    draw = np.random.default_rng(step)
    shape = (options.batch, options.length)
    ids = np.cumsum(draw.integers(0, 7, shape), 1) % options.vocab
    documents = 4 if options.packed else 1
    part = options.length // documents
    column = np.arange(options.length)
    weights = np.ones(shape, np.float32)
    weights[:, part - 1 :: part] = 0
    return {
        "input_ids": ids.astype(np.int32),
        "targets": np.roll(ids, -1, 1).astype(np.int32),
        "loss_mask": weights,
        "segments": np.tile(column // part + 1, (options.batch, 1)).astype(np.int32),
        "positions": np.tile(column % part, (options.batch, 1)).astype(np.int32),
    }


def ours(options: argparse.Namespace, place: Path):
    """A function: batch → loss."""
    from sabia.core.model.storage.hub import load_model
    from sabia.core.train.losses.next_token import next_token_loss
    from sabia.core.train.stepper_factory import make_stepper

    spec, params = load_model(place)
    stepper = make_stepper("torch", spec, params, next_token_loss, precision=options.precision)

    def step(batch: dict[str, np.ndarray]) -> float:
        if not options.packed:
            batch = {k: v for k, v in batch.items() if k not in ("segments", "positions")}
        return stepper.step(batch, LR).loss

    return step


def theirs(options: argparse.Namespace, place: Path):
    """A function: batch → loss, as the usual transformers loop has it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LR, (0.9, 0.95), fused=True)
    narrow = options.precision == "bf16"

    def step(batch: dict[str, np.ndarray]) -> float:
        data = {name: torch.from_numpy(array) for name, array in batch.items()}
        labels = data["targets"].long().masked_fill(data["loss_mask"] == 0, -100)
        more = {}
        if options.packed:
            segments, t = data["segments"], options.length
            seen = (segments[:, :, None] == segments[:, None]) & torch.ones(t, t).tril().bool()
            more = {"attention_mask": seen[:, None], "position_ids": data["positions"].long()}
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            out = model(input_ids=data["input_ids"].long(), use_cache=False, **more)
            loss = torch.nn.functional.cross_entropy(
                out.logits.float().flatten(0, 1), labels.flatten()
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def child(options: argparse.Namespace) -> None:
    """Measure one contender; prints JSON."""
    import torch

    torch.set_num_threads(1)
    step = {"sabia": ours, "transformers": theirs}[options.contender](options, options.model)
    losses = [step(rows(number, options)) for number in range(WARM_UP)]
    seconds = []
    for number in range(WARM_UP, WARM_UP + options.steps):
        batch = rows(number, options)
        start = time.process_time()
        losses.append(step(batch))
        seconds.append(time.process_time() - start)
    tokens = options.batch * options.length
    print(json.dumps({"rate": tokens / statistics.median(seconds), "losses": losses}))


def main() -> None:
    """Run the contenders in turns and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 256), ("layers", 6), ("vocab", 4096), ("batch", 8),
                          ("length", 256), ("steps", 8), ("rounds", 3)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--contender", default="")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    if options.contender:
        child(options)
        return
    from sabia.core.model.storage.hub import init_params, save_model
    from sabia.core.spec import from_config, new_config, parameter_count

    spec = from_config(
        new_config("llama", hidden=options.hidden, layers=options.layers, vocab=options.vocab)
    )
    found: dict[str, list[dict]] = {"sabia": [], "transformers": []}
    with tempfile.TemporaryDirectory() as scratch:
        save_model(scratch, spec, init_params(spec, 0))
        words = [sys.executable, __file__, *sys.argv[1:], "--model", scratch, "--contender"]
        settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        for _ in range(options.rounds):
            for name, results in found.items():
                done = subprocess.run(
                    [*words, name], env={**os.environ, **settings}, capture_output=True, text=True
                )
                if done.returncode:
                    sys.exit(done.stderr)
                results.append(json.loads(done.stdout))
    rates = {name: statistics.median(r["rate"] for r in got) for name, got in found.items()}
    pairs = zip(found["sabia"][0]["losses"], found["transformers"][0]["losses"], strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    print(f"{parameter_count(spec):,} parameters, {options.precision}, {options.batch} rows of "
          f"{options.length}{', packed' if options.packed else ''}")  # fmt: skip
    for name, rate in rates.items():
        spread = [round(r["rate"]) for r in found[name]]
        print(f"{name:13} {rate:8,.0f} tokens a CPU second   runs {spread}")
    print(f"ratio {rates['sabia'] / rates['transformers']:.2f}, losses apart by {apart:.1e}")
    if apart > (1e-4 if options.precision == "fp32" else 5e-2):
        sys.exit("the losses differ: not the same computation")


if __name__ == "__main__":
    main()
