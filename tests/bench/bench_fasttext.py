"""fastText scoring: documents per CPU-second of ours and of the library, as a slope.

    python tests/bench/bench_fasttext.py [--docs 5000 25000] [--rounds 3]

Texts are made of a fixed vocabulary with Zipf's weights, about 1.75 kB each, two labels by topic.
For each model (a library's default, word pairs, subwords, both quantized and not) each contender
runs in a process of its own, A B A B …, on one thread, over two numbers of documents held in
memory; the slope between them leaves start-up and loading out. The library gets a list of strings
and predicts all labels; ours gets the Arrow array. The largest difference of scores is told too.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MODELS = {
    "unigrams, dim 100": {"dim": 100},
    "bigrams, dim 32": {"dim": 32, "wordNgrams": 2, "bucket": 1 << 20},
    "bigrams, dim 100, 2M buckets": {"dim": 100, "wordNgrams": 2, "bucket": 2_000_000},
    "subwords 2-4, dim 16 (as lid.176)": {"dim": 16, "minn": 2, "maxn": 4, "bucket": 1 << 19},
    "bigrams, dim 32, quantized": {"dim": 32, "wordNgrams": 2, "bucket": 1 << 18, "quantize": True},
}
TRAINED = 2000


def make_texts(path: Path, count: int) -> None:
    """`count` documents, even rows of one topic, odd ones of the other."""
    draw = random.Random(11)
    words = ["".join(draw.choices("aeioubcdfglmnprstvé", k=draw.randint(2, 11)))
             for _ in range(40_000)]  # fmt: skip
    weights = list(itertools.accumulate(1 / (i + 3) for i in range(len(words))))
    turned = words[20_000:] + words[:20_000]
    texts = []
    for i in range(count):
        body = draw.choices(words, cum_weights=weights, k=220) + draw.choices(
            turned if i % 2 else words, cum_weights=weights, k=40
        )
        draw.shuffle(body)
        texts.append(" ".join(body) + ".\nEnd.")
    pq.write_table(pa.table({"text": texts}), path)


def train(texts: Path, settings: dict, out: str) -> None:
    """A model of the library from the first texts."""
    from sabia.core.text.classify.train_stage import library, zeroed_memory

    settings = dict(settings)
    quantize = settings.pop("quantize", False)
    rows = pq.read_table(texts)["text"].to_pylist()[:TRAINED]
    lines = Path(f"{out}.txt")
    lines.write_text("".join(f"__label__{'ab'[i % 2]} {' '.join(text.split())}\n"
                             for i, text in enumerate(rows)))  # fmt: skip
    with zeroed_memory():
        model = library().train_supervised(str(lines), epoch=1, lr=0.2, thread=1, verbose=0,
                                           **settings)  # fmt: skip
        if quantize:
            model.quantize(qnorm=True)
    model.save_model(out)


def scored(contender: str, model: str, texts: Path, count: int) -> dict:
    """CPU seconds of scoring `count` texts in memory; the scores of label a go to a file."""
    column = pq.read_table(texts)["text"].combine_chunks().slice(0, count)
    if contender == "ours":
        from sabia.core.text.classify import fasttext_model

        opened = fasttext_model.load(model)
        fasttext_model.score_array(opened, pa.array(["start"]))
        start = time.process_time()
        found = fasttext_model.score_array(opened, column)[:, opened.labels.index("a")]
        spent = time.process_time() - start
    else:
        from sabia.core.text.classify.train_stage import library

        opened = library().load_model(model)
        rows = [text.replace("\n", " ") for text in column.to_pylist()]
        start = time.process_time()
        labels, chances = opened.predict(rows, k=-1)
        spent = time.process_time() - start
        found = np.array([c[list(n).index("__label__a")] for n, c in zip(labels, chances)])  # noqa: B905
    np.save(f"{model}.{contender}.npy", np.minimum(found, 1))
    return {"cpu_s": spent}


def once(contender: str, model: str, texts: Path, count: int) -> float:
    """CPU seconds of one run in a process of its own."""
    words = [sys.executable, __file__, "--phase", contender, model, str(texts), str(count)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["cpu_s"])


def compare(model: str, texts: Path, docs: list[int], rounds: int) -> dict:
    """Slopes of both contenders over alternating rounds, and how far the scores are apart."""
    slopes: dict[str, list[float]] = {"library": [], "ours": []}
    for _ in range(rounds):
        for name, found in slopes.items():
            low, high = (once(name, model, texts, count) for count in docs)
            found.append((docs[1] - docs[0]) / max(high - low, 1e-9))
    speed = {name: statistics.median(found) for name, found in slopes.items()}
    apart = np.abs(np.load(f"{model}.ours.npy") - np.load(f"{model}.library.npy")).max()
    return {
        "library_docs_per_cpu_s": round(speed["library"]),
        "ours_docs_per_cpu_s": round(speed["ours"]),
        "ratio": round(speed["ours"] / speed["library"], 2),
        "ratio_by_round": [round(o / p, 2) for p, o in zip(*slopes.values(), strict=True)],
        "largest_difference": float(apart),
    }


def main() -> None:
    """Run and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", type=int, nargs=2, default=[5000, 25_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phase", nargs=4, metavar=("CONTENDER", "MODEL", "TEXTS", "COUNT"))
    options = parser.parse_args()
    if options.phase:
        contender, model, texts, count = options.phase
        print(json.dumps(scored(contender, model, Path(texts), int(count))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        texts = Path(scratch) / "texts.parquet"
        make_texts(texts, options.docs[1])
        report = {}
        for number, (name, settings) in enumerate(MODELS.items()):
            model = f"{scratch}/m{number}.bin"
            train(texts, settings, model)
            report[name] = compare(model, texts, options.docs, options.rounds)
            print(name, report[name], file=sys.stderr)
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
