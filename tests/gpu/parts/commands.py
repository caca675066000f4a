"""Commands as a user calls them, on the device and on the CPU: exit status, metrics, models."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case, Comparison, Device, Failed, Figures, Skipped
from user_commands import UserCommands, metrics, weights

STEPS = 5
LOSS = {"fp32": 1e-4, "bf16": 5e-3}  # relative
CODES = 0.01  # share of GPTQ's codes that may differ: one that is rounded otherwise moves others
# recipe → roundings; auto is GPTQ for 4 bits, and fp8 has no choice
RECIPES = {"w4": ("auto", "rtn"), "mixed": ("auto",), "w8": ("gptq",), "w8a8": ("auto",),
           "fp8": ("",)}  # fmt: skip


def cases(device: Device) -> Iterator[Case]:
    """Training, tuning, reinforcement learning and quantization of a small model."""
    work = _Commands(device)
    try:
        yield Case("tokenize", work.tokenize)
        for precision in ("fp32", "bf16"):
            yield Case(f"pretrain / {precision}", lambda p=precision: work.pretrain(p))
            yield Case(f"pretrain / {precision} / jax", lambda p=precision: work.jax(p))
        yield Case("sft", work.sft)
        yield Case("grpo", work.grpo)
        for recipe, rounding in ((name, how) for name, hows in RECIPES.items() for how in hows):
            title = f"quantize / {recipe} {rounding}".rstrip()
            yield Case(title, lambda name=recipe, how=rounding: work.quantize(name, how))
    finally:
        work.commands.close()


class _Commands:
    """The cases, which share a model that was trained on the CPU."""

    def __init__(self, device: Device) -> None:
        self.device, self.commands, self.folder = device, UserCommands(device), device.scratch

    def both(self, name: str, *words: object) -> tuple[Path, Path]:
        """The output directories on the device and on the CPU, made at the same time."""
        outs = self.folder / f"{name}-device", self.folder / f"{name}-cpu"
        with ThreadPoolExecutor(1 if self.device.tiny else 2) as pool:
            ends = [pool.submit(self.commands, *words, "-o", out, cpu=out is outs[1])
                    for out in outs]  # fmt: skip
        for end in ends:
            end.result()
        return outs

    def base(self) -> Path:
        """A trained model."""
        out = self.folder / "base"
        if not out.exists():
            self.commands(*self.commands.pretraining("dense", "fp32", 20), "-o", out, cpu=True)
        return out / "final"

    def chats(self) -> Path:
        """Conversations about sums."""

        rows = []
        for i in range(80):
            answer = {"role": "assistant", "content": f"{i % 9 + i % 4}, wrote the owl"}
            question = {"role": "user", "content": f"{i % 9} and {i % 4}?"}
            rows.append({"messages": [question, answer]})
        return self.commands.records("chats", rows)

    def tokenize(self) -> Figures:
        """Rows of tokens, with a new tokenizer."""
        import pyarrow.parquet as pq

        table = pq.read_table(self.commands.tokens())
        return {"rows": table.num_rows, "tokens": sum(map(len, table["input_ids"].to_pylist()))}

    def compared(self, outs: tuple[Path, Path], precision: str = "fp32") -> Figures:
        """Losses by step and final weights of two training runs."""
        comparison, runs = Comparison(), [metrics(out) for out in outs]
        if [len(run) for run in runs] != [STEPS, STEPS]:
            raise Failed(f"metrics of {[len(run) for run in runs]} steps (expected {STEPS})")
        for step, pair in enumerate(zip(*runs, strict=True), 1):
            comparison.add(f"loss of step {step}", *pair, LOSS[precision])
        models = [weights(out / "final") for out in outs]
        off = Comparison()
        for name, tensor in models[1].items():
            off.add_norm(name, models[0][name], tensor, np.inf)
        return comparison.check({"weights_difference": off.figures()["difference"]})

    def pretrain(self, precision: str) -> Figures:
        """A new model."""
        words = self.commands.pretraining("dense", precision, STEPS)
        return self.compared(self.both(f"pretrain-{precision}", *words), precision)

    def jax(self, precision: str) -> Figures:
        """A new model by JAX, where its GPU build is installed."""
        if self.device.cuda and jax_platform() != "gpu":
            raise Skipped("JAX has no GPU here")
        words = self.commands.pretraining("dense", precision, STEPS)
        return self.compared(self.both(f"jax-{precision}", *words, "--backend", "jax"), precision)

    def sft(self) -> Figures:
        """The trained model on conversations."""
        words = ("sft", self.chats(), "--model", self.base(), "--length", 64, "--batch", 8)
        return self.compared(self.both("sft", *words, "--steps", STEPS, "--lr", "1e-3"))

    def grpo(self) -> Figures:
        """Answers rewarded for digits; the steps are compared while all samples are equal."""
        rows = ({"id": str(n), "messages": [{"role": "user", "content": f"{n}+{n}="}],
                 "answer": "[0-9A-Z]"} for n in range(20))  # fmt: skip
        words = ["grpo", self.commands.records("prompts", rows), "--model", self.base()]
        words += ["--reward", "regex", "--prompts", 4, "--group", 8, "--max-new-tokens", 8]
        outs = self.both("grpo", *words, "--lr", "1e-3", "--steps", STEPS)
        samples = [_samples(out) for out in outs]
        same = [a == b for a, b in zip(*samples, strict=True)]
        equal_steps = same.index(False) if False in same else len(same)
        figures: Figures = {"samples": sum(map(len, samples[0])), "equal_steps": equal_steps}
        if len(same) != STEPS or not equal_steps:
            raise Failed(f"samples of {len(same)} steps; those of the first differ", figures)
        comparison = Comparison()
        for column, bound in (("reward", 1e-9), ("grad_norm", 1e-3), ("length", 1e-9)):
            pair = [metrics(out, column)[:equal_steps] for out in outs]
            comparison.add(column, *pair, bound)
        for out in outs:
            weights(out / "final")
        return comparison.check(figures)

    def quantize(self, recipe: str, rounding: str) -> Figures:
        """Values that differ, and the divergence from the original on the calibration rows."""
        words = ("quantize", self.chats(), "--model", self.base(), "--recipe", recipe)
        words += ("--rounding", rounding) if rounding else ()
        outs = self.both(f"{recipe}-{rounding}", *words)
        found, expected = (weights(out) for out in outs)
        other = {name: int((found[name] != x).sum()) for name, x in expected.items()}
        reports = [json.loads((out / "quantization.json").read_text()) for out in outs]
        methods = {row["method"] for row in reports[0]["layers"]}
        values, count = sum(x.size for x in expected.values()), sum(other.values())
        kl: list[Any] = [report["divergence"]["kl_nats"] for report in reports]
        figures: Figures = {"values": values, "other_values": count, "kl_nats": kl[0]}
        figures["kl_nats_cpu"] = kl[1]
        allowed = CODES * values if "gptq" in methods else 0  # the others are rounded by NumPy
        if count > allowed:
            worst = max(other, key=lambda name: other[name])
            raise Failed(f"{count} values differ, {other[worst]} of {worst}", figures)
        comparison = Comparison()
        comparison.add("kl_nats", kl[0], kl[1], 0.05 if count else 1e-2)
        return comparison.check(figures)


def jax_platform() -> str:
    """The platform that JAX chooses, asked in a process of its own; empty: it does not start."""
    code = "import jax; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def _samples(run: Path) -> list[list[Any]]:
    """The tokens of the samples of each step."""
    import pyarrow.parquet as pq

    table = pq.read_table(
        run / "samples", columns=["policy_version", "request_id", "sample", "tokens"]
    )
    steps: dict[int, list[Any]] = {}
    for row in table.to_pylist():
        key = (row["request_id"], row["sample"], row["tokens"])
        steps.setdefault(int(row["policy_version"]), []).append(key)
    return [sorted(steps[step]) for step in sorted(steps)]
