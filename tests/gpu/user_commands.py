"""The sabia command in processes of its own, on the device or on the CPU, and what it reads.

Without a GPU the processes are forked from one that has imported the libraries, which takes 0.3 s
instead of 3 s of a CPU for each (tests/support/interrupted.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from cases import Device, Failed
from training_cases import Commands

LAUNCHER = str(Path(__file__).with_name("one_command.py"))
TIMEOUT_S = 300
SHAPES = {"dense": "", "moe": ",family=qwen3_moe,experts=8,chosen=2,expert_ffn=32"}


class UserCommands:
    """Runs commands and keeps their data in `folder`."""

    def __init__(self, device: Device) -> None:
        self.device, self.folder = device, device.scratch
        self.server = Commands(device.scratch) if device.tiny else None
        self.length = 32 if device.tiny else 256

    def close(self) -> None:
        """End the process that forks."""
        if self.server is not None:
            self.server.close()

    def __call__(
        self, *words: object, cpu: bool = False, kill_at: int = -1, deterministic: bool = False
    ) -> str:
        """Run a command, killed before step `kill_at` (from 0) if given; its stderr.

        Raises Failed unless it ended as it should.
        """
        expected = 0 if kill_at < 0 else -9
        if self.server is not None:
            at = ("step", kill_at, "SIGKILL") if kill_at >= 0 else None
            done = self.server(*words, at=at)
        else:
            done = self._process([str(word) for word in words], cpu, kill_at, deterministic)
        text = done.stderr.decode(errors="replace")
        if done.returncode != expected:
            last = "; ".join(text.strip().splitlines()[-3:])
            side = "CPU" if cpu else self.device.kind
            raise Failed(f"{words[0]} on {side} ended with {done.returncode}: {last}"[:800])
        return text

    def _process(
        self, words: list[str], cpu: bool, kill_at: int, deterministic: bool
    ) -> "subprocess.CompletedProcess[bytes]":
        environment = dict(os.environ)
        if cpu:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        start = ["-m", "sabia.cli.main"]
        if deterministic or kill_at >= 0:
            start = [LAUNCHER, str(kill_at), str(int(deterministic))]
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        settings = {"env": environment, "capture_output": True, "timeout": TIMEOUT_S}
        return subprocess.run(
            [sys.executable, *start, *words], stdin=subprocess.DEVNULL, **settings
        )

    def tokens(self) -> Path:
        """Token rows with their tokenizer, made by `sabia tokenize` once."""
        out = self.folder / "tokens"
        if not out.exists():
            texts = (f"{i} and {i + 1} make {2 * i + 1}, wrote the owl of house {i % 7}."
                     for i in range(400 if self.device.tiny else 6000))  # fmt: skip
            rows = self.records("texts", ({"text": text} for text in texts))
            options = ("--train-tokenizer", "--vocab-size", 400, "--length", self.length)
            self("tokenize", rows, *options, "-o", out, cpu=True)
        return out

    def records(self, name: str, rows: Iterable[object]) -> Path:
        """A file of JSON lines."""
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def pretraining(self, kind: str, precision: str, steps: int) -> list[object]:
        """Words of a command that trains a new model, without -o; kind of SHAPES."""
        sizes = "d=32,layers=2,heads=2" if self.device.tiny else "d=256,layers=2,heads=4,kv=2"
        shape = f"{sizes},context={2 * self.length}{SHAPES[kind]}"
        options = ["--steps", steps, "--batch", 8, "--lr", "3e-3", "--precision", precision]
        return ["pretrain", self.tokens(), "--shape", shape, *options]


def metrics(run: Path, column: str = "loss") -> np.ndarray:
    """A column of a run's metrics, by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = {row["step"]: row[column] for row in rows if row.get(column) is not None}
    return np.array([values[step] for step in sorted(values)])


def weights(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a model directory as float32 (quantized ones decoded)."""
    from sabia.core.model.storage import hub

    return {name: np.array(x, np.float32) for name, x in hub.load_model(directory)[1].items()}
