"""CPU time of `sabia grpo --exact` beside the same run without it, A/B/A/B, on one thread.

usage: python tests/bench/bench_exact.py [STEPS]
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo import policy_run
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.telemetry import metrics_path, read_rows

SIZES: Any = {"hidden": 256, "layers": 6, "heads": 8, "kv_heads": 4, "context": 512}
EXPERTS = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS}


def write(place: Path) -> None:
    """The models and the prompts."""
    tokenizer = train_bpe(["user assistant which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)
    tokenizer.save(place / "t")
    for name, changes in MODELS.items():
        spec = from_config(new_config(vocab=8192, **SIZES) | changes)
        params = {n: x * (3 if x.ndim > 1 else 1) for n, x in hub.init_params(spec, 0).items()}
        hub.save_model(place / name, spec, params, tokenizer_from=place / "t")
    rows = [{"id": f"p{n}", "answer": "[0-9]",
             "messages": [{"role": "user", "content": "which digit?" * (1 + n % 12)}]}
            for n in range(12)]  # fmt: skip
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def child(place: Path, name: str, precision: str, exact: bool, steps: int, out: Path) -> None:
    """One run; its CPU seconds, trained tokens and largest gap on stdout."""
    torch.set_num_threads(1)
    options = GrpoOptions(
        model=str(place / name), reward="regex", steps=steps, prompts=4, group=16, warmup="1",
        max_new_tokens=64, precision=precision, exact=exact, max_logprob_gap=10.0,
    )  # fmt: skip
    before = os.times()
    inputs = (str(place / "prompts.jsonl"),)
    policy_run.run(Job("grpo", inputs=inputs, out=str(out), to="jsonl"), options)
    after, rows = os.times(), read_rows(metrics_path(out))
    seconds = after.user + after.system - before.user - before.system
    tokens = sum(row["sampled_tokens"] for row in rows)
    gap = max(row["logprob_gap_max"] for row in rows)
    (out / "bench.json").write_text(json.dumps([seconds, tokens, gap]))


def main() -> None:
    """Print a line per model and precision."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write(place)
        for name in MODELS:
            for precision in ("fp32", "bf16"):
                costs: dict[bool, list[float]] = {False: [], True: []}
                gaps = {}
                for number in range(4):
                    exact, out = bool(number % 2), place / f"{name}-{precision}-{number}"
                    if not (pid := os.fork()):
                        with open(os.devnull, "w") as null:
                            os.dup2(null.fileno(), 1)
                            os.dup2(null.fileno(), 2)
                            child(place, name, precision, exact, steps, out)
                        os._exit(0)
                    if os.waitpid(pid, 0)[1]:
                        raise SystemExit(f"{name}, {precision}, exact {exact}: the run failed")
                    seconds, tokens, gaps[exact] = json.loads((out / "bench.json").read_text())
                    costs[exact].append(1000 * seconds / tokens)
                plain, ours = (statistics.median(costs[exact]) for exact in (False, True))
                print(
                    f"{name}, {precision}: {plain:.3f} ms of CPU time a token, with --exact "
                    f"{ours:.3f}, ratio {ours / plain:.2f}; largest gap {gaps[False]:.1e} and "
                    f"{gaps[True]:g}", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
