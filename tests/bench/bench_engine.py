"""New tokens per CPU second of the generation engine beside transformers, in turns.

Run: python tests/bench/bench_engine.py MODEL_DIRECTORY [--rounds 3] [--workloads batch1,shared16]
Each side is a process that is kept for all rounds; ours starts as the commands do (huge pages).
Measured on one thread with sampling at temperature 1 and without stop tokens, prefill included: 64
new tokens after random prompts of 32 tokens (batch1, batch64), and 16 samples of one prompt of 512
tokens (shared16). `--profile` prints where the engine's time goes instead, and `--draft-tokens K`
compares greedy decoding of 1 and of 8 prompts of a repeated piece of text with and without K tokens
proposed by n-grams.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sabia.core.generate.draft.draft import Draft
from sabia.core.generate.engine import Engine
from sabia.core.generate.model_directory import load_engine
from sabia.core.generate.requests import Request
from sabia.core.generate.session import Counts
from sabia.core.process_start import start_with_huge_pages

NEW = 64
WORKLOADS = {  # prompts, their tokens, samples of each
    "batch1-float32": (1, 32, 1), "batch64-float32": (64, 32, 1),
    "batch64-bfloat16": (64, 32, 1), "shared16-float32": (1, 512, 16),
}  # fmt: skip


def ours(engine: Engine, prompts: np.ndarray, samples: int) -> Callable[[], None]:
    """A call that generates all samples with the engine."""
    requests = [Request(row, NEW, n=samples, id=str(n), stop_ids=())
                for n, row in enumerate(prompts.tolist())]  # fmt: skip

    def call() -> None:
        made = engine.generate(requests)
        assert [len(one.tokens) for one in made] == [NEW] * len(prompts) * samples

    return call


def theirs(model: Any, prompts: np.ndarray, samples: int) -> Callable[[], None]:
    """A call that generates all samples with transformers."""
    ids = torch.from_numpy(prompts)

    def call() -> None:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=True,
            temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=samples,
        )  # fmt: skip
        assert output.shape == (len(prompts) * samples, prompts.shape[1] + NEW)

    return call


def speculation(model: str, tokens: int, rounds: int) -> None:
    """Print tokens per CPU second without and with proposals."""
    engine = load_engine(model)
    draw, new = np.random.default_rng(0), 4 * NEW
    for count in (1, 8):
        prompts = np.tile(draw.integers(0, engine.spec.vocab_size, (count, 8)), 4)
        requests = [Request(row, new, 0.0, id=str(n), stop_ids=())
                    for n, row in enumerate(prompts.tolist())]  # fmt: skip

        def call(draft: Draft | None, requests: list[Request] = requests) -> list[list[int]]:
            engine.draft = draft
            return [one.tokens for one in engine.generate(requests)]

        drafts = None, Draft(tokens)
        engine.counts = Counts()
        assert call(drafts[0]) == call(drafts[1])
        kept = engine.counts.describe()
        pairs = [[cpu_seconds(lambda draft=draft: call(draft)) for draft in drafts]
                 for _ in range(rounds)]  # fmt: skip
        a, b = (count * new / statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(first / second for first, second in pairs)
        print(f"greedy, {count} rows: {a:,.0f} and {b:,.0f} tokens/CPU s, {ratio:.2f}; {kept}")


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of a call in this process."""
    start = time.process_time()
    call()
    return time.process_time() - start


def side(options: argparse.Namespace, name: str) -> None:
    """Print the CPU seconds of a workload on one side, for each line of stdin."""
    count, length, samples = WORKLOADS[name]
    dtype, draw = name.partition("-")[2], np.random.default_rng(0)
    if options.side == "ours":
        engine = load_engine(options.model, dtype)
        prompts = draw.integers(0, engine.spec.vocab_size, (count, length))
        call = ours(engine, prompts, samples)
    else:
        from transformers import AutoModelForCausalLM

        peer = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype))
        peer.generation_config.eos_token_id = None
        prompts = draw.integers(0, peer.config.vocab_size, (count, length))
        call = theirs(peer.eval(), prompts, samples)
    call()
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(call)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for _ in sys.stdin:
        print(cpu_seconds(call), flush=True)


def main() -> None:
    """Print tokens per CPU second of both, and the ratio, for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--side", choices=("ours", "theirs"))
    options = parser.parse_args()
    if options.side != "theirs":
        start_with_huge_pages()
    torch.set_num_threads(1)
    if options.draft_tokens:
        speculation(options.model, options.draft_tokens, options.rounds)
        return
    for name in options.workloads.split(","):
        if options.profile or options.side:
            options.side = options.side or "ours"
            side(options, name)
            continue
        both = []
        for one in ("ours", "theirs"):
            command = [sys.executable, __file__, options.model, "--side", one, "--workloads", name]
            environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
            both.append(subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ))  # fmt: skip
        times: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            for process, taken in zip(both, times, strict=True):
                assert process.stdin is not None and process.stdout is not None
                print(file=process.stdin, flush=True)
                taken.append(float(process.stdout.readline()))
        for process in both:
            process.communicate()
        count, _, samples = WORKLOADS[name]
        tokens = count * samples * NEW
        a, b = (tokens / statistics.median(each) for each in times)
        ratio = statistics.median(second / first for first, second in zip(*times, strict=True))
        print(f"{name}: {a:,.0f} and {b:,.0f} tokens/CPU s, ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
