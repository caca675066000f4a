"""Fit the weights of core/web/extraction/block_weights.tsv on pages whose main text is known.

    python tests/bench/fit_extract.py FOLDER… -o block_weights.tsv [--report FILE.json]

A FOLDER is either of `article-extraction` (ground-truth.json beside html/ID.html.gz) or of `wcxb`
(ground-truth/N.json beside html/N.html.gz). Of article-extraction only pages in the tuning half
are read: those whose id begins with an even hexadecimal digit (`tuning`); the others are for
`bench_extract.py score`. A block's label is the share of its 3-word shingles that the true text
has; a block of one or two words must stand in the text and near a labelled one. Blocks weigh
words ** 0.7, scaled to 1 a page, and to ARTICLE_WEIGHT for article-extraction. The second stage
learns from guesses for pages that the first has not seen (three folds), as it will be used.
"""

import argparse
import gzip
import html
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sabia.core.web.extraction.block_features import NAMES, SECOND_NAMES, features, second_features
from sabia.core.web.extraction.extract import decode
from sabia.kernels.html.definitions import Page
from sabia.kernels.html.interface import scan

HIDDEN = (8, 16)
FOLDS, EPOCHS, BATCH, RATE, DECAY = 3, 8, 4096, 3e-3, 1e-2
ARTICLE_WEIGHT = 8.0
NEAR = 3
_WORD = re.compile(r"\w+")
THRESHOLDS = (0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass
class Labelled:
    """A page with its blocks' words and labels; guesses are filled in on the way."""

    name: str
    page: Page
    truth: str
    weight: float
    body: bytes
    words: list[list[str]] = field(default_factory=list)
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    rows: list[np.ndarray] = field(default_factory=list)
    guesses: list[np.ndarray] = field(default_factory=list)


def tuning(name: str) -> bool:
    """Whether a page of article-extraction may be looked at when anything is chosen."""
    return int(name[0], 16) % 2 == 0


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, in small letters."""
    return _WORD.findall(text.lower())


def shingles(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    """The multiset of 3-word shingles."""
    return Counter(tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2)) if words)


def f1(found: Sequence[str], true: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over shingles."""
    a, b = shingles(found), shingles(true)
    return 2 * (a & b).total() / max(1, a.total() + b.total())


def read(folder: Path) -> Iterator[tuple[str, bytes, str, float]]:
    """(name, page, true text, weight) of a folder of either kind."""
    one = folder / "ground-truth.json"
    truth = json.loads(one.read_text()) if one.exists() else {}
    for path in sorted((folder / "html").iterdir()):
        name = path.name.partition(".")[0]
        if truth:
            if tuning(name) and name in truth:
                yield (
                    name,
                    gzip.decompress(path.read_bytes()),
                    truth[name]["articleBody"],
                    ARTICLE_WEIGHT,
                )
            continue
        known = json.loads((folder / "ground-truth" / f"{name}.json").read_text())
        text = known.get("ground_truth", {}).get("main_content") or ""
        if len(text) > 200:
            yield name, gzip.decompress(path.read_bytes()), text, 1.0


def labelled(name: str, body: bytes, truth: str, weight: float) -> Labelled:
    """Scan a page and label its blocks."""
    page = scan(np.frombuffer(decode(body, "text/html").encode("utf-8", "replace"), np.uint8))
    made = Labelled(name, page, truth, weight, body)
    raw, true = page.text.tobytes(), words_of(truth)
    known, line = shingles(true), f" {' '.join(true)} "
    made.words = [words_of(html.unescape(raw[s:e].decode("utf-8", "replace")))
                  for s, e in page.blocks[:, :2].tolist()]  # fmt: skip
    made.labels = np.zeros(len(made.words), np.float32)
    for i, words in enumerate(made.words):
        if len(words) > 2:
            found = [tuple(words[k : k + 3]) in known for k in range(len(words) - 2)]
            made.labels[i] = sum(found) / len(found)
    sure = np.array([len(w) > 2 for w in made.words], bool) & (made.labels > 0.5)
    for i, words in enumerate(made.words):
        if 0 < len(words) < 3 and f" {' '.join(words)} " in line:
            made.labels[i] = float(sure[max(0, i - NEAR) : i + NEAR + 1].any())
    return made


def fit(pages: Sequence[Labelled], stage: int, seed: int) -> list[np.ndarray]:
    """[W1, b1, W2, b2] of one hidden layer with ReLU and one logit, by AdamW."""
    torch.manual_seed(seed)
    x = torch.tensor(np.concatenate([p.rows[stage] for p in pages]))
    y = torch.tensor(np.concatenate([p.labels for p in pages]))
    w = torch.tensor(np.concatenate([_weights(p) for p in pages]))
    w *= len(w) / w.sum()
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], HIDDEN[stage]), torch.nn.ReLU(),
                              torch.nn.Linear(HIDDEN[stage], 1))  # fmt: skip
    steps = EPOCHS * (len(x) // BATCH + 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * RATE, total_steps=steps)
    loss_of = torch.nn.BCEWithLogitsLoss(reduction="none")
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            loss = (loss_of(net(x[rows])[:, 0], y[rows]) * w[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return [p.detach().numpy() for p in net.parameters()]


def _weights(page: Labelled) -> np.ndarray:
    sizes = np.array([max(len(w), 1) for w in page.words], np.float32) ** 0.7
    return sizes / sizes.sum() * page.weight


def guess(net: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """The probability of each row."""
    hidden = np.maximum(rows @ net[0].T + net[1], 0)
    return 1 / (1 + np.exp(-(hidden @ net[2][0] + net[3][0])))


def unseen_guesses(pages: Sequence[Labelled], stage: int) -> None:
    """Give each page a guess by weights that were fitted without it."""
    for fold in range(FOLDS):
        net = fit([p for i, p in enumerate(pages) if i % FOLDS != fold], stage, fold)
        for page in pages[fold::FOLDS]:
            page.guesses.append(guess(net, page.rows[stage]))


def rounded(net: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the table holds: three decimals."""
    return [np.round(part, 3) for part in net]


def write(path: Path, nets: Sequence[Sequence[np.ndarray]]) -> None:
    """One line a feature: stage, name, its weight on every hidden unit; then biases and outputs."""
    lines = ["# weights of the block classifier, made by tests/bench/fit_extract.py"]
    for stage, (net, names) in enumerate(zip(nets, (NAMES, SECOND_NAMES), strict=True), start=1):
        table = [*zip(names, net[0].T, strict=True), ("(bias)", net[1]),
                 ("(output)", [*net[2][0], net[3][0]])]  # fmt: skip
        lines += [f"{stage}\t{name}\t" + "\t".join(f"{v:.3g}" for v in row) for name, row in table]
    path.write_text("\n".join(lines) + "\n")


def report(pages: Sequence[Labelled]) -> dict[str, object]:
    """F1 on pages that the weights had not seen, at several thresholds, by kind of folder."""
    answer: dict[str, object] = {}
    for kind in sorted({p.weight for p in pages}):
        some = [p for p in pages if p.weight == kind]
        scores = {t: [f1([w for words, g in zip(p.words, p.guesses[1], strict=True) if g > t
                          for w in words], words_of(p.truth)) for p in some]
                  for t in THRESHOLDS}  # fmt: skip
        answer["article-extraction" if kind > 1 else "wcxb"] = {
            "pages": len(some), **{str(t): round(float(np.mean(s)), 4) for t, s in scores.items()}
        }  # fmt: skip
    return answer


def run(folders: Sequence[Path], out: Path) -> list[Labelled]:
    """Fit both stages and write the table; the pages come back with their unseen guesses."""
    pages = [labelled(*facts) for folder in folders for facts in read(folder)]
    pages = [p for p in pages if len(p.labels) and p.labels.max() > 0.5]
    for page in pages:
        page.rows.append(features(page.page))
    unseen_guesses(pages, 0)
    first = rounded(fit(pages, 0, FOLDS))
    for page in pages:
        page.rows.append(second_features(page.page, page.rows[0], page.guesses[0]))
    unseen_guesses(pages, 1)
    write(out, [first, rounded(fit(pages, 1, FOLDS))])
    return pages


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(report(run(options.folders, options.out)), indent=1))


if __name__ == "__main__":
    main()
