"""Encoding beside tokenizers and tiktoken, in CPU seconds: `python tests/bench/bench_tokenize.py`.

A BPE of 32,000 tokens is trained on Python sources and their documentation: byte-level with a
pattern; `neox`, the pattern of GPT-2 without tokens for bytes that UTF-8 never uses, after NFC; or
`characters`, without a splitting pattern as in Llama-2. tiktoken cannot express the last two.
Each engine encodes the same documents in a process of its own, in turns, one thread. The cost is
the slope between a small and a large part of the corpus, start-up apart. `whole` is `sabia
tokenize` from Parquet to Parquet. All engines must give the same ids.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ENGINES = ("kernel", "tiktoken", "tokenizers")
PATTERNS = ("gpt2", "cl100k", "o200k", "deepseek", "neox", "characters")
NO_TIKTOKEN = ("neox", "characters")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def corpus(root: Path, most_bytes: int) -> list[str]:
    """Documents of at most 20 kB out of the Python sources in a folder."""
    texts, size = [], 0
    for path in sorted(root.rglob("*.py")):
        text = path.read_text("utf-8", "replace")
        for start in range(0, len(text), 20_000):
            texts.append(text[start : start + 20_000])
            size += len(texts[-1])
        if size >= most_bytes:
            return texts
    return texts


def prepare(work: Path, texts: list[str], pattern: str) -> None:
    """documents.parquet, its first sixth, and a tokenizer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sabia.core.options.tokenize import TokenizerTraining
    from sabia.core.text.tokenize.tokenizer import Tokenizer
    from sabia.core.text.tokenize.tokenizer_training import train

    for name, part in (("large", texts), ("small", texts[: len(texts) // 6])):
        ids = [f"{i:07d}" for i in range(len(part))]
        pq.write_table(pa.table({"id": ids, "text": part}), work / f"{name}.parquet")
    sample = texts[:: max(3, len(texts) // 600)]
    if pattern == "characters":
        trained = train(sample, TokenizerTraining(model="bpe-fallback"))
        definition = json.loads(trained.definition) | {"pre_tokenizer": None}
        steps = [{"type": "Prepend", "prepend": "▁"}, definition["normalizer"]]
        definition["normalizer"] = {"type": "Sequence", "normalizers": steps}
        trained = Tokenizer(json.dumps(definition), trained.config)
    elif pattern == "neox":
        trained = train(sample, TokenizerTraining(pattern="gpt2"))
        definition = json.loads(trained.definition) | {"normalizer": {"type": "NFC"}}
        # byte-level characters of C0, C1 and F5 to FF
        unused = {chr(code) for code in (0xC0, 0xC1, *range(0xF5, 0x100))}
        vocabulary = definition["model"]["vocab"]
        definition["model"]["vocab"] = {k: v for k, v in vocabulary.items() if k not in unused}
        trained = Tokenizer(json.dumps(definition), trained.config)
    else:
        trained = train(sample, TokenizerTraining(pattern=pattern))
    trained.save(work / "tokenizer")


def encode(work: Path, engine: str) -> None:
    """One contender's turn: CPU seconds of both parts, and a hash of the ids."""
    import pyarrow.parquet as pq

    from sabia.core.text.tokenize.encoders import Encoder
    from sabia.core.text.tokenize.tokenizer import load_tokenizer

    encoder = Encoder(load_tokenizer(work / "tokenizer"), engine)
    encoder.prepare()
    found: dict[str, object] = {}
    for name in ("small", "large"):
        batches = pq.ParquetFile(work / f"{name}.parquet").iter_batches(500, columns=["text"])
        columns = [batch.column(0) for batch in batches]
        digest, start = hashlib.sha256(), time.process_time()
        rows = [encoder.encode(column) for column in columns]
        found[name] = time.process_time() - start
        for ids, _ in rows:
            digest.update(ids.tobytes())
        found[f"{name}_mb"] = sum(column.nbytes for column in columns) / 1e6
        found["ids"] = digest.hexdigest()
    print(json.dumps(found))


def turn(work: Path, engine: str) -> dict[str, object]:
    """Run one contender in a process of its own."""
    command = [sys.executable, __file__, "--encode", engine, "--work", str(work)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def whole(work: Path, name: str) -> float:
    """CPU seconds of `sabia tokenize` on a part."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["tokenize", work / f"{name}.parquet", "--tokenizer", work / "tokenizer", "--force"]
    words += ["-o", work / "rows.parquet", "-q", "--encoder", "kernel"]
    subprocess.run([sys.executable, "-m", "sabia.cli.main", *map(str, words)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(work: Path, rounds: int, engines: Sequence[str]) -> dict[str, object]:
    """Megabytes a CPU second of each engine, by slope, median of the rounds."""
    speeds: dict[str, list[float]] = {}
    digests = set()
    whole(work, "small")  # compiles
    for _ in range(rounds):
        for engine in engines:
            one = turn(work, engine)
            digests.add(one["ids"])
            size = one["large_mb"] - one["small_mb"]
            speeds.setdefault(engine, []).append(size / (one["large"] - one["small"]))
        speeds.setdefault("whole", []).append(size / (whole(work, "large") - whole(work, "small")))
    median = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    ratios = {
        f"{name}_over_{peer}": [
            round(own / other, 2) for own, other in zip(speeds[name], speeds[peer], strict=True)
        ]
        for name in ("kernel", "whole")
        for peer in engines[1:]
    }
    return {"mb_per_cpu_second": median, "identical": len(digests) == 1, **ratios}


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=36)
    packages = Path(sysconfig.get_paths()["purelib"])
    parser.add_argument("--sources", type=Path, default=packages, help="folder of Python sources")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patterns", nargs="+", default=["cl100k"], choices=PATTERNS)
    parser.add_argument("--encode", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.encode:
        encode(given.work, given.encode)
        return
    os.environ.update(ONE_THREAD)
    for pattern in given.patterns:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), corpus(given.sources, given.megabytes * 1_000_000), pattern)
            engines = [e for e in ENGINES if e != "tiktoken" or pattern not in NO_TIKTOKEN]
            figures = compare(Path(folder), given.rounds, engines)
            print(json.dumps({"pattern": pattern} | figures), flush=True)


if __name__ == "__main__":
    main()
