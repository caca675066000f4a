"""What tests of the trainers share: a little corpus of token rows, and the command in a process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from forked import Command

from sabia.core.shards.outputs import with_metadata
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("SABIA_", "SLURM_"))},
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SHAPE = "d=32,layers=1,heads=2"
LENGTH = 32


def corpus(count: int = 300) -> list[str]:
    """Short texts with something to learn in them."""
    return [f"{i % 17} and {i % 5} make {i % 17 + i % 5}, said the owl." for i in range(count)]


def make_tokens(folder: Path, rows: int = 64, sources: tuple[str, ...] = ("web", "books")) -> Path:
    """Token rows, made as `tokenize` makes them, with the tokenizer beside; row r is of r-th source
    of `sources`, which begins anew behind its end."""
    tokenizer = train_bpe(corpus(), 300)
    tokenizer.save(folder / "_tokenizer")
    flat = [i for text in corpus(2000) for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    table = pa.table(
        {
            "input_ids": [flat[LENGTH * r : LENGTH * (r + 1)] for r in range(rows)],
            "document_lengths": [[LENGTH // 2, LENGTH // 2 - r % 2] for r in range(rows)],
            "source": [sources[r % len(sources)] for r in range(rows)],
        }
    )
    said = {"options": {"tokenizer": "", "fingerprint": tokenizer.fingerprint}}
    schema = with_metadata(table.schema, said)
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(schema.metadata), folder / "part-00000.parquet")
    return folder


def load(folder: Path) -> Tokenizer:
    """The tokenizer beside the rows."""
    from sabia.core.text.tokenize.tokenizer import load_tokenizer

    return load_tokenizer(folder / "_tokenizer")


def without_template(model: Path, out: Path) -> Path:
    """A copy of a model directory whose tokenizer has no chat template."""
    shutil.copytree(model, out)
    file = out / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    return out


def sabia(
    *words: object, launcher: tuple[str, ...] = (), **settings
) -> subprocess.CompletedProcess:
    """Run the command; stdout is kept as bytes."""
    start = launcher or Command()
    settings = {"env": ENVIRONMENT, "capture_output": True, "timeout": 600} | settings
    return subprocess.run([*start, *map(str, words)], **settings)


def torchrun(processes: int) -> tuple[str, ...]:
    """Words that start so many processes on this machine."""
    start = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return (sys.executable, *start, "-m", "sabia.cli.main")


def losses(run: Path) -> dict[int, float]:
    """Loss by step; fails if a step is there twice."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert len(found) == len(dict(found)), "a step was reported twice"
    return dict(found)


def difference(a: Path, b: Path) -> float:
    """Largest difference of two runs' losses, which must have the same steps."""
    one, other = losses(a), losses(b)
    assert list(one) == list(other)
    return float(np.abs(np.array(list(one.values())) - np.array(list(other.values()))).max())


class Commands:
    """Runs the command in forked children of one process (see interrupted.py): 0.3 s, not 3."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, str(Path(__file__).with_name("interrupted.py"))]
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)
        self.out, self.err = folder / "stdout", folder / "stderr"

    def __call__(
        self,
        *words: object,
        at: tuple[str, float, str] | None = None,
        limit: int = 0,
        reads: Path | str = "",
        folder: Path | str = ".",
    ) -> subprocess.CompletedProcess:
        """Run to the end, or until the mishap of `at`; see interrupted.py for the settings."""
        said = {"words": [str(w) for w in words], "at": at, "limit": limit, "reads": str(reads)}
        said |= {"out": str(self.out), "err": str(self.err), "folder": str(folder)}
        self.server.stdin.write(json.dumps(said) + "\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        return subprocess.CompletedProcess(
            words, code, self.out.read_bytes(), self.err.read_bytes()
        )

    def close(self) -> None:
        """End the process."""
        self.server.stdin.close()
        self.server.wait()
